"""kernels/rms_norm.py: the kernel against its reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localchat.kernels.rms_norm import rms_norm, rms_norm_reference

Relative = Callable[[Tensor, Tensor], float]
pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 576), (3, 97), (2, 5120)])
def test_agrees(
    device: torch.device, relative: Relative, tokens: int, hidden: int, dtype: torch.dtype, half: bool
) -> None:
    x = torch.randn(tokens, hidden, device=device) * 30
    weight = torch.randn(hidden, device=device).to(dtype)
    y, row_scale = rms_norm(x, weight, 1e-5, half=half)
    wanted = rms_norm_reference(x, weight, 1e-5)
    if row_scale is None:
        assert y.dtype == torch.bfloat16
        assert relative(y, wanted) < 2.5e-3
    else:
        assert y.dtype == torch.float16
        assert bool((row_scale == 1).all())
        assert relative(y, wanted) < 5e-4


def test_large_rows_are_scaled_down(device: torch.device, relative: Relative) -> None:
    """One outlier after the norm is sqrt(H); with a large gain it passes 512."""
    x, weight = torch.randn(2, 300, device=device), torch.full((300,), 1.0, device=device)
    x[1, 7] = 1e5
    weight[7] = 400
    y, row_scale = rms_norm(x, weight, 1e-6, half=True)
    assert row_scale is not None
    wanted = rms_norm_reference(x, weight, 1e-6)
    assert float(y.abs().max()) <= 512
    assert row_scale.tolist() == [torch.exp2((row.abs().max() / 512).log2().ceil().clamp(min=0)) for row in wanted]
    assert row_scale[1] > 1
    assert relative(y.float() * row_scale[:, None], wanted) < 5e-4


def test_a_row_of_zeros(device: torch.device) -> None:
    y, row_scale = rms_norm(torch.zeros(1, 64, device=device), torch.ones(64, device=device), 1e-6, half=True)
    assert row_scale is not None
    assert y.abs().max() == 0
    assert row_scale.tolist() == [1.0]


def test_refusals() -> None:
    x, weight = torch.zeros(2, 64), torch.ones(64)
    with pytest.raises(
        ValueError, match=r"rms_norm: x: got bfloat16 \[2, 64\], wanted contiguous float32 \[any, any\]"
    ):
        rms_norm(x.bfloat16(), weight, 1e-6, half=True)
    with pytest.raises(ValueError, match=r"rms_norm: weight: got float32 \[64\], wanted contiguous .* \[32\]"):
        rms_norm(torch.zeros(2, 32), weight, 1e-6, half=True)
    with pytest.raises(ValueError, match="not contiguous"):
        rms_norm(torch.zeros(64, 2).T, weight, 1e-6, half=True)
