"""AutoAWQ's layout "gemm", of 4 bits.

    qweight int32 [K, N/8]   bits 4i.. of column c: the code of output 8c + ORDER[i]
    qzeros  int32 [S, N/8]   the zero points, in the same order
    scales  float [S, N]     S groups of inputs in a row

    w[n, k] = scale[s, n] * (code[k, n] - zero[s, n])

What AWQ multiplies important inputs by is in the norms and weights in front of them already.
Source: the packing code of AutoAWQ.
"""

import torch
from torch import Tensor

from localchat.quantize.codes import Codes, Layout
from localchat.quantize.parts import Parts, fields

KINDS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def layout(parts: Parts) -> Layout:
    """What the shapes say.

    Raises:
        BadCheckpoint: they do not belong together.
    """
    (groups, n), k = parts.matrix_shape("scales"), parts.matrix_shape("qweight")[0]
    return Layout((n, k), 4, groups, parts.group_of(k, groups, parts.foreign.group_size), symmetric=False)


def decode(parts: Parts) -> Codes:
    """The matrix.

    Raises:
        BadCheckpoint: a tensor is missing, or of another shape or dtype.
    """
    found = layout(parts)
    (n, k), groups, words = found.shape, found.groups, -(-found.shape[0] // 8)
    return Codes(
        _by_output(parts.integers("qweight", (k, words)), n),
        parts.floats("scales", (groups, n)).t().contiguous(),
        _by_output(parts.integers("qzeros", (groups, words)), n),
        found.group_of,
    )


def _by_output(words: Tensor, n: int) -> Tensor:
    """int32 [R, N/8] -> uint8 [N, R]."""
    place = torch.tensor(ORDER).argsort()
    in_order = fields(words, 4).view(len(words), -1, 8)[:, :, place]
    return in_order.flatten(1)[:, :n].t().contiguous()
