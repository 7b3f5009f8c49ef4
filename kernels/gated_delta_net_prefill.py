"""A gated delta net over many tokens: the recurrence of gated_delta_net.py, 64 tokens at a time (arXiv 2412.06464).

For one value head and one chunk of tokens i, j, with k and q normalised and without q's 1 / sqrt(dk), which comes last;
D_ij = sum of g over j < l <= i (a difference of sums that is right to fp32's last bit); S0 [dv, dk] the state before:

    A_ij = beta_i (k_i . k_j) e^{D_ij}  for j < i         inverse = (I + A)^-1
    P_ij =       (q_i . k_j) e^{D_ij}  for j <= i
    R_i  = beta_i (v_i - e^{G_i} S0 k_i)                  G_i = g_0 + ... + g_i
    X    = inverse R                                      what each token adds to the state
    o_i  = e^{G_i} S0 q_i + sum_j P_ij X_j
    S    = e^{G_last} S0 + sum_j e^{H_j} X_j k_j^T        H_j = g_{j+1} + ... + g_last

Only the last four lines need the chunk before; five launches do the work:

1. and 2. `_conv_kernel` for q, k and for v: convolution, SiLU, norm; and the ring.
3. `_triangle_kernel`, a program per chunk and value head: the gates, inverse, P.
4. `_state_kernel`, a program per value head and part of dv: chunk after chunk R, X, o and S, which stays in fp32.
5. `_gated_norm_kernel`.

Operands of the tensor cores are fp16: 11 bits of mantissa at the price of bf16's 8, which would miss the bound of
2.5e-3; tf32 has as many at half the speed and twice the shared memory. q and k are at most 1; inverse, P and the
products in between stay small (with beta and decays below 1 an update never lengthens the state); v is scaled by a
power of two per token, R and S per tile, exactly. Sums are fp32. What lies between the launches is of whole chunks,
with zeros behind the last token. Moves, beside qkvz and the output, 4 bytes per element of q, k and v, 8 of o, and 512
bytes per token and value head for inverse and P.
"""

import torch
from torch import Tensor

from localchat.kernels.activations import silu
from localchat.kernels.checks import FLOATS
from localchat.kernels.gated_delta_net import CHUNK, L2_EPS, check_gated_delta_net, step_and_decay
from localchat.kernels.gpu import tl, triton
from localchat.kernels.padding import real_tokens
from localchat.kernels.scaled_half import in_units

_LOG2_E = tl.constexpr(1.4426950408889634)
_DOUBLINGS = tl.constexpr(CHUNK.bit_length() - 1)  # from blocks of one row to the chunk
# Columns of q and k that its products take at once.
_BLOCK_K = 64
CONV_LENGTH = 8  # tokens in a row that a thread of the convolution goes through
# Tokens of a program of the last kernel.
_BLOCK_T = 16


@triton.jit
def _power_of_two(peak):
    """The power of two that brings a peak to between 256 and 512, and its inverse; both exact, from the exponent."""
    bits = (peak * (1.0 / 512.0)).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits + 0x7FFFFF) >> 23, 27), 227)  # biased, rounded up
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _tile_to_half(x):
    """x fp32 in fp16, and the power of two that was divided out."""
    scale, inverse = _power_of_two(tl.max(tl.max(tl.abs(x), 1), 0))
    return (x * inverse).to(tl.float16), scale


@triton.jit
def _input(rows, token, tokens):
    """Channels [RUNS, D] of tokens [RUNS], fp32; zeros where a token is none of this call."""
    return tl.load(rows, mask=((token >= 0) & (token < tokens))[:, None], other=0.0).to(tl.float32)


@triton.jit
def _inputs(rows, first, tokens, ROW_STRIDE, LENGTH: tl.constexpr):
    """The same of LENGTH tokens, one after the other, from `first` on."""
    inputs = ()
    for t in tl.static_range(LENGTH):
        u = _input(rows + t * ROW_STRIDE, first + t, tokens)
        inputs = inputs + (u,)  # type: ignore[assignment] # noqa: RUF005 -- the one way that Triton knows
    return inputs


