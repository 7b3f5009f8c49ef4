"""Float8 weights (e4m3) with scales: official FP8 repositories, and compressed-tensors' "float-quantized".

    weight            float8 e4m3 [N, K]
    weight_scale_inv  float [N/128, K/128]    one scale for a block of 128 x 128 (or as config.json says)
    weight_scale      float [N/128, K/128], [N, 1] or [N]: of a row, or [1]: of the whole matrix

    w = weight * scale: also of weight_scale_inv, which is the inverse of what the weights were multiplied by

Source: transformers' fine-grained FP8 and compressed-tensors.
"""

import torch
from torch import Tensor

from localchat.quantize.parts import Parts

KINDS = ("weight", "weight_scale_inv", "weight_scale")


def shape(parts: Parts) -> tuple[int, int]:
    """[N, K] of the matrix."""
    return parts.matrix_shape("weight")


def decode(parts: Parts) -> Tensor:
    """The matrix, fp32 [N, K].

    Raises:
        BadCheckpoint: a tensor is missing, or of another shape or dtype.
    """
    n, k = shape(parts)
    rows, columns = parts.foreign.block
    blocks = ((-(-n // rows), -(-k // columns)),) if rows else ()
    kind = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scales = parts.floats(kind, *blocks, (n, 1), (n,), (1, 1), (1,), ()).float()
    weight = parts.tensor("weight", "F8_E4M3", (n, k))
    if scales.shape not in blocks:
        return weight.float() * (scales.view(-1, 1))
    w = torch.empty(n, k, dtype=torch.float32)
    for i, scale in enumerate(scales):
        block = slice(i * rows, (i + 1) * rows)
        torch.mul(weight[block].float(), scale.repeat_interleave(columns)[:k], out=w[block])
    return w
