"""SwiGLU: y = silu(gate) * up, from the fused gate_up product.

gate_up [T, 2I] (gate and up in turn), y [T, I]; computed in fp32, rounded once. Source: arXiv 2002.05202.
The reference returns gate_up's dtype. The kernel takes fp32 or bf16 and returns what down_proj takes: scaled half
(kernels/scaled_half.py), which needs the row's maximum first and so reads a row beyond 32,768 twice (the second
time from L2), or bf16 in one pass. Moves 2 T I elements in and 2 T I bytes out; one program a row.
"""

import torch
from torch import Tensor

from localchat.kernels.activations import silu
from localchat.kernels.checks import check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import power_of_two_scale, warps_for

_BLOCK = 4096
# Rows up to here are held in registers: 9.4 -> 6.0 us at 27,648 on an H200, 2026-11-30.
_WHOLE = 32768


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    gate, up = gate_up.float().reshape(*gate_up.shape[:-1], -1, 2).unbind(-1)
    y: Tensor = torch.nn.functional.silu(gate) * up
    return y.to(gate_up.dtype)


@triton.jit
def _silu_times(row_ptr, start, inner, BLOCK: tl.constexpr):
    """silu(gate) * up of BLOCK pairs from `start` on, fp32; the exponential never overflows."""
    offsets = 2 * start + tl.arange(0, 2 * BLOCK)
    both = tl.load(row_ptr + offsets, mask=offsets < 2 * inner, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    return silu(gate) * up


@triton.jit
def _swiglu_kernel(
    x_ptr, y_ptr, scale_ptr, inner, HALF: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x_row = x_ptr + row.to(tl.int64) * 2 * inner
    y_row = y_ptr + row.to(tl.int64) * inner + offsets
    wait_for_previous(PDL)
    if WHOLE:  # the row stays in registers between its maximum and its scaling
        mask = offsets < inner
        y = _silu_times(x_row, 0, inner, BLOCK)
        if HALF:
            scale, inverse = power_of_two_scale(tl.max(tl.abs(y), 0))
            tl.store(scale_ptr + row, scale)
            y = y * inverse
        tl.store(y_row, y.to(y_ptr.dtype.element_ty), mask=mask)
        return
    if HALF:
        peaks = tl.zeros([BLOCK], tl.float32)
        for start in range(0, inner, BLOCK):
            peaks = tl.maximum(peaks, tl.abs(_silu_times(x_row, start, inner, BLOCK)))
        scale, inverse = power_of_two_scale(tl.max(peaks, 0))
        tl.store(scale_ptr + row, scale)
    else:
        inverse = 1.0
    for start in range(0, inner, BLOCK):
        y = _silu_times(x_row, start, inner, BLOCK) * inverse
        tl.store(y_row + start, y.to(y_ptr.dtype.element_ty), mask=start + offsets < inner)


def swiglu(gate_up: Tensor, *, half: bool) -> tuple[Tensor, Tensor | None]:
    """gate_up fp32 or bf16 [T, 2I] -> fp16 [T, I] and its row_scale fp32 [T], or bf16 [T, I] and None.

    Raises:
        ValueError: gate_up has another dtype or an odd width, or is not contiguous.
    """
    check_tensor("swiglu: gate_up", gate_up, (torch.float32, torch.bfloat16), (None, None))
    tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"swiglu: got gate_up of width {width}, wanted gate and up of one width")
    inner = width // 2
    y = torch.empty(tokens, inner, dtype=torch.float16 if half else torch.bfloat16, device=gate_up.device)
    row_scale = torch.empty(tokens, dtype=torch.float32, device=gate_up.device) if half else None
    whole = triton.next_power_of_2(inner) <= _WHOLE
    block = triton.next_power_of_2(inner) if whole else _BLOCK
    warps = 32 if block > 16384 else warps_for(block)
    _swiglu_kernel[(tokens,)](
        *(gate_up, y, row_scale, inner),
        HALF=half,
        WHOLE=whole,
        BLOCK=block,
        num_warps=warps,
        **pdl_options(gate_up),
    )
    return y, row_scale
