"""Error feedback: products change less than by rounding alone, groups stay where they are, nothing fails."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from localchat.kernels.int4_packing import dequantize, pack
from localchat.quantize.gptq import _factor, _order, hessian_of, quantize_gptq
from localchat.quantize.scales import quantize_int4

BOTH = pytest.mark.parametrize("symmetric", [True, False])
Quantised = tuple[Tensor, Tensor, Tensor | None]


def problem(n: int = 96, k: int = 256, tokens: int = 1024, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random W [N, K], and inputs [T, K] that are correlated and of very different energies, as those of models."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) * torch.rand(k, generator=generator) ** 3
    return torch.randn(n, k, generator=generator), torch.randn(tokens, k, generator=generator) @ mixing


def restored(found: Quantised) -> Tensor:
    codes, scales, mins = found
    return dequantize(pack(codes, codes.shape[1] // scales.shape[1]), scales, mins)


def product_error(w: Tensor, x: Tensor, found: Quantised) -> float:
    return float((x @ (w - restored(found)).t()).norm() / (x @ w.t()).norm())


def test_the_mean_over_all_tokens_of_all_windows() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hessian_of(x.split((20, 7, 23))), x.t() @ x / 50)
    with pytest.raises(ValueError, match="no inputs"):
        hessian_of([])


@BOTH
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_products_change_less_than_by_searched_rounding(group_size: int, symmetric: bool) -> None:
    w, x = problem()
    hessian = hessian_of([x])
    rounded = quantize_int4(w, group_size, symmetric, hessian.diagonal())
    found = quantize_gptq(w, hessian, group_size, symmetric)
    assert found[0].dtype == torch.uint8 and found[0].shape == w.shape and int(found[0].max()) <= 15
    assert found[1].dtype == torch.float16 and found[1].shape == (96, 256 // group_size)
    assert (found[2] is None) == symmetric
    assert product_error(w, x, found) < 0.85 * product_error(w, x, rounded)


def test_each_column_answers_for_those_before_it() -> None:
    """Against the textbook's form: one column at a time, and H^-1 of the columns that are left computed anew."""
    w, x = problem(n=4, k=32, tokens=200)
    hessian = hessian_of([x])
    codes, scales, _ = quantize_gptq(w, hessian, 32, True)
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(32, dtype=torch.float64)
    left, scale = w.double().clone(), scales.double()[:, 0]
    remaining = [int(i) for i in hessian.diagonal().argsort(descending=True)]
    while remaining:
        j = remaining[0]
        inverse = torch.linalg.inv(damped[remaining][:, remaining])
        q = (left[:, j] / scale).round().clamp(-8, 7)
        assert torch.equal(q + 8, codes[:, j].double())
        error = (left[:, j] - q * scale) / inverse[0, 0]
        left[:, remaining] -= error[:, None] * inverse[0]
        remaining = remaining[1:]


def test_independent_inputs_leave_searched_rounding() -> None:
    """Without correlation there is nothing to make good."""
    w, _ = problem()
    energy = torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.1
    found = quantize_gptq(w, torch.diag(energy), 64, True)
    codes, scales, _ = quantize_int4(w, 64, True, energy)
    torch.testing.assert_close(found[1], scales)
    assert (found[0] != codes).float().mean() < 1e-3  # halves may go either way


def test_order_stays_inside_groups() -> None:
    energy = torch.rand(256, generator=torch.Generator().manual_seed(0))
    order = _order(energy, 64).view(4, 64)
    for group, columns in enumerate(order):
        assert torch.equal(columns.sort().values, torch.arange(64 * group, 64 * group + 64))
        assert (energy[columns].diff() <= 0).all()


def test_factor_is_that_of_the_inverse() -> None:
    _, x = problem(k=64)
    hessian = hessian_of([x])
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(64, dtype=torch.float64)
    order = _order(hessian.diagonal(), 32)
    upper = _factor(hessian, order)
    assert torch.equal(upper, upper.triu())
    inverse = torch.linalg.inv(damped).float()[order][:, order]
    torch.testing.assert_close(upper.t() @ upper, inverse, rtol=1e-3, atol=1e-6)


