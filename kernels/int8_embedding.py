"""Embedding lookup from INT8 rows: y[t] = scales[ids[t]] * weight[ids[t]].

ids int64 [T], weight int8 [V, H], scales fp32 [V], y [T, H] in the model's dtype. Moves one row a token.
"""

import torch
from torch import Tensor

from localchat.kernels.int4_packing import dequantize_rows


def int8_embedding_reference(ids: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """ids [T] -> [T, H] in `dtype`."""
    return dequantize_rows(weight[ids], scales[ids], dtype)
