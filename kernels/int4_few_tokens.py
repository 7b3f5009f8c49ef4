"""The INT4 product for 1 to 8 tokens by tensor cores: see kernels/int4_matmul.py.

A program has 16 rows and PARTS warps; a warp takes every PARTS-th tile of the packed format (16 rows x 128 inputs) and
the warps add up at the end. Lane 4g + t loads words 4t..4t+3 of rows g and g + 8 and, from x as it lies, the pairs that
meet them. That is what the instructions in int4_fragments.py take; Triton gives such lanes to tensors [PARTS * 8, 16]
of words, pairs and sums.

The instruction multiplies with 8 columns of x, where one token needs one. So the columns are 8 / TOKENS tiles of x, of
all tokens each: column g is token g % TOKENS of tile g // TOKENS. One load of x serves that many tiles of weights, and
of each product the columns of its own tile count. With one token x costs next to nothing, neither loads nor the sums
that correct raw codes.

    raw     groups of 128: the group's scale multiplies what a tile gives; a minimum takes the sum of x
    scaled  groups of 32 and 64, of which a fragment spans several: weights get scale and minimum in fp16 before the
            product. Where scales are fp32 because fp16 does not hold them, raw once per group, with the inputs of the
            others as zeros.

What a warp loads it asks for BATCH tiles at a time, one batch ahead. The compiler's scheduler moves loads down to where
they are used, to save registers, which leaves the memory idle; it does not move them across the instruction that lets
the next kernel start, which does nothing when it is repeated. So that one stands behind each batch, where cards have it
(9.0 and newer); on others the scheduler has its way. What a program's end adds or multiplies with comes at its start:
there memory would be waited for.
"""

from localchat.kernels.activations import silu
from localchat.kernels.early import fill_unwritten, read_early
from localchat.kernels.fragments import LOAD_WORDS, row_sums
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_address import tile_offset
from localchat.kernels.int4_fragments import raw_product, scaled_product, sums_of_x
from localchat.kernels.pdl import let_next_start, wait_for_previous
from localchat.kernels.scaled_half import factors_of, in_units, load_factors

FEW_TOKENS = 8

_LOAD_PAIR = tl.constexpr("ld.relaxed.cta.global.b32 $0, [$1];")


