"""Product with INT8 rows: y = x (scales * W)^T + bias; for lm_head and for matrices kept at 8 bits.

x [T, K], y [T, N]; weight int8 [N, K], scales fp32 [N], bias [N].
Bytes moved for one token: N * K codes + 4 N of scales. On a GPU x comes as "scaled half", as for the INT4 product:

    vector kernel   one token; several, one by one, where the matrix is narrow or rows are not 16-byte pieces.
    int8_few_tokens 2 to 8 tokens, and one where rows are very many: tensor-core instructions fed from registers.
    many_tokens     up to 512 tokens: codes become fp16 in registers, for `tl.dot`.
    dequantize_int8 longer prefill: one matrix into bf16 scratch, for the library's dense product.
"""

from typing import Any

import torch
from torch import Tensor

from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int8_codes import exact
from localchat.kernels.int8_few_tokens import int8_few_tokens_kernel
from localchat.kernels.many_tokens import many_tokens
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import Squares, factor_options, row_factors

# Warps of a program of int8_few_tokens, and tiles that each asks for at once: measured on an H200; see NOTES.md.
FRAGMENTS = (8, 1)
FEW_TOKENS = 8
# Rows from which on one token takes it too, and how: in a step of the 27B 314 us for 353 to 397 (248,320 x 5120), while
# 152,064 rows take as long either way (H200, 2026-11-30).
MANY_ROWS, ONE_TOKEN = 200_000, (4, 2)
WHOLE, BODY = 32, 8  # steps (of 64 inputs a warp) that are written out; more are a loop of so many
# The vector kernel's rows a program, inputs a step, warps: measured on an H200 2026-11-30; see NOTES.md. So many steps'
# weights are asked for at once.
GEMV_ROWS, GEMV_K, GEMV_WARPS, GEMV_STEPS = 2, 1024, 2, 8
# Outputs up to which FEW tokens are taken one by one by programs of their own: a narrow matrix is few programs, which
# walk over K with one load in flight after the other.
# The weights come from memory once and then from L2.
NARROW, FEW = 128, 16


def int8_matmul_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the codes in fp32, scale each output, round once to x's dtype. -> [T, N]."""
    y = (x.float() @ weight.float().T) * scales.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


@triton.jit
def _weights(w_row, first, K, in_range, BLOCK_K: tl.constexpr, STEPS: tl.constexpr):
    """Codes of STEPS steps from input `first` on, each [ROWS, BLOCK_K]."""
    weights = ()
    for step in tl.static_range(STEPS):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = in_range[:, None] & (k < K)[None, :]
        w = tl.load(w_row + k[None, :], mask=mask, other=0, eviction_policy="evict_first")
        weights = weights + (w,)  # type: ignore[assignment] # noqa: RUF005 -- the one way that Triton knows
    return weights


@triton.jit
def _add_products(acc, weights, x_ptr, first, K, BLOCK_K: tl.constexpr, STEPS: tl.constexpr):
    for step in tl.static_range(STEPS):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0).to(tl.float32)
        acc += exact(weights[step]) * x[None, :]
    return acc


