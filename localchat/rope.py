"""Rotary position embedding: the frequencies of a model, and cos/sin of the positions of one step.

Angles are fp32 products of an integer position and an fp32 frequency, computed for the positions at hand, so the
cost does not depend on the context's length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from localchat.config import RopeParameters


@dataclass(frozen=True)
class Rotary:
    """What the layers of one step share: positions int64 [T], cos and sin fp32 [T, R] (kernels/rope_kv_write.py).

    length: one more than the last position, where the host knows it.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor
    length: int | None = None


def inverse_frequencies(rope: RopeParameters, rotary_dim: int) -> Tensor:
    """fp32 [R/2]: theta^(-2j/R), stretched as `rope.rope_type` says; R = rotary_dim, the rotated part of a head.

    "linear" divides every frequency. "yarn" (arXiv 2309.00071) keeps the fast ones, divides the slow ones, and ramps
    between. "llama3" (Llama 3.1's reference code) does the same by wavelength. On the CPU whatever the default device.
    """
    inv = rope.rope_theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)
    if rope.rope_type == "linear":
        inv = inv / rope.factor
    elif rope.rope_type == "yarn":
        keep = 1 - _yarn_ramp(rope, rotary_dim)
        inv = inv * keep + inv / rope.factor * (1 - keep)
    elif rope.rope_type == "llama3":
        turns = rope.original_max_position_embeddings * inv / (2 * math.pi)  # over the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        inv = inv * keep + inv / rope.factor * (1 - keep)
    return inv.float()


def _yarn_ramp(rope: RopeParameters, rotary_dim: int) -> Tensor:
    """0 for the dimensions that keep their frequency, 1 for those that are divided by the factor."""

    def dimension_of(turns: float) -> float:
        """The (fractional) index of the frequency that makes so many turns over the original context."""
        length = rope.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)


def rotary(positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Rotary:
    """cos and sin of `positions` int64 [T], times YaRN's attention factor, for both halves of the rotated dimensions.

    sin is negated in the first half: out_j = x_j cos_j - x_{j+R/2} sin_j, out_{j+R/2} = x_{j+R/2} cos_j + x_j sin_j.
    """
    angles = positions.float()[:, None] * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return Rotary(positions, torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
