"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight.

x [T, H], weight [H] in any float dtype; computed in fp32, rounded once at the end. Source: arXiv 1910.07467.
The reference returns x's dtype. The kernel takes the fp32 residual stream and returns what the product behind it
takes: scaled half (kernels/scaled_half.py) for few tokens, bf16 for many. Moves 4 T H bytes in and 2 T H out; one
program holds one row in registers.
"""

import torch
from torch import Tensor

from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import power_of_two_scale, warps_for


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype. Also the per-head q/k norm, with H = head_dim."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, y_ptr, scale_ptr, H, eps, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < H
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * H + offsets, mask=mask, other=0.0)
    y = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / H + eps)) * weight
    if HALF:
        scale, inverse = power_of_two_scale(tl.max(tl.abs(y), 0))
        tl.store(scale_ptr + row, scale)
        y = y * inverse
    tl.store(y_ptr + row.to(tl.int64) * H + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, half: bool) -> tuple[Tensor, Tensor | None]:
    """x fp32 [T, H], weight [H] -> fp16 [T, H] and its row_scale fp32 [T], or bf16 [T, H] and None.

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    check_tensor("rms_norm: x", x, (torch.float32,), (None, None))
    tokens, hidden = x.shape
    check_tensor("rms_norm: weight", weight, FLOATS, (hidden,))
    y = torch.empty(tokens, hidden, dtype=torch.float16 if half else torch.bfloat16, device=x.device)
    row_scale = torch.empty(tokens, dtype=torch.float32, device=x.device) if half else None
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x, weight, y, row_scale, hidden, eps, HALF=half, BLOCK=block, num_warps=warps_for(block), **pdl_options(x)
    )
    return y, row_scale
