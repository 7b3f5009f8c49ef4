"""Product with a packed INT4 matrix: y = x W^T + bias, W stored as kernels/int4_packing.py defines.

x [T, K], y [T, N]; qweight int32 [N, K/8], scales and mins [N, K/G], bias [N].
Bytes moved for one token: N * K / 2 codes + 2 N K / G a scale (twice that with mins); x and y are nothing beside it.

On a GPU x comes as "scaled half" (kernels/scaled_half.py): fp16 with |x| <= 512 and a power of two per row, because
arithmetic, not bandwidth, limits the naive product: two weights are one logical operation and one fp16 multiply-add.
Three kernels share the layout:

    int4_gemv       one token: every program takes a few rows and walks along K; fp16 chains of four products a word,
                    then fp32. The minimum enters through the sums of x, which all rows share.
    int4_gemm       2 to about 64 tokens: tl.dot on dequantised tiles, one dot per nibble position, so that nothing is
                    shuffled: the inputs of nibble p are gathered from x instead.
    dequantize_int4 longer prefill: one matrix into bf16 scratch, for the library's dense product.
"""

from typing import Any

import torch
from torch import Tensor

from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_packing import dequantize
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous


def gemv_settings(n: int, k: int) -> tuple[int, int, int]:
    """Rows a program, words a step, warps of the vector kernel. Measured on an H200, 2026-11-30 (NOTES.md)."""
    words, warps = (512, 4) if k >= 16384 else (128, 1)
    return (4 if n >= 32768 else 2), words, warps


GEMM_WARPS = 8  # with 4, tiles of 32 tokens and more do not fit into registers


def gemm_tokens(tokens: int) -> int:
    """Tokens of a tile of the tensor-core kernels."""
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64


