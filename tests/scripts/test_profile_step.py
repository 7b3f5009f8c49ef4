"""scripts/profile_step: charges, gaps and launches of steps whose times are known."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def profile_step(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("profile_step")


def step(module: ModuleType, at: float) -> list[Any]:
    """A product of 10 us; a norm that starts 4 us early and ends 1 us later; a gap of 2 us; a product of 5 us."""
    times = [("product", 0.0, 10.0), ("norm", 6.0, 11.0), ("product", 13.0, 18.0)]
    return [module.Run(name, at + start, at + end) for name, start, end in times]


def test_charges_and_gaps_add_up_to_the_step(profile_step: ModuleType) -> None:
    runs = [run for at in (100.0, 123.0, 146.0) for run in step(profile_step, at)]
    profile = profile_step.profile_of(list(reversed(runs)), 3)
    assert (profile.launches, profile.idle_us, profile.host_us, profile.us) == (3, 2.0, 5.0, 23.0)
    product, norm = profile.kernels
    assert (product.name, product.launches, product.us) == ("product", 2, 15.0)
    assert (norm.name, norm.launches, norm.us) == ("norm", 1, 1.0)
    assert sum(share.us for share in profile.kernels) + profile.idle_us + profile.host_us == profile.us
    text = profile_step.text_of(profile, {"full_attention": 5})
    assert "23 us a step (43478.3 tok/s): 3 launches, nothing runs for 2 us within it and 5 us between two" in text
    assert "launches of a layer, full attention: 5" in text
    assert text.splitlines()[-1].split() == ["norm", "1", "1.0", "1.0", "4.3%"]


@pytest.mark.parametrize("steps", [2, 4])
def test_steps_that_are_not_equal_are_refused(profile_step: ModuleType, steps: int) -> None:
    runs = [run for at in (100.0, 123.0, 146.0) for run in step(profile_step, at)]
    with pytest.raises(ValueError, match=f"wanted {steps} equal steps"):
        profile_step.profile_of(runs, steps)


def test_without_a_card_it_says_so(profile_step: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["profile_step", "qwen3.5-27b"])
    with pytest.raises(SystemExit):
        profile_step.main()
    assert "profiled on a CUDA card" in capsys.readouterr().err
