"""Codes and scales: exact where they can be, never worse than plain rounding, safe from 1e-9 to 5e5."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from localchat.kernels.int4_packing import dequantize, dequantize_rows, pack
from localchat.quantize.scales import quantize_int4, quantize_int8_rows

BOTH = pytest.mark.parametrize("symmetric", [True, False])


def restored(codes: Tensor, scales: Tensor, mins: Tensor | None) -> Tensor:
    return dequantize(pack(codes, codes.shape[1] // scales.shape[1]), scales, mins)


def group_errors(w: Tensor, group_size: int, energy: Tensor | None, symmetric: bool, search: bool) -> Tensor:
    got = restored(*quantize_int4(w, group_size, symmetric, energy, search))
    error = (got - w.float()).double().square()
    if energy is not None:
        error = error * energy.double()
    return error.view(len(w), -1, group_size).sum(-1)


def random_matrix(n: int = 24, k: int = 256, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)


@BOTH
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_shapes_and_dtypes(group_size: int, symmetric: bool) -> None:
    codes, scales, mins = quantize_int4(random_matrix(n=5, k=384), group_size, symmetric)
    assert codes.dtype == torch.uint8 and codes.shape == (5, 384) and int(codes.max()) <= 15
    assert scales.dtype == torch.float16 and scales.shape == (5, 384 // group_size)
    assert (mins is None) == symmetric
    if mins is not None:
        assert mins.dtype == torch.float16 and mins.shape == scales.shape


@BOTH
def test_plain_rounding_is_within_half_a_step(symmetric: bool) -> None:
    w = random_matrix()
    codes, scales, mins = quantize_int4(w, 32, symmetric, search=False)
    # Half a step, and for rounding scale and min to fp16 a little more.
    bound = 0.52 * scales.float().abs().repeat_interleave(32, dim=1)
    assert ((restored(codes, scales, mins) - w).abs() <= bound).all()


@BOTH
@pytest.mark.parametrize("with_energy", [True, False])
@pytest.mark.parametrize("group_size", [32, 128])
def test_search_is_never_worse_in_any_group_and_better_in_all(
    group_size: int, with_energy: bool, symmetric: bool
) -> None:
    w = random_matrix(n=64)
    energy = torch.rand(256, generator=torch.Generator().manual_seed(1)) ** 4 if with_energy else None
    plain = group_errors(w, group_size, energy, symmetric, search=False)
    searched = group_errors(w, group_size, energy, symmetric, search=True)
    assert (searched <= plain * (1 + 1e-5)).all()
    assert searched.sum() < 0.9 * plain.sum()


@BOTH
def test_energy_steers_the_error(symmetric: bool) -> None:
    """Inputs with much energy get the smaller error, measured against a search that does not know of it."""
    w = random_matrix(n=64)
    energy = torch.where(torch.arange(256) % 4 == 0, 100.0, 1.0)
    loud = energy == 100.0
    informed = restored(*quantize_int4(w, 64, symmetric, energy)) - w
    uniform = restored(*quantize_int4(w, 64, symmetric, None)) - w
    assert informed[:, loud].square().sum() < 0.9 * uniform[:, loud].square().sum()


def test_grid_with_min_comes_back_exactly() -> None:
    """Weights that are such a grid already, as those of a Q4_1 file: codes use 0 and 15 in every group."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (40, 128), generator=generator, dtype=torch.uint8)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = (torch.rand(40, 4, generator=generator) / 100 + 1e-3).half()
    mins = torch.randn(40, 4, generator=generator).half()
    w = restored(codes, scales, mins)
    got = quantize_int4(w, 32, symmetric=False)
    assert torch.equal(restored(*got), w)