@triton.jit
def _write_ring(qkvz_ptr, conv_state_ptr, channel, position, tokens, ROW_STRIDE, CHANNELS):
    """The inputs of the last four tokens, or of as many as there are; position: of the first of all."""
    last = tokens - 4 + tl.arange(0, 4)
    there = (last >= 0)[:, None]
    recent = tl.load(qkvz_ptr + last.to(tl.int64)[:, None] * ROW_STRIDE + channel[None, :], mask=there, other=0.0)
    slot = conv_state_ptr + ((position + last) & 3)[:, None] * CHANNELS + channel[None, :]
    tl.store(slot, recent.to(conv_state_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _conv_kernel(
    qkvz_ptr,
    weight_ptr,
    positions_ptr,
    conv_state_ptr,
    out_ptr,
    scale_ptr,
    tokens,
    first_channel,
    ROW_STRIDE,
    CHANNELS,
    L2_EPS: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """RUNS * LENGTH tokens of a head: out fp16 [T, heads, D], T of whole chunks, of length 1 or with scales fp32.

    A thread goes through LENGTH tokens of its channels, so that it reads and converts an input once. Each sum has the
    same order, where a chunk begins as well: chunks are the whole, bit for bit.
    """
    head, heads = tl.program_id(1), tl.num_programs(1)
    tokens = real_tokens(positions_ptr, tokens)
    first, d = (tl.program_id(0) * RUNS + tl.arange(0, RUNS)) * LENGTH, tl.arange(0, D)
    channel = first_channel + head * D + d
    rows = qkvz_ptr + first.to(tl.int64)[:, None] * ROW_STRIDE + channel[None, :]
    # All loads first: a change of layout is a barrier, which no load passes.
    weight = weight_ptr + channel * 4
    w0, w1, w2, w3 = tl.load(weight), tl.load(weight + 1), tl.load(weight + 2), tl.load(weight + 3)
    oldest = _input(rows - 3 * ROW_STRIDE, first - 3, tokens)
    older = _input(rows - 2 * ROW_STRIDE, first - 2, tokens)
    old = _input(rows - ROW_STRIDE, first - 1, tokens)
    inputs = _inputs(rows, first, tokens, ROW_STRIDE, LENGTH)
    if tl.program_id(0) == 0:
        position, begins = tl.load(positions_ptr).to(tl.int32), (first == 0)[:, None]
        ring = conv_state_ptr + channel[None, :]
        oldest += tl.load(ring + ((position + 1) & 3) * CHANNELS, mask=begins, other=0.0).to(tl.float32)
        older += tl.load(ring + ((position + 2) & 3) * CHANNELS, mask=begins, other=0.0).to(tl.float32)
        old += tl.load(ring + ((position + 3) & 3) * CHANNELS, mask=begins, other=0.0).to(tl.float32)
        tl.debug_barrier()  # the past has been read, and nobody else looks at these channels of it
        _write_ring(qkvz_ptr, conv_state_ptr, channel, position, tokens, ROW_STRIDE, CHANNELS)
    w0, w1 = w0.to(tl.float32)[None, :], w1.to(tl.float32)[None, :]
    w2, w3 = w2.to(tl.float32)[None, :], w3.to(tl.float32)[None, :]
    cell = first.to(tl.int64) * heads + head
    outs = out_ptr + cell[:, None] * D + d[None, :]
    for t in tl.static_range(LENGTH):
        now = inputs[t]
        y = silu(w0 * oldest + w1 * older + w2 * old + w3 * now)
        if NORM:
            factor = tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)
        else:
            scale, factor = _power_of_two(tl.max(tl.abs(y), 1))
            tl.store(scale_ptr + cell + t * heads, scale)
        factor = tl.where(first + t < tokens, factor, 0.0)
        tl.store(outs + t * heads * D, (y * factor[:, None]).to(tl.float16))
        oldest, older, old = older, old, now


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _in_two(g):
    """The logarithm of a decay, to base 2, as a multiple of 2^-10 and a rest of at most 2^-11.

    A chunk's sums of the first are exact (2^-150 is 0 in fp32, and 64 times 150 is below 2^24 such multiples), and so
    are their differences: what lies between two tokens is known as well as by a sum over it.
    """
    g *= _LOG2_E
    g = tl.where(g < -150.0, -150.0, g)  # and NaN stays
    coarse = tl.floor(g * 1024.0 + 0.5) * (1.0 / 1024.0)
    return coarse, g - coarse


@triton.jit
def _half_dot(a, b):
    return tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def _inverse(a, CHUNK: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular [CHUNK, CHUNK].

    Of blocks on the diagonal, whose inverses are known, two together have the inverse
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]: M - M C M for all pairs at once, with M the known ones.
    Sizes double. A series in a would be shorter, and cancel terms of up to 1e18 where keys repeat.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(row == column, 1.0, tl.where(row ^ column == 1, -a, 0.0))
    for doubling in tl.static_range(1, _DOUBLINGS):
        corner = tl.where((row >> doubling) ^ (column >> doubling) == 1, a, 0.0)
        inverse -= _half_dot(_half_dot(inverse, corner), inverse)
    return inverse


@triton.jit(do_not_specialize=["tokens"])
def _triangle_kernel(
    qk_ptr,
    ba_ptr,
    A_log_ptr,
    dt_bias_ptr,
    positions_ptr,
    inverse_ptr,
    p_ptr,
    gates_ptr,
    tokens,
    BA_STRIDE,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """inverse and P fp16 [chunks, nv, CHUNK, CHUNK]; gates fp32 [chunks, nv, 3, CHUNK]: beta, e^G, e^H."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    heads = KEY_HEADS * REPEATS
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    token = chunk * CHUNK + i
    real = token < real_tokens(positions_ptr, tokens)
    ba = ba_ptr + token.to(tl.int64) * BA_STRIDE + head
    b = tl.load(ba, mask=real, other=0.0).to(tl.float32)
    a = tl.load(ba + heads, mask=real, other=0.0).to(tl.float32)
    A_log, dt_bias = tl.load(A_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    row = qk_ptr + (chunk.to(tl.int64) * CHUNK * 2 * KEY_HEADS + head // REPEATS) * DK
    row += i[:, None] * (2 * KEY_HEADS * DK) + d[None, :]
    qk, kk = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, DK, BLOCK_K):  # in parts, so that the operands stay in registers
        q, k = tl.load(row + first), tl.load(row + first + KEY_HEADS * DK)
        qk += tl.dot(q, tl.trans(k))
        kk += tl.dot(k, tl.trans(k))

    beta, g = step_and_decay(b, a, A_log, dt_bias)
    beta, g = tl.where(real, beta, 0.0), tl.where(real, g, 0.0)
    parts = _in_two(g)
    coarse, fine = tl.associative_scan(parts, 0, _add_pairs)
    coarse_all, fine_all = tl.reduce(parts, 0, _add_pairs)
    out = (chunk * heads + head).to(tl.int64)
    gates = gates_ptr + out * 3 * CHUNK + i
    tl.store(gates, beta)
    tl.store(gates + CHUNK, tl.exp2(coarse + fine))
    tl.store(gates + 2 * CHUNK, tl.exp2((coarse_all - coarse) + (fine_all - fine)))

    tile = out * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    decay = tl.exp2(tl.where(i[:, None] >= i[None, :], between, float("-inf")))
    tl.store(p_ptr + tile, (qk * decay).to(tl.float16))
    a = tl.where(i[:, None] > i[None, :], beta[:, None] * kk * decay, 0.0).to(tl.float16)
    tl.store(inverse_ptr + tile, _inverse(a, CHUNK).to(tl.float16))


@triton.jit(do_not_specialize=["tokens"])  # or one chunk would be no loop: see state_blocks
def _state_kernel(
    qk_ptr,
    v_ptr,
    v_scale_ptr,
    inverse_ptr,
    p_ptr,
    gates_ptr,
    state_ptr,
    out_ptr,
    tokens,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out fp32 [T, nv, DV], T of whole chunks, before the norm; the state moves on in place.

    What a row is multiplied by is one factor before it meets the tile, and x is two operands as soon as it is there: 64
    columns of DV leave no register over.
    """
    head, heads = tl.program_id(0), KEY_HEADS * REPEATS
    i, d = tl.arange(0, CHUNK), tl.arange(0, DK)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    cells = state_ptr + head.to(tl.int64) * DK * DV + j[None, :] * DK + d[:, None]
    state = tl.load(cells)
    square = i[:, None] * CHUNK + i[None, :]
    key_row, value_row = i[:, None] * (2 * KEY_HEADS * DK) + d[None, :], i[:, None] * (heads * DV) + j[None, :]
    for chunk in range(tl.cdiv(tokens, CHUNK)):
        first, tile = tl.cast(chunk * CHUNK, tl.int64), (chunk * heads + head).to(tl.int64)
        keys = qk_ptr + (first * 2 * KEY_HEADS + head // REPEATS) * DK
        cell = first * heads + head
        q = tl.load(keys + key_row)
        k = tl.load(keys + KEY_HEADS * DK + key_row)
        v = tl.load(v_ptr + cell * DV + value_row)
        v_scale = tl.load(v_scale_ptr + cell + i * heads)[:, None]
        inverse = tl.load(inverse_ptr + tile * CHUNK * CHUNK + square)
        p = tl.load(p_ptr + tile * CHUNK * CHUNK + square)
        gates = gates_ptr + tile * 3 * CHUNK
        beta = tl.load(gates + i)[:, None]
        decay = tl.load(gates + CHUNK + i)[:, None]
        decay_after = tl.load(gates + 2 * CHUNK + i)[:, None]
        decay_all = tl.load(gates + 2 * CHUNK - 1)

        half_state, scale = _tile_to_half(state)
        decay *= scale
        right = beta * v_scale * v.to(tl.float32) - beta * decay * tl.dot(k, half_state)
        right, right_scale = _tile_to_half(right)
        seen = decay * (1.0 / tl.sqrt_rn(DK * 1.0)) * tl.dot(q, half_state)
        x = tl.dot(inverse, right)
        later, x = (x * decay_after).to(tl.float16), x.to(tl.float16)
        out = seen + (right_scale * (1.0 / tl.sqrt_rn(DK * 1.0))) * tl.dot(p, x)
        tl.store(out_ptr + cell * DV + value_row, out)
        state = decay_all * state + right_scale * tl.dot(tl.trans(k), later)
    tl.store(cells, state)


@triton.jit(do_not_specialize=["tokens"])
def _gated_norm_kernel(
    o_ptr, qkvz_ptr, norm_ptr, out_ptr, tokens, first_gate, ROW_STRIDE, eps, D: tl.constexpr, BLOCK_T: tl.constexpr
):
    """o, out [T, nv, D]."""
    token, head = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    d = tl.arange(0, D)
    real = (token < tokens)[:, None]
    wide_token = token.to(tl.int64)[:, None]
    cell = (wide_token * tl.num_programs(1) + head) * D + d[None, :]
    o = tl.load(o_ptr + cell, mask=real, other=0.0)
    z = tl.load(qkvz_ptr + wide_token * ROW_STRIDE + first_gate + head * D + d[None, :], mask=real, other=0.0)
    rms = 1.0 / tl.sqrt_rn(tl.sum(o * o, 1) / D + eps)
    y = o * rms[:, None] * tl.load(norm_ptr + d).to(tl.float32)[None, :] * silu(z.to(tl.float32))
    if out_ptr.dtype.element_ty == tl.float16:
        y = in_units(y)
    tl.store(out_ptr + cell, y.to(out_ptr.dtype.element_ty), mask=real)


def gated_delta_net_prefill(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    conv_state: Tensor,
    state: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """qkvz [T, C + V], ba [T, 2 nv], positions int64 [T] -> [T, V] in `dtype`.

    Both states move on in place, by rows that fill up (kernels/padding.py) not at all.

    dtype: fp32, bf16, or fp16 divided by UNIT (kernels/scaled_half.py), as a packed product behind it takes it.

    The result depends on the inputs alone, bit for bit.

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    key_heads, repeats = check_gated_delta_net(
        "gated_delta_net_prefill", qkvz, ba, conv_weight, A_log, dt_bias, norm_weight, positions, conv_state, state
    )
    if dtype not in FLOATS:
        raise ValueError(f"gated_delta_net_prefill: got dtype {dtype}, wanted float32, bfloat16 or float16")
    (value_heads, value_dim, key_dim), (tokens, device) = state.shape, (qkvz.shape[0], qkvz.device)
    chunks = triton.cdiv(tokens, CHUNK)
    channels, keys, row = conv_weight.shape[0], key_heads * key_dim, qkvz.stride(0)
    filled = chunks * CHUNK
    qk = torch.empty(filled, 2 * key_heads, key_dim, dtype=torch.float16, device=device)
    v = torch.empty(filled, value_heads, value_dim, dtype=torch.float16, device=device)
    v_scale = torch.empty(filled, value_heads, dtype=torch.float32, device=device)
    inverse, p = torch.empty(2, chunks, value_heads, CHUNK, CHUNK, dtype=torch.float16, device=device)
    gates = torch.empty(chunks, value_heads, 3, CHUNK, dtype=torch.float32, device=device)
    o = torch.empty(filled, value_heads, value_dim, dtype=torch.float32, device=device)
    out = torch.empty(tokens, value_heads * value_dim, dtype=dtype, device=device)

    for heads, scale, first in ((qk, None, 0), (v, v_scale, 2 * keys)):
        _conv_kernel[(chunks, heads.shape[1])](
            qkvz,
            conv_weight,
            positions,
            conv_state,
            heads,
            scale,
            tokens,
            first,
            row,
            channels,
            L2_EPS=L2_EPS,
            NORM=scale is None,
            D=heads.shape[2],
            RUNS=CHUNK // CONV_LENGTH,
            LENGTH=CONV_LENGTH,
            num_warps=4,
        )
    _triangle_kernel[(chunks, value_heads)](
        qk,
        ba,
        A_log,
        dt_bias,
        positions,
        inverse,
        p,
        gates,
        tokens,
        ba.stride(0),
        KEY_HEADS=key_heads,
        REPEATS=repeats,
        DK=key_dim,
        BLOCK_K=min(_BLOCK_K, key_dim),
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=2,
    )
    card = torch.cuda.get_device_properties(device) if qkvz.is_cuda else None
    major, multiprocessors = (card.major, card.multi_processor_count) if card else (0, 0)
    block_v, warps, stages = state_blocks(value_heads, value_dim, major, multiprocessors)
    _state_kernel[(value_heads, value_dim // block_v)](
        qk,
        v,
        v_scale,
        inverse,
        p,
        gates,
        state,
        o,
        tokens,
        KEY_HEADS=key_heads,
        REPEATS=repeats,
        DK=key_dim,
        DV=value_dim,
        BLOCK_V=block_v,
        CHUNK=CHUNK,
        num_warps=warps,
        num_stages=stages,
    )
    _gated_norm_kernel[(triton.cdiv(tokens, _BLOCK_T), value_heads)](
        o, qkvz, norm_weight, out, tokens, channels, row, eps, D=value_dim, BLOCK_T=_BLOCK_T, num_warps=4
    )
    return out


def state_blocks(value_heads: int, value_dim: int, major: int, multiprocessors: int) -> tuple[int, int, int]:
    """Columns of the state a program takes, its warps and stages, for a card of compute capability `major`.x.

    Chosen so that nothing spills and, but on Hopper, 99 KB of shared memory suffice (test_compile.py). There 64 columns
    where programs of 32 would have to share multiprocessors: what is not columns is done half as often. Two stages on
    Hopper, and the number of chunks unknown to the compiler: of loops that are not pipelined ptxas 12.8 makes programs
    whose descriptors of shared memory nobody has written (NOTES.md).
    """
    if major != 9:
        return min(32, value_dim), 8, 1
    return min(64 if value_heads * value_dim > 32 * multiprocessors else 32, value_dim), 4, 2