@triton.jit
def _int8_gemv_kernel(
    x_ptr,
    row_scale_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    res_ptr,
    y_ptr,
    N,
    K,
    parts,
    eps,
    SQUARES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of one token. The first weights are on their way while the kernel before still works."""
    let_next_start(PDL)
    token = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = n < N
    w_row = w_ptr + n.to(tl.int64)[:, None] * K
    weights = _weights(w_row, 0, K, in_range, BLOCK_K, STEPS)
    x_ptr += token * K
    row_scale_ptr += token * parts
    wait_for_previous(PDL)
    acc = _add_products(tl.zeros([ROWS, BLOCK_K], tl.float32), weights, x_ptr, 0, K, BLOCK_K, STEPS)
    for first in range(BLOCK_K * STEPS, K, BLOCK_K * STEPS):
        weights = _weights(w_row, first, K, in_range, BLOCK_K, STEPS)
        acc = _add_products(acc, weights, x_ptr, first, K, BLOCK_K, STEPS)
    y = tl.sum(acc, axis=1) * tl.load(s_ptr + n, mask=in_range, other=0)
    y *= tl.sum(row_factors(row_scale_ptr, tl.arange(0, 1), 1, parts, K, eps, SQUARES), 0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=in_range, other=0).to(tl.float32)
    if HAS_RES:
        y += tl.load(res_ptr + token * N + n, mask=in_range, other=0).to(tl.float32)
    tl.store(y_ptr + token * N + n, y.to(y_ptr.dtype.element_ty), mask=in_range)


@triton.jit
def _dequantize_int8_kernel(w_ptr, s_ptr, out_ptr, K, BLOCK_K: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + n * K + k, mask=k < K, other=0).to(tl.float32) * tl.load(s_ptr + n)
    tl.store(out_ptr + n * K + k, w.to(out_ptr.dtype.element_ty), mask=k < K)


def int8_matmul(
    x: Tensor,
    row_scale: Tensor | Squares,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    arrivals: Tensor | None = None,
    settings: tuple[int, int] | None = None,
    use_ptx: bool | None = None,
) -> Tensor:
    """x fp16 [T, K] with row_scale fp32 [T] (scaled half) -> y [T, N] in `dtype`.

    bias [N] and residual [T, N] are added in the epilogue. 2 to FEW_TOKENS tokens take int8_few_tokens, but where N is
    at most NARROW: there the vector kernel takes FEW of them.

    arrivals: see many_tokens.py. settings: warps and batch of int8_few_tokens, which then takes one token too; None:
    FRAGMENTS. use_ptx: its inline PTX or its plain twin; None: PTX on CUDA, where the interpreter has none.

    Raises:
        ValueError: shapes or dtypes do not belong together, or there are more than MANY_TOKENS tokens.
    """
    (tokens, k), (n, k_weight) = x.shape, weight.shape
    if x.dtype != torch.float16 or weight.dtype != torch.int8 or k != k_weight or scales.shape != (n,):
        raise ValueError(
            f"int8_matmul: got x {x.dtype} {list(x.shape)}, weight {weight.dtype} {list(weight.shape)}, "
            f"scales {list(scales.shape)}, wanted fp16 [T, K], int8 [N, K], [N]"
        )
    if bias is not None:
        check_tensor("int8_matmul: bias", bias, FLOATS, (n,))
    if residual is not None:
        check_tensor("int8_matmul: residual", residual, FLOATS, (tokens, n))
    y = torch.empty(tokens, n, dtype=dtype, device=x.device) if out is None else out
    stored = (weight, scales, scales if bias is None else bias, scales if residual is None else residual)
    factors, parts, eps, squares = factor_options(row_scale)
    flags = {"SQUARES": squares, "HAS_BIAS": bias is not None, "HAS_RES": residual is not None}
    if tokens == 1 and n >= MANY_ROWS:
        settings = settings or ONE_TOKEN
    several = tokens > 1 or settings is not None
    if several and tokens <= FEW_TOKENS and n > NARROW and k % 16 == 0:
        int8_few_tokens_kernel[(triton.cdiv(n, 16),)](
            *(x, factors, *stored, y, tokens, n, k // 16, parts, eps),
            **flags,
            **few_tokens_options(tokens, k, settings or FRAGMENTS),
            USE_PTX=x.is_cuda if use_ptx is None else use_ptx,
            **pdl_options(x),
        )
        return y
    if tokens == 1 or (tokens <= FEW and n <= NARROW) or k % 16:
        _int8_gemv_kernel[(triton.cdiv(n, GEMV_ROWS), tokens)](
            *(x, factors, *stored, y, n, k, parts, eps),
            **flags,
            ROWS=GEMV_ROWS,
            BLOCK_K=GEMV_K,
            STEPS=gemv_steps(k),
            num_warps=GEMV_WARPS,
            **pdl_options(x),
        )
        return y
    many_tokens(x, row_scale, weight, scales, None, bias, residual, y, arrivals=arrivals, use_ptx=use_ptx)
    return y


def few_tokens_options(tokens: int, k: int, settings: tuple[int, int]) -> dict[str, Any]:
    """The constants of int8_few_tokens."""
    parts, batch = settings
    steps = -(-k // (64 * parts))
    batch = min(batch, steps)
    count = max(1, BODY // batch) * batch
    bodies = 0 if steps <= WHOLE else (steps - batch) // count
    return {
        "EVEN": k % (64 * parts) == 0,
        "TOKENS": next(t for t in (1, 2, 4, 8) if t >= tokens),
        "LOOP": bodies > 0,
        "COUNT": count,
        "LAST": steps - bodies * count,
        "BATCH": batch,
        "PARTS": parts,
        "num_warps": parts,
    }


def gemv_steps(k: int) -> int:
    """Steps whose weights are asked for at once: as few equal parts of a row as GEMV_STEPS allows.

    One where rows do not begin at a multiple of 16 bytes: their loads are narrow and would take all registers.
    """
    if k % 16:
        return 1
    steps = -(-k // GEMV_K)
    return -(-steps // -(-steps // GEMV_STEPS))


def dequantize_int8(weight: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """The matrix itself into `out` [N, K] (bf16 or fp16).

    Raises:
        ValueError: `out` has another shape.
    """
    n, k = weight.shape
    if out.shape != weight.shape:
        raise ValueError(f"dequantize_int8: got out {list(out.shape)}, wanted {[n, k]}")
    _dequantize_int8_kernel[(n, triton.cdiv(k, 2048))](weight, scales, out, k, BLOCK_K=2048, num_warps=4)
    return out
