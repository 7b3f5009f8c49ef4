"""Causal grouped-query attention of new tokens over the cache: softmax(q k^T / sqrt(D)) v.

q [T, Hq, D]; keys, values [Hkv, S, D] of which the rows up to each token's own position are valid; positions
int64 [T], ascending. Query head h reads KV head h // (Hq / Hkv): the group shares its keys, nothing is repeated.
Output [T, Hq * D], computed in fp32. A gate [T, Hq * D], where there is one (Qwen3.5), multiplies it by its sigmoid
before it leaves. One token moves 2 * Hkv * length * D elements of the cache.

An INT8 cache has `scales`, those of its keys and values, fp32 [Hkv, S]: a key is its scale times its codes, int8 [D]
(kernels/rope_kv_write.py writes them). A scale is the same for all of a key's dimensions, so it multiplies the score,
and a value's scale multiplies the probability: codes go into the products as they are, exact in bf16, and no
dequantised row is ever stored. One token moves half of what a bf16 cache costs, and 4 bytes a row for its scale.

Two kernels, both with the online softmax of FlashAttention-2 (arXiv 2307.08691) in base 2 and fp32 accumulators; q,
keys and values bf16 (or fp32, multiplied as such; or INT8 under either), D a power of two.

* `attention_decode`, one token: the context is cut into `splits` parts (boundaries computed on the device from the
  position, so that one CUDA graph serves every length), one program per KV head and part; a second kernel joins the
  parts in a fixed order. The group's queries are padded to the 16 rows of a tensor-core tile.
* `attention_prefill`, a chunk behind a cached prefix: a program takes a tile of (token, head of the group) rows, so
  keys and values are read once for the whole group and few tokens still fill a tile. Only blocks that the diagonal
  cuts are masked. Positions are contiguous: the first one says all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from localchat.kernels.activations import sigmoid
from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import in_units

# Scores held at once, in fp32 elements (256 MB): queries are taken in blocks so that memory does not grow with T * S.
_MAX_SCORES = 64 * 1024 * 1024


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
def _softmax_step(
    q,
    keys,
    values,
    key_scales_ptr,
    value_scales_ptr,
    rows,
    inside,
    visible,
    m,
    l,
    acc,
    scale,
    INT8: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One block more: keys and values, pointers [N, D], of the cache's `rows` [N], of which `inside` [N] are read.

    q [M, D]; visible [M, N]; m, l [M], acc [M, D]. scale includes log2(e). Not MASKED, all is inside and visible.
    """
    if MASKED:
        k = tl.load(keys, mask=inside[:, None], other=0)
        v = tl.load(values, mask=inside[:, None], other=0)
    else:
        k = tl.load(keys)
        v = tl.load(values)
    scores = _dot(q, tl.trans(_operand(k, q, WIDEN)), WIDEN) * scale
    if INT8:
        scores *= _row_scales(key_scales_ptr + rows, inside, MASKED)[None, :]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    l = l * shrink + tl.sum(p, 1)
    if INT8:
        p *= _row_scales(value_scales_ptr + rows, inside, MASKED)[None, :]
    acc = acc * shrink[:, None] + _dot(p.to(q.dtype), _operand(v, q, WIDEN), WIDEN)
    return m_new, l, acc


@triton.jit
def _row_scales(scales, inside, MASKED: tl.constexpr):
    """scales, pointers [N] -> [N], 0 outside."""
    if MASKED:
        loaded = tl.load(scales, mask=inside, other=0.0)
    else:
        loaded = tl.load(scales)
    return loaded


