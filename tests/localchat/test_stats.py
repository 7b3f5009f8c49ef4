"""Rates leave the first token out and never divide by nothing; memory numbers are of this machine."""

import os
from pathlib import Path

import pytest

from localchat.stats import Stats, memory_used


def test_the_first_token_belongs_to_prefill() -> None:
    stats = Stats(prefilled_tokens=300, generated_tokens=21, prefill_seconds=1.5, decode_seconds=4.0)
    assert stats.decode_rate == 5.0
    assert stats.prefill_rate == 200.0


@pytest.mark.parametrize("stats", [Stats(), Stats(generated_tokens=1, decode_seconds=3.0), Stats(generated_tokens=5)])
def test_no_rate_yet(stats: Stats) -> None:
    assert stats.decode_rate == 0.0
    assert stats.prefill_rate == 0.0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc")
def test_memory_of_this_process() -> None:
    before, total = memory_used("cpu")
    ballast = bytearray(os.urandom(64 << 20))
    after, _ = memory_used("cpu")
    assert after - before > len(ballast) // 2
    assert after < total
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (10, 24))
    assert memory_used("cuda:1") == (14, 24)
    assert asked == [torch.device("cuda:1")]
