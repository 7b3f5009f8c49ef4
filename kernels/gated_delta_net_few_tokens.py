"""A gated delta net for 2 to 16 tokens: everything of gated_delta_net.py behind the two products, in one launch.

One program per value head, as for one token (gated_delta_net_decode.py, whose layout of the state and formulas these
are), with the state in registers from the first token to the last. Only what depends on the state is done token by
token; what a token gives by itself comes before, and what is made of its result comes behind:

1. convolution, SiLU, and the steps and decays, of a few tokens at once. A thread has a channel and the last three
   inputs of it, so every input is read once. The results go to scratch, from where each thread reads what it needs
   for its part of the state: through the card's caches, with one barrier for all tokens.
2. token after token, without a barrier and without one warp waiting for another:

       e = beta (v - decay S k / |k|)        S = decay S + e k^T / |k|        o = S q / (|q| sqrt(dk))

3. the gated norm of a few tokens at once.

The ring of inputs is where programs meet: of the last four tokens' rows that are written some are rows of the past, and
the value heads of a key head all read the past of its q and k. (Only one token's row is nobody's input.) So these
columns are written by the program that arrives last at the key head's counter, which all do behind the barrier that
follows their last look at the past. Nobody waits for it, and what is written does not depend on who writes it. A value
head's own columns are read and written by its program alone, on the two sides of that barrier.

Moves, beside the state once in and once out, qkvz, and the output, 8 (dk + dv) bytes per token and value head to the
scratch and back, which stay in L2.
"""

import torch
from torch import Tensor

from localchat.kernels.activations import silu
from localchat.kernels.checks import check_tensor
from localchat.kernels.gated_delta_net import L2_EPS, check_gated_delta_net, step_and_decay
from localchat.kernels.gated_delta_net_decode import decode_warps, key_width, over_keys
from localchat.kernels.gpu import tl, triton
from localchat.kernels.padding import real_tokens
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import in_units

MOST_TOKENS = 16
AT_ONCE = 8  # tokens whose inputs are asked for together


