"""The share of the card's limit."""

from dataclasses import replace
from typing import Any

import pytest

from localchat import statusline
from localchat.limit import CardLimit, card_limit
from localchat.stats import Stats

LIMIT = CardLimit(bandwidth=1e12, weights=14_000_000_000, per_position=100_000)


def test_a_share() -> None:
    assert LIMIT.share(50.0, 0) == pytest.approx(0.7)
    assert LIMIT.share(50.0, 10_000) == pytest.approx(0.75)


def test_it_stands_behind_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statusline, "memory_used", lambda device: (15_100_000_000, 24_000_000_000))
    stats = Stats(generated_tokens=129, decode_seconds=128 / 60, ttft_seconds=0.214, context_size=8192)
    assert statusline.status_line(stats, "cuda", LIMIT) == (
        "60.0 tok/s - 84 % of this card's limit - ttft 0.21 s - 129 tok - ctx 0 % - 15.1/24.0 GB"
    )
    assert "limit" not in statusline.status_line(replace(stats, generated_tokens=1), "cuda", LIMIT)
    assert "limit" not in statusline.status_line(stats, "cpu")


def test_a_processor_has_none(hybrid: Any) -> None:
    assert card_limit(hybrid) is None
