"""The INT4 product for one token by vector arithmetic: see kernels/int4_matmul.py.

Every program takes a few rows and walks along K. Two weights are one logical operation and one fp16 multiply-add: fp16
chains of four products a word, then fp32. The minimum enters through the sums of x, which all rows share.
"""

from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_address import word_offset
from localchat.kernels.pdl import let_next_start, wait_for_previous

# One word times its four pairs of x: lop3 with 0x6400 makes 1024 + q in both halves of a register, and 1024 + 16 q for
# the nibbles at odd positions; one subtraction or fma makes q - 8 of it. $0 fp32; $1 word; $2..$5 x; $6..$8 constants.
_DOT8 = tl.constexpr("""{ .reg .b32 q, t, a; .reg .f16 lo, hi; .reg .f32 flo, fhi;
lop3.b32 q, $1, 0x000f000f, 0x64006400, 0xea; sub.f16x2 q, q, $6; mul.f16x2 a, q, $2;
lop3.b32 q, $1, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 q, q, $7, $8; fma.rn.f16x2 a, q, $3, a;
shr.u32 t, $1, 8;
lop3.b32 q, t, 0x000f000f, 0x64006400, 0xea; sub.f16x2 q, q, $6; fma.rn.f16x2 a, q, $4, a;
lop3.b32 q, t, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 q, q, $7, $8; fma.rn.f16x2 a, q, $5, a;
mov.b32 {lo,hi}, a; cvt.f32.f16 flo, lo; cvt.f32.f16 fhi, hi; add.f32 $0, flo, fhi; }""")


@triton.jit
def _x_pair(x_ptr, pair, mask):
    """Two neighbouring fp16 inputs as one int32."""
    return tl.load((x_ptr).to(tl.pointer_type(tl.int32)) + pair, mask=mask, other=0)


@triton.jit
def _sum_of_pair(pair):
    """The two fp16 halves of an int32, added in fp32."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low + high


@triton.jit
def _dot_word(w, pair, p: tl.constexpr):
    """The twin of the inline PTX for one nibble position, in fp32: (q - 8) of both halves times x."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    q_low = ((w >> (4 * p)) & 15).to(tl.float32) - 8
    q_high = ((w >> (16 + 4 * p)) & 15).to(tl.float32) - 8
    return q_low * low + q_high * high


@triton.jit
def _load_words(
    w_ptr, s_row, m_row, n, word, in_range, words_k, G8: tl.constexpr, HAS_MIN: tl.constexpr, WHOLE: tl.constexpr
):
    """Words, scales and what is added to a weight (minimum + 8 scales) of a step, each [ROWS, WORDS]."""
    mask = in_range[:, None] & (word < words_k)[None, :]
    at = word_offset(n[:, None], word[None, :], words_k, WHOLE)
    w = tl.load(w_ptr + at, mask=mask, other=0, eviction_policy="evict_first")
    s = tl.load(s_row + (word // G8)[None, :], mask=mask, other=0).to(tl.float32)
    m = s
    if HAS_MIN:  # scale * q + min = scale * (q - 8) + (min + 8 scale)
        m = tl.load(m_row + (word // G8)[None, :], mask=mask, other=0).to(tl.float32) + 8 * s
    return w, s, m


@triton.jit
def _add_words(acc, w, s, m, x_ptr, word, words_k, G8: tl.constexpr, HAS_MIN: tl.constexpr, USE_PTX: tl.constexpr):
    """acc plus the products of a step's words with their inputs."""
    valid = word < words_k
    pair = word // G8 * (4 * G8) + word % G8  # of nibble position 0
    x0 = _x_pair(x_ptr, pair, valid)
    x1 = _x_pair(x_ptr, pair + G8, valid)
    x2 = _x_pair(x_ptr, pair + 2 * G8, valid)
    x3 = _x_pair(x_ptr, pair + 3 * G8, valid)
    if USE_PTX:
        zero = tl.zeros_like(w)
        dot = tl.inline_asm_elementwise(
            _DOT8,
            "=f,r,r,r,r,r,r,r,r",
            # x four times; 1024 + 8, 1 / 16 and -(64 + 8), each twice
            [w, x0[None, :] + zero, x1[None, :] + zero, x2[None, :] + zero, x3[None, :] + zero,
             zero + 0x64086408, zero + 0x2C002C00, zero + -729754496],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        dot = _dot_word(w, x0[None, :], 0) + _dot_word(w, x1[None, :], 1)
        dot += _dot_word(w, x2[None, :], 2) + _dot_word(w, x3[None, :], 3)
    acc += dot * s
    if HAS_MIN:
        total = _sum_of_pair(x0) + _sum_of_pair(x1) + _sum_of_pair(x2) + _sum_of_pair(x3)
        acc += m * total[None, :]
    return acc


@triton.jit
def int4_gemv_kernel(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    s_ptr,
    m_ptr,
    bias_ptr,
    res_ptr,
    y_ptr,
    N,
    K32,  # K / 32
    G8: tl.constexpr,  # words a group
    HAS_MIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[n] = row_scale * sum_k x[k] W[n, k] + bias[n] for ROWS rows."""
    let_next_start(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = n < N
    words_k = K32 * 4
    groups = words_k // G8
    s_row = n.to(tl.int64)[:, None] * groups
    word = tl.arange(0, WORDS)
    # The first weights are on their way while the kernel before still works.
    w, s, m = _load_words(w_ptr, s_ptr + s_row, m_ptr + s_row, n, word, in_range, words_k, G8, HAS_MIN, WHOLE)
    wait_for_previous(PDL)
    acc = _add_words(tl.zeros_like(s), w, s, m, x_ptr, word, words_k, G8, HAS_MIN, USE_PTX)
    for start in range(WORDS, words_k, WORDS):
        at = start + word
        w, s, m = _load_words(w_ptr, s_ptr + s_row, m_ptr + s_row, n, at, in_range, words_k, G8, HAS_MIN, WHOLE)
        acc = _add_words(acc, w, s, m, x_ptr, at, words_k, G8, HAS_MIN, USE_PTX)
    y = tl.sum(acc, axis=1) * tl.load(row_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=in_range, other=0).to(tl.float32)
    if HAS_RES:
        y += tl.load(res_ptr + n, mask=in_range, other=0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=in_range)
