"""The INT4 product for 1 to 8 tokens by tensor cores: see kernels/int4_matmul.py.

A warp takes a tile of the packed format (16 rows x 128 inputs) at a time: lane 4g + t loads words 4t..4t+3 of rows g
and g + 8 and, from x as it lies, the pairs that meet them for token g. That is what the instructions in
int4_fragments.py take; Triton gives such lanes to tensors [PARTS * 8, 16] of words, pairs and sums. The PARTS warps of
a program take every PARTS-th tile along K and add up at the end.

    raw     groups of 128: the group's scale multiplies what a tile gives; a minimum takes the sum of x
    scaled  groups of 32 and 64, of which a fragment spans several: weights get scale and minimum in fp16 before the
            product. Where scales are fp32 because fp16 does not hold them, raw once per group, with the inputs of the
            others as zeros.
"""

from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_address import tile_offset
from localchat.kernels.int4_fragments import add_scaled, raw_product, sums_of_x
from localchat.kernels.pdl import let_next_start, wait_for_previous

FEW_TOKENS = 8


@triton.jit
def _words(
    w_ptr, block, start, words_k, BELOW: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr
):
    """Of each part's tile, rows g (BELOW = 8: rows g + 8) of the block: int32 [PARTS * 8, 16], zeros outside K."""
    lane, c = tl.arange(0, PARTS * 8)[:, None], tl.arange(0, 16)[None, :]
    tile = start + lane // 8
    at = tile_offset(block, tile, lane % 8 + BELOW, c, words_k, WHOLE)
    if EVEN:
        return tl.load(w_ptr + at, eviction_policy="evict_first")
    return tl.load(w_ptr + at, mask=c < words_k - tile * 16, other=0, eviction_policy="evict_first")


@triton.jit
def _of_rows(ptr, n, N, groups, group, EVEN: tl.constexpr):
    """The value of each row in n and each group; of the last row where n is beyond it."""
    at = tl.minimum(n, N - 1).to(tl.int64) * groups + group
    if EVEN:
        return tl.load(ptr + at)
    return tl.load(ptr + at, mask=group < groups, other=0)


