"""The INT8 product for 2 to 8 tokens (one, where told to) by tensor cores: see kernels/int8_matmul.py.

It is built as the INT4 product is (int4_few_tokens.py says why: columns that are tiles of x, batches of ordered loads,
fences), on rows as they lie in the matrix, which the embedding shares. A program has 16 rows and PARTS warps; a warp
takes every PARTS-th tile of 16 rows x 64 inputs, and its loads are of 64 bytes of eight rows each. Codes are multiplied
as they are; a row's scale comes at the end. The vector kernel takes 200 instructions of a warp for 1 KB of codes, one
after the other for each token; this one 95 to 122 for all.

What is different: the batch behind a loop's body is asked for inside it, and sums of squares with the last batch.
"""

from localchat.kernels.fragments import LOAD_WORDS, row_sums
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int8_fragments import code_product
from localchat.kernels.pdl import let_next_start, wait_for_previous
from localchat.kernels.scaled_half import factors_of, load_factors


@triton.jit
def _words(own, tile, words_k, EVEN: tl.constexpr, USE_PTX: tl.constexpr):
    """What lies at `own` [PARTS * 8, 16], of each part's tile [PARTS * 8, 1]: int32, zeros outside K."""
    if EVEN and USE_PTX:
        return tl.inline_asm_elementwise(
            LOAD_WORDS, "=r,=r,=r,=r,l,l,l,l", [own.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=4
        )
    c = tl.arange(0, 16)[None, :]
    return tl.load(own, mask=c < words_k - tile * 16, other=0, eviction_policy="evict_first")


@triton.jit
def _fetch(
    up, low, body, words_k, FIRST: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr, USE_PTX: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """COUNT tiles of each part, from the FIRST of a body on: for each the words of rows g and of rows g + 8.

    up, low: where those of step 0 lie. Constants are added last: instructions have a place for them, and no register.
    """
    fetched = ()
    up += body * (PARTS * 16)
    low += body * (PARTS * 16)
    for j in tl.static_range(FIRST, FIRST + COUNT):
        tile = (body + j) * PARTS + tl.arange(0, PARTS * 8)[:, None] // 8
        both = (
            _words(up + j * PARTS * 16, tile, words_k, EVEN, USE_PTX),
            _words(low + j * PARTS * 16, tile, words_k, EVEN, USE_PTX),
        )
        fetched = fetched + (both,)  # type: ignore[assignment]  # noqa: RUF005 -- Triton knows no other way
    return fetched


@triton.jit
def _columns(x_ptr, step, steps, T, words_k, EVEN: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """Pairs of x as `code_product` takes them: row g is token g % TOKENS of the part's tile in step
    `step` + g // TOKENS. Tokens and steps that do not exist are others or zeros, and nobody looks.
    """
    lane, c = tl.arange(0, PARTS * 8)[:, None], tl.arange(0, 16)[None, :]
    g = lane % 8
    tile = tl.minimum(step + g // TOKENS, steps - 1) * PARTS + lane // 8
    at = tl.minimum(g % TOKENS, T - 1) * (words_k * 2) + tile * 32 + (c // 4 * 8 + c % 4)
    x = x_ptr.to(tl.pointer_type(tl.int32)) + at
    if EVEN:
        return tl.load(x), tl.load(x + 4)
    valid = c < words_k - tile * 16
    return tl.load(x, mask=valid, other=0), tl.load(x + 4, mask=valid, other=0)


@triton.jit
def _early_columns(
    x_ptr, body, steps, T, words_k, FIRST: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """`_columns` for those of COUNT steps, from the FIRST of a loop's body on, where x changes. None where one step or
    two take as much x as weights: there it comes when it is needed.
    """
    columns = ()
    SET: tl.constexpr = 8 // TOKENS
    if SET >= 4:
        for j in tl.static_range(FIRST, FIRST + COUNT):
            if j % SET == 0:
                x = _columns(x_ptr, body + j, steps, T, words_k, EVEN, PARTS, TOKENS)
                columns = columns + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return columns


@triton.jit
def _multiply(
    acc, words, x, early, x_ptr, body, steps, T, words_k, FIRST: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr,
    USE_PTX: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """acc after COUNT steps, from the FIRST of a body on; x: what the step before had. -> acc, x."""
    c = tl.arange(0, 16)[None, :]
    own = (2 * (c // 4) + c % 2) // TOKENS  # which of the tiles in x a column is of
    SET: tl.constexpr = 8 // TOKENS
    for j in tl.static_range(FIRST, FIRST + COUNT):
        if j % SET == 0:
            if SET >= 4:
                x = early[j // SET - (FIRST + SET - 1) // SET]
            else:
                x = _columns(x_ptr, body + j, steps, T, words_k, EVEN, PARTS, TOKENS)
        up, low = words[j - FIRST]
        y = code_product(up, low, x[0], x[1], PARTS, USE_PTX)
        if SET == 1:
            acc += y
        else:
            acc += tl.where(own == j % SET, y, 0.0)
    return acc, x


@triton.jit
def _steps(
    acc, words, early, x_ptr, up, low, body, steps, T, words_k, COUNT: tl.constexpr, NEXT: tl.constexpr,
    STAY: tl.constexpr, BATCH: tl.constexpr, EVEN: tl.constexpr, USE_PTX: tl.constexpr, PARTS: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT steps of a body, whole batches, of which `words` and `early` are the first; asks for NEXT steps behind
    them, which belong to this body (STAY) or are the start of another. -> acc, what was asked for, and the last x.
    """
    behind = body if STAY else body + COUNT
    x = words[0]  # no x: a body's first step takes its own, and this has the type
    for b in tl.static_range(0, COUNT, BATCH):
        if b + BATCH < COUNT:
            following = _fetch(up, low, body, words_k, b + BATCH, BATCH, EVEN, USE_PTX, PARTS)
            columns = _early_columns(x_ptr, body, steps, T, words_k, b + BATCH, BATCH, EVEN, PARTS, TOKENS)
        else:
            following = _fetch(up, low, body, words_k, COUNT, NEXT, EVEN, USE_PTX, PARTS)
            columns = _early_columns(x_ptr, behind, steps, T, words_k, COUNT if STAY else 0, NEXT, EVEN, PARTS, TOKENS)
        let_next_start(PDL)  # a fence
        acc, x = _multiply(acc, words, x, early, x_ptr, body, steps, T, words_k, b, BATCH, EVEN, USE_PTX, PARTS, TOKENS)
        words, early = following, columns
    return acc, words, early, x


@triton.jit(do_not_specialize_on_alignment=["T"])
def int8_few_tokens_kernel(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    res_ptr,
    y_ptr,
    T,
    N,
    K16,  # K / 16
    parts,
    eps,
    SQUARES: tl.constexpr,  # parts, eps, this: see row_factors
    HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of 64 PARTS: no masks
    TOKENS: tl.constexpr,  # 1, 2, 4 or 8, at least T
    LOOP: tl.constexpr,  # there are bodies of COUNT steps in front of the last one
    COUNT: tl.constexpr,  # steps of the loop's body, whole batches; a step is one tile of each part
    LAST: tl.constexpr,  # steps behind the loop, BATCH at least
    BATCH: tl.constexpr,  # steps whose weights are asked for at once
    PARTS: tl.constexpr,  # warps
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t, n] = row_scale[t] * scales[n] * sum_k x[t, k] W[n, k] + bias[n] + res[t, n] for 16 rows and 8 tokens."""
    let_next_start(PDL)
    words_k = K16 * 4
    steps = tl.cdiv(words_k, 16 * PARTS)
    lane = tl.arange(0, PARTS * 8)[:, None]
    row = tl.program_id(0) * 16 + lane % 8
    first = w_ptr.to(tl.pointer_type(tl.int32)) + (lane // 8 * 16 + tl.arange(0, 16)[None, :])
    up = first + tl.minimum(row, N - 1).to(tl.int64) * words_k  # of rows behind the last nobody looks at the sums
    low = first + tl.minimum(row + 8, N - 1).to(tl.int64) * words_k
    TAIL: tl.constexpr = (LAST - 1) % BATCH + 1  # the last batch
    words = _fetch(up, low, 0, words_k, 0, BATCH, EVEN, USE_PTX, PARTS)
    tokens = tl.arange(0, TOKENS)
    n, token = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None], tokens[None, :]
    mask, at = (token < T) & (n < N), token * N + n
    scales = tl.load(s_ptr + n, mask=n < N, other=0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)
    wait_for_previous(PDL)
    early = _early_columns(x_ptr, 0, steps, T, words_k, 0, BATCH, EVEN, PARTS, TOKENS)
    if HAS_RES:
        residual = tl.load(res_ptr + at, mask=mask, other=0).to(tl.float32)
    acc = tl.zeros([PARTS * 8, 16], tl.float32)
    if LOOP:
        for body in tl.range(0, steps - LAST, COUNT, num_stages=1):
            acc, words, early, _ = _steps(
                acc, words, early, x_ptr, up, low, body, steps, T, words_k, COUNT, BATCH, False,
                BATCH, EVEN, USE_PTX, PARTS, TOKENS, PDL,
            )  # fmt: skip
    body = steps - LAST if LOOP else 0
    x = words[0]
    if LAST > TAIL:
        acc, words, early, x = _steps(
            acc, words, early, x_ptr, up, low, body, steps, T, words_k, LAST - TAIL, TAIL, True,
            BATCH, EVEN, USE_PTX, PARTS, TOKENS, PDL,
        )  # fmt: skip
    factors = load_factors(row_scale_ptr, tokens, T, parts, SQUARES)
    let_next_start(PDL)  # a fence
    acc, x = _multiply(
        acc, words, x, early, x_ptr, body, steps, T, words_k, LAST - TAIL, TAIL, EVEN, USE_PTX, PARTS, TOKENS
    )
    y = row_sums(acc, PARTS, TOKENS) * scales * factors_of(factors, K16 * 16, eps, SQUARES)[None, :]
    if HAS_BIAS:
        y += bias
    if HAS_RES:
        y += residual
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
