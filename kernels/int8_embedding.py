"""Embedding lookup from INT8 rows: y[t] = scales[ids[t]] * weight[ids[t]].

ids int64 [T], weight int8 [V, H], scales fp32 [V]; y [T, H] in the dtype asked for, fp32 (the residual stream's) from
the kernel. Moves H bytes in and 4 H out a token. An id outside 0..V-1 is the caller's error: the engine checks.
"""

import torch
from torch import Tensor

from localchat.kernels.checks import check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int4_packing import dequantize_rows
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous


def int8_embedding_reference(ids: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """ids [T] -> [T, H] in `dtype`."""
    return dequantize_rows(weight[ids], scales[ids], dtype)


@triton.jit
def _int8_embedding_kernel(ids_ptr, weight_ptr, scales_ptr, y_ptr, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    token = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < H
    wait_for_previous(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64)
    codes = tl.load(weight_ptr + row * H + offsets, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + token.to(tl.int64) * H + offsets, codes * tl.load(scales_ptr + row), mask=mask)


def int8_embedding(ids: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """ids int64 [T], weight int8 [V, H], scales fp32 [V] -> fp32 [T, H].

    `weight` may lie in pinned memory of the host, where the card reads the rows it needs by itself.

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    check_tensor("int8_embedding: ids", ids, (torch.int64,), (None,))
    check_tensor("int8_embedding: weight", weight, (torch.int8,), (None, None))
    vocab, hidden = weight.shape
    check_tensor("int8_embedding: scales", scales, (torch.float32,), (vocab,))
    y = torch.empty(ids.shape[0], hidden, dtype=torch.float32, device=ids.device)
    block = min(1024, triton.next_power_of_2(hidden))
    grid = (ids.shape[0], triton.cdiv(hidden, block))
    _int8_embedding_kernel[grid](ids, weight, scales, y, hidden, BLOCK=block, num_warps=4, **pdl_options(ids))
    return y
