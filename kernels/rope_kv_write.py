"""From the fused qkv product to a rotated query and a longer cache: q/k norm, RoPE, KV write.

qkv [T, (Hq + 2 Hkv) * D] holds q | k | v, head-major; it may be the first columns of a wider product. q and k are
normalised per head where the family does that (RMSNorm over D), then their first R dimensions are rotated by half-split
pairs (j, j + R/2), and the others are left as they are (R = D but for Qwen3.5, where it is 64 of 256):

    out_j       = x_j cos_j - x_{j+R/2} sin_j
    out_{j+R/2} = x_{j+R/2} cos_j + x_j sin_j

cos and sin come as fp32 [T, R], each half twice and the first half of sin negated, so that the rotation is
x * cos + swap_halves(x) * sin for all dimensions at once. k and v go to keys, values [Hkv, S, D] at `positions`
int64 [T]; q [T, Hq, D] comes back. Computed in fp32, rounded once. The reference returns q in qkv's dtype; the kernel
takes qkv in fp32 or bf16 and returns q in the cache's dtype, which is what attention's tensor-core products take.
One program per token and head; moves qkv once in (the partner of an element comes from L1) and once out. Source: arXiv
2104.09864, in the half-split ("NeoX") order.
"""

import torch
from torch import Tensor

from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
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
    """Writes keys and values in place, returns q [T, Hq, D]. Shapes as in the module's docstring.

    cos and sin may be narrower than a head, [T, R]: then its first R dimensions are rotated and the others are not.
    """
    kv_heads, _, head_dim = keys.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim).float()
    q_heads = heads.shape[1] - 2 * kv_heads
    if q_norm is not None and k_norm is not None:
        q = rms_norm_reference(heads[:, :q_heads], q_norm, eps)
        k = rms_norm_reference(heads[:, q_heads : q_heads + kv_heads], k_norm, eps)
        qk = torch.cat((q, k), dim=1)
    else:
        qk = heads[:, : q_heads + kv_heads]
    rotary_dim = cos.shape[-1]
    turning, still = qk[..., :rotary_dim], qk[..., rotary_dim:]
    swapped = turning.roll(rotary_dim // 2, dims=-1)
    rotated = torch.cat((torch.addcmul(turning * cos.unsqueeze(1), swapped, sin.unsqueeze(1)), still), dim=-1)
    keys.index_copy_(1, positions, rotated[:, q_heads:].transpose(0, 1).to(keys.dtype))
    values.index_copy_(1, positions, heads[:, q_heads + kv_heads :].transpose(0, 1).to(values.dtype))
    return rotated[:, :q_heads].to(qkv.dtype)


@triton.jit
def _rope_kv_write_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    eps,
    ROW_STRIDE,
    Q_HEADS,
    KV_HEADS,
    HEAD_STRIDE,
    NORM: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    token, head = tl.program_id(0), tl.program_id(1)
    wide_token = token.to(tl.int64)
    j = tl.arange(0, BLOCK)
    mask = j < D
    row = qkv_ptr + wide_token * ROW_STRIDE + head * D
    wait_for_previous(PDL)
    x = tl.load(row + j, mask=mask, other=0.0).to(tl.float32)

    if head < Q_HEADS + KV_HEADS:  # q or k: norm and rotation
        turns = j < ROTARY
        partner = tl.where(j < ROTARY // 2, j + ROTARY // 2, j - ROTARY // 2)
        other = tl.load(row + partner, mask=turns, other=0.0).to(tl.float32)
        if NORM:
            norm_ptr = q_norm_ptr
            if head >= Q_HEADS:
                norm_ptr = k_norm_ptr
            rms = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps)
            x = x * rms * tl.load(norm_ptr + j, mask=mask, other=0.0).to(tl.float32)
            other = other * rms * tl.load(norm_ptr + partner, mask=turns, other=0.0).to(tl.float32)
        angle = wide_token * ROTARY + j
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        x = x * cos + other * sin

    if head < Q_HEADS:
        out = q_ptr + (wide_token * Q_HEADS + head) * D + j
    else:
        position = tl.load(positions_ptr + token).to(tl.int64)
        if head < Q_HEADS + KV_HEADS:
            out = keys_ptr + (head - Q_HEADS).to(tl.int64) * HEAD_STRIDE + position * D + j
        else:
            out = values_ptr + (head - Q_HEADS - KV_HEADS).to(tl.int64) * HEAD_STRIDE + position * D + j
    tl.store(out, x.to(q_ptr.dtype.element_ty), mask=mask)


def rope_kv_write(
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
    """Writes keys and values (bf16 or fp32) in place, returns q [T, Hq, D] in their dtype.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or only one of the two norms is there.
    """
    check_tensor("rope_kv_write: keys", keys, (torch.bfloat16, torch.float32), (None, None, None))
    check_tensor("rope_kv_write: values", values, (keys.dtype,), keys.shape)
    (kv_heads, capacity, head_dim), tokens = keys.shape, qkv.shape[0]
    q_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    if head_dim % 2 or q_heads < 1:
        raise ValueError(f"rope_kv_write: got qkv {list(qkv.shape)} for keys {list(keys.shape)}, wanted (Hq + 2 Hkv) D")
    check_tensor("rope_kv_write: qkv", qkv, FLOATS, (None, (q_heads + 2 * kv_heads) * head_dim), rows_apart=True)
    check_tensor("rope_kv_write: cos", cos, (torch.float32,), (tokens, None))
    check_tensor("rope_kv_write: sin", sin, (torch.float32,), cos.shape)
    rotary_dim = cos.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rope_kv_write: got cos of width {rotary_dim}, wanted an even number up to {head_dim}")
    check_tensor("rope_kv_write: positions", positions, (torch.int64,), (tokens,))
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rope_kv_write: got one of q_norm and k_norm, wanted both or neither")
    if q_norm is not None and k_norm is not None:
        check_tensor("rope_kv_write: q_norm", q_norm, FLOATS, (head_dim,))
        check_tensor("rope_kv_write: k_norm", k_norm, (q_norm.dtype,), (head_dim,))
    q = torch.empty(tokens, q_heads, head_dim, dtype=keys.dtype, device=keys.device)
    _rope_kv_write_kernel[(tokens, q_heads + 2 * kv_heads)](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        q,
        keys,
        values,
        eps,
        qkv.stride(0),
        q_heads,
        kv_heads,
        capacity * head_dim,
        NORM=q_norm is not None,
        D=head_dim,
        ROTARY=rotary_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **pdl_options(q),
    )
    return q
