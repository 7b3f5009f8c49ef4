"""From the fused qkv product to a rotated query and a longer cache: q/k norm, RoPE, KV write.

qkv [T, (Hq + 2 Hkv) * D] holds q | k | v, head-major. q and k are normalised per head where the family does that
(RMSNorm over D), then rotated by half-split pairs (j, j + D/2):

    out_j       = x_j cos_j - x_{j+D/2} sin_j
    out_{j+D/2} = x_{j+D/2} cos_j + x_j sin_j

cos and sin come as fp32 [T, D], each half twice and the first half of sin negated, so that the rotation is
x * cos + swap_halves(x) * sin for all dimensions at once. k and v go to keys, values [Hkv, S, D] at `positions`
int64 [T]; q [T, Hq, D] comes back. Computed in fp32; q in qkv's dtype, the cache in its own.
Source: arXiv 2104.09864, in the half-split ("NeoX") order.
"""

import torch
from torch import Tensor

from localchat.kernels.rms_norm import rms_norm_reference


def rope_kv_write_reference(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Writes keys and values in place, returns q [T, Hq, D]. Shapes as in the module's docstring."""
    kv_heads, _, head_dim = keys.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim).float()
    q_heads = heads.shape[1] - 2 * kv_heads
    if q_norm is not None and k_norm is not None:
        q = rms_norm_reference(heads[:, :q_heads], q_norm, eps)
        k = rms_norm_reference(heads[:, q_heads : q_heads + kv_heads], k_norm, eps)
        qk = torch.cat((q, k), dim=1)
    else:
        qk = heads[:, : q_heads + kv_heads]
    swapped = qk.roll(head_dim // 2, dims=-1)
    rotated = torch.addcmul(qk * cos.unsqueeze(1), swapped, sin.unsqueeze(1))
    keys.index_copy_(1, positions, rotated[:, q_heads:].transpose(0, 1).to(keys.dtype))
    values.index_copy_(1, positions, heads[:, q_heads + kv_heads :].transpose(0, 1).to(values.dtype))
    return rotated[:, :q_heads].to(qkv.dtype)
