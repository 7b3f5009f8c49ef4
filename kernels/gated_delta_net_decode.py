"""A gated delta net for one token: everything of gated_delta_net.py in one launch, the product that gives b and a too.

One program per value head, which has the whole of its head's state in flight at once (64 KB, 64 elements a thread), so
that even 48 programs keep a card's memory busy and the norm at the end needs no other program. It moves the state once
in and once out, which is 6.3 MB a layer of the 27B, and its two rows of in_proj_ba, 10 KB. With qq = sum q^2 and
kk = sum k^2 of what the convolution gives, before their norms, and S already decayed, it computes

    e = sigmoid(b) (v - S k / sqrt(kk))       S = S + e k^T / sqrt(kk)       o = S q / sqrt(qq dk)

How long a launch takes is not its bytes but its chain of waiting, so

* nothing that only a step before has written waits for the kernel before, and what that one gives comes in one round of
  loads: none needs another one's result. The rows of conv_state that count are chosen when all four are there.
* no program waits for another: a token's row of conv_state is nobody's input. q's and k's part of it, which the value
  heads of a key head share, is written by the first of them.
* a row of the state lies in eight threads of a warp, so that sums over keys are a few shuffles, without shared memory.
  What all threads have to know is summed at once: b, a, qq, kk, and the squares of the norm in front.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from localchat.kernels.activations import silu
from localchat.kernels.checks import check_tensor
from localchat.kernels.gated_delta_net import L2_EPS, check_gated_delta_net, step_and_decay
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int8_codes import exact
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import UNIT, Squares, factor_options, in_units

_UNIT = tl.constexpr(UNIT)
_BLOCK_K = 1024  # inputs of in_proj_ba that a program asks for with one load
_WIDTH = 32  # keys that lie side by side in a warp: 8 threads of 16 bytes


class StepProduct(NamedTuple):
    """b and a of one token as the product that gives them, with INT8 rows (int8_matmul.py).

    x fp16 [1, K] with factors fp32 [1], or `Squares` (scaled_half.py); weight int8 [2 nv, K], scales fp32 [2 nv].
    """

    x: Tensor
    factors: Tensor | Squares
    weight: Tensor
    scales: Tensor


@triton.jit
def _add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def _codes(row_ptr, at, K, BLOCK_K: tl.constexpr, STEPS: tl.constexpr):
    """A row of INT8 codes in STEPS parts."""
    codes = ()
    for step in tl.static_range(STEPS):
        place = step * BLOCK_K + at
        part = tl.load(row_ptr + place, mask=place < K, other=0, eviction_policy="evict_first")
        codes = codes + (part,)  # type: ignore[assignment] # noqa: RUF005 -- the one way that Triton knows
    return codes


@triton.jit
def _dot(codes, x, STEPS: tl.constexpr):
    """[N, M] each -> [N], of which the sum is the product."""
    products = exact(codes[0]) * x[0]
    for step in tl.static_range(1, STEPS):
        products += exact(codes[step]) * x[step]
    return tl.sum(products, 1)


@triton.jit
def _past(weight_ptr, ring_ptr, channel, channels, position, mask):
    """What the three tokens before give to the convolution, and the weight of this one: 0 and 1 where masked."""
    oldest = tl.load(weight_ptr + channel * 4, mask=mask, other=0.0).to(tl.float32)
    older = tl.load(weight_ptr + channel * 4 + 1, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(weight_ptr + channel * 4 + 2, mask=mask, other=0.0).to(tl.float32)
    own = tl.load(weight_ptr + channel * 4 + 3, mask=mask, other=1.0).to(tl.float32)
    y = tl.zeros_like(own)
    for row in tl.static_range(4):
        u = tl.load(ring_ptr + row * channels + channel, mask=mask, other=0.0).to(tl.float32)
        age = (position - row) & 3  # in tokens; 0 is the row that this token takes
        weight = tl.where(age == 1, old, tl.where(age == 2, older, oldest))
        y += tl.where(age == 0, 0.0, u * weight)
    return y, own


@triton.jit
def _one_of(pair, WHICH: tl.constexpr):
    """[2, ...] -> [1, ...]; both lie in one thread."""
    index = tl.arange(0, 2)[:, None, None, None]
    return tl.sum(tl.where(index == WHICH, pair, 0.0), 0, keep_dims=True)


@triton.jit
def over_keys(x):
    """Sums. [1, DK / WIDTH, DV, WIDTH] -> [1, 1, DV, 1]."""
    return tl.sum(tl.sum(x, 1, keep_dims=True), 3, keep_dims=True)


@triton.jit
def _decode_kernel(
    qkvz_ptr,
    ba_ptr,
    x_ptr,
    factors_ptr,
    ba_weight_ptr,
    ba_scales_ptr,
    conv_weight_ptr,
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    positions_ptr,
    ring_ptr,
    state_ptr,
    out_ptr,
    KEY_HEADS,
    K,
    parts,
    x_eps,
    eps,
    L2_EPS: tl.constexpr,
    SQUARES: tl.constexpr,  # parts, x_eps, this: see row_factors in scaled_half.py
    STEPS: tl.constexpr,  # parts of BLOCK_K inputs of in_proj_ba; 0: ba is given
    BLOCK_K: tl.constexpr,
    REPEATS: tl.constexpr,
    UNITS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tensors over the state are [1, DK / WIDTH, DV, WIDTH]: it is asked for as rows of WIDTH keys in the order
    (key // WIDTH, value), which Triton spreads as the module says; in memory's order it would take a warp for a row. q
    and k, and v and z, are one tensor each, an element a thread, until they come to the state.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    key_head = head // REPEATS
    row = tl.arange(0, DV * DK // WIDTH)[:, None]
    within = row % DV * DK + row // DV * WIDTH + tl.arange(0, WIDTH)[None, :]
    cells = state_ptr + head.to(tl.int64) * DK * DV + within
    # First of all: it is nearly all of the bytes.
    state = tl.reshape(tl.load(cells), [1, DK // WIDTH, DV, WIDTH])

    channels = 2 * KEY_HEADS * DK + heads * DV
    i, j = tl.arange(0, 2 * DK), tl.arange(0, 2 * DV)
    value = tl.arange(0, DV)[None, None, :, None]
    qk_channel = (i // DK * KEY_HEADS + key_head) * DK + i % DK
    v_channel = 2 * KEY_HEADS * DK + head * DV + j % DV
    is_v = j < DV
    at = i[:, None] * (BLOCK_K // (2 * DK)) + tl.arange(0, BLOCK_K // (2 * DK))[None, :]
    if STEPS > 0:
        b_codes = _codes(ba_weight_ptr + head.to(tl.int64) * K, at, K, BLOCK_K, STEPS)
        a_codes = _codes(ba_weight_ptr + (heads + head).to(tl.int64) * K, at, K, BLOCK_K, STEPS)
        b_scale, a_scale = tl.load(ba_scales_ptr + head), tl.load(ba_scales_ptr + heads + head)
    position = tl.load(positions_ptr).to(tl.int32)
    qk, qk_own = _past(conv_weight_ptr, ring_ptr, qk_channel, channels, position, i < 2 * DK)
    vz, vz_own = _past(conv_weight_ptr, ring_ptr, v_channel, channels, position, is_v)
    A_log, dt_bias = tl.load(A_log_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    gain = tl.load(norm_ptr + value).to(tl.float32)
    wait_for_previous(PDL)
    let_next_start(PDL)

    qk_now = tl.load(qkvz_ptr + qk_channel).to(tl.float32)
    vz_now = tl.load(qkvz_ptr + v_channel + j // DV * (heads * DV)).to(tl.float32)
    squares, b_parts, a_parts = tl.zeros_like(qk_now), tl.zeros_like(qk_now), tl.zeros_like(qk_now)
    if STEPS > 0:
        x = ()
        for step in tl.static_range(STEPS):
            place = step * BLOCK_K + at
            part = tl.load(x_ptr + place, mask=place < K, other=0).to(tl.float32)
            x = x + (part,)  # type: ignore[assignment] # noqa: RUF005
        for first in tl.static_range(0, SQUARES, 2 * DK):
            squares += tl.load(factors_ptr + first + i, mask=first + i < parts, other=0.0)
        b_parts, a_parts = _dot(b_codes, x, STEPS), _dot(a_codes, x, STEPS)

    qk, vz = silu(qk + qk_own * qk_now), silu(vz + vz_own * vz_now)
    qq, kk = tl.where(i < DK, qk * qk, 0.0), tl.where(i < DK, 0.0, qk * qk)
    qk = tl.reshape(qk, [2, DK // WIDTH, WIDTH])[:, :, None, :]
    vz = tl.reshape(vz, [2, DV])[:, None, :, None]
    q, k, v, gate = _one_of(qk, 0), _one_of(qk, 1), _one_of(vz, 0), _one_of(vz, 1)
    read = over_keys(state * k)

    b, a, squares, qq, kk = tl.reduce((b_parts, a_parts, squares, qq, kk), 0, _add_five)
    if STEPS == 0:
        b, a = tl.load(ba_ptr + head).to(tl.float32), tl.load(ba_ptr + heads + head).to(tl.float32)
    elif SQUARES == 0:
        factor = tl.load(factors_ptr)
        b, a = b * b_scale * factor, a * a_scale * factor
    else:
        factor = _UNIT * tl.rsqrt(squares / K + x_eps)
        b, a = b * b_scale * factor, a * a_scale * factor
    beta, g = step_and_decay(b, a, A_log, dt_bias)
    decay, k_size = tl.exp(g), tl.rsqrt(kk + L2_EPS)
    error = beta * (v - decay * k_size * read)
    state = decay * state + k * (k_size * error)
    tl.store(cells, tl.reshape(state, [DV * DK // WIDTH, WIDTH]))

    out = over_keys(state * q) * (tl.rsqrt(qq + L2_EPS) * DK**-0.5)
    out = out * tl.rsqrt(tl.sum(out * out, 2, keep_dims=True) / DV + eps) * gain * gate
    if UNITS:
        out = in_units(out)
    tl.store(out_ptr + head * DV + value, out)

    own_row = ring_ptr + (position & 3) * channels
    tl.store(own_row + v_channel, vz_now.to(ring_ptr.dtype.element_ty), mask=is_v)
    first_of_key = (head % REPEATS == 0) & (i < 2 * DK)
    tl.store(own_row + qk_channel, qk_now.to(ring_ptr.dtype.element_ty), mask=first_of_key)


def gated_delta_net_decode(
    qkvz: Tensor,
    ba: Tensor | StepProduct,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    conv_state: Tensor,
    state: Tensor,
    *,
    units: bool = False,
) -> Tensor:
    """One token: qkvz [1, C + V], ba [1, 2 nv] or what gives it, positions int64 [1] -> fp32 [1, V].

    Both states move on in place.

    units: fp16 and divided by UNIT instead (kernels/scaled_half.py), as the product behind it takes it.

    The result depends on the inputs alone, bit for bit. Between two calls on one state lies a plain launch
    (kernels/pdl.py): the states and the position are read before the wait.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or there is more than one token.
    """
    given = None if isinstance(ba, StepProduct) else ba
    key_heads, repeats = check_gated_delta_net(
        "gated_delta_net_decode", qkvz, given, conv_weight, A_log, dt_bias, norm_weight, positions, conv_state, state
    )
    if qkvz.shape[0] != 1:
        raise ValueError(f"gated_delta_net_decode: got {qkvz.shape[0]} tokens, wanted 1")
    value_heads, value_dim, key_dim = state.shape
    k, parts, x_eps, squares, steps = 0, 0, 0.0, 0, 0
    block_k = 2 * key_dim
    stored: tuple[Tensor | None, ...] = (None,) * 4
    if isinstance(ba, StepProduct):
        _check_product(ba, value_heads)
        k = ba.x.shape[1]
        block_k = max(block_k, min(_BLOCK_K, triton.next_power_of_2(k)))
        steps = triton.cdiv(k, block_k)
        factors, parts, x_eps, squares = factor_options(ba.factors)
        stored = (ba.x, factors, ba.weight, ba.scales)
    out = torch.empty(1, value_heads * value_dim, dtype=torch.float16 if units else torch.float32, device=qkvz.device)
    _decode_kernel[(value_heads,)](
        qkvz,
        given,
        *stored,
        conv_weight,
        A_log,
        dt_bias,
        norm_weight,
        positions,
        conv_state,
        state,
        out,
        key_heads,
        k,
        parts,
        x_eps,
        eps,
        L2_EPS=L2_EPS,
        SQUARES=squares,
        STEPS=steps,
        BLOCK_K=block_k,
        REPEATS=repeats,
        UNITS=units,
        DK=key_dim,
        DV=value_dim,
        WIDTH=key_width(key_dim),
        num_warps=decode_warps(key_dim, value_dim),
        **pdl_options(qkvz),
    )
    return out


def key_width(key_dim: int) -> int:
    """Keys that lie side by side in a warp."""
    return min(_WIDTH, key_dim)


def decode_warps(key_dim: int, value_dim: int) -> int:
    """Warps of a program: 64 elements of the state a thread. With four, 128, ptxas delays loads to save registers."""
    return max(1, min(8, key_dim * value_dim // 2048))


def _check_product(product: StepProduct, value_heads: int) -> None:
    what, k = "gated_delta_net_decode", product.x.shape[-1]
    check_tensor(f"{what}: x", product.x, (torch.float16,), (1, None))
    check_tensor(f"{what}: weight", product.weight, (torch.int8,), (2 * value_heads, k))
    check_tensor(f"{what}: scales", product.scales, (torch.float32,), (2 * value_heads,))
    if isinstance(product.factors, Squares):
        check_tensor(f"{what}: squares", product.factors.parts, (torch.float32,), (1, None))
    else:
        check_tensor(f"{what}: factors", product.factors, (torch.float32,), (1,))
