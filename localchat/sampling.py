"""The sampling parameters of a reply, and where their defaults come from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from localchat.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; kernels/sampling.py defines each step.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and presence_penalty 0 switch a step off.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError for a value outside its range."""
        ranges = {
            "temperature": (0, 100),
            "top_k": (0, math.inf),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "repetition_penalty": (0.01, 100),
            "presence_penalty": (-100, 100),
            "seed": (0, 2**64 - 1),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise UsageError(f"{name} is {value}, it must be {wanted}.")

    @classmethod
    def from_generation_config(cls, raw: Mapping[str, Any]) -> "Sampling":
        """The model's own defaults; what it does not say is the built-in value, `do_sample: false` is greedy.

        Raises:
            UsageError: a value is outside its range.
        """
        sampling = cls(**{name: raw[name] for name in _numbers(raw)})
        return replace(sampling, temperature=0.0) if raw.get("do_sample") is False else sampling

    @classmethod
    def fields_given(cls, raw: Mapping[str, Any]) -> set[str]:
        """The fields that `from_generation_config` takes from `raw`."""
        return _numbers(raw) | ({"temperature"} if raw.get("do_sample") is False else set())


def _numbers(raw: Mapping[str, Any]) -> set[str]:
    return {f.name for f in fields(Sampling) if f.name != "seed" and _is_number(raw.get(f.name))}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
