"""Causal grouped-query attention of new tokens over the cache: softmax(q k^T / sqrt(D)) v.

q [T, Hq, D]; keys, values [Hkv, S, D] of which the rows up to each token's own position are valid; positions
int64 [T], ascending. Query head h reads KV head h // (Hq / Hkv): the group shares its keys, nothing is repeated.
Output [T, Hq * D], computed in fp32. A gate [T, Hq * D], where there is one (Qwen3.5), multiplies it by its sigmoid
before it leaves. One token moves 2 * Hkv * length * D elements of the cache.

An INT8 cache has `scales`, those of its keys and values, fp32 [Hkv, S]: a key is its scale times its codes, int8 [D]
(kernels/rope_kv_write.py writes them). A scale is the same for all of a key's dimensions, so it multiplies the score,
and a value's scale multiplies the probability: codes go into the products as they are, exact in bf16, and no
dequantised row is stored, but for many queries (attention_slabs.py). One token moves half of what a bf16 cache costs,
and 4 bytes a row for its scale.

The kernel here, `attention_prefill`, is for a chunk of tokens behind a cached prefix: a program takes a tile of (token,
head of the group) rows, so keys and values are read once for the whole group and few tokens still fill a tile. Only
blocks that the diagonal cuts are masked. Positions are contiguous: the first and the last say all. One token, with what
comes before and after it: attention_decode.py. Both have the online softmax of FlashAttention-2 (arXiv 2307.08691) in
base 2 and fp32 accumulators; q, keys and values bf16 (or fp32, multiplied as such; or INT8 under either), D a power of
two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from localchat.kernels.activations import sigmoid
from localchat.kernels.attention_parts import attention_join
from localchat.kernels.attention_slabs import Slabs
from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.scaled_half import in_units

# Scores held at once, in fp32 elements (256 MB): queries are taken in blocks so that memory does not grow with T * S.
_MAX_SCORES = 64 * 1024 * 1024
_ENDLESS = 2**31 - 1  # more keys than there are
LOG2_E = 1.4426950408889634
# In fp16 (attention_slabs.py) probabilities count 16 for 1, and so does their sum: small ones keep more of themselves.
_RAISED = tl.constexpr(4.0)


def attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    gate: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> Tensor:
    """-> [T, Hq * D] in q's dtype."""
    if gate is not None:
        heads = attention_reference(q.float(), keys, values, positions, scales=scales)
        return (heads * gate.float().sigmoid()).to(q.dtype)
    tokens, q_heads, _ = q.shape
    length = int(positions[-1]) + 1
    k, v = keys[:, :length].float(), values[:, :length].float()
    scales = [scale[:, None, :length] for scale in scales]
    if tokens == 1:  # sees the whole cache
        return _attend(q.float(), k, v, None, scales).to(q.dtype)
    block = max(1, _MAX_SCORES // (q_heads * length))
    starts = range(0, tokens, block)
    parts = [_attend(q[i : i + block].float(), k, v, positions[i : i + block], scales) for i in starts]
    return torch.cat(parts).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, scales: Sequence[Tensor]) -> Tensor:
    """A block of queries [t, Hq, D] over k, v [Hkv, L, D] -> [t, Hq * D]; without positions nothing is hidden.

    scales: those of INT8 keys and values [Hkv, 1, L], or none.
    """
    (tokens, _, head_dim), (kv_heads, length, _) = q.shape, k.shape
    group = q.view(tokens, kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, t, Hq / Hkv, D]
    scores = (group * head_dim**-0.5).reshape(kv_heads, -1, head_dim) @ k.transpose(1, 2)
    if scales:
        scores = scores * scales[0]
    if positions is not None:
        hidden = torch.arange(length, device=q.device) > positions[:, None]
        scores.view(kv_heads, tokens, -1, length).masked_fill_(hidden[None, :, None], float("-inf"))
    weights = scores.softmax(-1)
    heads: Tensor = (weights * scales[1] if scales else weights) @ v
    return heads.view(kv_heads, tokens, -1, head_dim).transpose(0, 1).reshape(tokens, -1)


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    """a b in fp32. The interpreter has no bf16 product: there the (already rounded) operands are widened first."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _operand(x, q, WIDEN: tl.constexpr):
    """Codes as numbers of q's dtype, which holds them all; the interpreter has no cast from int8 to bf16."""
    if WIDEN:
        x = x.to(tl.float32)
    else:
        x = x.to(q.dtype)
    return x


