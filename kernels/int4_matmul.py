"""Product with a packed INT4 matrix: y = x W^T + bias, W stored as kernels/int4_packing.py defines.

x [T, K], y [T, N]; qweight int32 [N', K/8], scales and mins [N'/16, K/G, 16], bias [N]; N' is N rounded up to 16.
Bytes moved for one token: N * K / 2 codes + 2 N K / G a scale (twice that with mins); x and y are nothing beside it.

On a GPU x comes as "scaled half" (kernels/scaled_half.py): fp16 and a factor per row. Three kernels share the layout:

    int4_few_tokens 1 to 8 tokens: tensor-core instructions fed from registers, in the order in which words lie.
    many_tokens     up to 512 tokens: weights become fp16 in registers, for `tl.dot`.
    dequantize_int4 longer prefill: one matrix into bf16 scratch, for the library's dense product.
"""

from typing import Any

import torch
from torch import Tensor

from localchat.kernels.cards import Fragments, card_of
from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_address import scale_offset, word_offset
from localchat.kernels.int4_few_tokens import FEW_TOKENS, int4_few_tokens_kernel
from localchat.kernels.int4_packing import GROUP_SIZES, TILE_ROWS, dequantize, padded_rows, unpack_scales
from localchat.kernels.many_tokens import MANY_TOKENS, many_tokens
from localchat.kernels.pdl import pdl_options
from localchat.kernels.scaled_half import Squares, factor_options


def int4_matmul_reference(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rows: int | None = None,
) -> Tensor:
    """Dequantise W in fp32, multiply in fp32, round once to x's dtype. -> [T, N]; rows: N, else N'."""
    n = qweight.shape[0] if rows is None else rows
    by_row = (unpack_scales(scales, n), None if mins is None else unpack_scales(mins, n))
    y = x.float() @ dequantize(qweight, *by_row).T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


