"""cos and sin of one step's rotary angles: what kernels/rope_kv_write.py multiplies heads with.

angle[t, j] = positions[t] * inv_freq[j] in fp32; cos = cos(angle) * f for both halves of the rotated dimensions, sin =
sin(angle) * f, negated in the first half. positions int64 [T], inv_freq fp32 [R/2], f YaRN's attention factor; cos, sin
fp32 [T, R], where R is the number of rotated dimensions of a head. Moves 8 T R bytes out and nothing beside it.
A step of the decode graph computes its one row once for all layers.

Angles reach 262,143 radians, where the hardware's sine is wrong and libdevice's goes through local memory. So the
angle is reduced to [-pi/4, pi/4] in fp64 (error 1e-10 there) and two short polynomials finish in fp32 (error 6e-8).
"""

import math

import torch
from torch import Tensor

from localchat.kernels.checks import check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous

_TWO_OVER_PI = tl.constexpr(2 / math.pi)
_HALF_PI = tl.constexpr(math.pi / 2)


def rotary_table_reference(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """positions [T], inv_freq [R/2] -> cos, sin fp32 [T, R]."""
    angles = positions.float()[:, None] * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


@triton.jit
def _sin_cos(angle):
    """fp32 sine and cosine of an fp32 angle below 2^30. Polynomials: Cephes' sinf and cosf."""
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * _TWO_OVER_PI + 0.5)
    r = (wide - quarter * _HALF_PI).to(tl.float32)
    r2 = r * r
    sin = r + r * r2 * (-1.6666654611e-1 + r2 * (8.3321608736e-3 + r2 * -1.9515295891e-4))
    cos = 1.0 - 0.5 * r2 + r2 * r2 * (4.166664568298827e-2 + r2 * (-1.388731625493765e-3 + r2 * 2.443315711809948e-5))
    turn = quarter.to(tl.int32) & 3
    odd = (turn & 1) == 1
    sin_out = tl.where(odd, cos, sin)
    cos_out = tl.where(odd, sin, cos)
    sin_out = tl.where(turn >= 2, -sin_out, sin_out)
    cos_out = tl.where((turn == 1) | (turn == 2), -cos_out, cos_out)
    return sin_out, cos_out


@triton.jit
def _rotary_kernel(
    positions_ptr, inv_freq_ptr, cos_ptr, sin_ptr, factor, HALF_DIM, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    token = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    mask = j < HALF_DIM
    wait_for_previous(PDL)
    position = tl.load(positions_ptr + token).to(tl.float32)
    sin, cos = _sin_cos(position * tl.load(inv_freq_ptr + j, mask=mask, other=0.0))
    sin = sin * factor
    cos = cos * factor
    row = token.to(tl.int64) * 2 * HALF_DIM + j
    tl.store(cos_ptr + row, cos, mask=mask)
    tl.store(cos_ptr + row + HALF_DIM, cos, mask=mask)
    tl.store(sin_ptr + row, -sin, mask=mask)
    tl.store(sin_ptr + row + HALF_DIM, sin, mask=mask)


def rotary_table(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """positions int64 [T], inv_freq fp32 [R/2] -> cos, sin fp32 [T, R].

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    check_tensor("rotary_table: positions", positions, (torch.int64,), (None,))
    check_tensor("rotary_table: inv_freq", inv_freq, (torch.float32,), (None,))
    tokens, half_dim = positions.shape[0], inv_freq.shape[0]
    cos = torch.empty(tokens, 2 * half_dim, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    block = triton.next_power_of_2(half_dim)
    _rotary_kernel[(tokens,)](
        *(positions, inv_freq, cos, sin, attention_factor, half_dim),
        BLOCK=block,
        num_warps=1,
        **pdl_options(positions),
    )
    return cos, sin
