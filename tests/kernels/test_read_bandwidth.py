"""kernels/read_bandwidth.py: how much it reads where a card is nearly full."""

import pytest
import torch

from localchat.kernels import read_bandwidth


@pytest.mark.parametrize(("room", "read"), [(4_000_000_000, 4_000_000_000), (3_300_000_000, 2_000_000_000)])
def test_a_card_that_is_nearly_full_reads_less(room: int, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def randn(elements: int, device: str) -> torch.Tensor:
        if elements * 4 > room:
            raise torch.OutOfMemoryError
        return torch.empty(elements, device="meta")

    monkeypatch.setattr(torch, "randn", randn)
    found = read_bandwidth._filled(4_000_000_000, 500_000_000).numel() * 4
    assert read * 0.999 < found <= read


def test_a_full_card_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def randn(elements: int, device: str) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "randn", randn)
    with pytest.raises(torch.OutOfMemoryError):
        read_bandwidth._filled(4_000_000_000, 500_000_000)
