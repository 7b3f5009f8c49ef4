"""One token's attention in one launch: q/k norm, RoPE, the cache's new row, softmax(q k^T / sqrt(D)) v, output gate.

qkv [1, (Hq + 2 Hkv) * D] as the product before gives it; what is computed stands in kernels/rope_kv_write.py and
kernels/attention.py, whose references, one after the other, are the specification. Moves 2 * Hkv * position * D
elements of the cache, and little beside them: qkv, the new row, and what the parts of the context leave for each other.

The context is cut into `splits` parts, whose boundaries follow from the position on the device, so that one CUDA graph
serves every length. There is one program per KV head and part.

* Each normalises and rotates the queries of its group itself: a few KB, which all of them find in L2. They are padded
  to the 16 rows of a tensor-core tile.
* The newest key and value are made by the program whose part ends with them. It writes them into the cache, and its
  softmax begins with them, rounded as the cache holds them: no program reads what another of the launch wrote there.
* A part's last block is taken first: it alone needs a mask. Earlier steps have written all that is in it, so it is
  loaded before the wait (kernels/pdl.py), and of a short context that is half of what there is, or all.
* The parts of a KV head are put together by the one of its programs that arrives last at the head's counter. It takes
  them in their order, so who that is makes no difference to the result, and leaves the counter at zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from localchat.kernels.attention import LOG2_E, check_heads, load_rows, row_scales, softmax_step
from localchat.kernels.attention_parts import leave, parts_at_once, together
from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import capability, let_next_start, pdl_options, wait_for_previous
from localchat.kernels.rope_kv_write import check_rope_kv_write, partner_of, quantized, turned

_PART = 64  # keys; shorter parts are more for the last program to put together than the others save


@triton.jit
def _gains(norm_ptr, j, partner, turns, NORM: tl.constexpr):
    """A norm's gain at these dimensions and at their partners."""
    gain = 1.0
    other_gain = 1.0
    if NORM:
        gain = tl.load(norm_ptr + j).to(tl.float32)
        other_gain = tl.load(norm_ptr + partner, mask=turns, other=0.0).to(tl.float32)
    return gain, other_gain


