"""Product with a packed INT4 matrix: y = x W^T + bias, W stored as kernels/int4_packing.py defines.

x [T, K], y [T, N]; qweight int32 [N', K/8], scales and mins [N'/16, K/G, 16], bias [N]; N' is N rounded up to 16.
Bytes moved for one token: N * K / 2 codes + 2 N K / G a scale (twice that with mins); x and y are nothing beside it.

On a GPU x comes as "scaled half" (kernels/scaled_half.py): fp16 and a factor per row. Three kernels share the layout:

    int4_few_tokens 1 to 8 tokens: tensor-core instructions fed from registers, in the order in which words lie.
    many_tokens     up to 512 tokens: weights become fp16 in registers, for `tl.dot`.
    dequantize_int4 longer prefill: one matrix into bf16 scratch, for the library's dense product.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from localchat.kernels.cards import Fragments, card_of
from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.early import can_read_early
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_address import scale_offset, tile_offset
from localchat.kernels.int4_few_tokens import FEW_TOKENS, int4_few_tokens_kernel
from localchat.kernels.int4_packing import GROUP_SIZES, TILE_ROWS, dequantize, padded_rows, unpack_scales
from localchat.kernels.many_tokens import MANY_TOKENS, many_tokens
from localchat.kernels.pdl import pdl_options
from localchat.kernels.scaled_half import Squares, factor_options


class Dequantized(NamedTuple):
    """The launch of dequantize_int4: tiles of a program, lanes of a row (4, 8 or 16), warps."""

    tiles: int
    lanes: int
    warps: int


DEQUANTIZED = Dequantized(2, 16, 4)  # the best of nine on an H200, by 4 % over the worst but one (kernels/NOTES.md)


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
def _code(w, bit):
    """The code at bits `bit` to `bit` + 3 of w, below 23, as fp32: a number of 2^(23 - bit) counts in ones there."""
    unit = (150 - bit) << 23
    return ((w & (15 << bit)) | unit).to(tl.float32, bitcast=True) - unit.to(tl.float32, bitcast=True)


@triton.jit
def _of_lanes(ptr, at, inside, ROWS: tl.constexpr, LANES: tl.constexpr):
    """One scale or minimum a lane, at [ROWS * LANES] -> fp32 [ROWS, 4 * LANES]: the same for its four words.

    From such a vector, because Triton puts a [ROWS, LANES] load through shared memory.
    """
    values = tl.reshape(tl.load(ptr + at, mask=inside).to(tl.float32), [ROWS, LANES, 1])
    return tl.reshape(tl.broadcast_to(values, [ROWS, LANES, 4]), [ROWS, 4 * LANES])


@triton.jit
def _dequantize_int4_kernel(
    w_ptr, s_ptr, m_ptr, out_ptr,
    n,
    K32,  # K / 32
    G8: tl.constexpr, HAS_MIN: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr,  # whole programs: K is a multiple of 128 TILES, n of 16
    TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of one block of 16 rows to fp values in out [n, K].

    A tile's row has LANES lanes. A lane loads four neighbouring words, 16 bytes; what these hold at one nibble position
    are eight neighbouring inputs, which it stores in 16 bytes. With 4 lanes it takes the four positions one after the
    other; with 8 or 16 there are two or four lanes to the same words, each with its own position first, so that what
    they store together lies in longer pieces: 64 bytes for 4 lanes and groups of 128, the whole row for 16.
    """
    ROWS: tl.constexpr = 16 * TILES
    AT_ONCE: tl.constexpr = LANES // 4  # positions
    first, block, words_k = tl.program_id(0) * TILES, tl.program_id(1), K32 * 4
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 4 * LANES)[None, :]
    tile, word, position = first + row // 16, column // (G8 * AT_ONCE) * G8 + column % G8, column // G8 % AT_ONCE

    lane = tl.arange(0, ROWS * LANES)
    group = (first + lane // LANES // 16) * (16 // G8) + lane % LANES * 4 // (G8 * AT_ONCE)
    scale = scale_offset(block * 16 + lane // LANES % 16, group, words_k // G8)

    place = tl.arange(0, 8 * LANES)[None, :]
    inputs = place // (2 * G8 * AT_ONCE) * (8 * G8) + place % (2 * G8 * AT_ONCE)
    out = out_ptr + block.to(tl.int64) * (128 * words_k) + (row % 16 * (8 * words_k) + tile * 128 + inputs)

    if EVEN:
        loaded, scaled, stored = None, None, None
    else:
        left = words_k - tile * 16
        loaded, scaled, stored = word < left, group < words_k // G8, (inputs < 8 * left) & (row % 16 < n - block * 16)
    at = tile_offset(block, tile, row % 16, word, words_k, WHOLE)
    w = tl.load(w_ptr + at, mask=loaded, eviction_policy="evict_first")
    s = _of_lanes(s_ptr, scale, scaled, ROWS, LANES)
    if HAS_MIN:
        m = _of_lanes(m_ptr, scale, scaled, ROWS, LANES)
    else:
        m = -8 * s
    for p in tl.static_range(0, 4, AT_ONCE):
        bit = 4 * (p + position)
        low, high = tl.fma(_code(w, bit), s, m), tl.fma(_code(w >> 12, bit + 4), s, m)
        both = tl.reshape(tl.join(low, high), [ROWS, 8 * LANES])
        tl.store(out + 2 * G8 * p, both.to(out_ptr.dtype.element_ty), mask=stored)


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
    unwritten: Tensor | None = None,
) -> Tensor:
    """x fp16 [T, K] with row_scale fp32 [T] (scaled half) -> y [T, N] in `dtype`.

    bias [N] and residual [T, N] are added in the epilogue. rows: N; None: as many as qweight has.

    arrivals: see many_tokens.py. settings: of few tokens; None: the card's (cards.py). use_ptx: the kernels' inline PTX
    or its plain twin; None: PTX on CUDA, where the interpreter has none. unwritten: fp16 [T, even], which the launch
    fills for somebody who reads it early (early.py); of few tokens only.

    Raises:
        ValueError: shapes or dtypes do not belong together, or there are more tokens than `takes` says yes to, or more
            than few and something to fill.
    """
    n = qweight.shape[0] if rows is None else rows
    y = torch.empty(x.shape[0], n, dtype=dtype, device=x.device) if out is None else out
    if x.shape[0] <= FEW_TOKENS:
        matrix = (qweight, scales, mins, bias, residual)
        _launch(x, row_scale, *matrix, y, n, settings=settings, use_ptx=use_ptx, unwritten=unwritten)
        return y
    if unwritten is not None:
        raise ValueError(f"int4_matmul: got {x.shape[0]} tokens and a tensor to fill, wanted up to {FEW_TOKENS}")
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
    unwritten: Tensor | None = None,
    early: bool = False,
    late: bool = False,
) -> None:
    """Launch int4_few_tokens. behind: gain, half and sums of squares of `int4_matmul_norm`.

    For early.py: unwritten is filled, x is read early, and the next kernel, which reads y so, starts late.
    """
    tensors, flags = _arguments(x, qweight, scales, mins, bias, residual, n)
    tokens, k = x.shape
    if tokens > FEW_TOKENS:
        raise ValueError(f"int4_few_tokens: got {tokens} tokens, wanted up to {FEW_TOKENS}")
    chosen = settings or card_of(x.device).fragments(n, k)
    chosen = chosen._replace(late=chosen.late or late)
    ptx = x.is_cuda if use_ptx is None else use_ptx
    early = early and ptx and can_read_early(x)
    launch = few_tokens_options(tokens, k, flags["G8"] * 8, scales.dtype, mins is not None, chosen, early=early)
    fill = y  # a tensor that nobody fills
    if unwritten is not None:
        check_tensor("int4_matmul: unwritten", unwritten, (torch.float16,), (tokens, None))
        fill = unwritten.view(torch.int32)
    factors, parts, eps, squares = factor_options(row_scale)
    gain, half, sums = (y, y, y) if behind is None else behind  # tensors that nobody reads or writes
    int4_few_tokens_kernel[(qweight.shape[0] // TILE_ROWS,)](
        x, factors, *tensors, y, gain, half, sums, tokens, n, k // 32, parts, eps,
        fill, 0 if unwritten is None else fill.numel(),
        SQUARES=squares, SWIGLU=swiglu, NORM=behind is not None, FILL=unwritten is not None,
        **flags, **launch, USE_PTX=ptx, **pdl_options(x),
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
    out: Tensor | None = None,
) -> Tensor:
    """As `int4_matmul`, with SwiGLU of rows that take turns: fp16 [T, N / 2], values / UNIT.

    out: where to put it, for somebody who reads it early; it was filled (early.py).

    Raises:
        ValueError: shapes or dtypes do not belong together, there are more than 8 tokens, or N is odd.
    """
    n = qweight.shape[0] if rows is None else rows
    if n % 2:
        raise ValueError(f"int4_matmul_swiglu: got {n} rows, wanted gate and up in turn")
    shape = (x.shape[0], n // 2)
    y = torch.empty(shape, dtype=torch.float16, device=x.device) if out is None else out
    check_tensor("int4_matmul_swiglu: out", y, (torch.float16,), shape)
    _launch(x, row_scale, qweight, scales, mins, bias, None, y, n, swiglu=True, late=out is not None)
    return y


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
    *,
    early: bool = False,
) -> tuple[Tensor, Tensor, Squares]:
    """As `int4_matmul`, and what the product behind an RMSNorm of y takes.

    residual fp32 [T, N]; gain [N] and eps: of that norm. -> y fp32 [T, N]; y * gain / UNIT in fp16 [T, N]; the sums of
    squares of y. early: x is `int4_matmul_swiglu`'s, which may still be writing it (early.py).

    Raises:
        ValueError: shapes or dtypes do not belong together, or there are more than 8 tokens.
    """
    tokens, n = residual.shape
    check_tensor("int4_matmul_norm: gain", gain, FLOATS, (n,))
    y, half = torch.empty_like(residual), torch.empty(tokens, n, dtype=torch.float16, device=x.device)
    squares = Squares(torch.empty(tokens, qweight.shape[0] // TILE_ROWS, device=x.device), eps)
    behind = (gain, half, squares.parts)
    _launch(x, row_scale, qweight, scales, mins, bias, residual, y, n, behind=behind, early=early)
    return y, half, squares


def few_tokens_options(
    tokens: int, k: int, group_size: int, dtype: torch.dtype, has_min: bool, settings: Fragments, *, early: bool = False
) -> dict[str, Any]:
    """The constants of the kernel; dtype: of the scales. early: x may be read early, where there is a form for it.

    A loop's body is as many steps as x has in its columns, four at least, but no more than the settings say, or fewer
    if that divides K better, or if a step is several products: forty of these took 255 registers, 300 bytes of stack
    and more, and 40 s to compile. Some forms with eight parts would leave 8 to 16 bytes on the stack.
    """
    parts, batch, body, late = settings
    wide = dtype != torch.float16
    if wide:
        parts = min(parts, 4)
    elif group_size == 32 and parts > 4 and tokens > 4:
        batch = min(batch, 2)
    columns = next(t for t in (1, 2, 4, 8) if t >= tokens)
    steps = -(-k // (128 * parts))
    products = 128 // group_size if wide else 1  # of a step: raw, each group has its own
    bodies = -(-steps // max(1, min(body, max(4, 8 // columns)) // products))
    count = -(-steps // bodies)
    even, rest = k % (128 * parts) == 0, steps % count
    early = early and even and group_size == 128 and not wide and bodies > 1 and parts <= 4
    if early and not rest:
        rest = count  # something has to come behind the wait
    return {
        "RAW": group_size == 128 or wide,
        "WIDE": wide,
        "EVEN": even,
        "TOKENS": columns,
        "COUNT": count,
        "REST": rest,
        "BATCH": min(batch, count, 4 if has_min else count),  # minima take the registers of a fifth
        "PARTS": parts,
        "LATE": late,
        "EARLY": early,
        "num_warps": parts,
    }


def dequantize_int4(
    qweight: Tensor, scales: Tensor, mins: Tensor | None, out: Tensor, *, settings: Dequantized = DEQUANTIZED
) -> Tensor:
    """The matrix itself into `out` [N, K] (bf16 or fp16), one rounding from fp32.

    Raises:
        ValueError: `out` has another shape.
    """
    n, words = out.shape[0], qweight.shape[1]
    if out.shape != (n, words * 8) or padded_rows(n) != qweight.shape[0]:
        raise ValueError(f"dequantize_int4: got out {list(out.shape)}, wanted {[qweight.shape[0], words * 8]}")
    launch = dequantize_options(n, words * 8, words * 8 // scales.shape[1], mins is not None, settings)
    _dequantize_int4_kernel[(triton.cdiv(words, 16 * settings.tiles), qweight.shape[0] // TILE_ROWS)](
        qweight, scales, scales if mins is None else mins, out, n, words // 4, **launch
    )
    return out


def dequantize_options(
    n: int, k: int, group_size: int, has_min: bool, settings: Dequantized = DEQUANTIZED
) -> dict[str, Any]:
    """The constants of its kernel."""
    tiles, lanes, warps = settings
    return {
        "G8": group_size // 8,
        "HAS_MIN": has_min,
        "WHOLE": k % 128 == 0,
        "EVEN": k % (128 * tiles) == 0 and n % TILE_ROWS == 0,
        "TILES": tiles,
        "LANES": lanes,
        "num_warps": warps,
    }
