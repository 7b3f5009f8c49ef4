"""Sampling parameters: ranges, and what a model's generation_config.json makes of them."""

from typing import Any

import pytest

from localchat.errors import UsageError
from localchat.sampling import Sampling


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("temperature", -1, "between"),
        ("top_p", 1.5, "between"),
        ("top_k", -3, "at least 0"),
        ("seed", 2**64, "between"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field: str, value: float, word: str) -> None:
    with pytest.raises(UsageError, match=f"{field} is .*{word}"):
        Sampling(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ({}, Sampling()),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, Sampling(temperature=0.6, top_k=20)),
        ({"do_sample": False, "temperature": 0.6}, Sampling(temperature=0.0)),
        ({"temperature": None, "top_p": "high", "seed": 7, "min_p": True}, Sampling()),
    ],
)
def test_defaults_come_from_the_model(raw: dict[str, Any], wanted: Sampling) -> None:
    assert Sampling.from_generation_config(raw) == wanted
