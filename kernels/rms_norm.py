"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight.

x [T, H] in the model's dtype, weight [H] in any float dtype, y like x; computed in fp32, rounded once at the end.
Moves T * H elements in and out. Source: arXiv 1910.07467.
"""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H] in x's dtype. Also the per-head q/k norm, with H = head_dim."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)
