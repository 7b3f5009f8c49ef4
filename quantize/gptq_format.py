"""GPTQ's layout (AutoGPTQ, GPTQModel, AutoRound), of 4 or 8 bits.

    qweight int32 [K/8, N]   bits 4i.. of row r: the code of input 8r + i       (8 bits: [K/4, N], 8i.., 4r + i)
    qzeros  int32 [S, N/8]   bits 4i.. of column c: the zero point of output 8c + i
    scales  float [S, N]
    g_idx   int   [K]        the group of each input; with act-order in any order

    w[n, k] = scale[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])

The first version of the format stores zero points less one, modulo 16; `gptq_v2` stores them as they are.
Source: the packing code of AutoGPTQ and GPTQModel.
"""

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.foreign import USE_INSTEAD
from localchat.quantize.codes import Codes, Layout
from localchat.quantize.parts import Parts, fields

KINDS = ("qweight", "qzeros", "scales", "g_idx")


def layout(parts: Parts) -> Layout:
    """What the shapes say, and the zero points, where config.json says that they are all in the middle.

    Raises:
        BadCheckpoint: they do not belong together, or are of other bits than 4 and 8.
    """
    words, n = parts.matrix_shape("qweight")
    given = parts.shape("g_idx") if "g_idx" in parts else ()
    k = given[0] if len(given) == 1 and given[0] else words * 32 // parts.foreign.bits
    bits = words * 32 // max(k, 1)
    if bits not in (4, 8) or words * 32 != k * bits:
        raise BadCheckpoint(
            f"{parts.name}.qweight has {words} words for {k} inputs, wanted 4 or 8 bits of each: {USE_INSTEAD}."
        )
    groups = parts.matrix_shape("scales")[0]
    group_of = parts.group_of(k, groups, parts.foreign.group_size, "g_idx")
    symmetric = parts.foreign.symmetric
    if symmetric and bits == 4 and not parts.headers_only:
        symmetric = bool((_zeros(parts, n, groups, bits) == 8).all())
    return Layout((n, k), bits, groups, group_of, symmetric)


def decode(parts: Parts) -> Codes:
    """The matrix.

    Raises:
        BadCheckpoint: a tensor is missing, or of another shape or dtype.
    """
    found = layout(parts)
    (n, k), bits, groups = found.shape, found.bits, found.groups
    return Codes(
        fields(parts.integers("qweight", (k * bits // 32, n)).t(), bits),
        parts.floats("scales", (groups, n)).t().contiguous(),
        _zeros(parts, n, groups, bits).t().contiguous(),
        found.group_of,
        bits,
    )


def _zeros(parts: Parts, n: int, groups: int, bits: int) -> Tensor:
    """uint8 [S, N]."""
    stored = fields(parts.integers("qzeros", (groups, -(-n * bits // 32))), bits)[:, :n]
    return torch.add(stored, parts.foreign.zero_offset).bitwise_and(2**bits - 1)
