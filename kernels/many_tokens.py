"""Product of tens to hundreds of tokens with a packed matrix: weights become fp16 in registers, `tl.dot` multiplies.

x fp16 [T, K] and a factor per row (kernels/scaled_half.py); W [N, K] as kernels/int4_packing.py has it, INT4 in groups
whose scales are fp16, or INT8 with K a multiple of 16; y [T, N]. Moves W once for each BLOCK_T tokens, from memory
once; x and y are little beside it.

A tile of the result is BLOCK_M rows of W by BLOCK_T tokens, and a step 128 inputs of it. The steps of all tiles, one
after the other, are dealt out evenly to as many programs as find room at once (stream-K, arXiv 2301.03598): whatever
the shape, they end together, and of a matrix with few rows K is cut. A tile that several programs share is put
together by the one of them that arrives last at its counter, from what they left, in their order: who that is makes no
difference to the result.

On Hopper the codes go from shared memory straight into the registers that the instruction reads, without a conversion
of layouts. That holds because nothing between the loads and the product depends on the row: rows g and g + 8, whose
scales are the two halves of one word in memory, are loaded and made into weights apart, and then joined.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from localchat.kernels.cards import card_of
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_address import tile_offset
from localchat.kernels.pdl import capability, let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import Squares

STEP = 128  # inputs; of INT4 a tile of the packed format
MANY_TOKENS = 512
_HOPPER_MAJOR = 9
_AT_ONCE = 32  # tokens whose outputs a program finishes at once
_MOST_TILES = 8192


class Tile(NamedTuple):
    """How a product is launched: rows and tokens of a tile, warps, stages, programs for each multiprocessor."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int


# Measured on an H200 2026-11-30 (kernels/NOTES.md); others have no instruction for 64 rows, and 99 KB.
_HOPPER = (Tile(64, 16, 4, 4, 4), Tile(64, 32, 4, 5, 3), Tile(128, 64, 8, 4, 1), Tile(128, 128, 8, 3, 1))
_OTHERS = (Tile(64, 16, 4, 4, 3), Tile(64, 32, 4, 4, 2), Tile(128, 64, 8, 3, 1))


def _int4_ptx(has_min: bool) -> str:
    """The eight weights of a word: $0 and $1 those of nibble position 0, and so on. $8 the word; scale and minimum are
    the lower halves of $9 and $10.
    """
    # Code (minus 8): 1024 (+ 8) from the even ones, a 16th minus 64 (+ 8) of the odd ones.
    even, odd = ("0x64006400", "0xd400d400") if has_min else ("0x64086408", "0xd480d480")
    text = "{ .reg .b32 a0, a1, a2, a3, t, e, o, f, s, m;\nshr.u32 t, $8, 8;\n"
    text += f"mov.b32 e, {even};\nmov.b32 o, {odd};\nmov.b32 f, 0x2c002c00;\nprmt.b32 s, $9, $9, 0x1010;\n"
    text += "prmt.b32 m, $10, $10, 0x1010;\n" if has_min else ""
    for p in range(4):
        word, mask = "t" if p >= 2 else "$8", "0x00f000f0" if p % 2 else "0x000f000f"
        text += f"lop3.b32 a{p}, {word}, {mask}, 0x64006400, 0xea;\n"
        text += f"fma.rn.f16x2 a{p}, a{p}, f, o;\n" if p % 2 else f"sub.f16x2 a{p}, a{p}, e;\n"
        text += f"fma.rn.f16x2 a{p}, a{p}, s, m;\n" if has_min else f"mul.f16x2 a{p}, a{p}, s;\n"
        text += f"mov.b32 {{${2 * p}, ${2 * p + 1}}}, a{p};\n"
    return text + "}"


_INT4 = tl.constexpr(_int4_ptx(False))
_INT4_MIN = tl.constexpr(_int4_ptx(True))
_INT4_OPERANDS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 2))
_INT4_MIN_OPERANDS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 3))
_EIGHT = tl.constexpr((tl.float16,) * 8)


@triton.jit
def _lower_half(pair):
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _twin_nibble(w, s, m, shift: tl.constexpr, HAS_MIN: tl.constexpr):
    """What the PTX gives for the codes at bit `shift`."""
    code = ((w >> shift) & 15).to(tl.float32)
    if HAS_MIN:
        weight = code * _lower_half(s) + _lower_half(m)
    else:
        weight = (code - 8) * _lower_half(s)
    return weight.to(tl.float16)