@triton.jit
def _words(
    w_ptr, block, tile, words_k, BELOW: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, USE_PTX: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of each part's tile [PARTS * 8, 1], rows g (BELOW = 8: rows g + 8): int32 [PARTS * 8, 16], zeros outside K."""
    lane, c = tl.arange(0, PARTS * 8)[:, None], tl.arange(0, 16)[None, :]
    at = w_ptr + tile_offset(block, tile, lane % 8 + BELOW, c, words_k, WHOLE)
    if EVEN and USE_PTX:
        return tl.inline_asm_elementwise(
            LOAD_WORDS, "=r,=r,=r,=r,l,l,l,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=4
        )
    return tl.load(at, mask=c < words_k - tile * 16, other=0, eviction_policy="evict_first")


@triton.jit
def _pairs(
    ptr, block, group, groups, WIDE: tl.constexpr, EVEN: tl.constexpr, USE_PTX: tl.constexpr, PARTS: tl.constexpr
):
    """Scales or minima of rows g and g + 8 as `_both` takes them, each [PARTS * 8, 16] like the words.

    group: of each lane, [PARTS * 32]; all four words of a lane are of one group. As such a vector, because Triton puts
    a [PARTS * 8, 4] load through shared memory, with barriers in every step.
    """
    at = (block.to(tl.int64) * groups + group) * 8 + tl.arange(0, PARTS * 32) // 4 % 8
    valid = group < groups
    if WIDE:
        first, second = tl.load(ptr + 2 * at, mask=valid, other=0), tl.load(ptr + 2 * at + 1, mask=valid, other=0)
    else:
        pair = ptr.to(tl.pointer_type(tl.int32)) + at
        if EVEN and USE_PTX:
            first = tl.inline_asm_elementwise(
                _LOAD_PAIR, "=r,l", [pair.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            first = tl.load(pair, mask=valid, other=0)
        second = first
    return _four_times(first, PARTS), _four_times(second, PARTS)


@triton.jit
def _both(pairs, WIDE: tl.constexpr):
    """Of rows g and of rows g + 8: fp32, or fp16 out of the halves of a word."""
    up, low = pairs
    if not WIDE:
        up, low = up & 0xFFFF, (up >> 16) & 0xFFFF
        up, low = up.to(tl.int16).to(tl.float16, bitcast=True), low.to(tl.int16).to(tl.float16, bitcast=True)
    return up, low


@triton.jit
def _four_times(values, PARTS: tl.constexpr):
    """One value a lane -> [PARTS * 8, 16]."""
    wide = tl.broadcast_to(tl.reshape(values, [PARTS * 8, 4, 1]), [PARTS * 8, 4, 4])
    return tl.reshape(wide, [PARTS * 8, 16])


@triton.jit
def _scales(
    s_ptr, m_ptr, block, first, words_k, J: tl.constexpr, G8: tl.constexpr, HAS_MIN: tl.constexpr, RAW: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, USE_PTX: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Pairs of scales and of minima (or scales again): of the J-th group of a part's tile; scaled: of each lane's."""
    lane = tl.arange(0, PARTS * 32)
    group = (first + lane // 32) * (16 // G8) + J
    if not RAW:
        group = (first + lane // 32) * (16 // G8) + lane % 4 * 4 // G8
    s = _pairs(s_ptr, block, group, words_k // G8, WIDE, EVEN, USE_PTX, PARTS)
    m = s
    if HAS_MIN:
        m = _pairs(m_ptr, block, group, words_k // G8, WIDE, EVEN, USE_PTX, PARTS)
    return s, m


@triton.jit
def _fetch(
    w_ptr, s_ptr, m_ptr, block, step, words_k, COUNT: tl.constexpr,
    G8: tl.constexpr, HAS_MIN: tl.constexpr, RAW: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, USE_PTX: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """COUNT tiles of each part from step `step` on: for each the words of rows g, of rows g + 8, and `_scales`."""
    fetched = ()
    for j in tl.static_range(COUNT):
        first = (step + j) * PARTS
        tile = first + tl.arange(0, PARTS * 8)[:, None] // 8
        up = _words(w_ptr, block, tile, words_k, 0, WHOLE, EVEN, USE_PTX, PARTS)
        low = _words(w_ptr, block, tile, words_k, 8, WHOLE, EVEN, USE_PTX, PARTS)
        s = _scales(s_ptr, m_ptr, block, first, words_k, 0, G8, HAS_MIN, RAW, WIDE, EVEN, USE_PTX, PARTS)
        fetched = fetched + ((up, low, s),)  # type: ignore[assignment]  # noqa: RUF005 -- Triton knows no other way
    return fetched


@triton.jit
def _columns(
    x_ptr, step, steps, T, words_k,
    G8: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Pairs of x for the four nibble positions, each [PARTS * 8, 16]: row g is token g % TOKENS of the part's tile in
    step `step` + g // TOKENS. Tokens and steps that do not exist are others or zeros, and nobody looks.
    """
    lane, c = tl.arange(0, PARTS * 8)[:, None], tl.arange(0, 16)[None, :]
    g = lane % 8
    tile = tl.minimum(step + g // TOKENS, steps - 1) * PARTS + lane // 8
    at = tl.minimum(g % TOKENS, T - 1) * (words_k * 4) + tile * 64 + (c // G8 * (4 * G8) + c % G8)
    x = x_ptr.to(tl.pointer_type(tl.int32)) + at
    if EARLY:
        return read_early(x)
    if EVEN:
        return tl.load(x), tl.load(x + G8), tl.load(x + 2 * G8), tl.load(x + 3 * G8)
    valid = c < words_k - tile * 16
    return (
        tl.load(x, mask=valid, other=0), tl.load(x + G8, mask=valid, other=0),
        tl.load(x + 2 * G8, mask=valid, other=0), tl.load(x + 3 * G8, mask=valid, other=0),
    )  # fmt: skip


@triton.jit
def _of_group(x, J: tl.constexpr, G8: tl.constexpr):
    """x with zeros outside the J-th group of its tile."""
    if G8 == 16:
        return x
    inside = tl.arange(0, 16)[None, :] // G8 == J
    return tl.where(inside, x[0], 0), tl.where(inside, x[1], 0), tl.where(inside, x[2], 0), tl.where(inside, x[3], 0)


@triton.jit
def _raw(
    up, low, pairs, x, sums, HAS_MIN: tl.constexpr, WIDE: tl.constexpr, USE_PTX: tl.constexpr, PARTS: tl.constexpr
):
    """What a tile, or a group of it, gives with its scales, in all columns."""
    s_up, s_low = _both(pairs[0], WIDE)
    even, odd, total = sums
    lower = (tl.arange(0, 16) % 4 >= 2)[None, :]
    y = raw_product(up, low, x[0], x[1], x[2], x[3], even, odd, PARTS, USE_PTX)
    y *= tl.where(lower, s_low.to(tl.float32), s_up.to(tl.float32))
    if HAS_MIN:
        m_up, m_low = _both(pairs[1], WIDE)
        y += total * tl.where(lower, m_low.to(tl.float32), m_up.to(tl.float32))
    return y


@triton.jit
def _steps(
    acc, fetched, x_ptr, w_ptr, s_ptr, m_ptr, block, step, steps, T, words_k, COUNT: tl.constexpr, BATCH: tl.constexpr,
    G8: tl.constexpr, HAS_MIN: tl.constexpr, RAW: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, USE_PTX: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """acc after COUNT steps from `step` on; `fetched` is the first batch of them."""
    c = tl.arange(0, 16)[None, :]
    own = (2 * (c // 4) + c % 2) // TOKENS  # which of the tiles in x a column is of
    SET: tl.constexpr = 8 // TOKENS
    for b in tl.static_range(0, COUNT, BATCH):
        following = fetched
        if b + BATCH < COUNT:
            following = _fetch(
                w_ptr, s_ptr, m_ptr, block, step + b + BATCH, words_k,
                BATCH if b + 2 * BATCH <= COUNT else COUNT - b - BATCH,
                G8, HAS_MIN, RAW, WIDE, WHOLE, EVEN, USE_PTX, PARTS,
            )  # fmt: skip
        let_next_start(PDL)  # a fence: see the module
        for j in tl.static_range(b, b + BATCH if b + BATCH <= COUNT else COUNT):
            if j % SET == 0:
                x = _columns(x_ptr, step + j, steps, T, words_k, G8, EVEN, PARTS, TOKENS, EARLY)
                if RAW and G8 == 16:
                    sums = sums_of_x(x[0], x[1], x[2], x[3], HAS_MIN, PARTS, USE_PTX)
            up, low, pairs = fetched[j - b]
            if not RAW:
                s_up, s_low = _both(pairs[0], WIDE)
                m_up, m_low = _both(pairs[1], WIDE)
                y = scaled_product(up, low, s_up, s_low, m_up, m_low, x[0], x[1], x[2], x[3], HAS_MIN, PARTS, USE_PTX)
            elif G8 == 16:
                y = _raw(up, low, pairs, x, sums, HAS_MIN, WIDE, USE_PTX, PARTS)
            else:
                y = tl.zeros([PARTS * 8, 16], tl.float32)
                for group in tl.static_range(16 // G8):
                    part = _of_group(x, group, G8)
                    of_part = sums_of_x(part[0], part[1], part[2], part[3], HAS_MIN, PARTS, USE_PTX)
                    pairs = _scales(
                        s_ptr, m_ptr, block, (step + j) * PARTS, words_k, group,
                        G8, HAS_MIN, RAW, WIDE, EVEN, USE_PTX, PARTS,
                    )  # fmt: skip
                    y += _raw(up, low, pairs, part, of_part, HAS_MIN, WIDE, USE_PTX, PARTS)
            acc += tl.where(own == j % SET, y, 0.0)
        fetched = following
    return acc


@triton.jit(do_not_specialize_on_alignment=["T"])
def int4_few_tokens_kernel(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    s_ptr,
    m_ptr,
    bias_ptr,
    res_ptr,
    y_ptr,
    gain_ptr,
    half_ptr,
    squares_ptr,
    T,
    N,
    K32,  # K / 32
    parts,
    eps,
    fill_ptr,
    fill_words,
    SQUARES: tl.constexpr,  # parts, eps, this: see row_factors
    SWIGLU: tl.constexpr,
    NORM: tl.constexpr,
    G8: tl.constexpr,  # words a group
    HAS_MIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr,
    WHOLE: tl.constexpr,  # K is a multiple of 128
    RAW: tl.constexpr,  # scales after the product; necessary where they are fp32
    WIDE: tl.constexpr,  # scales are fp32
    EVEN: tl.constexpr,  # K is a multiple of 128 PARTS: no masks
    TOKENS: tl.constexpr,  # 1, 2, 4 or 8, at least T
    COUNT: tl.constexpr,  # steps of the loop's body; a step is one tile of each part
    REST: tl.constexpr,  # steps that are left after it
    BATCH: tl.constexpr,  # steps whose weights are asked for at once
    PARTS: tl.constexpr,  # warps
    USE_PTX: tl.constexpr,
    LATE: tl.constexpr,  # the next kernel may start behind the wait, not before
    EARLY: tl.constexpr,  # x is read early, and the last REST steps come behind the wait (early.py)
    FILL: tl.constexpr,  # fill_words int32 are filled, for somebody who reads them early
    PDL: tl.constexpr,
):
    """y[t, n] = row_scale[t] * sum_k x[t, k] W[n, k] + bias[n] + res[t, n] for 16 rows.

    SWIGLU: y is silu of the even rows times the odd ones, in units of fp16. NORM: besides y, y * gain in units of fp16
    and the sums of its squares, for the product behind the next norm.
    """
    if not LATE:
        let_next_start(PDL)
    words_k = K32 * 4
    block, blocks = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(words_k, 16 * PARTS)
    acc = tl.zeros([PARTS * 8, 16], tl.float32)
    # The first weights are on their way while the kernel before still works.
    fetched = _fetch(w_ptr, s_ptr, m_ptr, block, 0, words_k, BATCH, G8, HAS_MIN, RAW, WIDE, WHOLE, EVEN, USE_PTX, PARTS)
    # What the end adds or multiplies with is asked for here: at the end of a short kernel it would be waited for.
    n, tokens = block * 16 + tl.arange(0, 16)[:, None], tl.arange(0, TOKENS)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0)
    if NORM:
        gain = tl.load(gain_ptr + n, mask=n < N, other=0)
    token = tokens[None, :]
    mask = (token < T) & (n < N)
    at = token * N + n
    FULL: tl.constexpr = WIDE and TOKENS > 2  # no register is free for it until the end
    if not EARLY:
        wait_for_previous(PDL)
        if HAS_RES and not FULL:
            res = tl.load(res_ptr + at, mask=mask, other=0)
        factors = load_factors(row_scale_ptr, tokens, T, parts, SQUARES)
        if TOKENS > 2:  # of more tokens they would take too many registers until the end
            factors = factors_of(factors, words_k * 8, eps, SQUARES)
    acc = _steps(
        acc, fetched, x_ptr, w_ptr, s_ptr, m_ptr, block, 0, steps, T, words_k, COUNT, BATCH,
        G8, HAS_MIN, RAW, WIDE, WHOLE, EVEN, USE_PTX, PARTS, TOKENS, EARLY, PDL,
    )  # fmt: skip
    for step in tl.range(COUNT, steps - REST, COUNT, num_stages=1):
        fetched = _fetch(
            w_ptr, s_ptr, m_ptr, block, step, words_k, BATCH, G8, HAS_MIN, RAW, WIDE, WHOLE, EVEN, USE_PTX, PARTS
        )
        acc = _steps(
            acc, fetched, x_ptr, w_ptr, s_ptr, m_ptr, block, step, steps, T, words_k, COUNT, BATCH,
            G8, HAS_MIN, RAW, WIDE, WHOLE, EVEN, USE_PTX, PARTS, TOKENS, EARLY, PDL,
        )  # fmt: skip
    if REST > 0:
        LAST: tl.constexpr = BATCH if BATCH < REST else REST
        fetched = _fetch(
            w_ptr, s_ptr, m_ptr, block, steps - REST, words_k, LAST,
            G8, HAS_MIN, RAW, WIDE, WHOLE, EVEN, USE_PTX, PARTS,
        )  # fmt: skip
        if EARLY:
            wait_for_previous(PDL)
            if HAS_RES:
                res = tl.load(res_ptr + at, mask=mask, other=0)
            factors = load_factors(row_scale_ptr, tokens, T, parts, SQUARES)
            if TOKENS > 2:
                factors = factors_of(factors, words_k * 8, eps, SQUARES)
        acc = _steps(
            acc, fetched, x_ptr, w_ptr, s_ptr, m_ptr, block, steps - REST, steps, T, words_k, REST, LAST,
            G8, HAS_MIN, RAW, WIDE, WHOLE, EVEN, USE_PTX, PARTS, TOKENS, False, PDL,
        )  # fmt: skip
    if TOKENS <= 2:
        factors = factors_of(factors, words_k * 8, eps, SQUARES)
    y = row_sums(acc, PARTS, TOKENS) * factors[None, :]
    if HAS_BIAS:
        y += bias.to(tl.float32)
    if HAS_RES:
        if FULL:
            res = tl.load(res_ptr + at, mask=mask, other=0)
        y += res.to(tl.float32)
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, [8, 2, TOKENS]), (0, 2, 1)))
        row = block * 8 + tl.arange(0, 8)[:, None]
        tl.store(y_ptr + token * (N // 2) + row, in_units(silu(gate) * up), mask=(token < T) & (2 * row < N))
    else:
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if NORM:
        tl.store(half_ptr + at, in_units(y * gain.to(tl.float32)), mask=mask)
        squares = tl.sum(tl.where(mask, y * y, 0.0), 0)
        tl.store(squares_ptr + tokens * blocks + block, squares, mask=tokens < T)
    if FILL:
        fill_unwritten(fill_ptr, fill_words)
