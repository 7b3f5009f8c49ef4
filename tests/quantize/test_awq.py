"""AutoAWQ's layout against a decoder that reads the format's definition word by word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign
from localchat.quantize import awq

Make = Callable[..., Any]
# Output 8c + j lies in the bits 4 * PLACE[j] of word c.
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def random_matrix(n: int, k: int, group_size: int, seed: int = 0) -> dict[str, Tensor]:
    generator, groups = torch.Generator().manual_seed(seed), -(-k // group_size)

    def words(rows: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (rows, -(-n // 8)), generator=generator).to(torch.int32)

    scales = (torch.rand(groups, n, generator=generator) / 64 + 1e-4).half()
    return {"qweight": words(k), "qzeros": words(groups), "scales": scales}


def decoded(tensors: dict[str, Tensor], group_size: int) -> Tensor:
    """W fp32 [N, K], one weight at a time."""
    words, zeros, scales = (tensors[kind].tolist() for kind in ("qweight", "qzeros", "scales"))

    def field(row: list[int], n: int) -> int:
        return row[n // 8] >> 4 * PLACE[n % 8] & 15

    return torch.tensor(
        [
            [
                scales[k // group_size][n] * (field(words[k], n) - field(zeros[k // group_size], n))
                for k in range(len(words))
            ]
            for n in range(len(scales[0]))
        ],
        dtype=torch.float32,
    )


@pytest.mark.parametrize(
    ("n", "k", "group_size", "ours"),
    [
        *((24, 256, 128, 128), (40, 576, 64, 64), (8, 896, 128, 128)),
        *((8, 4864, 128, 32), (16, 192, 64, 64), (1, 64, 32, 32)),
    ],
)
def test_every_weight(parts_of: Make, packed_again: Make, n: int, k: int, group_size: int, ours: int) -> None:
    tensors = random_matrix(n, k, group_size)
    parts = parts_of(Foreign("awq", 4, group_size, symmetric=False), **tensors)
    want = decoded(tensors, group_size)
    assert awq.layout(parts).shape == (n, k)
    codes = awq.decode(parts)
    assert torch.equal(codes.values(), want)
    assert torch.equal(packed_again(codes, ours, symmetric=False), want)
    if n > 1:
        assert packed_again(codes, ours, symmetric=True) is None


def test_a_group_over_the_whole_row(parts_of: Make, packed_again: Make) -> None:
    tensors = random_matrix(16, 256, 256)
    codes = awq.decode(parts_of(Foreign("awq", 4, 0, symmetric=False), **tensors))
    assert torch.equal(packed_again(codes, 128, symmetric=False), decoded(tensors, 256))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qweight": torch.zeros(256, 4, dtype=torch.int32)}, r"x\.qweight is I32 \[256, 4\], wanted .* \[256, 3\]"),
        ({"qweight": torch.zeros(250, 3, dtype=torch.int32)}, None),
        ({"qzeros": torch.zeros(1, 3, dtype=torch.int32)}, r"x\.qzeros is I32 \[1, 3\]"),
        ({"qzeros": None}, r"x\.qzeros is missing"),
        ({"scales": torch.ones(1, 24)}, r"x has 1 groups of scales, wanted 2"),
        ({"scales": torch.ones(2, 24, dtype=torch.int32)}, r"x\.scales is I32"),
    ],
)
def test_damaged(parts_of: Make, change: dict[str, Tensor | None], words: str | None) -> None:
    tensors = {**random_matrix(24, 256, 128), **change}
    parts = parts_of(Foreign("awq", 4, 128), **{kind: t for kind, t in tensors.items() if t is not None})
    if words is None:  # of fewer inputs, which the look at config.json finds
        assert awq.layout(parts).shape == (24, 250)
        return
    with pytest.raises(BadCheckpoint, match=words):
        awq.decode(parts)