@BOTH
@pytest.mark.parametrize(
    "hessian",
    [
        torch.zeros(64, 64),
        torch.ones(64, 64) * 1e30,
        torch.eye(64) * 1e-30,
        -torch.eye(64),
        torch.ones(64, 64) - 2 * torch.eye(64),
        torch.diag(torch.cat((torch.ones(1), torch.zeros(63)))),
    ],
    ids=["zero", "rank one and huge", "tiny", "negative", "indefinite", "one input"],
)
def test_damping_cannot_fail(hessian: Tensor, symmetric: bool) -> None:
    w, _ = problem(k=64)
    found = quantize_gptq(w, hessian, 32, symmetric)
    assert torch.isfinite(restored(found)).all()
    assert (restored(found) - w).norm() / w.norm() < 0.35


@BOTH
def test_zero_groups_stay_zero(symmetric: bool) -> None:
    w, x = problem(n=8)
    w[:, 224:] = 0  # the last group, and one in the middle: errors of the others would move them
    w[5, 96:128] = 0
    w[3] = 0
    got = restored(quantize_gptq(w, hessian_of([x]), 32, symmetric))
    assert (got[w.view(8, -1, 32).eq(0).all(-1).repeat_interleave(32, 1)] == 0).all()
    assert torch.isfinite(got).all()


def test_one_row() -> None:
    w, x = problem(n=1)
    found = quantize_gptq(w, hessian_of([x]), 32, True)
    assert product_error(w, x, found) < product_error(w, x, quantize_int4(w, 32, True))


@pytest.mark.parametrize("magnitude", [1e-9, 1e-3, 5e5])
@BOTH
def test_magnitudes(magnitude: float, symmetric: bool) -> None:
    w, x = problem(n=16)
    plain = quantize_gptq(w, hessian_of([x]), 32, symmetric)
    scaled = quantize_gptq(w * magnitude, hessian_of([x]), 32, symmetric)
    assert scaled[1].dtype == (torch.float16 if magnitude == 1e-3 else torch.float32)
    assert product_error(w * magnitude, x, scaled) < 1.05 * product_error(w, x, plain)


@BOTH
def test_steps_whose_inverse_is_infinite(symmetric: bool) -> None:
    """Numbers so small that fp32 has fewer digits for them."""
    w, x = problem(n=16)
    got = restored(quantize_gptq(w * 1e-40, hessian_of([x]), 32, symmetric)).double() * 1e40
    assert float((got - w).norm() / w.norm()) < 0.3


@pytest.mark.parametrize("k", [96, 192, 576, 896, 4864])
def test_widths_that_are_no_multiple_of_a_block(k: int) -> None:
    w, x = problem(n=8, k=k)
    found = quantize_gptq(w, hessian_of([x]), 32, True)
    assert product_error(w, x, found) < product_error(w, x, quantize_int4(w, 32, True))


def test_workers_change_nothing() -> None:
    w, x = problem(n=1100, k=64)
    alone = quantize_gptq(w, hessian_of([x]), 32, False)
    with ThreadPoolExecutor(2) as pool:
        shared = quantize_gptq(w, hessian_of([x]), 32, False, pool)
    for a, b in zip(alone, shared, strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_few_matrices_as_large_as_the_hessian_live_at_once() -> None:
    """A down_proj of qwen3.5-27b has one of 1.2 GB, and calibrating one has to fit a card of 24 GB beside its layer."""
    k = 1024
    x = torch.randn(k + 64, k, generator=torch.Generator().manual_seed(0))
    hessian, w = x.t() @ x / len(x), torch.randn(32, k)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        quantize_gptq(w, hessian, 128, True)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    assert 2 * k * k * 4 < max(held) < 4 * k * k * 4  # beside the Hessian itself
