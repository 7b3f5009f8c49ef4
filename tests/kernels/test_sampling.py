"""Sampling: every cut keeps what it should, the draw follows the distribution, and it is a function of its seed."""

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from localchat.kernels.sampling import (
    SEEN_IN_CONTEXT,
    SEEN_IN_REPLY,
    SamplingScratch,
    gumbel_noise,
    mark_seen,
    sample,
    sample_reference,
    sampling_scratch,
    sampling_settings,
)

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


# ---- the kernels

VOCABS = [1, 31, 1003, 2048, 5001]  # one block of the kernels is 2,048 ids


def drawn(logits: torch.Tensor, seen: torch.Tensor, scratch: SamplingScratch | None = None, **settings: Any) -> int:
    """What the kernels choose; without `scratch`, with one that holds garbage."""
    if scratch is None:
        scratch = sampling_scratch(len(seen), logits.device)
        for field in fields(scratch):
            getattr(scratch, field.name).fill_(123)
    given = {**OFF, **settings}
    positions = torch.tensor([given.pop("position")], device=logits.device)
    floats, integers = (t.to(logits.device) for t in sampling_settings(**given))
    out = torch.full((1,), -1, device=logits.device)
    return int(sample(logits, seen, floats, integers, positions, out, scratch))


def margin(logits: torch.Tensor, seen: torch.Tensor, **settings: Any) -> float:
    """How close the reference came to another answer: at a boundary, or between its two best."""
    s = {**OFF, **settings}
    x = torch.where(logits > 0, logits / s["repetition_penalty"], logits * s["repetition_penalty"])
    x = torch.where(seen & SEEN_IN_CONTEXT > 0, x, logits) - s["presence_penalty"] * (seen & SEEN_IN_REPLY > 0)
    x, ids = (x / (s["temperature"] or 1.0)).double().sort(descending=True)
    gaps, kept = [], len(x)
    if s["temperature"] > 0:
        if 0 < s["top_k"] < kept:
            kept = s["top_k"]
            gaps.append(float(x[kept - 1] - x[kept]))
        if s["top_p"] < 1:
            mass = x[:kept].softmax(-1).cumsum(-1)
            gaps.append(float((mass - s["top_p"]).abs().min()))
            kept = 1 + int((mass < s["top_p"]).sum())
        if s["min_p"] > 0:
            gaps.append(float((x[:kept] - x[0] - torch.tensor(s["min_p"]).double().log()).abs().min()))
            kept = int((x[:kept] > x[0] + torch.tensor(s["min_p"]).double().log()).sum())
        x, ids = x[:kept], ids[:kept]
        x = x + gumbel_noise(ids, s["seed"], s["position"])
    best = x.topk(min(2, len(x))).values
    return min([*gaps, float(best[0] - best[-1]) if len(best) > 1 else 1.0])


def random_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.0, 0.05, 0.7, 1.0, 1.0, 5.0]),
        "top_k": rng.choice([0, 0, 1, 2, 20, 400, 10**6]),
        "top_p": rng.choice([1.0, 1.0, 0.0, 0.3, 0.9, 0.95, 0.999]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        "repetition_penalty": rng.choice([1.0, 1.1, 0.8]),
        "presence_penalty": rng.choice([0.0, 1.5, -0.5]),
        "seed": rng.randrange(2**64),
        "position": rng.randrange(2**18),
    }


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])  # from flat to peaked
@pytest.mark.parametrize("vocab", [*VOCABS, 151936])
def test_kernels_choose_what_the_reference_chooses(vocab: int, spread: float, device: torch.device) -> None:
    if device.type == "cpu" and vocab > 10000:
        pytest.skip("too large for the interpreter, runs with -m gpu")
    rng = random.Random(vocab * spread)
    scratch, differ = sampling_scratch(vocab, device), 0
    for _ in range(8 if device.type == "cpu" else 100):
        logits = torch.randn(1, vocab + 13) * spread + rng.choice([0.0, 20.0, -20.0])
        logits[:, vocab:] = 1e4  # padding rows: no candidates
        seen = torch.randint(0, 4, (vocab,), dtype=torch.uint8)
        settings = random_settings(rng)
        wanted = int(sample_reference(logits[0, :vocab], seen, **settings))
        got = drawn(logits.to(device), seen.to(device), scratch, **settings)
        assert got == wanted or margin(logits[0, :vocab], seen, **settings) < 1e-5, settings
        differ += got != wanted
    assert differ <= 2


@pytest.mark.parametrize("spread", [4.0, 4 * 2.0**-17])  # boundaries in a key's first digit, and in its last
@pytest.mark.parametrize(
    "settings",
    [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 50, "top_p": 0.45}, {"min_p": 0.3}],
    ids=["k", "p", "k-p", "min-p"],
)
def test_kernels_cut_where_the_reference_cuts(settings: dict[str, Any], spread: float, device: torch.device) -> None:
    """Logits this flat draw every id that is kept soon, and would draw one behind the boundary."""
    logits = torch.linspace(0, spread, 97)[torch.randperm(97)]
    seen, scratch = torch.zeros(97, dtype=torch.uint8), sampling_scratch(97, device)
    n = 30 if device.type == "cpu" else 2000
    wanted = [int(sample_reference(logits, seen, **{**OFF, **settings, "position": p})) for p in range(n)]
    on_device = logits.to(device), seen.to(device)
    assert [drawn(*on_device, scratch, **settings, position=p) for p in range(n)] == wanted


