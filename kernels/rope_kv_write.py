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

An INT8 cache has one scale per token and KV head, fp32 [Hkv, S], for keys and for values. A row x of D elements is kept
as codes in -127..127, rounded to nearest even:

    scale = max |x| / 127          code_j = round(x_j / max |x| * 127)          x_j ~ scale * code_j

so that no element is off by more than half a scale, and rows of zeros stay so. With q bf16, D + 4 bytes a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.rms_norm import rms_norm_reference

_CACHED = (torch.bfloat16, torch.float32)  # dtypes of a cache that is not INT8


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
    *,
    scales: Sequence[Tensor] = (),
) -> Tensor:
    """Writes keys and values in place, returns q [T, Hq, D]. Shapes as in the module's docstring.

    scales: those of keys and of values, which are INT8 then; written as well.

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
    rows = rotated[:, q_heads:].transpose(0, 1), heads[:, q_heads + kv_heads :].transpose(0, 1)
    if scales:
        rows, row_scales = zip(*map(quantize_rows, rows), strict=True)
        for scale, written in zip(scales, row_scales, strict=True):
            scale.index_copy_(1, positions, written)
    for cache, row in zip((keys, values), rows, strict=True):
        cache.index_copy_(1, positions, row.to(cache.dtype))
    return rotated[:, :q_heads].to(qkv.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x fp32 [..., D] -> codes int8 [..., D] and scales fp32 [...], as in the module's docstring."""
    largest = x.abs().amax(dim=-1)
    codes = (x / largest.where(largest > 0, 1.0).unsqueeze(-1) * 127).round()
    return codes.to(torch.int8), largest / 127


@triton.jit
def partner_of(j, ROTARY: tl.constexpr):
    """The dimension that a rotated dimension turns with. The compiler is told that they come in runs, as j does."""
    half: tl.constexpr = ROTARY // 2
    run: tl.constexpr = half & -half if half & -half < 16 else 16
    return tl.max_contiguous(tl.multiple_of(tl.where(j < half, j + half, j - half), run), run)


