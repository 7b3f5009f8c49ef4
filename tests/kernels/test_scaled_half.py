"""kernels/scaled_half.py: the scale that kernels find, and the reference, against what it promises."""

import pytest
import torch

from localchat.kernels.gpu import tl, triton
from localchat.kernels.scaled_half import power_of_two_scale, scaled_half_reference

# Row maxima and the scales that belong to them; 512 is still 1, the next fp32 value is 2.
PEAKS = {0.0: 1.0, 1e-30: 1.0, 3.0: 1.0, 512.0: 1.0, 512.00006: 2.0, 1024.0: 2.0, 1e5: 256.0, 1e30: 2.0**91}


def test_reference_promises() -> None:
    x = torch.tensor(list(PEAKS))[:, None] * torch.tensor([1.0, -0.3, 0.0])
    y, row_scale = scaled_half_reference(x)
    assert row_scale.tolist() == list(PEAKS.values())
    assert float(y.abs().max()) <= 512
    assert y.dtype == torch.float16


@triton.jit
def _scale_kernel(peaks_ptr, scales_ptr):
    scale, inverse = power_of_two_scale(tl.load(peaks_ptr + tl.program_id(0)))
    tl.store(scales_ptr + 2 * tl.program_id(0), scale)
    tl.store(scales_ptr + 2 * tl.program_id(0) + 1, inverse)


@pytest.mark.usefixtures("nan_filled")
def test_kernels_find_the_same_scale(device: torch.device) -> None:
    scales = torch.empty(len(PEAKS), 2, device=device)
    _scale_kernel[(len(PEAKS),)](torch.tensor(list(PEAKS), device=device), scales)
    assert scales.tolist() == [[scale, 1 / scale] for scale in PEAKS.values()]
