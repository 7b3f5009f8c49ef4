"""kernels/swiglu.py: the kernel against its reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localchat.kernels import swiglu as module
from localchat.kernels.swiglu import swiglu, swiglu_reference

Relative = Callable[[Tensor, Tensor], float]
pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 4864), (3, 97), (2, 29568)])
def test_agrees(
    device: torch.device, relative: Relative, tokens: int, inner: int, dtype: torch.dtype, half: bool
) -> None:
    gate_up = (torch.randn(tokens, 2 * inner, device=device) * 3).to(dtype)
    y, row_scale = swiglu(gate_up, half=half)
    wanted = swiglu_reference(gate_up.float())
    if row_scale is None:
        assert y.dtype == torch.bfloat16
        assert relative(y, wanted) < 2.5e-3
    else:
        assert y.dtype == torch.float16
        assert relative(y.float() * row_scale[:, None], wanted) < 5e-4


@pytest.mark.parametrize("whole", [256, 0])  # one pass, or blocks of 64
def test_large_inputs(device: torch.device, relative: Relative, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e5 squared passes fp16's range by far; gates of -1e5 are zeros, not NaN; the maximum sits in the last block."""
    monkeypatch.setattr(module, "_BLOCK", 64)
    monkeypatch.setattr(module, "_WHOLE", whole)
    gate_up = torch.randn(3, 2 * 150, device=device)
    gate_up[0, 298] = gate_up[0, 299] = 1e5
    gate_up[1, ::2] = -1e5
    y, row_scale = swiglu(gate_up, half=True)
    assert row_scale is not None
    wanted = swiglu_reference(gate_up)
    assert float(y.abs().max()) <= 512
    assert row_scale.tolist() == [2.0**25, 1.0, 1.0]
    for row in (0, 2):
        assert relative(y[row].float() * row_scale[row], wanted[row]) < 5e-4
    assert y[1].abs().max() == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="swiglu: gate_up: got float16"):
        swiglu(torch.zeros(2, 64).half(), half=True)
    with pytest.raises(ValueError, match="swiglu: got gate_up of width 63"):
        swiglu(torch.zeros(2, 63), half=True)