@triton.jit
def turned(x, other, gain, other_gain, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotation of heads x [..., D]; `other` and `other_gain` are x and gain at each dimension's partner.

    Where a dimension is not rotated, cos is 1 and sin is 0. Not NORM, nobody looks at the gains.
    """
    if NORM:
        rms = 1.0 / tl.sqrt_rn(tl.sum(x * x, -1, keep_dims=True) / D + eps)
        x = x * rms * gain
        other = other * rms * other_gain
    return x * cos + other * sin


@triton.jit
def quantized(x):
    """x fp32 [D] -> codes, as whole numbers in fp32, and their scale."""
    largest = tl.max(tl.abs(x), 0)
    code = tl.div_rn(x, tl.where(largest > 0, largest, 1.0)) * 127
    # To nearest even: behind 1.5 * 2^23 an fp32 number has no room for a fraction.
    return (code + 12582912.0) - 12582912.0, tl.div_rn(largest, 127.0)


@triton.jit
def _store_row(cache_ptr, scales_ptr, row, x, j, mask, INT8: tl.constexpr, D: tl.constexpr):
    """x [BLOCK] to row `row` of a cache."""
    out = cache_ptr + row * D + j
    if INT8:
        codes, scale = quantized(x)
        tl.store(out, codes.to(tl.int8), mask=mask)
        tl.store(scales_ptr + row, scale)
    else:
        tl.store(out, x.to(cache_ptr.dtype.element_ty), mask=mask)


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
    key_scales_ptr,
    value_scales_ptr,
    eps,
    ROW_STRIDE,
    Q_HEADS,
    KV_HEADS,
    HEAD_STRIDE,
    INT8: tl.constexpr,
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
        partner = partner_of(j, ROTARY)
        other = tl.load(row + partner, mask=turns, other=0.0).to(tl.float32)
        gain = 1.0
        other_gain = 1.0
        if NORM:
            norm_ptr = q_norm_ptr
            if head >= Q_HEADS:
                norm_ptr = k_norm_ptr
            gain = tl.load(norm_ptr + j, mask=mask, other=0.0).to(tl.float32)
            other_gain = tl.load(norm_ptr + partner, mask=turns, other=0.0).to(tl.float32)
        angle = wide_token * ROTARY + j
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        x = turned(x, other, gain, other_gain, cos, sin, eps, D, NORM)

    if head < Q_HEADS:
        if q_ptr.dtype.element_ty == tl.float16:
            x = tl.clamp(x, -65504.0, 65504.0)
        tl.store(q_ptr + (wide_token * Q_HEADS + head) * D + j, x.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        position = tl.load(positions_ptr + token).to(tl.int64)
        capacity = (HEAD_STRIDE // D).to(tl.int64)
        if position - tl.load(positions_ptr) == token:  # no row that fills up
            if head < Q_HEADS + KV_HEADS:
                slot = (head - Q_HEADS) * capacity + position
                _store_row(keys_ptr, key_scales_ptr, slot, x, j, mask, INT8, D)
            else:
                slot = (head - Q_HEADS - KV_HEADS) * capacity + position
                _store_row(values_ptr, value_scales_ptr, slot, x, j, mask, INT8, D)


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
    *,
    scales: Sequence[Tensor] = (),
    q_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Writes keys and values (bf16 or fp32) in place, returns q [T, Hq, D] in their dtype.

    scales: those of keys and of values, which are INT8 then; written as well. Then q comes in `q_dtype`: bf16, fp32, or
    fp16, where it ends at 65,504. Positions are consecutive; of rows that fill up (kernels/padding.py) nothing is
    written.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or only one of the two norms is there.
    """
    if q_dtype not in FLOATS:
        raise ValueError(f"rope_kv_write: got q_dtype {q_dtype}, wanted bfloat16, float16 or float32")
    q_heads = check_rope_kv_write("rope_kv_write", qkv, q_norm, k_norm, cos, sin, positions, keys, values, scales)
    (kv_heads, capacity, head_dim), tokens = keys.shape, qkv.shape[0]
    q = torch.empty(tokens, q_heads, head_dim, dtype=q_dtype if scales else keys.dtype, device=keys.device)
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
        *(scales or (None, None)),
        eps,
        qkv.stride(0),
        q_heads,
        kv_heads,
        capacity * head_dim,
        INT8=bool(scales),
        NORM=q_norm is not None,
        D=head_dim,
        ROTARY=cos.shape[1],
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **pdl_options(q),
    )
    return q


def check_rope_kv_write(
    what: str,
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Sequence[Tensor],
) -> int:
    """The number of query heads.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or only one of the two norms is there.
    """
    check_tensor(f"{what}: keys", keys, (torch.int8,) if scales else _CACHED, (None, None, None))
    check_tensor(f"{what}: values", values, (keys.dtype,), keys.shape)
    if len(scales) not in (0, 2):
        raise ValueError(f"{what}: got {len(scales)} tensors of scales, wanted none, or those of keys and of values")
    for scale in scales:
        check_tensor(f"{what}: scales", scale, (torch.float32,), keys.shape[:2])
    (kv_heads, _, head_dim), tokens = keys.shape, qkv.shape[0]
    q_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    if head_dim % 2 or q_heads < 1:
        raise ValueError(f"{what}: got qkv {list(qkv.shape)} for keys {list(keys.shape)}, wanted (Hq + 2 Hkv) D")
    check_tensor(f"{what}: qkv", qkv, FLOATS, (None, (q_heads + 2 * kv_heads) * head_dim), rows_apart=True)
    check_tensor(f"{what}: cos", cos, (torch.float32,), (tokens, None))
    check_tensor(f"{what}: sin", sin, (torch.float32,), cos.shape)
    rotary_dim = cos.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"{what}: got cos of width {rotary_dim}, wanted an even number up to {head_dim}")
    check_tensor(f"{what}: positions", positions, (torch.int64,), (tokens,))
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{what}: got one of q_norm and k_norm, wanted both or neither")
    if q_norm is not None and k_norm is not None:
        check_tensor(f"{what}: q_norm", q_norm, FLOATS, (head_dim,))
        check_tensor(f"{what}: k_norm", k_norm, (q_norm.dtype,), (head_dim,))
    return q_heads