def int4_matmul_reference(
    x: Tensor, qweight: Tensor, scales: Tensor, mins: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Dequantise W in fp32, multiply in fp32, round once to x's dtype. -> [T, N]."""
    y = x.float() @ dequantize(qweight, scales, mins).T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


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
def _load_words(w_row, s_row, m_row, word, in_range, WORDS_K, G8: tl.constexpr, HAS_MIN: tl.constexpr):
    """Words, scales and what is added to a weight (minimum + 8 scales) of a step, each [ROWS, WORDS]."""
    mask = in_range[:, None] & (word < WORDS_K)[None, :]
    w = tl.load(w_row + word[None, :], mask=mask, other=0, eviction_policy="evict_first")
    s = tl.load(s_row + (word // G8)[None, :], mask=mask, other=0).to(tl.float32)
    m = s
    if HAS_MIN:  # scale * q + min = scale * (q - 8) + (min + 8 scale)
        m = tl.load(m_row + (word // G8)[None, :], mask=mask, other=0).to(tl.float32) + 8 * s
    return w, s, m


@triton.jit
def _add_words(acc, w, s, m, x_ptr, word, WORDS_K, G8: tl.constexpr, HAS_MIN: tl.constexpr, USE_PTX: tl.constexpr):
    """acc plus the products of a step's words with their inputs."""
    valid = word < WORDS_K
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
def _int4_gemv_kernel(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    s_ptr,
    m_ptr,
    bias_ptr,
    res_ptr,
    y_ptr,
    N,
    WORDS_K,  # K / 8
    G8: tl.constexpr,  # words a group
    HAS_MIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    USE_PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[n] = row_scale * sum_k x[k] W[n, k] + bias[n] for ROWS rows."""
    let_next_start(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = n < N
    groups = WORDS_K // G8
    w_row = w_ptr + n.to(tl.int64)[:, None] * WORDS_K
    s_row = n.to(tl.int64)[:, None] * groups
    word = tl.arange(0, WORDS)
    # The first weights are on their way while the kernel before still works.
    w, s, m = _load_words(w_row, s_ptr + s_row, m_ptr + s_row, word, in_range, WORDS_K, G8, HAS_MIN)
    wait_for_previous(PDL)
    acc = _add_words(tl.zeros_like(s), w, s, m, x_ptr, word, WORDS_K, G8, HAS_MIN, USE_PTX)
    for start in range(WORDS, WORDS_K, WORDS):
        w, s, m = _load_words(w_row, s_ptr + s_row, m_ptr + s_row, start + word, in_range, WORDS_K, G8, HAS_MIN)
        acc = _add_words(acc, w, s, m, x_ptr, start + word, WORDS_K, G8, HAS_MIN, USE_PTX)
    y = tl.sum(acc, axis=1) * tl.load(row_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=in_range, other=0).to(tl.float32)
    if HAS_RES:
        y += tl.load(res_ptr + n, mask=in_range, other=0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=in_range)


@triton.jit
def _int4_gemm_kernel(
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
    WORDS_K,
    G8: tl.constexpr,
    HAS_MIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A tile [BLOCK_T, BLOCK_N] of y: for each nibble position one dot of its inputs with its codes."""
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    groups = WORDS_K // G8
    x_row = x_ptr + t.to(tl.int64)[:, None] * (WORDS_K * 8)
    w_row = w_ptr + n.to(tl.int64)[None, :] * WORDS_K
    s_row = n.to(tl.int64)[None, :] * groups
    t_valid, n_valid = t[:, None] < T, n[None, :] < N
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, WORDS_K, WORDS):
        word = start + tl.arange(0, WORDS)
        valid = word < WORDS_K
        group = word // G8
        mask = valid[:, None] & n_valid
        w = tl.load(w_row + word[:, None], mask=mask, other=0)  # [WORDS, BLOCK_N]
        s = tl.load(s_ptr + s_row + group[:, None], mask=mask, other=0).to(tl.float32)
        if HAS_MIN:
            m = tl.load(m_ptr + s_row + group[:, None], mask=mask, other=0).to(tl.float32)
        else:
            m = -8 * s
        for p in tl.static_range(4):
            even = 2 * (group * (4 * G8) + p * G8 + word % G8)
            for h in tl.static_range(2):
                q = ((w >> (4 * p + 16 * h)) & 15).to(tl.float32)
                x = tl.load(x_row + (even + h)[None, :], mask=t_valid & valid[None, :], other=0)
                acc = tl.dot(x, (q * s + m).to(tl.float16), acc)
    y = acc * tl.load(row_scale_ptr + t, mask=t < T, other=0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0).to(tl.float32)[None, :]
    at = t.to(tl.int64)[:, None] * N + n[None, :]
    if HAS_RES:
        y += tl.load(res_ptr + at, mask=(t[:, None] < T) & (n[None, :] < N), other=0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=t_valid & n_valid)


@triton.jit
def _dequantize_int4_kernel(
    w_ptr, s_ptr, m_ptr, out_ptr, WORDS_K, G8: tl.constexpr, HAS_MIN: tl.constexpr, WORDS: tl.constexpr
):
    """WORDS words of one row to fp values in out [N, K]."""
    n = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    valid = word < WORDS_K
    group = word // G8
    w = tl.load(w_ptr + n * WORDS_K + word, mask=valid, other=0)
    s = tl.load(s_ptr + n * (WORDS_K // G8) + group, mask=valid, other=0).to(tl.float32)
    if HAS_MIN:
        m = tl.load(m_ptr + n * (WORDS_K // G8) + group, mask=valid, other=0).to(tl.float32)
    else:
        m = -8 * s
    for p in tl.static_range(4):
        even = 2 * (group * (4 * G8) + p * G8 + word % G8)
        low = ((w >> (4 * p)) & 15).to(tl.float32) * s + m
        high = ((w >> (16 + 4 * p)) & 15).to(tl.float32) * s + m
        both = tl.interleave(low, high).to(out_ptr.dtype.element_ty)
        at = tl.interleave(even, even + 1)
        tl.store(out_ptr + n * (WORDS_K * 8) + at, both, mask=tl.interleave(valid.to(tl.int32), valid.to(tl.int32)) > 0)


def int4_matmul(
    x: Tensor,
    row_scale: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    use_ptx: bool | None = None,
) -> Tensor:
    """x fp16 [T, K] with row_scale fp32 [T] (scaled half) -> y [T, N] in `dtype`.

    bias [N] and residual [T, N] are added in the epilogue. T = 1 takes the vector kernel.

    use_ptx: the inline PTX of the vector kernel or its plain twin; None: PTX on CUDA, where the interpreter has none.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    (tokens, k), (n, words) = x.shape, qweight.shape
    group_size = k // scales.shape[1] if scales.dim() == 2 and scales.shape[1] else 0
    if x.dtype != torch.float16 or words * 8 != k or scales.shape != (n, k // max(group_size, 1)) or group_size % 8:
        raise ValueError(
            f"int4_matmul: got x {x.dtype} {list(x.shape)}, qweight {list(qweight.shape)}, "
            f"scales {list(scales.shape)}, wanted fp16 [T, K], [N, K/8], [N, K/G]"
        )
    y = torch.empty(tokens, n, dtype=dtype, device=x.device) if out is None else out
    stored = (
        qweight,
        scales,
        scales if mins is None else mins,
        scales if bias is None else bias,
        scales if residual is None else residual,
    )
    flags: dict[str, Any] = {
        "G8": group_size // 8,
        "HAS_MIN": mins is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RES": residual is not None,
    }
    if tokens == 1:
        use_ptx = x.is_cuda if use_ptx is None else use_ptx
        rows, step, warps = gemv_settings(n, k)
        _int4_gemv_kernel[(triton.cdiv(n, rows),)](
            *(x, row_scale, *stored, y, n, words),
            **flags,
            ROWS=rows,
            WORDS=step,
            USE_PTX=use_ptx,
            num_warps=warps,
            **pdl_options(x),
        )
        return y
    block_t = gemm_tokens(tokens)
    grid = (triton.cdiv(n, 64), triton.cdiv(tokens, block_t))
    _int4_gemm_kernel[grid](
        x, row_scale, *stored, y, tokens, n, words,
        **flags, BLOCK_T=block_t, BLOCK_N=64, WORDS=32, num_warps=GEMM_WARPS, num_stages=3,
    )  # fmt: skip
    return y


def dequantize_int4(qweight: Tensor, scales: Tensor, mins: Tensor | None, out: Tensor) -> Tensor:
    """The matrix itself into `out` [N, K] (bf16 or fp16), one rounding from fp32.

    Raises:
        ValueError: `out` has another shape.
    """
    n, words = qweight.shape
    if out.shape != (n, words * 8):
        raise ValueError(f"dequantize_int4: got out {list(out.shape)}, wanted {[n, words * 8]}")
    _dequantize_int4_kernel[(n, triton.cdiv(words, 256))](
        qweight, scales, scales if mins is None else mins, out, words,
        G8=words // scales.shape[1], HAS_MIN=mins is not None, WORDS=256, num_warps=4,
    )  # fmt: skip
    return out
