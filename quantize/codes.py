"""A matrix that lies on a grid of whole numbers already, as GPTQ, AWQ and compressed-tensors store it, and its way into
the packed format without being rounded a second time.

    w[n, k] = scale[n, s] * (code[n, k] - zero[n, s])        s = group_of[k]

The packed format has scale * (q - 8), or scale * q + min with min = -scale * zero. A scale of 11 bits (fp16) times a
zero point of 4 mostly is no fp16 number, but always one of fp32's 24 bits, and so is the sum: there scales and mins are
stored in fp32. Which one is needed is found by comparing all 16 levels of every group, not by such an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localchat.kernels.int4_packing import group_size_for

# Weights that are turned into floats at a time.
_BLOCK = 1 << 24
# Where levels may move a little: so much of a step. A min in fp16 is off by 15 steps / 2^11 at most.
_CLOSE = 1 / 128


@dataclass(frozen=True)
class Layout:
    """What the shapes of a stored matrix say: [N, K], bits of a code, S scales a row, group_of int64 [K] of 0..S-1.

    symmetric: every zero point is in the middle.
    """

    shape: tuple[int, int]
    bits: int
    groups: int
    group_of: Tensor
    symmetric: bool

    def is_kept(self, group_size: int, symmetric: bool) -> bool:
        """Whether its levels are levels of the packed format with this recipe."""
        size = group_size_for(self.shape[1], group_size)
        fits = size is not None and group_columns(self.group_of, size) is not None
        return self.bits == 4 and fits and (self.symmetric or not symmetric)


@dataclass(frozen=True)
class Codes:
    """codes uint8 [N, K], scales floating [N, S], zeros uint8 [N, S], group_of int64 [K] of 0..S-1; bits: 4 or 8."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    bits: int = 4

    def of_rows(self, order: Callable[[Tensor], Tensor]) -> "Codes":
        """The same of those rows that `order` makes of any tensor [N, ...]."""
        return replace(self, codes=order(self.codes), scales=order(self.scales), zeros=order(self.zeros))

    def to(self, device: torch.device) -> "Codes":
        """The same on a device."""
        return replace(self.of_rows(lambda tensor: tensor.to(device)), group_of=self.group_of.to(device))

    def values(self) -> Tensor:
        """W, fp32 [N, K]: exact for scales of fp16 and bf16, one rounding for those of fp32."""
        n, k = self.codes.shape
        w = torch.empty(n, k, dtype=torch.float32, device=self.codes.device)
        step = max(1, _BLOCK // k)
        for i in range(0, n, step):
            rows = slice(i, i + step)
            torch.sub(self.codes[rows], self.zeros[rows].float()[:, self.group_of], out=w[rows])
            w[rows] *= self.scales[rows].float()[:, self.group_of]
        return w

    def repacked(self, group_size: int, symmetric: bool, exact: bool = True) -> dict[str, Tensor] | None:
        """The tensors "codes", "scales" and, unless `symmetric`, "mins" [N, K/G] of groups of `group_size` inputs.

        None where the levels are not those of such groups, so that the matrix has to be rounded again. exact: every
        weight stays what it is, to the last bit; otherwise mins may be rounded to fp16, 1/128 of a step.
        """
        columns = group_columns(self.group_of, group_size)
        if self.bits != 4 or columns is None:
            return None
        scales, zeros = self.scales[:, columns].float(), self.zeros[:, columns].float()
        if symmetric and bool((zeros != 8).any()):
            return None
        for dtype in (torch.float16, torch.float32):
            stored, mins = scales.to(dtype), None if symmetric else (-scales * zeros).to(dtype)
            if _same_levels(scales, zeros, stored, mins, 0.0 if exact else _CLOSE):
                tensors = {"codes": self.codes, "scales": stored}
                return tensors if mins is None else {**tensors, "mins": mins}
        return None


def group_columns(group_of: Tensor, group_size: int) -> Tensor | None:
    """Which column of the scales each group of `group_size` neighbours has, or None where it is not one."""
    if group_of.numel() % group_size:
        return None
    blocks = group_of.view(-1, group_size)
    return blocks[:, 0] if bool((blocks == blocks[:, :1]).all()) else None


def _same_levels(scales: Tensor, zeros: Tensor, stored: Tensor, mins: Tensor | None, tolerance: float) -> bool:
    """Whether every code of every group decodes to the same number (up to so many steps), by the packed formula."""
    stored, room = stored.float(), tolerance * scales.abs()
    for code in range(16):
        got = stored * (code - 8) if mins is None else stored * code + mins.float()
        if not bool(((got - scales * (code - zeros)).abs() <= room).all()):  # also where one is not a number
            return False
    return True