@triton.jit
def _attention_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    positions_ptr,
    parts_ptr,
    stats_ptr,
    scale,
    HEAD_STRIDE,
    INT8: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts fp32 [Hq, splits, D] (not yet divided by l), stats fp32 [Hq, splits, 2] = (m, l)."""
    let_next_start(PDL)
    kv_head, split = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    splits = tl.num_programs(1)
    length = (tl.load(positions_ptr) + 1).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start = split * part
    end = tl.minimum(start + part, length)

    row, column, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    head = kv_head * GROUP + row
    q = tl.load(q_ptr + head[:, None] * D + d[None, :], mask=row[:, None] < GROUP, other=0.0)
    rows = kv_head.to(tl.int64) * (HEAD_STRIDE // D) + column
    tile = rows[:, None] * D + d[None, :]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for n in range(start, end, BLOCK_N):
        inside = n + column < end
        offset = tile + n * D
        m, l, acc = _softmax_step(
            *(q, keys_ptr + offset, values_ptr + offset, key_scales_ptr, value_scales_ptr, rows + n),
            *(inside, inside[None, :], m, l, acc, scale, INT8, True, WIDEN),
        )
    out = head * splits + split
    tl.store(parts_ptr + out[:, None] * D + d[None, :], acc, mask=row[:, None] < GROUP)
    tl.store(stats_ptr + out * 2, m, mask=row < GROUP)
    tl.store(stats_ptr + out * 2 + 1, l, mask=row < GROUP)


@triton.jit
def _attention_combine_kernel(
    parts_ptr,
    stats_ptr,
    gate_ptr,
    out_ptr,
    splits,
    GATED: tl.constexpr,
    UNITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s, in the order of the parts; an empty part has m = -inf."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0)
    split, d = tl.arange(0, BLOCK_S), tl.arange(0, D)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        inside = first + split < splits
        row = head * splits + first + split
        m_part = tl.load(stats_ptr + row * 2, mask=inside, other=float("-inf"))
        l_part = tl.load(stats_ptr + row * 2 + 1, mask=inside, other=0.0)
        part = tl.load(parts_ptr + row[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 0))  # finite from the first part on: it is never empty
        weight = tl.exp2(m_part - m_new)
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(weight * l_part, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * part, 0)
        m = m_new
    out = acc / l
    if GATED:
        out = out * sigmoid(tl.load(gate_ptr + head * D + d).to(tl.float32))
    if UNITS:
        out = in_units(out)
    tl.store(out_ptr + head * D + d, out)


def attention_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    splits: int,
    gate: Tensor | None = None,
    scales: Sequence[Tensor] = (),
    units: bool = False,
) -> Tensor:
    """q [1, Hq, D], keys and values [Hkv, S, D] in q's dtype (bf16 or fp32), positions int64 [1] -> fp32 [1, Hq * D].

    units: fp16 and divided by UNIT instead (kernels/scaled_half.py), as the product behind it takes it.

    gate [1, Hq * D] in any float dtype. scales: fp32 [Hkv, S] of keys and of values, which are INT8 then.

    The result depends on the inputs and `splits` alone, bit for bit.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or splits is not positive.
    """
    group = _check("attention_decode", q, keys, values, positions, gate, scales)
    (tokens, q_heads, head_dim), (kv_heads, capacity, _) = q.shape, keys.shape
    if tokens != 1 or splits < 1:
        raise ValueError(f"attention_decode: got {tokens} tokens, {splits} splits, wanted 1 token, at least 1 split")
    block_n, warps = decode_blocks(head_dim, _operand_size(q, keys))
    parts = torch.empty(q_heads, splits, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(q_heads, splits, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(1, q_heads * head_dim, dtype=torch.float16 if units else torch.float32, device=q.device)
    _attention_decode_kernel[(kv_heads, splits)](
        q,
        keys,
        values,
        *(scales or (None, None)),
        positions,
        parts,
        stats,
        head_dim**-0.5 * _LOG2_E,
        capacity * head_dim,
        INT8=bool(scales),
        GROUP=group,
        D=head_dim,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=block_n,
        WIDEN=not q.is_cuda,
        num_warps=warps,
        num_stages=2,
        **pdl_options(q),
    )
    block_s = max(2, min(16, triton.next_power_of_2(splits)))
    _attention_combine_kernel[(q_heads,)](
        *(parts, stats, gate, out, splits),
        GATED=gate is not None,
        UNITS=units,
        D=head_dim,
        BLOCK_S=block_s,
        num_warps=4,
        **pdl_options(q),
    )
    return out


@triton.jit
def _store_columns(
    out,
    out_ptr,
    gate_ptr,
    first_row,
    kv_head,
    real,
    Q_HEADS,
    GATE_STRIDE,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
):
    """out [M, WIDTH] are the columns from FIRST on. Few at a time, so that their gates find room in registers."""
    if WIDTH > 32:
        left, right = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, WIDTH // 2]), (0, 2, 1)))
        _store_columns(
            *(left, out_ptr, gate_ptr, first_row, kv_head, real, Q_HEADS, GATE_STRIDE),
            *(FIRST, WIDTH // 2, D, BLOCK_M, GROUP, GATED),
        )
        _store_columns(
            *(right, out_ptr, gate_ptr, first_row, kv_head, real, Q_HEADS, GATE_STRIDE),
            *(FIRST + WIDTH // 2, WIDTH // 2, D, BLOCK_M, GROUP, GATED),
        )
    else:
        d = FIRST + tl.arange(0, WIDTH)
        first_token = (first_row // GROUP).to(tl.int64)
        row = first_row + tl.arange(0, BLOCK_M)
        token, head = row // GROUP - first_row // GROUP, row % GROUP  # behind the first: 32 bits suffice
        if GATED:
            gate_row = gate_ptr + first_token * GATE_STRIDE + kv_head * GROUP * D
            at = (token * GATE_STRIDE + head * D)[:, None] + d[None, :]
            out = out * sigmoid(tl.load(gate_row + at, mask=real[:, None], other=0.0).to(tl.float32))
        out_row = out_ptr + (first_token * Q_HEADS + kv_head * GROUP) * D
        at = ((token * Q_HEADS + head) * D)[:, None] + d[None, :]
        tl.store(out_row + at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def _attention_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    positions_ptr,
    gate_ptr,
    out_ptr,
    scale,
    tokens,
    Q_HEADS,
    HEAD_STRIDE,
    GATE_STRIDE,
    INT8: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Row r of a KV head is token r // GROUP, head r % GROUP of the group. The last tiles see most: they go first."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    kv_head = tl.program_id(1)
    before = tl.load(positions_ptr).to(tl.int32)  # the cached prefix
    d, column = tl.arange(0, D), tl.arange(0, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_M)
    real = row < tokens * GROUP
    first_token = first_row // GROUP
    start = (first_token.to(tl.int64) * Q_HEADS + kv_head * GROUP) * D
    q_row = ((row // GROUP - first_token) * Q_HEADS + row % GROUP) * D  # behind `start`: 32 bits suffice
    q = tl.load(q_ptr + start + q_row[:, None] + d[None, :], mask=real[:, None], other=0.0)
    position = before + row // GROUP
    rows = kv_head.to(tl.int64) * (HEAD_STRIDE // D) + column
    tile = rows[:, None] * D + d[None, :]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    everyone_sees = (before + first_token + 1) // BLOCK_N * BLOCK_N
    length = before + tl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, tokens)
    for n in range(0, everyone_sees, BLOCK_N):
        offset = tile + n * D
        m, l, acc = _softmax_step(
            *(q, keys_ptr + offset, values_ptr + offset, key_scales_ptr, value_scales_ptr, rows + n),
            *(None, None, m, l, acc, scale, INT8, False, WIDEN),
        )
    for n in range(everyone_sees, length, BLOCK_N):
        offset = tile + n * D
        visible = n + column[None, :] <= position[:, None]
        m, l, acc = _softmax_step(
            *(q, keys_ptr + offset, values_ptr + offset, key_scales_ptr, value_scales_ptr, rows + n),
            *(n + column < length, visible, m, l, acc, scale, INT8, True, WIDEN),
        )
    _store_columns(
        *(acc * (1.0 / l)[:, None], out_ptr, gate_ptr, first_row, kv_head, real, Q_HEADS, GATE_STRIDE),
        *(0, D, D, BLOCK_M, GROUP, GATED),
    )


def attention_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    gate: Tensor | None = None,
    scales: Sequence[Tensor] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """q [T, Hq, D], keys and values [Hkv, S, D] in q's dtype (bf16 or fp32), positions int64 [T] -> [T, Hq * D].

    gate [T, Hq * D] in any float dtype may be columns of a wider matrix. scales: fp32 [Hkv, S] of keys and of values,
    which are INT8 then. The output is fp32 or bf16, as `dtype` says.
    Positions are those of consecutive tokens; only the first is read.

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    group = _check("attention_prefill", q, keys, values, positions, gate, scales)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"attention_prefill: got dtype {dtype}, wanted float32 or bfloat16")
    (tokens, q_heads, head_dim), (kv_heads, capacity, _) = q.shape, keys.shape
    out = torch.empty(tokens, q_heads * head_dim, dtype=dtype, device=q.device)
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
    block_m, block_n, warps, stages = prefill_blocks(head_dim, _operand_size(q, keys), tokens * group, major)
    _attention_prefill_kernel[(triton.cdiv(tokens * group, block_m), kv_heads)](
        q,
        keys,
        values,
        *(scales or (None, None)),
        positions,
        gate,
        out,
        head_dim**-0.5 * _LOG2_E,
        tokens,
        q_heads,
        capacity * head_dim,
        0 if gate is None else gate.stride(0),
        INT8=bool(scales),
        GATED=gate is not None,
        GROUP=group,
        D=head_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        WIDEN=not q.is_cuda,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def prefill_blocks(head_dim: int, element_size: int, rows: int, major: int) -> tuple[int, int, int, int]:
    """Rows and keys of a prefill tile, warps, and stages, for a card of compute capability `major`.x.

    element_size: 1 for INT8 codes under bf16 queries, else that of queries and keys. Chosen so that nothing spills, and
    that 99 KB of shared memory suffice (test_compile.py) but on Hopper, which has 227 KB, keeps its operands there, and
    fills its tensor cores with 128 rows and as many keys as registers hold. Elsewhere codes are widened in registers,
    which leaves room for fewer keys. Eight warps where four would leave too few registers for the accumulator. fp32 has
    no tensor cores: small tiles keep its unrolled products in registers.
    """
    if element_size == 4:
        return 16, 16, 4, 2
    if major == 9 and rows >= 128:
        wide = element_size == 1
        keys = {64: 64, 128: 64 if wide else 128, 256: 32 if wide else 64}.get(head_dim, 64)
        return 128, keys, 8, 3 if wide and head_dim == 128 else 2
    block_m = max(16, min(128, 16384 // head_dim, triton.next_power_of_2(rows)))
    block_n = max(16 if element_size == 1 else 32, min(64, 4096 // head_dim))
    return block_m, block_n, 8 if block_m >= 64 and block_m * head_dim >= 8192 else 4, 2


def decode_blocks(head_dim: int, element_size: int) -> tuple[int, int]:
    """Keys of a decode block, and warps: tiles of 16 KB (8 in fp32, which has no tensor cores), so that nothing spills.

    element_size as above. As many bytes of codes are twice the keys, and twice the warps widen them.
    """
    block_n = max(16, min(128, (8192 if element_size == 4 else 16384) // (head_dim * element_size)))
    return block_n, 8 if element_size == 1 else 4


def _operand_size(q: Tensor, keys: Tensor) -> int:
    """Bytes of an element that the products are made of; fp32 queries make an fp32 product of any keys."""
    return 4 if q.dtype == torch.float32 else keys.element_size()


_LOG2_E = 1.4426950408889634


def _check(
    what: str,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    gate: Tensor | None,
    scales: Sequence[Tensor],
) -> int:
    """Queries per KV head."""
    check_tensor(f"{what}: q", q, (torch.bfloat16, torch.float32), (None, None, None))
    tokens, q_heads, head_dim = q.shape
    check_tensor(f"{what}: keys", keys, (torch.int8 if scales else q.dtype,), (None, None, head_dim))
    check_tensor(f"{what}: values", values, (keys.dtype,), keys.shape)
    if len(scales) not in (0, 2):
        raise ValueError(f"{what}: got {len(scales)} tensors of scales, wanted none, or those of keys and of values")
    for scale in scales:
        check_tensor(f"{what}: scales", scale, (torch.float32,), keys.shape[:2])
    check_tensor(f"{what}: positions", positions, (torch.int64,), (tokens,))
    if gate is not None:
        check_tensor(f"{what}: gate", gate, FLOATS, (tokens, q_heads * head_dim), rows_apart=True)
    if q_heads % keys.shape[0] or head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        raise ValueError(
            f"{what}: got {q_heads} query heads, {keys.shape[0]} KV heads, head_dim {head_dim}, wanted a multiple "
            "of the KV heads and head_dim 16, 32, 64, 128 or 256"
        )
    return q_heads // keys.shape[0]