def test_kernel_draws_follow_softmax(device: torch.device) -> None:
    logits, n = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0]), 200 if device.type == "cpu" else 4000
    seen, scratch = torch.zeros(5, dtype=torch.uint8, device=device), sampling_scratch(5, device)
    ids = [drawn(logits.to(device), seen, scratch, position=p) for p in range(n)]
    got = torch.bincount(torch.tensor(ids), minlength=5) / n
    assert float((got - logits.softmax(-1)).abs().max()) < 1.6 / n**0.5  # three standard deviations


def test_kernels_keep_all_ties_at_a_boundary_and_take_the_lowest_id_of_the_best(device: torch.device) -> None:
    logits, seen = torch.zeros(4100, device=device), torch.zeros(4100, dtype=torch.uint8, device=device)
    logits[[5, 2060, 4099]] = 3.0
    scratch = sampling_scratch(4100, device)
    assert drawn(logits, seen, scratch, temperature=0.0) == 5
    for cut in ({"top_k": 2}, {"top_p": 0.001}, {"top_k": 1, "top_p": 0.5}):
        ids = {drawn(logits, seen, scratch, **cut, position=p) for p in range(12)}
        assert ids == {5, 2060, 4099}


def test_the_same_scratch_serves_one_setting_after_another(device: torch.device) -> None:
    """Bit-identical, whatever the step before left behind."""
    logits, seen = 3 * torch.randn(3001, device=device), torch.zeros(3001, dtype=torch.uint8, device=device)
    shared = sampling_scratch(3001, device)
    for settings in ({"top_k": 40, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 40}, {}, {"temperature": 0.0}) * 2:
        first = drawn(logits, seen, shared, **settings, seed=3)
        histograms = shared.histograms.clone()
        assert drawn(logits, seen, **settings, seed=3) == first  # in a scratch full of garbage
        assert drawn(logits, seen, shared, **settings, seed=3) == first
        assert torch.equal(shared.histograms, histograms)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_id_is_chosen_whatever_the_logits_are(value: float, device: torch.device) -> None:
    seen = torch.zeros(70, dtype=torch.uint8, device=device)
    for settings in ({"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}):
        assert 0 <= drawn(torch.full((70,), value, device=device), seen, **settings) < 70
        logits = torch.randn(70, device=device)
        logits[3] = value
        assert (drawn(logits, seen, **settings) == 3) == (value == float("inf"))


def test_mark_seen_sets_both_bits_of_one_id(device: torch.device) -> None:
    seen = torch.zeros(9, dtype=torch.uint8, device=device)
    seen[2] = SEEN_IN_CONTEXT
    for token in (2, 8):
        mark_seen(torch.tensor([token], device=device), seen)
    assert seen.tolist() == [0, 0, 3, 0, 0, 0, 0, 0, 3]


def test_sample_refuses_what_it_would_misread() -> None:
    x, seen = torch.zeros(10), torch.zeros(10, dtype=torch.uint8)
    floats, integers = torch.zeros(8), torch.zeros(4, dtype=torch.int64)
    one, scratch = torch.zeros(1, dtype=torch.int64), sampling_scratch(10, "cpu")
    with pytest.raises(ValueError, match="wanted float32"):
        sample(x.double(), seen, floats, integers, one, one, scratch)
    with pytest.raises(ValueError, match="got scratch for 10 ids, wanted 5"):
        sample(x, seen[:5], floats, integers, one, one, scratch)
    with pytest.raises(ValueError, match=r"got positions torch\.int32"):
        sample(x, seen, floats, integers, one.int(), one, scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_one_graph_serves_every_setting(device: torch.device) -> None:
    vocab = 151936
    logits, seen = torch.empty(1, vocab, device=device), torch.zeros(vocab, dtype=torch.uint8, device=device)
    scratch, position = sampling_scratch(vocab, device), torch.zeros(1, dtype=torch.int64, device=device)
    floats, integers = (t.to(device) for t in sampling_settings(**{k: v for k, v in OFF.items() if k != "position"}))
    out = torch.zeros(1, dtype=torch.int64, device=device)
    logits.normal_()
    sample(logits, seen, floats, integers, position, out, scratch)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, seen, floats, integers, position, out, scratch)
        mark_seen(out, seen)
    rng = random.Random(0)
    for _ in range(100):
        settings = random_settings(rng)
        logits.normal_(0, rng.choice([0.1, 1.0, 5.0]))
        wanted = drawn(logits, seen, **settings)
        position.fill_(settings.pop("position"))
        for held, given in zip((floats, integers), sampling_settings(**settings), strict=True):
            held.copy_(given)
        graph.replay()
        assert int(out) == wanted
        assert int(seen[wanted]) == SEEN_IN_CONTEXT | SEEN_IN_REPLY
