"""Sampling: every cut keeps what it should, the draw follows the distribution, and it is a function of its seed."""

from typing import Any

import pytest
import torch

from localchat.kernels.sampling import SEEN_IN_CONTEXT, SEEN_IN_REPLY, gumbel_noise, sample_reference

OFF: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "seed": 0,
    "position": 0,
}
UNSEEN = torch.zeros(1000, dtype=torch.uint8)


def draws(logits: torch.Tensor, n: int = 2000, **settings: Any) -> torch.Tensor:
    """How often each id is drawn over n positions."""
    seen = settings.pop("seen", UNSEEN[: len(logits)])
    ids = [int(sample_reference(logits, seen, **{**OFF, **settings, "position": p})) for p in range(n)]
    return torch.bincount(torch.tensor(ids), minlength=len(logits))


def test_draws_follow_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    for temperature in (1.0, 0.5, 2.0):
        wanted = (logits / temperature).softmax(-1)
        got = draws(logits, temperature=temperature) / 2000
        assert float((got - wanted).abs().max()) < 0.035  # three standard deviations of 2,000 draws


def test_noise_is_uniform_before_the_logarithm_and_differs_by_each_argument() -> None:
    ids = torch.arange(50000)
    noise = gumbel_noise(ids, 7, 3)
    u = torch.exp(-torch.exp(-noise))
    assert bool(noise.isfinite().all())
    assert abs(float(u.mean()) - 0.5) < 0.005
    assert float((torch.histc(u, 20, 0, 1) / 2500 - 1).abs().max()) < 0.1
    for other in (gumbel_noise(ids, 8, 3), gumbel_noise(ids, 7, 4), gumbel_noise(ids, 7 + 2**32, 3)):
        correlation = torch.corrcoef(torch.stack((noise, other)))[0, 1]
        assert abs(float(correlation)) < 0.02


def test_the_same_seed_and_position_draw_the_same_id() -> None:
    logits = torch.randn(1000)
    first = draws(logits, 50, seed=5)
    assert torch.equal(first, draws(logits, 50, seed=5))
    assert not torch.equal(first, draws(logits, 50, seed=6))


def test_temperature_zero_is_the_argmax() -> None:
    logits = torch.randn(1000)
    assert int(sample_reference(logits, UNSEEN, **{**OFF, "temperature": 0.0})) == int(logits.argmax())


def test_top_k_keeps_k() -> None:
    logits = torch.zeros(50)
    logits[[3, 17, 40]] = 0.5
    assert set(draws(logits, 300, top_k=3).nonzero().flatten().tolist()) == {3, 17, 40}


@pytest.mark.parametrize(("top_p", "kept"), [(0.45, 1), (0.55, 2), (0.75, 2), (0.85, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert int((draws(logits, 600, top_p=top_p) > 0).sum()) == kept


def test_top_p_over_a_flat_distribution_looks_beyond_its_first_candidates() -> None:
    assert int((draws(torch.zeros(1000), 4000, top_p=0.9) > 0).sum()) > 800


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()  # of the first two, the first holds 0.57
    assert int((draws(logits, 400, top_k=2, top_p=0.5) > 0).sum()) == 1


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert int((draws(logits, 600, min_p=0.25) > 0).sum()) == 3


def test_penalties_use_their_own_memory() -> None:
    logits, seen = torch.tensor([2.0, 1.9, -1.0, -1.1]), torch.zeros(4, dtype=torch.uint8)
    greedy = {**OFF, "temperature": 0.0}
    seen[0] = SEEN_IN_CONTEXT
    assert int(sample_reference(logits, seen, **greedy)) == 0
    assert int(sample_reference(logits, seen, **{**greedy, "repetition_penalty": 1.2})) == 1
    assert int(sample_reference(logits, seen, **{**greedy, "presence_penalty": 1.0})) == 0  # not of this reply
    seen[0] |= SEEN_IN_REPLY
    assert int(sample_reference(logits, seen, **{**greedy, "presence_penalty": 1.0})) == 1
    seen[:] = torch.tensor([0, 0, SEEN_IN_CONTEXT, 0])  # a negative logit is penalised downwards too
    below = sample_reference(logits - 5 * torch.tensor([1.0, 1, 0, 0]), seen, **{**greedy, "repetition_penalty": 1.2})
    assert int(below) == 3
