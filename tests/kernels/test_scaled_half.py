"""kernels/scaled_half.py: the kernel against its reference, and the reference against what it promises."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localchat.kernels import scaled_half as module
from localchat.kernels.scaled_half import scaled_half, scaled_half_reference

Relative = Callable[[Tensor, Tensor], float]
pytestmark = pytest.mark.usefixtures("nan_filled")

# Row maxima and the scales that belong to them; 512 is still 1, the next fp32 value is 2.
PEAKS = {0.0: 1.0, 1e-30: 1.0, 3.0: 1.0, 512.0: 1.0, 512.00006: 2.0, 1024.0: 2.0, 1e5: 256.0, 1e30: 2.0**91}


def test_reference_promises() -> None:
    x = torch.tensor(list(PEAKS))[:, None] * torch.tensor([1.0, -0.3, 0.0])
    y, row_scale = scaled_half_reference(x)
    assert row_scale.tolist() == list(PEAKS.values())
    assert float(y.abs().max()) <= 512
    assert y.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 97, 5120])
def test_agrees(
    device: torch.device, relative: Relative, dtype: torch.dtype, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 1024)
    rows = torch.randn(len(PEAKS), k, device=device)
    rows /= rows.abs().amax(dim=-1, keepdim=True)
    x = (rows * torch.tensor(list(PEAKS), device=device)[:, None]).to(dtype)
    y, row_scale = scaled_half(x)
    wanted, wanted_scale = scaled_half_reference(x)
    assert torch.equal(row_scale, wanted_scale)
    assert torch.equal(y, wanted)
    assert all(relative(y[row].double() * row_scale[row].double(), x[row]) < 5e-4 for row in range(2, len(PEAKS)))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="scaled_half: x: got float16"):
        scaled_half(torch.zeros(2, 64).half())