@triton.jit
def _scales(
    ptr, block, start, N, groups,
    RAW: tl.constexpr, G8: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Scales or minima of rows g and of rows g + 8: raw [PARTS * 8, 1] of each tile's J-th group, else [PARTS * 8, 16]
    as the words.
    """
    if RAW:
        lane = tl.arange(0, PARTS * 8)[:, None]
        n, group = block * 16 + lane % 8, (start + lane // 8) * (16 // G8) + J
        up, low = _of_rows(ptr, n, N, groups, group, EVEN), _of_rows(ptr, n + 8, N, groups, group, EVEN)
    else:  # one value a lane, whose four words are of one group; a vector of so many has one layout only
        lane = tl.arange(0, PARTS * 32)
        n, group = block * 16 + lane // 4 % 8, (start + lane // 32) * (16 // G8) + lane % 4 * 4 // G8
        up = _four_times(_of_rows(ptr, n, N, groups, group, EVEN), PARTS)
        low = _four_times(_of_rows(ptr, n + 8, N, groups, group, EVEN), PARTS)
    return up, low


@triton.jit
def _four_times(values, PARTS: tl.constexpr):
    """One value a lane -> [PARTS * 8, 16]."""
    wide = tl.broadcast_to(tl.reshape(values, [PARTS * 8, 4, 1]), [PARTS * 8, 4, 4])
    return tl.reshape(wide, [PARTS * 8, 16])


@triton.jit
def _fetch(
    w_ptr, s_ptr, m_ptr, block, start, N, words_k, G8: tl.constexpr, HAS_MIN: tl.constexpr,
    RAW: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of a block of 16 rows and the tiles from `start`: words, scales, minima (or the scales again), each of rows g and
    of rows g + 8.
    """
    w_up = _words(w_ptr, block, start, words_k, 0, WHOLE, EVEN, PARTS)
    w_low = _words(w_ptr, block, start, words_k, 8, WHOLE, EVEN, PARTS)
    s_up, s_low = _scales(s_ptr, block, start, N, words_k // G8, RAW, G8, EVEN, PARTS, 0)
    m_up, m_low = s_up, s_low
    if HAS_MIN:
        m_up, m_low = _scales(m_ptr, block, start, N, words_k // G8, RAW, G8, EVEN, PARTS, 0)
    return w_up, w_low, s_up, s_low, m_up, m_low


@triton.jit
def _next_group(
    fetched, s_ptr, m_ptr, block, start, N, groups,
    HAS_MIN: tl.constexpr, G8: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """`fetched` with the scales and minima of the tiles' J-th group."""
    w_up, w_low, s_up, s_low, m_up, m_low = fetched
    s_up, s_low = _scales(s_ptr, block, start, N, groups, True, G8, EVEN, PARTS, J)
    m_up, m_low = s_up, s_low
    if HAS_MIN:
        m_up, m_low = _scales(m_ptr, block, start, N, groups, True, G8, EVEN, PARTS, J)
    return w_up, w_low, s_up, s_low, m_up, m_low


@triton.jit
def _add_raw(
    acc, fetched, x0, x1, x2, x3, even, odd, total,
    HAS_MIN: tl.constexpr, PARTS: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """acc plus a tile, or what x has of it, with the group's scale."""
    w_up, w_low, s_up, s_low, m_up, m_low = fetched
    lower = (tl.arange(0, 16) % 4 >= 2)[None, :]
    if HAS_MIN:
        acc += total * tl.where(lower, m_low.to(tl.float32), m_up.to(tl.float32))
    y = raw_product(w_up, w_low, x0, x1, x2, x3, even, odd, PARTS, USE_PTX)
    return acc + y * tl.where(lower, s_low.to(tl.float32), s_up.to(tl.float32))


@triton.jit
def _step(
    acc0, acc1, first, second, x_ptr, s_ptr, m_ptr, block0, block1, start, T, N, words_k,
    G8: tl.constexpr, HAS_MIN: tl.constexpr, RAW: tl.constexpr, EVEN: tl.constexpr,
    TILES: tl.constexpr, PARTS: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """The sums after one tile more along K of each part; `first` and `second` are what was fetched of the blocks."""
    lane, c = tl.arange(0, PARTS * 8)[:, None], tl.arange(0, 16)[None, :]
    tile = start + lane // 8
    at = lane % 8 * (words_k * 4) + tile * 64 + (c // G8 * (4 * G8) + c % G8)  # pairs of nibble position 0
    valid = (lane % 8 < T) & (c >= 0)
    if not EVEN:
        valid = valid & (c < words_k - tile * 16)
    x = x_ptr.to(tl.pointer_type(tl.int32)) + at
    x0 = tl.load(x, mask=valid, other=0)
    x1 = tl.load(x + G8, mask=valid, other=0)
    x2 = tl.load(x + 2 * G8, mask=valid, other=0)
    x3 = tl.load(x + 3 * G8, mask=valid, other=0)
    if RAW:
        for j in tl.static_range(16 // G8):
            y0, y1, y2, y3 = x0, x1, x2, x3
            if G8 < 16:
                inside = c // G8 == j
                y0, y1 = tl.where(inside, x0, 0), tl.where(inside, x1, 0)
                y2, y3 = tl.where(inside, x2, 0), tl.where(inside, x3, 0)
            if j > 0:
                first = _next_group(first, s_ptr, m_ptr, block0, start, N, words_k // G8, HAS_MIN, G8, EVEN, PARTS, j)
                second = _next_group(second, s_ptr, m_ptr, block1, start, N, words_k // G8, HAS_MIN, G8, EVEN, PARTS, j)
            even, odd, total = sums_of_x(y0, y1, y2, y3, HAS_MIN, PARTS, USE_PTX)
            acc0 = _add_raw(acc0, first, y0, y1, y2, y3, even, odd, total, HAS_MIN, PARTS, USE_PTX)
            if TILES == 2:
                acc1 = _add_raw(acc1, second, y0, y1, y2, y3, even, odd, total, HAS_MIN, PARTS, USE_PTX)
    else:
        w_up, w_low, s_up, s_low, m_up, m_low = first
        acc0 = add_scaled(acc0, w_up, w_low, s_up, s_low, m_up, m_low, x0, x1, x2, x3, HAS_MIN, PARTS, USE_PTX)
        if TILES == 2:
            w_up, w_low, s_up, s_low, m_up, m_low = second
            acc1 = add_scaled(acc1, w_up, w_low, s_up, s_low, m_up, m_low, x0, x1, x2, x3, HAS_MIN, PARTS, USE_PTX)
    return acc0, acc1


@triton.jit
def _store(
    acc, row_scale_ptr, bias_ptr, res_ptr, y_ptr, block, T, N,
    HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """16 rows of y: the parts together, row scales, bias and residual."""
    c = tl.arange(0, 16)
    token = (2 * (c // 4) + c % 2)[None, :]
    n = block * 16 + tl.arange(0, 8)[:, None] + (c % 4 // 2 * 8)[None, :]
    mask = (token < T) & (n < N)
    y = tl.sum(tl.reshape(acc, [PARTS, 8, 16]), 0) * tl.load(row_scale_ptr + token, mask=token < T, other=0)
    at = token * N + n
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)
    if HAS_RES:
        y += tl.load(res_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def int4_few_tokens_kernel(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    s_ptr,
    m_ptr,
    bias_ptr,
    res_ptr,
    y_ptr,
    T,
    N,
    K32,  # K / 32
    G8: tl.constexpr,  # words a group
    HAS_MIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr,
    WHOLE: tl.constexpr,  # K is a multiple of 128
    RAW: tl.constexpr,  # scales after the product; necessary where they are fp32
    EVEN: tl.constexpr,  # K is a multiple of 128 PARTS: no masks
    TILES: tl.constexpr,  # blocks of 16 rows a program: 1 or 2, which share the loads of x
    PARTS: tl.constexpr,  # warps
    STAGES: tl.constexpr,  # of the loop's loads; 1 is none in advance
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, n] = row_scale[t] * sum_k x[t, k] W[n, k] + bias[n] + res[t, n] for TILES blocks of 16 rows and T <= 8."""
    let_next_start(PDL)
    words_k = K32 * 4
    block0 = tl.program_id(0) * TILES
    block1 = tl.minimum(block0 + TILES - 1, (N - 1) // 16)  # read again where there is no other, and not stored
    acc0 = tl.zeros([PARTS * 8, 16], tl.float32)
    acc1 = acc0
    steps = tl.cdiv(words_k, 16 * PARTS)
    if STAGES == 1:  # the first weights are on their way while the kernel before still works
        first = _fetch(w_ptr, s_ptr, m_ptr, block0, 0, N, words_k, G8, HAS_MIN, RAW, WHOLE, EVEN, PARTS)
        second = first
        if TILES == 2:
            second = _fetch(w_ptr, s_ptr, m_ptr, block1, 0, N, words_k, G8, HAS_MIN, RAW, WHOLE, EVEN, PARTS)
        wait_for_previous(PDL)
        acc0, acc1 = _step(
            acc0, acc1, first, second, x_ptr, s_ptr, m_ptr, block0, block1, 0, T, N, words_k,
            G8, HAS_MIN, RAW, EVEN, TILES, PARTS, USE_PTX,
        )  # fmt: skip
    else:
        wait_for_previous(PDL)
    for step in tl.range(1 if STAGES == 1 else 0, steps, num_stages=STAGES):
        start = step * PARTS
        first = _fetch(w_ptr, s_ptr, m_ptr, block0, start, N, words_k, G8, HAS_MIN, RAW, WHOLE, EVEN, PARTS)
        second = first
        if TILES == 2:
            second = _fetch(w_ptr, s_ptr, m_ptr, block1, start, N, words_k, G8, HAS_MIN, RAW, WHOLE, EVEN, PARTS)
        acc0, acc1 = _step(
            acc0, acc1, first, second, x_ptr, s_ptr, m_ptr, block0, block1, start, T, N, words_k,
            G8, HAS_MIN, RAW, EVEN, TILES, PARTS, USE_PTX,
        )  # fmt: skip
    _store(acc0, row_scale_ptr, bias_ptr, res_ptr, y_ptr, block0, T, N, HAS_BIAS, HAS_RES, PARTS)
    if TILES == 2:  # block1 unclamped: rows that do not exist are not stored
        _store(acc1, row_scale_ptr, bias_ptr, res_ptr, y_ptr, block0 + 1, T, N, HAS_BIAS, HAS_RES, PARTS)
