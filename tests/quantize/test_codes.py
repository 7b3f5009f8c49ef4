"""4-bit levels on their way into the packed format: exact, or not at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.quantize.codes import Codes, Layout

Make = Callable[..., Any]


def random_codes(scales: Tensor, zero: int | None, group_size: int = 32) -> Codes:
    generator, (n, groups) = torch.Generator().manual_seed(0), scales.shape
    return Codes(
        torch.randint(0, 16, (n, groups * group_size), generator=generator).to(torch.uint8),
        scales,
        torch.randint(0, 16, (n, groups), generator=generator).to(torch.uint8)
        if zero is None
        else torch.full((n, groups), zero, dtype=torch.uint8),
        torch.arange(groups * group_size) // group_size,
    )


def some_scales(dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    return ((torch.rand(20, 4, generator=torch.Generator().manual_seed(1)) / 64 + 1e-4) * factor).to(dtype)


@pytest.mark.parametrize("zero", [None, 0, 8, 15])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-36, 1e-7, 1e-4, 1.0, 1e3, 1e6, 1e30])
def test_exact_or_not_at_all(
    packed_again: Make, factor: float, dtype: torch.dtype, symmetric: bool, zero: int | None
) -> None:
    """Scales from those that fp16 has no room for to subnormal ones, of which an fp16 file has only some."""
    scales = some_scales(dtype, factor)
    if not scales.isfinite().all():
        return
    codes = random_codes(scales, zero)
    again = packed_again(codes, 32, symmetric)
    if symmetric and zero != 8:
        assert again is None
    else:
        assert torch.equal(again, codes.values())


@pytest.mark.parametrize(
    ("dtype", "zero", "symmetric", "wanted"),
    [
        (torch.float16, 8, True, torch.float16),
        (torch.float16, 8, False, torch.float16),  # a power of two
        (torch.float16, None, False, torch.float32),  # 11 bits times 4
        (torch.bfloat16, 7, False, torch.float16),  # 8 bits times 3
        (torch.bfloat16, 8, True, torch.float16),
    ],
)
def test_scales_are_wide_only_where_needed(dtype: torch.dtype, zero: int, symmetric: bool, wanted: torch.dtype) -> None:
    kept = random_codes(some_scales(dtype), zero).repacked(32, symmetric)
    assert kept is not None and kept["scales"].dtype == wanted
    assert kept.get("mins", kept["scales"]).dtype == wanted


def test_narrow_scales_are_off_by_no_more_than_is_said(packed_again: Make) -> None:
    codes = random_codes(some_scales(torch.float16), None)
    kept = codes.repacked(32, symmetric=False, exact=False)
    assert kept is not None and kept["mins"].dtype == torch.float16
    off = (packed_again(codes, 32, False, False) - codes.values()).abs() / codes.scales.float().repeat_interleave(32, 1)
    assert 1 / 2000 < float(off.max()) <= 1 / 128


def test_groups_of_zeros(packed_again: Make) -> None:
    """By a scale of zero, or by codes that are the zero point."""
    scales = some_scales(torch.float16)
    scales[3, 1] = 0
    codes = random_codes(scales, None)
    codes.codes[7, :32] = codes.zeros[7, 0]
    again = packed_again(codes, 32, symmetric=False)
    assert torch.equal(again, codes.values())
    assert (again[3, 32:64] == 0).all() and (again[7, :32] == 0).all()


@pytest.mark.parametrize(("wanted", "kept"), [(32, True), (64, True), (128, False)])
def test_finer_groups_repeat_a_scale(packed_again: Make, wanted: int, kept: bool) -> None:
    codes = random_codes(some_scales(torch.float16), None, group_size=64)
    again = packed_again(codes, wanted, symmetric=False)
    assert torch.equal(again, codes.values()) if kept else again is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_is_not_kept(packed_again: Make, bad: float) -> None:
    scales = some_scales(torch.float16)
    scales[0, 0] = bad
    codes = random_codes(scales, None)
    assert packed_again(codes, 32, symmetric=False) is None
    assert not codes.values().isfinite().all()


def test_fp32_scales_that_would_be_rounded_twice_are_not_kept(packed_again: Make) -> None:
    """24 bits times a code take one rounding in scale * (q - zero) and three in scale * q + min."""
    codes = random_codes(some_scales(torch.float32), None)
    assert packed_again(codes, 32, symmetric=False) is None
    symmetric = random_codes(some_scales(torch.float32), 8)
    assert torch.equal(packed_again(symmetric, 32, symmetric=True), symmetric.values())


def test_layout_by_the_group_size_of_the_recipe() -> None:
    """K = 576 takes groups of 64 in a recipe of 128; K = 40 takes none."""
    layout = Layout((8, 576), 4, 9, torch.arange(576) // 64, symmetric=True)
    assert layout.is_kept(128, True) and layout.is_kept(64, False) and layout.is_kept(32, True)
    assert not Layout((8, 576), 8, 9, torch.arange(576) // 64, symmetric=True).is_kept(64, True)
    assert not Layout((8, 40), 4, 1, torch.zeros(40, dtype=torch.long), symmetric=True).is_kept(32, True)
    assert not Layout((8, 64), 4, 2, torch.arange(64) // 32, symmetric=False).is_kept(32, True)
