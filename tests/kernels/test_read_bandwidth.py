"""kernels/read_bandwidth.py: how much it reads where a card is nearly full."""

import pytest
import torch

from localchat.kernels import read_bandwidth as module


@pytest.mark.parametrize(
    ("asked", "room", "tried"),
    [
        (4_000_000_000, 9e9, [4_000_000_000]),
        (4_000_000_000, 1.5e9, [4_000_000_000, 2_000_000_000, 1_000_000_000]),
        (4_000_000_000, 0.1e9, [4_000_000_000, 2_000_000_000, 1_000_000_000, 500_000_000]),
        (256_000_000, 0.1e9, [256_000_000]),
    ],
)
def test_a_card_that_is_nearly_full_reads_less(
    asked: int, room: float, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has no room: the numbers, or what measures them. A cache is never what is measured."""
    seen = []

    def measured(nbytes: int) -> float:
        seen.append(nbytes)
        if nbytes > room:
            raise torch.OutOfMemoryError
        return 1.0

    monkeypatch.setattr(module, "_measured", measured)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    if tried[-1] <= room:
        assert module.read_bandwidth(asked) == 1.0
    else:
        with pytest.raises(torch.OutOfMemoryError):
            module.read_bandwidth(asked)
    assert seen == tried