@triton.jit
def _int4_rows(w, s, m, G8: tl.constexpr, HAS_MIN: tl.constexpr, BLOCKS: tl.constexpr, USE_PTX: tl.constexpr):
    """Words [BLOCKS, 8, 16], scales and minima in the lower halves of s and m -> weights fp16 [BLOCKS, 8, 128]."""
    s = tl.broadcast_to(s, [BLOCKS, 8, 16])
    if HAS_MIN:
        m = tl.broadcast_to(m, [BLOCKS, 8, 16])
    if not USE_PTX:
        a, b = _twin_nibble(w, s, m, 0, HAS_MIN), _twin_nibble(w, s, m, 16, HAS_MIN)
        c, d = _twin_nibble(w, s, m, 4, HAS_MIN), _twin_nibble(w, s, m, 20, HAS_MIN)
        e, f = _twin_nibble(w, s, m, 8, HAS_MIN), _twin_nibble(w, s, m, 24, HAS_MIN)
        g, h = _twin_nibble(w, s, m, 12, HAS_MIN), _twin_nibble(w, s, m, 28, HAS_MIN)
    elif HAS_MIN:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4_MIN, _INT4_MIN_OPERANDS, [w, s, m], dtype=_EIGHT, is_pure=True, pack=1
        )
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4, _INT4_OPERANDS, [w, s], dtype=_EIGHT, is_pure=True, pack=1
        )
    # [block, row, word, even or odd, position % 2, position // 2], where a group is G8 words: see int4_packing.py.
    weights = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    weights = tl.reshape(weights, [BLOCKS, 8, 16 // G8, G8, 2, 2, 2])
    return tl.reshape(tl.permute(weights, (0, 1, 2, 6, 5, 3, 4)), [BLOCKS, 8, 128])


@triton.jit
def _pairs(ptr, block, row, word, step, K, there, G8: tl.constexpr):
    """Scales or minima of rows g and g + 8 as the halves of int32 [BLOCKS, 8, 1], or of groups below 128 [.., 16].

    Together they are the 4 bytes that an asynchronous copy brings at least.
    """
    groups = K // (8 * G8)
    at = block.to(tl.int64) * (groups * 8) + row
    group = step * (16 // G8)
    if G8 < 16:
        group += word // G8
        there &= group < groups
    return tl.load(ptr + (at + group * 8), mask=there, other=0)


@triton.jit
def _int4_weights(
    w_ptr, s_ptr, m_ptr, tile_m, step, N, K,
    G8: tl.constexpr, HAS_MIN: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """The weights of 128 inputs, fp16 [BLOCK_M, 128]; zeros or anything where there are none."""
    BLOCKS: tl.constexpr = BLOCK_M // 16
    block = tile_m * BLOCKS + tl.arange(0, BLOCKS)[:, None, None]
    row, word = tl.arange(0, 8)[None, :, None], tl.arange(0, 16)[None, None, :]
    there = block < tl.cdiv(N, 16)
    inside = there
    if not WHOLE:
        inside = there & (step * 16 + word < K // 8)
    upper = tl.load(w_ptr + tile_offset(block, step, row, word, K // 8, WHOLE), mask=inside, other=0)
    lower = tl.load(w_ptr + tile_offset(block, step, row + 8, word, K // 8, WHOLE), mask=inside, other=0)
    s = _pairs(s_ptr, block, row, word, step, K, there, G8)
    m = s
    if HAS_MIN:
        m = _pairs(m_ptr, block, row, word, step, K, there, G8)
    upper = _int4_rows(upper, s, m, G8, HAS_MIN, BLOCKS, USE_PTX)
    lower = _int4_rows(lower, s >> 16, m >> 16, G8, HAS_MIN, BLOCKS, USE_PTX)
    return tl.reshape(tl.permute(tl.join(upper, lower), (0, 3, 1, 2)), [BLOCK_M, 128])


@triton.jit
def _finish(
    acc, y_ptr, factors_ptr, bias_ptr, res_ptr, s_ptr, out, token, tokens, N,
    BITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, WIDTH]: outputs `out` [BLOCK_M] of the tokens from `token` on, to where they belong."""
    if WIDTH > AT_ONCE:
        left, right = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, WIDTH // 2]), (0, 2, 1)))
        to = (y_ptr, factors_ptr, bias_ptr, res_ptr, s_ptr, out)
        _finish(left, *to, token, tokens, N, BITS, HAS_BIAS, HAS_RES, WIDTH // 2, AT_ONCE, BLOCK_M)
        _finish(right, *to, token + WIDTH // 2, tokens, N, BITS, HAS_BIAS, HAS_RES, WIDTH // 2, AT_ONCE, BLOCK_M)
    else:
        t = token + tl.arange(0, WIDTH)
        acc *= tl.load(factors_ptr + t, mask=t < tokens, other=0.0)[None, :]
        if BITS == 8:
            acc *= tl.load(s_ptr + out, mask=out < N, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + out, mask=out < N, other=0.0).to(tl.float32)[:, None]
        at = t.to(tl.int64)[None, :] * N + out[:, None]
        inside = (out < N)[:, None] & (t < tokens)[None, :]
        if HAS_RES:
            acc += tl.load(res_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _leave(acc, at, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr):
    """acc [BLOCK_M, WIDTH] as fp32 [WIDTH / AT_ONCE, BLOCK_M, AT_ONCE] to this pointer."""
    if WIDTH > AT_ONCE:
        left, right = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, WIDTH // 2]), (0, 2, 1)))
        _leave(left, at, WIDTH // 2, AT_ONCE, BLOCK_M)
        _leave(right, at + WIDTH // 2 * BLOCK_M, WIDTH // 2, AT_ONCE, BLOCK_M)
    else:
        tl.store(at + tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc)


@triton.jit
def _owner(step, each, more):
    """The program that has a step, where the first `more` have `each` + 1 of them and the others `each`."""
    border = more * (each + 1)
    return tl.where(step < border, step // (each + 1), more + (step - border) // each)


@triton.jit(do_not_specialize=["tokens", "tiles_t"])
def many_tokens_kernel(
    x_ptr, factors_ptr, w_ptr, s_ptr, m_ptr, bias_ptr, res_ptr, y_ptr, left_ptr, arrivals_ptr,
    tokens, tiles_t, N, K,
    BITS: tl.constexpr, G8: tl.constexpr, HAS_MIN: tl.constexpr, WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
    AT_ONCE: tl.constexpr, USE_PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """INT4: s and m (scales, minima) as int32, two each. WHOLE: K is a multiple of 128. left: fp32 [2 * programs,
    BLOCK_T / AT_ONCE, BLOCK_M, AT_ONCE]. arrivals int32: one a tile, zeros before and after.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    steps_k = tl.cdiv(K, 128)
    steps = tl.cdiv(N, BLOCK_M) * tiles_t * steps_k
    each, more = steps // programs, steps % programs
    at = program * each + tl.minimum(program, more)
    end = at + each + (program < more).to(tl.int32)
    rows, k = tl.arange(0, BLOCK_M), tl.arange(0, 128)
    while at < end:
        tile = at // steps_k
        tile_m, tile_t = tile // tiles_t, tile % tiles_t
        first = at - tile * steps_k
        last = tl.minimum(steps_k, first + end - at)
        at += last - first
        out, t = tile_m * BLOCK_M + rows, tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
        x_at = x_ptr + t.to(tl.int64)[:, None] * K + k[None, :]
        w_at = w_ptr + out.to(tl.int64)[:, None] * K + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
        for step in range(first, last):
            real = (t < tokens)[:, None]
            there = (out < N)[:, None]
            if not WHOLE:
                real &= (step * 128 + k < K)[None, :]
                there &= (step * 128 + k < K)[None, :]
            x = tl.load(x_at + step * 128, mask=real, other=0.0)
            if BITS == 4:
                weights = _int4_weights(w_ptr, s_ptr, m_ptr, tile_m, step, N, K, G8, HAS_MIN, WHOLE, BLOCK_M, USE_PTX)
            else:
                weights = tl.load(w_at + step * 128, mask=there, other=0).to(tl.float16)  # exact
            acc = tl.dot(weights, tl.trans(x), acc)

        owner = _owner(tile * steps_k, each, more)
        last_owner = _owner(tile * steps_k + steps_k - 1, each, more)
        to = (y_ptr, factors_ptr, bias_ptr, res_ptr, s_ptr, out)
        if owner == last_owner:
            _finish(acc, *to, tile_t * BLOCK_T, tokens, N, BITS, HAS_BIAS, HAS_RES, BLOCK_T, AT_ONCE, BLOCK_M)
        else:
            # A program leaves two parts at most: of a tile whose first step is another's, and of one whose last is.
            mine = (2 * program + (first == 0).to(tl.int32)).to(tl.int64)
            _leave(acc, left_ptr + mine * (BLOCK_M * BLOCK_T), BLOCK_T, AT_ONCE, BLOCK_M)
            tl.debug_barrier()  # all warps have written before one of them says so
            if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == last_owner - owner:
                cell = rows[:, None] * AT_ONCE + tl.arange(0, AT_ONCE)[None, :]
                for column in range(0, BLOCK_T, AT_ONCE):
                    part = left_ptr + (2 * owner + 1).to(tl.int64) * (BLOCK_M * BLOCK_T) + column * BLOCK_M
                    sums = tl.load(part + cell, cache_modifier=".cg")
                    part -= BLOCK_M * BLOCK_T
                    for _ in range(owner, last_owner):
                        part += 2 * BLOCK_M * BLOCK_T
                        sums += tl.load(part + cell, cache_modifier=".cg")
                    token = tile_t * BLOCK_T + column
                    _finish(sums, *to, token, tokens, N, BITS, HAS_BIAS, HAS_RES, AT_ONCE, AT_ONCE, BLOCK_M)
                tl.store(arrivals_ptr + tile, 0)


def many_tokens(
    x: Tensor,
    row_scale: Tensor | Squares,
    weight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    *,
    arrivals: Tensor | None = None,
    tile: Tile | None = None,
    use_ptx: bool | None = None,
) -> None:
    """x fp16 [T, K] times a matrix [N, K] as stored -> y [T, N]; int4_matmul.py and int8_matmul.py check the arguments.

    arrivals int32, one for each tile: zeros that the launch needs and leaves as zeros; launches of one stream share it.
    None, or fewer than tiles: made here. tile: None is what was measured for the card. use_ptx: the inline PTX or its
    plain twin; None: PTX on CUDA, where the interpreter has none.

    Raises:
        ValueError: there are more than MANY_TOKENS tokens.
    """
    (tokens, k), n, int4 = x.shape, y.shape[1], weight.dtype == torch.int32
    if tokens > MANY_TOKENS:
        raise ValueError(f"many_tokens: got {tokens} tokens, wanted at most {MANY_TOKENS}")
    group = k // scales.shape[1] if int4 else STEP
    tile = tile or tile_for(tokens, x, group)
    tiles_t = triton.cdiv(tokens, tile.tokens)
    tiles = triton.cdiv(n, tile.rows) * tiles_t
    if arrivals is None or arrivals.numel() < tiles:
        arrivals = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    programs = min(card_of(x.device).multiprocessors * tile.programs, tiles * triton.cdiv(k, STEP))
    left = torch.empty(2 * programs * tile.rows * tile.tokens, device=x.device)
    minima = scales if mins is None else mins
    if int4:
        scales, minima = scales.view(torch.int32), minima.view(torch.int32)
    factors = row_scale.row_scale(k) if isinstance(row_scale, Squares) else row_scale
    many_tokens_kernel[(programs,)](
        *(x, factors, weight, scales, minima, y if bias is None else bias, y if residual is None else residual, y),
        *(left, arrivals, tokens, tiles_t, n, k),
        BITS=4 if int4 else 8,
        G8=group // 8,
        HAS_MIN=mins is not None,
        WHOLE=k % STEP == 0,
        HAS_BIAS=bias is not None,
        HAS_RES=residual is not None,
        BLOCK_M=tile.rows,
        BLOCK_T=tile.tokens,
        AT_ONCE=min(tile.tokens, _AT_ONCE),
        USE_PTX=x.is_cuda if use_ptx is None else use_ptx,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl_options(x),
    )


def tile_for(tokens: int, x: Tensor, group: int = STEP) -> Tile:
    """The smallest tile that all tokens fit into, or the largest, for groups of `group` on the card of `x`."""
    tiles = tiles_for(x, group)
    return next((tile for tile in tiles if tile.tokens >= tokens), tiles[-1])


def tiles_for(x: Tensor, group: int = STEP) -> tuple[Tile, ...]:
    """Those of the card of `x`; where kernels are interpreted, as on an H200. Scales of small groups need registers."""
    if not x.is_cuda or capability(x.device) == _HOPPER_MAJOR:
        return _HOPPER
    return _OTHERS if group == STEP else _OTHERS[:-1]


def arrivals_for(device: torch.device) -> Tensor:
    """Counters for all products of one stream but the largest: 34816 x 5120 in groups of 32, 512 tokens, is 8,704 tiles
    where these are 64 by 32.
    """
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