@triton.jit
def _dequantize_int4_kernel(
    w_ptr,
    s_ptr,
    m_ptr,
    out_ptr,
    K32,  # K / 32
    G8: tl.constexpr,
    HAS_MIN: tl.constexpr,
    WHOLE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """WORDS words of one row to fp values in out [N, K]."""
    n = tl.program_id(0).to(tl.int64)
    words_k = K32 * 4
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    valid = word < words_k
    group = word // G8
    w = tl.load(w_ptr + word_offset(n, word, words_k, WHOLE), mask=valid, other=0)
    scale = scale_offset(n, group, words_k // G8)
    s = tl.load(s_ptr + scale, mask=valid, other=0).to(tl.float32)
    if HAS_MIN:
        m = tl.load(m_ptr + scale, mask=valid, other=0).to(tl.float32)
    else:
        m = -8 * s
    for p in tl.static_range(4):
        even = 2 * (group * (4 * G8) + p * G8 + word % G8)
        low = ((w >> (4 * p)) & 15).to(tl.float32) * s + m
        high = ((w >> (16 + 4 * p)) & 15).to(tl.float32) * s + m
        both = tl.interleave(low, high).to(out_ptr.dtype.element_ty)
        at = tl.interleave(even, even + 1)
        tl.store(out_ptr + n * (words_k * 8) + at, both, mask=tl.interleave(valid.to(tl.int32), valid.to(tl.int32)) > 0)


def int4_matmul(
    x: Tensor,
    row_scale: Tensor | Squares,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    rows: int | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    arrivals: Tensor | None = None,
    settings: Fragments | None = None,
    use_ptx: bool | None = None,
) -> Tensor:
    """x fp16 [T, K] with row_scale fp32 [T] (scaled half) -> y [T, N] in `dtype`.

    bias [N] and residual [T, N] are added in the epilogue. rows: N; None: as many as qweight has.

    arrivals: see many_tokens.py. settings: of few tokens; None: the card's (cards.py). use_ptx: the kernels' inline PTX
    or its plain twin; None: PTX on CUDA, where the interpreter has none.

    Raises:
        ValueError: shapes or dtypes do not belong together, or there are more tokens than `takes` says yes to.
    """
    n = qweight.shape[0] if rows is None else rows
    y = torch.empty(x.shape[0], n, dtype=dtype, device=x.device) if out is None else out
    if x.shape[0] <= FEW_TOKENS:
        _launch(x, row_scale, qweight, scales, mins, bias, residual, y, n, settings=settings, use_ptx=use_ptx)
        return y
    if not takes(x.shape[0], scales):
        raise ValueError(
            f"int4_matmul: got {x.shape[0]} tokens, scales {scales.dtype}, wanted what `takes` says yes to"
        )
    _arguments(x, qweight, scales, mins, bias, residual, n)
    stored = (qweight, scales, mins, bias, residual)
    many_tokens(x, row_scale, *stored, y, arrivals=arrivals, use_ptx=use_ptx)
    return y


def takes(tokens: int, scales: Tensor) -> bool:
    """Whether `int4_matmul` has a kernel for so many tokens: beyond a few, scales must be fp16."""
    return tokens <= FEW_TOKENS or (tokens <= MANY_TOKENS and scales.dtype == torch.float16)


def _launch(
    x: Tensor,
    row_scale: Tensor | Squares,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    n: int,
    *,
    settings: Fragments | None = None,
    use_ptx: bool | None = None,
    swiglu: bool = False,
    behind: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch int4_few_tokens. behind: gain, half and sums of squares of `int4_matmul_norm`."""
    tensors, flags = _arguments(x, qweight, scales, mins, bias, residual, n)
    tokens, k = x.shape
    if tokens > FEW_TOKENS:
        raise ValueError(f"int4_few_tokens: got {tokens} tokens, wanted up to {FEW_TOKENS}")
    chosen = settings or card_of(x.device).fragments(n, k)
    launch = few_tokens_options(tokens, k, flags["G8"] * 8, scales.dtype, mins is not None, chosen)
    factors, parts, eps, squares = factor_options(row_scale)
    gain, half, sums = (y, y, y) if behind is None else behind  # tensors that nobody reads or writes
    int4_few_tokens_kernel[(qweight.shape[0] // TILE_ROWS,)](
        x, factors, *tensors, y, gain, half, sums, tokens, n, k // 32, parts, eps,
        SQUARES=squares, SWIGLU=swiglu, NORM=behind is not None,
        **flags, **launch, USE_PTX=x.is_cuda if use_ptx is None else use_ptx, **pdl_options(x),
    )  # fmt: skip


def _arguments(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    n: int,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The stored tensors and flags of both products' kernels; where there is none, a tensor that nobody reads."""
    (tokens, k), (stored, words) = x.shape, qweight.shape
    groups = scales.shape[1] if scales.dim() == 3 else 0
    group_size = k // max(groups, 1)
    fits = words * 8 == k and stored == padded_rows(n) and scales.shape == (stored // TILE_ROWS, groups, TILE_ROWS)
    fits = fits and qweight.dtype == torch.int32 and group_size in GROUP_SIZES and k % group_size == 0
    if x.dtype != torch.float16 or not fits:
        raise ValueError(
            f"int4_matmul: got x {x.dtype} {list(x.shape)}, qweight {qweight.dtype} {list(qweight.shape)}, "
            f"scales {list(scales.shape)}, wanted fp16 [T, K], int32 [N rounded up to 16, K/8], [N/16, K/G, 16]"
        )
    if mins is not None:
        check_tensor("int4_matmul: mins", mins, (scales.dtype,), scales.shape)
    if bias is not None:
        check_tensor("int4_matmul: bias", bias, FLOATS, (n,))
    if residual is not None:
        check_tensor("int4_matmul: residual", residual, FLOATS, (tokens, n))
    tensors = (
        qweight,
        scales,
        scales if mins is None else mins,
        scales if bias is None else bias,
        scales if residual is None else residual,
    )
    return tensors, {
        "G8": group_size // 8,
        "HAS_MIN": mins is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RES": residual is not None,
        "WHOLE": k % 128 == 0,
    }


def int4_matmul_swiglu(
    x: Tensor,
    row_scale: Tensor | Squares,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rows: int | None = None,
) -> Tensor:
    """As `int4_matmul`, with SwiGLU of rows that take turns: fp16 [T, N / 2], values / UNIT.

    Raises:
        ValueError: shapes or dtypes do not belong together, there are more than 8 tokens, or N is odd.
    """
    n = qweight.shape[0] if rows is None else rows
    if n % 2:
        raise ValueError(f"int4_matmul_swiglu: got {n} rows, wanted gate and up in turn")
    out = torch.empty(x.shape[0], n // 2, dtype=torch.float16, device=x.device)
    _launch(x, row_scale, qweight, scales, mins, bias, None, out, n, swiglu=True)
    return out


def int4_matmul_norm(
    x: Tensor,
    row_scale: Tensor | Squares,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Squares]:
    """As `int4_matmul`, and what the product behind an RMSNorm of y takes.

    residual fp32 [T, N]; gain [N] and eps: of that norm. -> y fp32 [T, N]; y * gain / UNIT in fp16 [T, N]; the sums of
    squares of y.

    Raises:
        ValueError: shapes or dtypes do not belong together, or there are more than 8 tokens.
    """
    tokens, n = residual.shape
    check_tensor("int4_matmul_norm: gain", gain, FLOATS, (n,))
    y, half = torch.empty_like(residual), torch.empty(tokens, n, dtype=torch.float16, device=x.device)
    squares = Squares(torch.empty(tokens, qweight.shape[0] // TILE_ROWS, device=x.device), eps)
    behind = (gain, half, squares.parts)
    _launch(x, row_scale, qweight, scales, mins, bias, residual, y, n, behind=behind)
    return y, half, squares


def few_tokens_options(
    tokens: int, k: int, group_size: int, dtype: torch.dtype, has_min: bool, settings: Fragments
) -> dict[str, Any]:
    """The constants of the kernel; dtype: of the scales.

    A loop's body is as many steps as x has in its columns, four at least, or fewer if that divides K better, or if a
    step is several products: forty of these took 255 registers, 300 bytes of stack and more, and 40 s to compile.
    """
    parts, batch = settings
    wide = dtype != torch.float16
    columns = next(t for t in (1, 2, 4, 8) if t >= tokens)
    steps = -(-k // (128 * parts))
    products = 128 // group_size if wide else 1  # of a step: raw, each group has its own
    bodies = -(-steps // max(1, max(4, 8 // columns) // products))
    count = -(-steps // bodies)
    return {
        "RAW": group_size == 128 or wide,
        "WIDE": wide,
        "EVEN": k % (128 * parts) == 0,
        "TOKENS": columns,
        "COUNT": count,
        "REST": steps % count,
        "BATCH": min(batch, count, 4 if has_min else count),  # minima take the registers of a fifth
        "PARTS": parts,
        "num_warps": parts,
    }


def dequantize_int4(qweight: Tensor, scales: Tensor, mins: Tensor | None, out: Tensor) -> Tensor:
    """The matrix itself into `out` [N, K] (bf16 or fp16), one rounding from fp32.

    Raises:
        ValueError: `out` has another shape.
    """
    n, words = out.shape[0], qweight.shape[1]
    if out.shape != (n, words * 8) or padded_rows(n) != qweight.shape[0]:
        raise ValueError(f"dequantize_int4: got out {list(out.shape)}, wanted {[qweight.shape[0], words * 8]}")
    _dequantize_int4_kernel[(n, triton.cdiv(words, 256))](
        qweight, scales, scales if mins is None else mins, out, words // 4,
        G8=words // scales.shape[1], HAS_MIN=mins is not None, WHOLE=words % 16 == 0, WORDS=256, num_warps=4,
    )  # fmt: skip
    return out
