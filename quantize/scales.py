"""Chooses the codes and scales of a matrix: the numerical heart of a conversion. Formats: kernels/int4_packing.py.

Rounding a group of weights to 16 levels leaves one choice, where the levels lie. From the smallest to the largest
weight is the obvious one, but a few steps narrower is often better: one weight is clipped and all others get finer
steps. So several ranges are tried for every group; for each, the best scale (and min) for its codes follows in closed
form by least squares; the best one is kept if, with the scale as it is stored, it beats plain rounding.

The error that counts is that of the product, sum_k E[x_k^2] (w_k - stored_k)^2. `energy` is E[x_k^2] up to a factor:
behind an RMSNorm it is the squared gain, otherwise it is unknown and taken as uniform. Minimising the plain error
instead can make a model worse. Everything runs in fp32, in blocks of rows so that memory stays small.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

# Weights per block: on a CPU its buffers should stay in the cache.
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 25}
# Symmetric codes are -8..7. Steps between 0 and the largest weight: where it takes the side of -8, and of 7.
_STEPS_NEGATIVE = (7.3, 7.7, 8.0, 8.4, 8.8, 9.3, 9.9, 10.8)
_STEPS_POSITIVE = (6.7, 7.0, 7.4, 7.8, 8.2, 8.7, 9.3, 10.0)
# Scale + min: how much of the range is cut off below and above.
_CUTS = (
    *((0.0, 0.0), (-0.02, -0.02), (0.03, 0.03), (0.06, 0.06), (0.10, 0.10), (0.15, 0.15)),
    *((0.0, 0.05), (0.05, 0.0), (0.0, 0.10), (0.10, 0.0), (0.03, 0.12), (0.12, 0.03)),
)
_REFINEMENTS = 2
_FP16_MAX = 65504.0
_FP16_MIN_NORMAL = 2.0**-14


def quantize_int4(
    w: Tensor,
    group_size: int,
    symmetric: bool,
    energy: Tensor | None = None,
    search: bool = True,
    grid: tuple[Tensor, Tensor] | None = None,
    pool: Executor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """W [N, K] (floating) -> codes uint8 [N, K], scales [N, K/G], and mins [N, K/G] unless `symmetric`.

    energy: mean square of each input, [K], up to a common factor; None is uniform. search = False is plain rounding.
    grid: scales and mins [N, K/G] that a 4-bit source was made with, tried as well: rounding to the levels it lies on
    loses nothing. pool: workers that share the rows.
    scales and mins are fp16; fp32 where one of them would leave fp16's range or the largest scale is not normal there;
    or `dtype`, for a part of a matrix.
    A group of zeros decodes to exactly zero.
    """
    n, k = w.shape
    groups = k // group_size
    dtype = dtype or storage_dtype(w, group_size, symmetric)
    codes = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    scales = torch.empty(n, groups, dtype=dtype, device=w.device)
    mins = None if symmetric else torch.empty_like(scales)
    weight = _normalised_energy(energy, groups, group_size, w.device)
    known = [t.to(w.device) for t in grid] if grid is not None and grid[0].shape == scales.shape else None

    def work(rows: slice) -> None:
        block = w[rows].float().reshape(-1, groups, group_size)
        candidate = [t[rows] for t in known] if known else None
        q, scale, *low = (_symmetric if symmetric else _scale_and_min)(block, weight, dtype, search, candidate)
        codes[rows] = q.reshape(-1, k)
        scales[rows] = scale
        if mins is not None:
            mins[rows] = low[0]

    _for_blocks(w, work, pool)
    return codes, scales, mins


def is_exact(w: Tensor, codes: Tensor, scales: Tensor, mins: Tensor | None) -> bool:
    """Whether what `quantize_int4` returned of W [N, K] stands for W itself."""
    q, scale = codes.view(*scales.shape, -1).float(), scales.float().unsqueeze(-1)
    stored = scale * (q - 8) if mins is None else scale * q + mins.float().unsqueeze(-1)
    return torch.equal(stored.view_as(w), w.float())


def quantize_int8_rows(w: Tensor, pool: Executor | None = None) -> tuple[Tensor, Tensor]:
    """W [N, K] (floating) -> codes int8 [N, K] in -127..127 and scales fp32 [N]; a row of zeros has the scale 0."""
    n, k = w.shape
    codes = torch.empty(n, k, dtype=torch.int8, device=w.device)
    scales = torch.empty(n, dtype=torch.float32, device=w.device)

    def work(rows: slice) -> None:
        block = w[rows].float()
        scale = block.abs().amax(dim=1) / 127
        codes[rows] = _ratio(block, scale.unsqueeze(-1)).round_().clamp_(-127, 127)
        scales[rows] = scale

    _for_blocks(w, work, pool)
    return codes, scales


def _for_blocks(w: Tensor, work: Callable[[slice], None], pool: Executor | None) -> None:
    """Call `work` with slices of W's rows that cover them all."""
    n, k = w.shape
    rows = max(1, _BLOCK.get(w.device.type, _BLOCK["cpu"]) // k)
    blocks = [slice(i, min(i + rows, n)) for i in range(0, n, rows)]
    for _ in map(work, blocks) if pool is None else pool.map(work, blocks):
        pass


def storage_dtype(w: Tensor, group_size: int, symmetric: bool) -> torch.dtype:
    """fp16 where all plain scales and mins fit with room for a search and the largest scale is normal, else fp32.

    What they decode to has to fit as well: kernels for groups of 32 and 64, and for many tokens, hold weights in fp16.
    """
    grouped = w.reshape(len(w), -1, group_size)
    low, high = grouped.amin(dim=-1).float(), grouped.amax(dim=-1).float()
    if symmetric:
        scale = float(torch.maximum(high, -low).max()) / 7
        largest = 8 * scale
    else:
        scale = float((high - low).max()) / 15
        largest = 15 * scale + float(low.abs().max())
    narrow = largest <= _FP16_MAX / 2 and (scale >= _FP16_MIN_NORMAL or largest == 0)
    return torch.float16 if narrow else torch.float32


def _normalised_energy(energy: Tensor | None, groups: int, group_size: int, device: torch.device) -> Tensor:
    """[G, g] with mean 1, so that squares of the search stay far from fp32's limits."""
    if energy is None:
        return torch.ones(groups, group_size, device=device)
    energy = energy.to(device=device, dtype=torch.float32)
    return (energy / energy.mean().clamp_min(torch.finfo(torch.float32).tiny)).view(groups, group_size)


def _symmetric(
    w: Tensor, energy: Tensor, dtype: torch.dtype, search: bool, grid: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Groups [R, G, g] -> codes [R, G, g] (float) and stored scales [R, G]."""
    low, high = w.amin(dim=-1), w.amax(dim=-1)
    extent = torch.maximum(high, -low)
    best = _stored_symmetric(w, extent / 7, energy, extent, dtype)
    if grid:
        best = _better(best, _stored_symmetric(w, grid[0], energy, extent, dtype))
    if search and best[-1].any():  # nothing to gain where a source was such a grid
        # The extreme weight takes the code -8, which exists, while +8 does not: a negative scale where it is positive.
        signed = torch.where(high >= -low, -extent, extent)
        searched = _search_symmetric(_ratio(w, signed.unsqueeze(-1)), energy) * signed
        best = _better(best, _stored_symmetric(w, searched, energy, extent, dtype))
    return best[0] + 8, best[1]


def _search_symmetric(u: Tensor, energy: Tensor) -> Tensor:
    """u [R, G, g], scaled so that its extreme is -1 -> the least-squares scale [R, G] of the best codes tried."""
    eu = u * energy
    best_gain = torch.zeros(u.shape[:-1], device=u.device)
    best_scale = torch.zeros_like(best_gain)
    for steps in (*_STEPS_NEGATIVE, *(-s for s in _STEPS_POSITIVE)):
        q = (u * steps).round_().clamp_(-8, 7)
        uq = (eu * q).sum(dim=-1)
        qq = (q.square_().mul_(energy)).sum(dim=-1)
        # For given codes: scale = uq / qq, and the error is smaller by uq^2 / qq than that of all zeros.
        scale = uq / qq
        gain = uq * scale
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _scale_and_min(
    w: Tensor, energy: Tensor, dtype: torch.dtype, search: bool, grid: Sequence[Tensor] | None
) -> tuple[Tensor, ...]:
    """Groups [R, G, g] -> codes [R, G, g] (float), stored scales [R, G], stored mins [R, G]."""
    low, high = w.amin(dim=-1), w.amax(dim=-1)
    extent = high - low
    best = _stored_affine(w, extent / 15, low, energy, extent, dtype)
    if grid:
        best = _better(best, _stored_affine(w, grid[0], grid[1], energy, extent, dtype))
    if search and best[-1].any():
        scale, offset = _search_affine(_ratio(w - low.unsqueeze(-1), extent.unsqueeze(-1)), energy)
        best = _better(best, _stored_affine(w, scale * extent, low + offset * extent, energy, extent, dtype))
    return best[:3]


def _search_affine(u: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """u [R, G, g] in 0..1 -> least-squares scale and min [R, G] of the best codes tried."""
    eu, e1 = u * energy, energy.sum(dim=-1)
    u1 = eu.sum(dim=-1)
    best_gain = torch.full_like(u1, -torch.inf)
    best_scale, best_min = torch.zeros_like(u1), torch.zeros_like(u1)
    for cut in (*_CUTS, *([None] * _REFINEMENTS)):
        if cut is not None:
            q = (u - cut[0]).mul_(15 / (1 - cut[0] - cut[1]))
        else:  # round anew with the best scale and min so far
            q = (u - best_min.unsqueeze(-1)).div_(best_scale.unsqueeze(-1))
        q.round_().clamp_(0, 15)
        uq = (eu * q).sum(dim=-1)
        eq = q * energy
        q1, qq = eq.sum(dim=-1), q.mul_(eq).sum(dim=-1)
        # Weighted linear regression of u on q; the gain is the squared error it explains.
        scale = (e1 * uq - u1 * q1) / (e1 * qq - q1 * q1)
        low = (u1 - scale * q1) / e1
        gain = scale * uq + low * u1
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
        best_min = torch.where(better, low, best_min)
    return best_scale, best_min


def _stored_symmetric(
    w: Tensor, scale: Tensor, energy: Tensor, extent: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Codes against the scale as stored: (codes -8..7, stored scale, weighted error relative to extent^2)."""
    stored = scale.to(dtype)
    s = stored.float().unsqueeze(-1)
    q = _ratio(w, s).round_().clamp_(-8, 7)
    error = _ratio(w - q * s, extent.unsqueeze(-1)).square_().mul_(energy).sum(dim=-1)
    return q, stored, error


def _stored_affine(
    w: Tensor, scale: Tensor, low: Tensor, energy: Tensor, extent: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Codes against scale and min as stored: (codes 0..15, scale, min, weighted error relative to extent^2)."""
    stored, stored_low = scale.to(dtype), low.to(dtype)
    s, m = stored.float().unsqueeze(-1), stored_low.float().unsqueeze(-1)
    q = _ratio(w - m, s).round_().clamp_(0, 15)
    error = _ratio(w - (q * s + m), extent.unsqueeze(-1)).square_().mul_(energy).sum(dim=-1)
    return q, stored, stored_low, error


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0 (a group of zeros, or a scale too small to be stored)."""
    return torch.where(b == 0, 0.0, a / b)


def _better(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Per group the candidate with the smaller error (the last entry); `a` in a tie, or where `b` is not a number."""
    wins = b[-1] < a[-1]
    pairs = zip(a, b, strict=True)
    return tuple(torch.where(wins.unsqueeze(-1) if y.dim() > wins.dim() else wins, y, x) for x, y in pairs)
