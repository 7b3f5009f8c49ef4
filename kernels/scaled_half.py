"""Scaled half: fp16 rows whose products cannot overflow. y = x / s with s a power of two >= 1 per row, |y| <= 512.

x fp32 or bf16 [T, K]; y fp16 [T, K]; row_scale fp32 [T], so that x = y * row_scale up to fp16's rounding (dividing
by a power of two is exact). s is the smallest power of two that brings the row's largest magnitude down to 512, and 1
where it is already there. rms_norm.py and swiglu.py end with it.

Trained models reach 1e4 and more in front of down_proj, and fp16 ends at 65,504.

Where no program sees the whole row (the end of a product, a head of attention) the divisor is the same for all rows:
UNIT. That holds 5e5, ends there instead of overflowing, and its steps are at most 5e-7: a row of 1e-3 and more keeps
more of itself than in bf16. What a norm does to such a row is one factor more, and the product applies it: each program
that made a part of the row has left the sum of its squares (`Squares`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from localchat.kernels.gpu import tl, triton

LIMIT = 512.0
UNIT = 8.0
_LARGEST = tl.constexpr(65504.0)
_UNIT = tl.constexpr(UNIT)


class Squares(NamedTuple):
    """In place of row scales: sums of squares of parts of each row, fp32 [T, parts], and the epsilon of its norm.

    The factor of a row of K is UNIT / sqrt(sum / K + epsilon).
    """

    parts: Tensor
    eps: float

    def row_scale(self, k: int) -> Tensor:
        """The factors themselves, fp32 [T]."""
        return UNIT * torch.rsqrt(self.parts.sum(-1) / k + self.eps)


def scaled_half_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> y fp16 [T, K], row_scale fp32 [T]."""
    x32 = x.float()
    peak = x32.abs().amax(dim=-1).double()
    row_scale = torch.exp2(torch.ceil(torch.log2(peak / LIMIT)).clamp(min=0)).float()
    return (x32 / row_scale.unsqueeze(-1)).half(), row_scale


@triton.jit
def power_of_two_scale(peak):
    """The smallest power of two s >= 1 with peak / s <= 512, and 1 / s; both exact, from the bits of the exponent."""
    bits = (peak * (1.0 / 512.0)).to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits + 0x7FFFFF) >> 23, 127)  # biased, rounded up
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def in_units(y):
    """y / UNIT in fp16, at most the largest number."""
    return tl.clamp(y * (1.0 / _UNIT), -_LARGEST, _LARGEST).to(tl.float16)


@triton.jit
def row_factors(ptr, token, tokens, parts, K, eps, SQUARES: tl.constexpr):
    """Row scales of the tokens [N], or what `Squares` make of them; SQUARES: 0, or a power of two >= parts."""
    return factors_of(load_factors(ptr, token, tokens, parts, SQUARES), K, eps, SQUARES)


@triton.jit
def load_factors(ptr, token, tokens, parts, SQUARES: tl.constexpr):
    """The first half of `row_factors`, which only loads: [N], or [N, SQUARES]."""
    if SQUARES == 0:
        loaded = tl.load(ptr + token, mask=token < tokens, other=0.0)
    else:
        part = tl.arange(0, SQUARES)
        mask = (token < tokens)[:, None] & (part < parts)[None, :]
        loaded = tl.load(ptr + token[:, None] * parts + part[None, :], mask=mask, other=0.0)
    return loaded


@triton.jit
def factors_of(loaded, K, eps, SQUARES: tl.constexpr):
    """The second half of `row_factors`."""
    if SQUARES == 0:
        factors = loaded
    else:
        factors = _UNIT / tl.sqrt_rn(tl.sum(loaded, 1) / K + eps)
    return factors


def factor_options(row_scale: "Tensor | Squares") -> tuple[Tensor, int, float, int]:
    """What a kernel passes to `row_factors`: ptr, parts, eps, SQUARES."""
    if isinstance(row_scale, Squares):
        parts = row_scale.parts.shape[1]
        return row_scale.parts, parts, row_scale.eps, triton.next_power_of_2(parts)
    return row_scale, 1, 0.0, 0


def warps_for(block: int) -> int:
    """Warps of a program over one row: 8 elements a thread, so that the loads are in flight together."""
    return max(1, min(16, block // 256))