@triton.jit
def load_rows(keys, values, inside, MASKED: tl.constexpr):
    """keys and values [N, D] at these pointers, 0 where not inside [N]. Not MASKED, all is inside."""
    if MASKED:
        k = tl.load(keys, mask=inside[:, None], other=0)
        v = tl.load(values, mask=inside[:, None], other=0)
    else:
        k = tl.load(keys)
        v = tl.load(values)
    return k, v


@triton.jit
def row_scales(scales_ptr, rows, inside, MASKED: tl.constexpr):
    """The scales [N] of these rows, in the same way."""
    if MASKED:
        loaded = tl.load(scales_ptr + rows, mask=inside, other=0.0)
    else:
        loaded = tl.load(scales_ptr + rows)
    return loaded


@triton.jit
def softmax_step(
    q,
    k,
    v,
    key_scales,
    value_scales,
    rows,
    inside,
    visible,
    m,
    l,
    acc,
    scale,
    INT8: tl.constexpr,
    LOADED: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One block more: k, v [N, D] and, if INT8, their scales [N], or (not LOADED) those of all rows of the cache.

    q [M, D]; rows [N], those of this block in the cache, of which `inside` are read; visible [M, N]; m, l [M], acc
    [M, D]. scale includes log2(e). Not MASKED, all is inside and visible.
    """
    scores = _dot(q, tl.trans(_operand(k, q, WIDEN)), WIDEN) * scale
    if INT8:
        if not LOADED:
            key_scales = row_scales(key_scales, rows, inside, MASKED)
        scores *= key_scales[None, :]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - (m_new - _RAISED if q.dtype == tl.float16 else m_new)[:, None])
    shrink = tl.exp2(m - m_new)
    l = l * shrink + tl.sum(p, 1)
    if INT8:
        if not LOADED:
            value_scales = row_scales(value_scales, rows, inside, MASKED)
        p *= value_scales[None, :]
    acc = acc * shrink[:, None] + _dot(p.to(q.dtype), _operand(v, q, WIDEN), WIDEN)
    return m_new, l, acc


@triton.jit
def _store_columns(
    out,
    out_ptr,
    out_at,
    gate_ptr,
    gate_at,
    real,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GATED: tl.constexpr,
):
    """out [M, WIDTH]: the columns from FIRST on of rows that begin at `out_at` [M], their gates' at `gate_at` [M].

    MOST at a time, so that gates and addresses find room in registers.
    """
    if WIDTH > MOST:
        left, right = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, WIDTH // 2]), (0, 2, 1)))
        rows = (out_ptr, out_at, gate_ptr, gate_at, real)
        _store_columns(left, *rows, FIRST, WIDTH // 2, MOST, BLOCK_M, GATED)
        _store_columns(right, *rows, FIRST + WIDTH // 2, WIDTH // 2, MOST, BLOCK_M, GATED)
    else:
        d = FIRST + tl.arange(0, WIDTH)
        if GATED:
            gate = tl.load(gate_ptr + gate_at[:, None] + d[None, :], mask=real[:, None], other=0.0)
            out = out * sigmoid(gate.to(tl.float32))
        if out_ptr.dtype.element_ty == tl.float16:
            out = in_units(out)
        tl.store(out_ptr + out_at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["tokens", "first", "last", "part", "part_count"])
def _attention_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    positions_ptr,
    gate_ptr,
    out_ptr,
    stats_ptr,
    scale,
    tokens,
    first,
    last,
    part,
    part_count,
    Q_HEADS,
    HEAD_STRIDE,
    GATE_STRIDE,
    INT8: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,  # a program sees one part of the context, and out is what attention_parts.py takes
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Row r of a KV head is token r // GROUP, head r % GROUP of the group. The last tiles see most: they go first.

    Only if CUT: keys and values are those from `first` on to before `last`, and make the parts from `part` on of all
    `part_count`; `first` is a multiple of BLOCK_N, and so is `last`, where there are more keys.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    kv_head = tl.program_id(1)
    before = tl.load(positions_ptr).to(tl.int32)  # the cached prefix
    behind = tl.load(positions_ptr + tokens - 1).to(tl.int32) + 1
    d, column = tl.arange(0, D), tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    real = row < tokens * GROUP
    first_token = first_row // GROUP
    q_start = (first_token.to(tl.int64) * Q_HEADS + kv_head * GROUP) * D
    q_row = ((row // GROUP - first_token) * Q_HEADS + row % GROUP) * D  # behind `q_start`: 32 bits suffice
    q = tl.load(q_ptr + q_start + q_row[:, None] + d[None, :], mask=real[:, None], other=0.0)
    position = before + row // GROUP
    begin = kv_head.to(tl.int64) * (HEAD_STRIDE // D)
    if INT8:  # those of this head: a block's scales lie at fixed offsets then, and addresses take no registers
        key_scales_ptr += begin
        value_scales_ptr += begin
    if CUT:
        begin -= first
    tile = (begin + column)[:, None] * D + d[None, :]
    m = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, for rows that see nothing of a part
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    everyone_sees = tl.minimum(before + first_token + 1, behind) // BLOCK_N * BLOCK_N
    length = tl.minimum(before + (first_row + BLOCK_M - 1) // GROUP + 1, behind)
    start = 0
    if CUT:
        split, splits = tl.program_id(2), tl.num_programs(2)
        last = tl.minimum(last, behind)
        size = tl.cdiv(tl.cdiv(last - first, splits), BLOCK_N) * BLOCK_N
        start = first + split * size
        last = tl.minimum(last, start + size)
        length = tl.minimum(length, last)
        everyone_sees = tl.minimum(everyone_sees, last)
    for n in range(start, everyone_sees, BLOCK_N):
        offset = tile + n * D
        k, v = load_rows(keys_ptr + offset, values_ptr + offset, None, False)
        m, l, acc = softmax_step(
            *(q, k, v, key_scales_ptr + n if INT8 else None, value_scales_ptr + n if INT8 else None),
            *(column, None, None),
            *(m, l, acc, scale, INT8, False, False, WIDEN),
        )
    for n in range(tl.maximum(start, everyone_sees), length, BLOCK_N):
        offset = tile + n * D
        visible = n + column[None, :] <= position[:, None]
        inside = n + column < length
        k, v = load_rows(keys_ptr + offset, values_ptr + offset, inside, True)
        m, l, acc = softmax_step(
            *(q, k, v, key_scales_ptr + n if INT8 else None, value_scales_ptr + n if INT8 else None),
            *(column, inside, visible),
            *(m, l, acc, scale, INT8, False, True, WIDEN),
        )
    token, head = row // GROUP, row % GROUP
    MOST: tl.constexpr = 16 if D > 64 else 32  # by what leaves nothing on the stack
    if CUT:
        at = ((token * (Q_HEADS // GROUP) + kv_head) * part_count + part + split) * GROUP + head
        tl.store(stats_ptr + at * 2, m, mask=real)
        tl.store(stats_ptr + at * 2 + 1, l, mask=real)
        _store_columns(acc, out_ptr, at.to(tl.int64) * D, gate_ptr, at, real, 0, D, MOST, BLOCK_M, False)
    else:
        out_at = (token.to(tl.int64) * Q_HEADS + kv_head * GROUP + head) * D
        gate_at = token.to(tl.int64) * GATE_STRIDE + (kv_head * GROUP + head) * D
        _store_columns(acc * (1.0 / l)[:, None], out_ptr, out_at, gate_ptr, gate_at, real, 0, D, MOST, BLOCK_M, GATED)


def attention_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    gate: Tensor | None = None,
    scales: Sequence[Tensor] = (),
    dtype: torch.dtype = torch.float32,
    multiprocessors: int = 1,
    slabs: Slabs | None = None,
) -> Tensor:
    """q [T, Hq, D], keys and values [Hkv, S, D] in q's dtype (bf16 or fp32), positions int64 [T] -> [T, Hq * D].

    gate [T, Hq * D] in any float dtype may be columns of a wider matrix. scales: fp32 [Hkv, S] of keys and of values,
    which are INT8 then. slabs: INT8 keys and values are dequantised once, and not by each program; its length is the
    last position and one, and q is in its memory's dtype (fp16). The output is in `dtype`: fp32, bf16, or fp16 divided
    by UNIT (kernels/scaled_half.py), as a packed product behind it takes it.
    Positions are those of consecutive tokens, of which only the first and the last are read; behind them the last one
    may come again (kernels/padding.py). Where there are fewer programs than a card has multiprocessors, each takes a
    part of the context, and one launch more puts the parts together (attention_parts.py), as it does with those of
    several slabs. The result depends on the inputs and the number of parts alone, bit for bit.

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    group = _check("attention_prefill", q, keys, values, positions, gate, scales, slabs)
    if dtype not in FLOATS:
        raise ValueError(f"attention_prefill: got dtype {dtype}, wanted float32, bfloat16 or float16")
    (tokens, q_heads, head_dim), kv_heads = q.shape, keys.shape[0]
    out = torch.empty(tokens, q_heads * head_dim, dtype=dtype, device=q.device)
    bounds, cached = [(0, _ENDLESS)], iter([(keys, values)])
    if slabs is not None:
        bounds, cached = slabs.bounds(kv_heads, head_dim), slabs.dequantised(keys, values, scales)
        scales = ()
    # Of what products are made of: fp32 queries make an fp32 product of any keys.
    element_size = keys.element_size() if scales and q.dtype == torch.bfloat16 else q.element_size()
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
    block_m, block_n, warps, stages = prefill_blocks(head_dim, element_size, tokens * group, major)
    tiles = triton.cdiv(tokens * group, block_m)
    splits = max(1, multiprocessors // (tiles * kv_heads))
    count = splits * len(bounds)
    parts, stats = out, None
    if count > 1:
        shape = (tokens, kv_heads, count, group)
        parts, stats = (torch.empty(*shape, size, dtype=torch.float32, device=q.device) for size in (head_dim, 2))
    for i, ((first, last), (k, v)) in enumerate(zip(bounds, cached, strict=True)):
        _attention_prefill_kernel[(tiles, kv_heads, splits)](
            *(q, k, v, *(scales or (None, None)), positions, gate, parts, stats),
            *(head_dim**-0.5 * LOG2_E, tokens, first, last, i * splits, count, q_heads, k.shape[1] * head_dim),
            0 if gate is None else gate.stride(0),
            INT8=bool(scales),
            GATED=gate is not None,
            CUT=count > 1,
            GROUP=group,
            D=head_dim,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            WIDEN=not q.is_cuda,
            num_warps=warps,
            num_stages=stages,
        )
    if stats is not None:
        attention_join(parts, stats, gate, out)
    return out


def prefill_blocks(head_dim: int, element_size: int, rows: int, major: int) -> tuple[int, int, int, int]:
    """Rows and keys of a prefill tile, warps, and stages, for a card of compute capability `major`.x.

    element_size: 1 for INT8 codes under bf16 queries, else that of queries and keys. Chosen so that nothing spills, and
    that 99 KB of shared memory suffice (test_compile.py) but on Hopper, which has 227 KB and keeps its operands there;
    its tiles for head_dim 128 and 256 are the best of those measured on an H200 (NOTES.md). Elsewhere codes are widened
    in registers, which leaves room for fewer keys. Eight warps where four would leave too few registers for the
    accumulator. fp32 has no tensor cores: small tiles keep its unrolled products in registers.
    """
    if element_size == 4:
        return 16, 16, 4, 2
    if major == 9 and rows >= 128:
        if element_size == 1:
            return 128, 32 if head_dim == 256 else 64, 8, 3 if head_dim == 128 else 2
        return (64, 64, 4, 3) if head_dim == 128 else (128, 64, 8, 2)
    block_m = max(16, min(128, 16384 // head_dim, triton.next_power_of_2(rows)))
    block_n = max(16 if element_size == 1 else 32, min(64, 4096 // head_dim))
    return block_m, block_n, 8 if block_m >= 64 and block_m * head_dim >= 8192 else 4, 2


def _check(
    what: str,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    gate: Tensor | None,
    scales: Sequence[Tensor],
    slabs: Slabs | None,
) -> int:
    """Queries per KV head."""
    dtypes = (torch.bfloat16, torch.float32) if slabs is None else (slabs.memory.dtype,)
    check_tensor(f"{what}: q", q, dtypes, (None, None, None))
    tokens, q_heads, head_dim = q.shape
    check_tensor(f"{what}: keys", keys, (torch.int8 if scales else q.dtype,), (None, None, head_dim))
    check_tensor(f"{what}: values", values, (keys.dtype,), keys.shape)
    if len(scales) not in (0, 2):
        raise ValueError(f"{what}: got {len(scales)} tensors of scales, wanted none, or those of keys and of values")
    for scale in scales:
        check_tensor(f"{what}: scales", scale, (torch.float32,), keys.shape[:2])
    if slabs is not None and not (scales and tokens <= slabs.length <= keys.shape[1]):
        raise ValueError(
            f"{what}: got slabs of {slabs.length} keys and {len(scales)} tensors of scales, wanted {tokens} to "
            f"{keys.shape[1]} keys and 2 tensors of scales"
        )
    check_tensor(f"{what}: positions", positions, (torch.int64,), (tokens,))
    if gate is not None:
        check_tensor(f"{what}: gate", gate, FLOATS, (tokens, q_heads * head_dim), rows_apart=True)
    return check_heads(what, q_heads, keys.shape[0], head_dim)


def check_heads(what: str, q_heads: int, kv_heads: int, head_dim: int) -> int:
    """Queries per KV head.

    Raises:
        ValueError: the kernels are not for these numbers.
    """
    if q_heads % kv_heads or head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        raise ValueError(
            f"{what}: got {q_heads} query heads, {kv_heads} KV heads, head_dim {head_dim}, wanted a multiple "
            "of the KV heads and head_dim 16, 32, 64, 128 or 256"
        )
    return q_heads // kv_heads
