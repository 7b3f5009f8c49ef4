"""Attention over a context that was cut into parts, put together: sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s.

What each part leaves: acc, the sum of its values weighted by 2^(score - m_s), not divided by l_s, the sum of its
weights, and m_s, the largest score in base 2 (arXiv 2307.08691). The parts of a token are taken in their order, so the
result does not depend on which of them was done first.
"""

from torch import Tensor

from localchat.kernels.activations import sigmoid
from localchat.kernels.gpu import tl, triton
from localchat.kernels.scaled_half import in_units

_COMBINED = 16384  # fp32 elements that putting together loads at once


@triton.jit
def leave(
    out, gate_ptr, out_ptr, kv_head, row, GROUP: tl.constexpr, D: tl.constexpr, GATED: tl.constexpr, UNITS: tl.constexpr
):
    """out [M, D], of which `row` [M] below GROUP are the heads of one group, through the gate to where it belongs."""
    at = (kv_head * GROUP + row)[:, None] * D + tl.arange(0, D)[None, :]
    head = (row < GROUP)[:, None]
    if GATED:
        out = out * sigmoid(tl.load(gate_ptr + at, mask=head, other=0.0).to(tl.float32))
    if UNITS:
        out = in_units(out)
    tl.store(out_ptr + at, out, mask=head)


@triton.jit
def together(
    parts_ptr,
    stats_ptr,
    first_part,
    used,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s over `used` parts in their order: [ROWS, D], heads of one group.

    Other multiprocessors have written them: loads go past this one's own cache.
    """
    i, d = tl.arange(0, AT_ONCE * ROWS), tl.arange(0, D)
    row = i % ROWS
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for first in range(0, used, AT_ONCE):
        part = first + i // ROWS
        at = (first_part + part) * GROUP + row
        inside = (part < used) & (row < GROUP)
        parts = tl.load(parts_ptr + at[:, None] * D + d[None, :], mask=inside[:, None], other=0.0, cache_modifier=".cg")
        nothing = tl.where(part < used, 0.0, float("-inf"))  # also of rows that are no head: no NaN arises
        m_part = tl.load(stats_ptr + at * 2, mask=inside, other=nothing, cache_modifier=".cg")
        l_part = tl.load(stats_ptr + at * 2 + 1, mask=inside, other=1.0, cache_modifier=".cg")
        m_part, l_part = tl.reshape(m_part, [AT_ONCE, ROWS]), tl.reshape(l_part, [AT_ONCE, ROWS])
        m_new = tl.maximum(m, tl.max(m_part, 0))  # finite from the first part on: a part that is used is never empty
        weight = tl.exp2(m_part - m_new[None, :])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(weight * l_part, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * tl.reshape(parts, [AT_ONCE, ROWS, D]), 0)
        m = m_new
    return acc / l[:, None]


@triton.jit(do_not_specialize=["splits"])
def _attention_join_kernel(
    parts_ptr,
    stats_ptr,
    gate_ptr,
    out_ptr,
    splits,
    GATE_STRIDE,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A token and KV head of parts [T, Hkv, splits, GROUP, D] and stats [T, Hkv, splits, GROUP, 2] = (m, l), fp32."""
    token, kv_head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first_part = (token * kv_heads + kv_head) * splits
    heads = together(parts_ptr, stats_ptr, first_part, splits, GROUP, ROWS, D, AT_ONCE)
    if GATED:
        gate_ptr += token * GATE_STRIDE
    out_row = out_ptr + token * kv_heads * GROUP * D
    UNITS: tl.constexpr = out_ptr.dtype.element_ty == tl.float16
    leave(heads, gate_ptr, out_row, kv_head, tl.arange(0, ROWS), GROUP, D, GATED, UNITS)


def attention_join(parts: Tensor, stats: Tensor, gate: Tensor | None, out: Tensor) -> None:
    """parts fp32 [T, Hkv, splits, G, D], stats fp32 [T, Hkv, splits, G, 2] -> out [T, Hkv * G * D], through the gate.

    In fp16 out is divided by UNIT (kernels/scaled_half.py). The first part of a token must have seen something; another
    that has not has l = 0 and an m that is finite.
    """
    tokens, kv_heads, splits, group, head_dim = parts.shape
    rows = triton.next_power_of_2(group)
    _attention_join_kernel[(tokens, kv_heads)](
        *(parts, stats, gate, out, splits, 0 if gate is None else gate.stride(0)),
        GATED=gate is not None,
        GROUP=group,
        D=head_dim,
        ROWS=rows,
        AT_ONCE=parts_at_once(splits, rows, head_dim),
        num_warps=4,
    )


def parts_at_once(splits: int, rows: int, head_dim: int) -> int:
    """Parts that are loaded together when they are put together: as many as fit in a program's registers."""
    at_most: int = triton.next_power_of_2(splits)
    return max(1, min(at_most, _COMBINED // (rows * head_dim)))
