"""The layout "pack-quantized" of compressed-tensors (llm-compressor), of 4 or 8 bits.

    weight_packed      int32 [N, K/8]   bits 4i.. of column c: the code of input 8c + i, rows filled up to whole words
    weight_scale       float [N, S]     S groups of inputs in a row; S = 1: a row; [1]: the whole matrix
    weight_zero_point  int32 [N/8, S]   bits 4i.. of row r: the zero point of output 8r + i; or int8 [N, S], less 8
    weight_shape       int64 [2]        N and K
    weight_g_idx       int   [K]        the group of each input, where they are not in a row

    w[n, k] = scale[n, s] * (code[n, k] - zero[n, s]), where zero is 8 (8 bits: 128) if there is no weight_zero_point

Float8 weights of the same tool are fp8.py's. Source: the packing code of compressed-tensors.
"""

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.quantize.codes import Codes, Layout
from localchat.quantize.parts import Parts, fields

KINDS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


def layout(parts: Parts) -> Layout:
    """What the shapes say.

    Raises:
        BadCheckpoint: they do not belong together, are of other bits than 4 and 8, or lack their zero points.
    """
    n, words = parts.matrix_shape("weight_packed")
    k = words * 32 // parts.foreign.bits
    if "weight_shape" in parts:
        given = parts.integers("weight_shape", (2,)).tolist()
        if given[0] != n or given[1] < 1:
            raise BadCheckpoint(f"{parts.name}.weight_shape is {given}, but weight_packed has {n} rows.")
        k = given[1]
    bits = next((b for b in (4, 8) if -(-k * b // 32) == words), 0)
    if not bits:
        raise BadCheckpoint(f"{parts.name}.weight_packed has {words} words for {k} inputs, wanted 4 or 8 bits of each.")
    symmetric = "weight_zero_point" not in parts
    if symmetric and not parts.foreign.symmetric and bits == parts.foreign.bits:  # other bits have rules of their own
        raise BadCheckpoint(f"{parts.name}.weight_zero_point is missing, and config.json does not say symmetric.")
    scales = parts.shape("weight_scale")
    groups = scales[1] if len(scales) == 2 else 1
    group_of = parts.group_of(k, groups, _group_size(parts, k, groups), "weight_g_idx")
    return Layout((n, k), bits, groups, group_of, symmetric)


def decode(parts: Parts) -> Codes:
    """The matrix.

    Raises:
        BadCheckpoint: a tensor is missing, or of another shape or dtype.
    """
    found = layout(parts)
    (n, k), bits, groups = found.shape, found.bits, found.groups
    scales = parts.floats("weight_scale", (n, groups), (1,), ()).reshape(-1, groups)
    return Codes(
        fields(parts.integers("weight_packed", (n, -(-k * bits // 32))), bits)[:, :k].contiguous(),
        scales.expand(n, groups).contiguous(),
        _zeros(parts, n, groups, bits),
        found.group_of,
        bits,
    )


def _group_size(parts: Parts, k: int, groups: int) -> int:
    """As config.json says, or, of a matrix that is stored otherwise than most, by the number of its scales."""
    size = parts.foreign.group_size
    return size if size and -(-k // size) == groups else k // max(groups, 1)


def _zeros(parts: Parts, n: int, groups: int, bits: int) -> Tensor:
    """uint8 [N, S]."""
    middle = 2 ** (bits - 1)
    if "weight_zero_point" not in parts:
        return torch.full((n, groups), middle, dtype=torch.uint8)
    if parts.dtype("weight_zero_point") == "I8":
        signed = parts.tensor("weight_zero_point", "I8", (n, groups), (1,), ()).reshape(-1, groups).expand(n, groups)
        return torch.add(signed.to(torch.int16), middle).to(torch.uint8)
    packed = parts.integers("weight_zero_point", (-(-n * bits // 32), groups))
    return fields(packed.t(), bits)[:, :n].t().contiguous()