@triton.jit
def _conv_weights(weight_ptr, channel, mask):
    """Those of the oldest of four tokens first; where masked, only the newest token counts, and as it is."""
    oldest = tl.load(weight_ptr + channel * 4, mask=mask, other=0.0).to(tl.float32)
    older = tl.load(weight_ptr + channel * 4 + 1, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(weight_ptr + channel * 4 + 2, mask=mask, other=0.0).to(tl.float32)
    own = tl.load(weight_ptr + channel * 4 + 3, mask=mask, other=1.0).to(tl.float32)
    return oldest, older, old, own


@triton.jit
def _past(ring_ptr, channel, channels, position, mask):
    """The inputs of the three tokens before, the oldest first."""
    oldest = tl.load(ring_ptr + ((position + 1) & 3) * channels + channel, mask=mask, other=0.0).to(tl.float32)
    older = tl.load(ring_ptr + ((position + 2) & 3) * channels + channel, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(ring_ptr + ((position + 3) & 3) * channels + channel, mask=mask, other=0.0).to(tl.float32)
    return oldest, older, old


@triton.jit
def _inputs(qkvz_ptr, channel, first, tokens, ROW_STRIDE, AT_ONCE: tl.constexpr):
    """Of AT_ONCE tokens from `first` on, each [channels]."""
    inputs = ()
    for t in tl.static_range(AT_ONCE):
        u = tl.load(qkvz_ptr + (first + t) * ROW_STRIDE + channel, mask=first + t < tokens, other=0.0).to(tl.float32)
        inputs = inputs + (u,)  # type: ignore[assignment] # noqa: RUF005 -- the one way that Triton knows
    return inputs


@triton.jit
def _activated(inputs, past, weights, out_ptr, first, tokens, ROW: tl.constexpr, AT_ONCE: tl.constexpr):
    """Convolution and SiLU of AT_ONCE tokens into rows of scratch; -> the three tokens before the next ones."""
    oldest, older, old = past
    for t in tl.static_range(AT_ONCE):
        now = inputs[t]
        y = weights[0] * oldest + weights[1] * older + weights[2] * old + weights[3] * now
        tl.store(out_ptr + (first + t) * ROW, silu(y), mask=first + t < tokens)
        oldest, older, old = older, old, now
    return oldest, older, old


@triton.jit
def _token(row_ptr, key, value, DK: tl.constexpr, DV: tl.constexpr):
    """A row of scratch as the state takes it: q, k [1, DK / WIDTH, 1, WIDTH], v [1, 1, DV, 1], beta, decay."""
    q, k, v = tl.load(row_ptr + key), tl.load(row_ptr + DK + key), tl.load(row_ptr + 2 * DK + value)
    return q, k, v, tl.load(row_ptr + 2 * DK + 2 * DV), tl.load(row_ptr + 2 * DK + 2 * DV + 1)


@triton.jit
def _in_turn(
    state,
    rows,
    tokens,
    L2_EPS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
):
    """The tokens, one after the other: -> the state behind them, and S q, without q's norm, [1, 1, DV, WIDTH].

    The last axis are tokens there. A thread has its values of all of them, so none is stored before the end.
    """
    width = tl.arange(0, WIDTH)[None, None, None, :]
    key = tl.arange(0, DK // WIDTH)[None, :, None, None] * WIDTH + width
    value = tl.arange(0, DV)[None, None, :, None]
    o = tl.zeros([1, 1, DV, WIDTH], tl.float32)
    q, k, v, beta, decay = _token(rows, key, value, DK, DV)
    for token in tl.range(0, tokens, num_stages=1):
        following = _token(rows + tl.minimum(token + 1, tokens - 1) * ROW, key, value, DK, DV)
        # As wide as the state: in a layout of its own the sum would be another load of k, and barriers.
        kk = over_keys(tl.broadcast_to(k * k, [1, DK // WIDTH, DV, WIDTH]))
        k_size = tl.rsqrt(kk + L2_EPS)
        error = beta * (v - decay * k_size * over_keys(state * k))
        state = decay * state + k * (k_size * error)
        o = tl.where(width == token, over_keys(state * q), o)
        q, k, v, beta, decay = following
    return state, o


@triton.jit
def _gated_norm(
    o,
    rows,
    norm_ptr,
    tokens,
    eps,
    L2_EPS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
):
    """S q as `_in_turn` gives it -> [WIDTH, DV] through q's norm and the gated norm."""
    o = tl.trans(tl.reshape(o, [DV, WIDTH]))
    d, token = tl.arange(0, DV)[None, :], tl.arange(0, WIDTH)[:, None]
    row = rows + token * ROW
    q = tl.load(row + tl.arange(0, DK)[None, :], mask=token < tokens, other=0.0)
    gate = tl.load(row + 2 * DK + DV + d, mask=token < tokens, other=0.0)
    o *= tl.rsqrt(tl.sum(q * q, 1, keep_dims=True) + L2_EPS) * DK**-0.5
    rms = tl.rsqrt(tl.sum(o * o, 1, keep_dims=True) / DV + eps)
    return o * rms * tl.load(norm_ptr + d).to(tl.float32) * gate


@triton.jit
def _keep(ring_ptr, qkvz_ptr, channel, channels, position, tokens, ROW_STRIDE):
    """The inputs of the last four tokens, or of all, to their rows of the ring; channel [1, N]."""
    token = tokens - 4 + tl.arange(0, 4)[:, None]
    u = tl.load(qkvz_ptr + token * ROW_STRIDE + channel, mask=token >= 0, other=0.0).to(tl.float32)
    rows = ring_ptr + ((position + token) & 3) * channels + channel
    tl.store(rows, u.to(ring_ptr.dtype.element_ty), mask=token >= 0)


@triton.jit(do_not_specialize=["tokens"])
def _few_tokens_kernel(
    qkvz_ptr,
    ba_ptr,
    conv_weight_ptr,
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    positions_ptr,
    ring_ptr,
    state_ptr,
    arrivals_ptr,
    scratch_ptr,
    out_ptr,
    tokens,
    KEY_HEADS,
    ROW_STRIDE,
    BA_STRIDE,
    eps,
    L2_EPS: tl.constexpr,
    REPEATS: tl.constexpr,
    UNITS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """scratch fp32 [nv, tokens, 2 DK + 2 DV + 4]: q | k | v | SiLU of z | beta, decay, and two to align rows.

    Tensors over the state are [1, DK / WIDTH, DV, WIDTH].
    """
    ROW: tl.constexpr = 2 * DK + 2 * DV + 4
    head, heads = tl.program_id(0), tl.num_programs(0)
    key_head = head // REPEATS
    place = tl.arange(0, DV * DK // WIDTH)[:, None]
    within = place % DV * DK + place // DV * WIDTH + tl.arange(0, WIDTH)[None, :]
    cells = state_ptr + head.to(tl.int64) * DK * DV + within
    state = tl.reshape(tl.load(cells), [1, DK // WIDTH, DV, WIDTH])  # in front of the trigger, which no load passes
    let_next_start(PDL)

    channels = 2 * KEY_HEADS * DK + heads * DV
    i, j, t = tl.arange(0, 2 * DK), tl.arange(0, 2 * DV), tl.arange(0, MOST)
    qk_channel = (i // DK * KEY_HEADS + key_head) * DK + i % DK
    v_channel = 2 * KEY_HEADS * DK + head * DV + j % DV
    is_v = j < DV
    position = tl.load(positions_ptr).to(tl.int32)
    qk_weights = _conv_weights(conv_weight_ptr, qk_channel, i < 2 * DK)
    vz_weights = _conv_weights(conv_weight_ptr, v_channel, is_v)
    qk_past = _past(ring_ptr, qk_channel, channels, position, i < 2 * DK)
    vz_past = _past(ring_ptr, v_channel, channels, position, is_v)
    A_log, dt_bias = tl.load(A_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    wait_for_previous(PDL)

    rows = scratch_ptr + head * tokens * ROW
    tokens = real_tokens(positions_ptr, tokens)
    b = tl.load(ba_ptr + t * BA_STRIDE + head, mask=t < tokens, other=0.0).to(tl.float32)
    a = tl.load(ba_ptr + t * BA_STRIDE + heads + head, mask=t < tokens, other=0.0).to(tl.float32)
    vz_channel = v_channel + j // DV * (heads * DV)
    for first in tl.range(0, tokens, AT_ONCE, num_stages=1):
        qk = _inputs(qkvz_ptr, qk_channel, first, tokens, ROW_STRIDE, AT_ONCE)
        vz = _inputs(qkvz_ptr, vz_channel, first, tokens, ROW_STRIDE, AT_ONCE)
        qk_past = _activated(qk, qk_past, qk_weights, rows + i, first, tokens, ROW, AT_ONCE)
        vz_past = _activated(vz, vz_past, vz_weights, rows + 2 * DK + j, first, tokens, ROW, AT_ONCE)
    beta, g = step_and_decay(b, a, A_log, dt_bias)
    tl.store(rows + t * ROW + (2 * DK + 2 * DV), beta, mask=t < tokens)
    tl.store(rows + t * ROW + (2 * DK + 2 * DV + 1), tl.exp(g), mask=t < tokens)
    tl.debug_barrier()  # scratch is written, and the past has been read
    if REPEATS > 1:
        arrived = tl.atomic_add(arrivals_ptr + key_head + i * 0, 1, mask=i == 0, sem="acq_rel", scope="gpu")

    state, o = _in_turn(state, rows, tokens, L2_EPS, DK, DV, WIDTH, ROW)
    tl.store(cells, tl.reshape(state, [DV * DK // WIDTH, WIDTH]))
    out = _gated_norm(o, rows, norm_ptr, tokens, eps, L2_EPS, DK, DV, WIDTH, ROW)
    if UNITS:
        out = in_units(out)
    token, d = tl.arange(0, WIDTH)[:, None], tl.arange(0, DV)[None, :]
    tl.store(out_ptr + (token * heads + head) * DV + d, out, mask=token < tokens)

    v_only = 2 * KEY_HEADS * DK + head * DV + d
    _keep(ring_ptr, qkvz_ptr, v_only, channels, position, tokens, ROW_STRIDE)
    if REPEATS > 1:
        if tl.max(tl.where(i == 0, arrived, 0), 0) == REPEATS - 1:
            _keep(ring_ptr, qkvz_ptr, qk_channel[None, :], channels, position, tokens, ROW_STRIDE)
            tl.store(arrivals_ptr + key_head, 0)
    else:
        _keep(ring_ptr, qkvz_ptr, qk_channel[None, :], channels, position, tokens, ROW_STRIDE)


def gated_delta_net_few_tokens(
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
    arrivals: Tensor,
    units: bool = False,
) -> Tensor:
    """qkvz [T, C + V], ba [T, 2 nv], positions int64 [T] with T at most MOST_TOKENS -> fp32 [T, V].

    Both states move on in place, by rows that fill up (kernels/padding.py) not at all; their output is not written.

    units: fp16 and divided by UNIT instead (kernels/scaled_half.py), as the product behind it takes it.

    arrivals int32, at least one per key head: zeros that the launch needs and leaves as zeros. Launches of one stream
    share it. The result depends on the inputs alone, bit for bit. Between two calls on one state lies a plain launch
    (kernels/pdl.py): the states and the position are read before the wait.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or there are more tokens.
    """
    what = "gated_delta_net_few_tokens"
    key_heads, repeats = check_gated_delta_net(
        what, qkvz, ba, conv_weight, A_log, dt_bias, norm_weight, positions, conv_state, state
    )
    (value_heads, value_dim, key_dim), tokens = state.shape, qkvz.shape[0]
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{what}: got {tokens} tokens, wanted 1 to {MOST_TOKENS}")
    check_tensor(f"{what}: arrivals", arrivals, (torch.int32,), (None,))
    if arrivals.shape[0] < key_heads:
        raise ValueError(f"{what}: got {arrivals.shape[0]} arrivals, wanted one per key head")
    row = 2 * key_dim + 2 * value_dim + 4
    scratch = torch.empty(value_heads, tokens, row, dtype=torch.float32, device=qkvz.device)
    dtype = torch.float16 if units else torch.float32
    out = torch.empty(tokens, value_heads * value_dim, dtype=dtype, device=qkvz.device)
    _few_tokens_kernel[(value_heads,)](
        *(qkvz, ba, conv_weight, A_log, dt_bias, norm_weight, positions, conv_state, state, arrivals, scratch, out),
        *(tokens, key_heads, qkvz.stride(0), ba.stride(0), eps),
        L2_EPS=L2_EPS,
        REPEATS=repeats,
        UNITS=units,
        DK=key_dim,
        DV=value_dim,
        WIDTH=key_width(key_dim),
        MOST=MOST_TOKENS,
        AT_ONCE=AT_ONCE,
        num_warps=decode_warps(key_dim, value_dim),
        **pdl_options(qkvz),
    )
    return out