@triton.jit
def _attention_decode_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    gate_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    parts_ptr,
    stats_ptr,
    arrivals_ptr,
    out_ptr,
    eps,
    scale,
    HEAD_STRIDE,
    INT8: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    UNITS: tl.constexpr,
    ONE: tl.constexpr,  # there is one split
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,  # a part is a multiple of so many keys, itself one of BLOCK_N
    ROWS: tl.constexpr,  # a power of two >= GROUP
    AT_ONCE: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts fp32 [Hkv, splits, GROUP, D] (not yet divided by l), stats fp32 [Hkv, splits, GROUP, 2] = (m, l)."""
    let_next_start(PDL)
    kv_head, split = tl.program_id(0), tl.program_id(1)
    kv_heads, splits = tl.num_programs(0), tl.num_programs(1)
    row, column, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    turns = d < ROTARY
    partner = partner_of(d, ROTARY)

    # Before the wait: the position and the rows of earlier tokens are older than this step, the norms never change.
    position = tl.load(positions_ptr).to(tl.int32)
    part = tl.cdiv(tl.cdiv(position + 1, splits), PART) * PART
    used = tl.cdiv(position + 1, part)
    newest = split == used - 1  # the part that ends with this token
    start = split * part
    end = tl.minimum(start + part, position)
    last = start + (tl.maximum(tl.cdiv(end - start, BLOCK_N), 1) - 1) * BLOCK_N
    wide_head = kv_head.to(tl.int64)
    rows = wide_head * (HEAD_STRIDE // D) + column
    tile = rows[:, None] * D + d[None, :]
    inside = last + column < end
    offset = tile + last * D
    k, v = load_rows(keys_ptr + offset, values_ptr + offset, inside, True)
    key_scales = 0.0
    value_scales = 0.0
    if INT8:
        key_scales = row_scales(key_scales_ptr, rows + last, inside, True)
        value_scales = row_scales(value_scales_ptr, rows + last, inside, True)
    q_gain, q_other_gain = _gains(q_norm_ptr, d[None, :], partner[None, :], turns[None, :], NORM)
    k_gain, k_other_gain = _gains(k_norm_ptr, d, partner, turns, NORM)
    wait_for_previous(PDL)
    if split >= used:
        return

    q_row = qkv_ptr + (kv_head * GROUP + row)[:, None] * D
    k_row = qkv_ptr + (kv_heads * GROUP + kv_head) * D
    head = (row < GROUP)[:, None]
    # All loads first, and those that others wait for in shared memory last.
    q = tl.load(q_row + d[None, :], mask=head, other=0.0).to(tl.float32)
    q_other = tl.load(q_row + partner[None, :], mask=head & turns[None, :], other=0.0).to(tl.float32)
    q_cos = tl.load(cos_ptr + d[None, :], mask=turns[None, :], other=1.0)
    q_sin = tl.load(sin_ptr + d[None, :], mask=turns[None, :], other=0.0)
    new_k = tl.load(k_row + d).to(tl.float32)
    k_other = tl.load(k_row + partner, mask=turns, other=0.0).to(tl.float32)
    k_cos = tl.load(cos_ptr + d, mask=turns, other=1.0)
    k_sin = tl.load(sin_ptr + d, mask=turns, other=0.0)
    new_v = tl.load(k_row + kv_heads * D + d).to(tl.float32)
    q = turned(q, q_other, q_gain, q_other_gain, q_cos, q_sin, eps, D, NORM)
    # Nothing is added. But an addition within a thread is what Triton does not move to the side of the product, where
    # every warp would load and rotate all queries for itself, in twice the registers.
    q = tl.sum(tl.join(q, tl.zeros_like(q)), 2)
    new_k = turned(new_k, k_other, k_gain, k_other_gain, k_cos, k_sin, eps, D, NORM)

    key_scale = 1.0
    value_scale = 1.0
    if INT8:
        new_k, key_scale = quantized(new_k)
        new_v, value_scale = quantized(new_v)
        q = q.to(tl.bfloat16)
    else:
        q = q.to(keys_ptr.dtype.element_ty)
    new_k = new_k.to(keys_ptr.dtype.element_ty)
    new_v = new_v.to(values_ptr.dtype.element_ty)
    if newest:
        slot = wide_head * (HEAD_STRIDE // D) + position
        tl.store(keys_ptr + slot * D + d, new_k)
        tl.store(values_ptr + slot * D + d, new_v)
        if INT8:
            tl.store(key_scales_ptr + slot, key_scale)
            tl.store(value_scales_ptr + slot, value_scale)

    # The softmax begins with the newest row, as the cache holds it: its weight is 1 so far.
    m = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * (key_scale * scale)
    m = tl.where(newest, m, float("-inf"))
    l = tl.full([BLOCK_M], tl.where(newest, 1.0, 0.0), tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32) + tl.where(newest, new_v.to(tl.float32) * value_scale, 0.0)[None, :]
    m, l, acc = softmax_step(
        *(q, k, v, key_scales, value_scales, None, None, inside[None, :]),
        *(m, l, acc, scale, INT8, True, True, WIDEN),
    )
    for n in range(start, last, BLOCK_N):
        offset = tile + n * D
        k, v = load_rows(keys_ptr + offset, values_ptr + offset, None, False)
        m, l, acc = softmax_step(
            *(q, k, v, key_scales_ptr, value_scales_ptr, rows + n, None, None),
            *(m, l, acc, scale, INT8, False, False, WIDEN),
        )

    if ONE:
        out = acc / l[:, None]
        leave(out, gate_ptr, out_ptr, kv_head, row, GROUP, D, GATED, UNITS)
        return
    first_part = kv_head * splits
    at = (first_part + split) * GROUP + row
    tl.store(parts_ptr + at[:, None] * D + d[None, :], acc, mask=head)
    tl.store(stats_ptr + at * 2, m, mask=row < GROUP)
    tl.store(stats_ptr + at * 2 + 1, l, mask=row < GROUP)
    tl.debug_barrier()  # all warps have written before one of them says so
    arrived = tl.atomic_add(arrivals_ptr + kv_head, 1, sem="acq_rel", scope="gpu")
    if arrived == used - 1:
        heads = together(parts_ptr, stats_ptr, first_part, used, GROUP, ROWS, D, AT_ONCE)
        leave(heads, gate_ptr, out_ptr, kv_head, tl.arange(0, ROWS), GROUP, D, GATED, UNITS)
        tl.store(arrivals_ptr + kv_head, 0)


def attention_decode(
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
    splits: int,
    arrivals: Tensor,
    gate: Tensor | None = None,
    scales: Sequence[Tensor] = (),
    units: bool = False,
) -> Tensor:
    """qkv [1, (Hq + 2 Hkv) * D], positions int64 [1] -> fp32 [1, Hq * D]; writes the row at the position in place.

    keys, values [Hkv, S, D] bf16 or fp32, to which queries are rounded too; or INT8 with `scales`, fp32 [Hkv, S] of
    keys and of values, under bf16 queries. gate [1, Hq * D] in any float dtype.

    units: fp16 and divided by UNIT instead (kernels/scaled_half.py), as the product behind it takes it.

    arrivals int32, at least one per KV head: zeros that the launch needs and leaves as zeros. Launches of one stream
    share it. The result depends on the inputs and `splits` alone, bit for bit. Before a call that reads what the call
    before wrote lies a plain launch (kernels/pdl.py): earlier rows, and the position, are read before the wait.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or splits is not positive.
    """
    what = "attention_decode"
    q_heads = check_rope_kv_write(what, qkv, q_norm, k_norm, cos, sin, positions, keys, values, scales)
    (kv_heads, capacity, head_dim), tokens = keys.shape, qkv.shape[0]
    group = check_heads(what, q_heads, kv_heads, head_dim)
    if tokens != 1 or splits < 1:
        raise ValueError(f"{what}: got {tokens} tokens, {splits} splits, wanted 1 token, at least 1 split")
    if gate is not None:
        check_tensor(f"{what}: gate", gate, FLOATS, (1, q_heads * head_dim), rows_apart=True)
    check_tensor(f"{what}: arrivals", arrivals, (torch.int32,), (None,))
    if arrivals.shape[0] < kv_heads:
        raise ValueError(f"{what}: got {arrivals.shape[0]} arrivals, wanted one per KV head")
    blocks = _blocks_for(keys)
    rows = triton.next_power_of_2(group)
    parts = torch.empty(kv_heads, splits, group, head_dim, dtype=torch.float32, device=keys.device)
    stats = torch.empty(kv_heads, splits, group, 2, dtype=torch.float32, device=keys.device)
    out = torch.empty(1, q_heads * head_dim, dtype=torch.float16 if units else torch.float32, device=keys.device)
    _attention_decode_kernel[(kv_heads, splits)](
        *(qkv, q_norm, k_norm, cos, sin, positions, gate, keys, values),
        *(scales or (None, None)),
        *(parts, stats, arrivals, out, eps, head_dim**-0.5 * LOG2_E, capacity * head_dim),
        INT8=bool(scales),
        NORM=q_norm is not None,
        GATED=gate is not None,
        UNITS=units,
        ONE=splits == 1,
        GROUP=group,
        D=head_dim,
        ROTARY=cos.shape[1],
        BLOCK_M=max(16, rows),
        BLOCK_N=blocks.keys,
        PART=max(_PART, blocks.keys),
        ROWS=rows,
        AT_ONCE=parts_at_once(splits, rows, head_dim),
        WIDEN=not keys.is_cuda,
        num_warps=blocks.warps if rows <= 16 else 8,  # with four, 32 rows of queries leave 16 bytes on the stack
        num_stages=blocks.stages,
        **pdl_options(keys),
    )
    return out


class Blocks(NamedTuple):
    """Keys of a block, warps, stages of the loop over them, and programs for which a multiprocessor has room."""

    keys: int
    warps: int
    stages: int
    programs: int


def decode_splits(keys: Tensor, multiprocessors: int) -> int:
    """Parts of the context for a cache [Hkv, S, D]: one for each program that a card has room for."""
    return max(1, _blocks_for(keys).programs * multiprocessors // keys.shape[0])


def _blocks_for(keys: Tensor) -> Blocks:
    kv_heads, _, head_dim = keys.shape
    return decode_blocks(kv_heads, head_dim, keys.element_size(), capability(keys.device) if keys.is_cuda else 0)


def decode_blocks(kv_heads: int, head_dim: int, element_size: int, major: int) -> Blocks:
    """For a cache whose elements have so many bytes, on a card of compute capability `major`.x.

    The best of those measured on an H200 (kernels/NOTES.md), of those that spill nothing, and fit into 99 KB of shared
    memory but on Hopper. With three stages a block's copies are under way while the one before is worked on. Codes are
    widened in registers, which takes longer than their bytes: so there are two programs for each multiprocessor. fp32
    has no tensor cores: as much as does not spill.
    """
    if element_size == 4:
        return Blocks(max(16, min(head_dim, 2048 // head_dim)), 8, 2, 1)
    if major == 9 and head_dim >= 128 and element_size == 2:
        return Blocks(64 if kv_heads <= 4 else 16384 // head_dim, 8, 3, 1)  # of few heads there are many, short parts
    warps = 8 if head_dim == 128 and major != 9 else 4
    return Blocks(min(head_dim, 8192 // head_dim), warps, 3, 2 if element_size == 1 else 1)