def test_symmetric_grid_comes_back_exactly() -> None:
    """As in a Q4_0 file: the largest weight has the code -8, so the scale's sign is opposite to its own."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 16, (40, 128), generator=generator, dtype=torch.uint8)
    codes[:, ::32] = 0
    scales = ((torch.rand(40, 4, generator=generator) / 100 + 1e-3) * torch.tensor([1.0, -1.0, 1.0, -1.0])).half()
    w = restored(codes, scales, None)
    assert torch.equal(restored(*quantize_int4(w, 32, symmetric=True)), w)


@BOTH
def test_zero_group_is_exactly_zero(symmetric: bool) -> None:
    w = random_matrix(n=4, k=128)
    w[1, 32:64] = 0
    w[2] = 0
    got = restored(*quantize_int4(w, 32, symmetric))
    assert (got[1, 32:64] == 0).all() and (got[2] == 0).all()
    assert (restored(*quantize_int4(torch.zeros(3, 64), 32, symmetric)) == 0).all()


def test_constant_group() -> None:
    w = torch.full((2, 64), 0.3)
    assert (restored(*quantize_int4(w, 32, symmetric=False)) - w).abs().max() < 0.3 * 2**-10
    assert (restored(*quantize_int4(w, 32, symmetric=True)) - w).abs().max() < 0.3 * 2**-10


@BOTH
@pytest.mark.parametrize("magnitude", [1e-9, 1e-6, 3e-5, 1e-3, 1.0, 1e3, 6e4, 5e5])
def test_magnitudes(magnitude: float, symmetric: bool) -> None:
    w = random_matrix(n=16, k=128) * magnitude
    codes, scales, mins = quantize_int4(w, 32, symmetric)
    assert torch.isfinite(scales.float()).all() and (mins is None or torch.isfinite(mins.float()).all())
    relative = (restored(codes, scales, mins) - w).norm() / w.norm()
    assert relative < 0.1


@BOTH
def test_scales_are_wide_only_where_needed(symmetric: bool) -> None:
    w = random_matrix(n=16, k=128)
    for magnitude, dtype in [(1e-9, torch.float32), (1.0, torch.float16), (5e5, torch.float32)]:
        assert quantize_int4(w * magnitude, 32, symmetric)[1].dtype == dtype


@BOTH
def test_small_groups_beside_large_ones(symmetric: bool) -> None:
    """A group whose scale is subnormal in fp16, or too small for it, in a tensor that keeps fp16 scales."""
    w = random_matrix(n=4, k=128)
    w[0, :32] *= 1e-5
    w[0, 32:64] *= 1e-9
    codes, scales, mins = quantize_int4(w, 32, symmetric)
    assert scales.dtype == torch.float16
    error = (restored(codes, scales, mins) - w).abs()
    assert error[0, :32].max() < 1e-5 and error[0, 32:64].max() < 1e-7


@BOTH
def test_low_precision_input_and_workers_change_nothing(symmetric: bool) -> None:
    w = random_matrix(n=700, k=128).bfloat16()
    alone = quantize_int4(w.float(), 64, symmetric)
    with ThreadPoolExecutor(2) as pool:
        shared = quantize_int4(w, 64, symmetric, pool=pool)
    for a, b in zip(alone, shared, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


def test_energy_of_zero_leaves_plain_rounding() -> None:
    w = random_matrix(n=4, k=64)
    got = restored(*quantize_int4(w, 32, False, torch.zeros(64)))
    assert torch.equal(got, restored(*quantize_int4(w, 32, False, search=False)))


def test_int8_rows() -> None:
    w = random_matrix(n=700, k=100)
    w[3] = 0
    codes, scales = quantize_int8_rows(w)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (700,)
    assert int(codes.abs().max()) == 127
    got = dequantize_rows(codes, scales)
    assert ((got - w).abs() <= 0.501 * scales.unsqueeze(-1)).all()
    assert (got[3] == 0).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 5e5, 1e30])
def test_int8_magnitudes(magnitude: float) -> None:
    w = random_matrix(n=4, k=64) * magnitude
    error = dequantize_rows(*quantize_int8_rows(w)).double() - w.double()
    assert error.norm() / w.double().norm() < 0.01
