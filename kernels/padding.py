"""Rows that fill a call up to one of few sizes, so that a captured graph of that size serves every smaller number.

Of consecutive tokens at the positions p, p + 1, ..., p + t - 1 in a call of T rows, the last position stands in all
rows from t - 1 on. So t follows from the first and the last position, on the device. Nothing of the other rows is kept:
no key, no value, no step of a recurrent state. What they give themselves nobody reads, and no row depends on another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from localchat.kernels.gpu import tl, triton


@triton.jit
def real_tokens(positions_ptr, rows):
    """How many of so many rows are tokens."""
    return (tl.load(positions_ptr + rows - 1) - tl.load(positions_ptr)).to(tl.int32) + 1


def padded(ids: Sequence[int], start: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and positions int64 [rows] of `ids` from the position `start` on."""
    filled = torch.tensor([*ids, *[0] * (rows - len(ids))], device=device)
    positions = torch.arange(start, start + rows, device=device)
    return filled, positions.clamp_(max=start + len(ids) - 1) if rows > len(ids) else positions
