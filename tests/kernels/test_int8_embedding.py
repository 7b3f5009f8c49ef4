"""kernels/int8_embedding.py: the kernel against its reference."""

import pytest
import torch

from localchat.kernels.int8_embedding import int8_embedding, int8_embedding_reference

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize(("vocab", "hidden"), [(50, 97), (7, 2048)])
def test_agrees(device: torch.device, vocab: int, hidden: int) -> None:
    weight = torch.randint(-127, 128, (vocab, hidden), dtype=torch.int8, device=device)
    scales = torch.rand(vocab, device=device)
    ids = torch.tensor([vocab - 1, 0, 3, 3], device=device)
    y = int8_embedding(ids, weight, scales)
    assert torch.equal(y, int8_embedding_reference(ids, weight, scales, torch.float32))


@pytest.mark.gpu
def test_rows_behind_two_to_the_31(card: torch.device) -> None:
    weight = torch.ones(300_000, 8192, dtype=torch.int8, device=card)
    weight[-1] = torch.arange(8192, device=card) % 100
    ids = torch.tensor([299_999, 0], device=card)
    scales = torch.full((300_000,), 0.5, device=card)
    assert torch.equal(
        int8_embedding(ids, weight, scales), int8_embedding_reference(ids, weight, scales, torch.float32)
    )


def test_refusals() -> None:
    ids, weight, scales = torch.zeros(2, dtype=torch.int64), torch.zeros(5, 8, dtype=torch.int8), torch.zeros(5)
    with pytest.raises(ValueError, match="int8_embedding: ids: got int32"):
        int8_embedding(ids.int(), weight, scales)
    with pytest.raises(ValueError, match=r"int8_embedding: scales: got float32 \[4\], wanted contiguous float32 \[5\]"):
        int8_embedding(ids, weight, scales[:4])
