"""Rounds a matrix so that its products change least: error feedback from column to column (GPTQ, arXiv 2210.17323).

For W [N, K] and inputs X [T, K] the error of a product is |X (W - Q)^T|^2, a quadratic form with H = X^T X [K, K].
Columns are rounded one after the other; what the rounding of column j loses, the columns behind it make good:

    H^-1 = U^T U, U upper triangular
    q_j = round(w_j);  e_j = (w_j - q_j) / U_jj;  w_k -= U_jk e_j for all k > j

Groups of inputs come in the order in which they are stored, so that the format stays as it is; inside a group the
column with the most energy (H_jj) comes first, when there still are others that can make good for it. The scale (and
min) of a group is searched when its turn comes, over the columns as they are by then, weighted by energy (scales.py).
A group of zeros stays zero, whatever is fed back into it.

Updates are lazy: inside a block of 128 columns at once, behind it once for the whole block as one product. W is
transposed, so that a column of it lies in one piece.
"""

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor

from localchat.quantize.scales import quantize_int4, storage_dtype

_BLOCK = 128  # columns
ROWS = 512  # that one worker of a CPU takes at once; always so many, so that every machine gives the same bytes
# Part of the mean energy that is added to the diagonal of H: the first that lets it be factorised. Then H's diagonal.
_DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0, 10.0)


def hessian_of(inputs: Iterable[Tensor]) -> Tensor:
    """The mean of x x^T over the rows of `inputs`, fp32 [K, K].

    Raises:
        ValueError: there are none.
    """
    total, tokens = None, 0
    for x in inputs:
        if total is None:
            total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
        total.addmm_(x.t(), x)
        tokens += len(x)
    if total is None:
        raise ValueError("hessian_of: got no inputs, wanted at least one")
    return total.div_(tokens)


def quantize_gptq(
    w: Tensor, hessian: Tensor, group_size: int, symmetric: bool, pool: Executor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """W [N, K] (floating) and H fp32 [K, K] on one device -> as scales.quantize_int4. pool: workers for the rows."""
    energy = hessian.diagonal().clamp_min(0)
    order = _order(energy, group_size)
    task = _Task(order, energy[order], _factor(hessian, order), group_size, symmetric)
    rows = ROWS if w.device.type == "cpu" else len(w)
    blocks = [w[i : i + rows] for i in range(0, len(w), rows)]
    each, dtype = map if pool is None else pool.map, storage_dtype(w, group_size, symmetric)
    solved = list(each(lambda block: task.solve(block, dtype), blocks))
    if not all(bool(torch.isfinite(t).all()) for part in solved for t in part[1:]):
        solved = list(each(lambda block: task.solve(block, torch.float32), blocks))  # feedback went beyond fp16
    codes, scales, mins = (torch.cat(parts) for parts in zip(*solved, strict=True))
    return codes, scales, None if symmetric else mins


@dataclass(frozen=True)
class _Task:
    """What all rows of a matrix share: the order of its columns, their energy [K] and U [K, K] in that order."""

    order: Tensor
    energy: Tensor
    upper: Tensor
    group_size: int
    symmetric: bool

    def solve(self, w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Rows W [n, K] -> codes uint8 [n, K], scales and mins [n, K/G] in `dtype`; mins are 0 if symmetric."""
        (n, k), upper = w.shape, self.upper
        left = w.float().t()[self.order].contiguous()  # [K, n]: what is still to be rounded
        empty = (w.reshape(n, -1, self.group_size) == 0).all(dim=-1).t()  # [K/G, n]
        codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
        scales = torch.zeros(k // self.group_size, n, dtype=dtype, device=w.device)
        mins = torch.zeros_like(scales)
        for start in range(0, k, _BLOCK):
            end = min(start + _BLOCK, k)
            errors = torch.empty(end - start, n, device=w.device)
            for first in range(start, end, self.group_size):
                group = first // self.group_size
                left[first : first + self.group_size].masked_fill_(empty[group], 0.0)
                levels = self._levels(left[first : first + self.group_size], first, dtype)
                scales[group], mins[group] = levels.scales, levels.mins
                for j in range(first, first + self.group_size):
                    codes[j], restored = levels.round(left[j])
                    error = errors[j - start]
                    torch.sub(left[j], restored, out=error).div_(upper[j, j])
                    left[j + 1 : end].addr_(upper[j, j + 1 : end], error, alpha=-1)
            left[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
        stored = torch.empty_like(codes)
        stored[self.order] = codes
        return stored.t().contiguous(), scales.t().contiguous(), mins.t().contiguous()

    def _levels(self, w: Tensor, first: int, dtype: torch.dtype) -> "_Levels":
        """The best levels for the columns W [G, n], the first of which is `first`."""
        energy = self.energy[first : first + self.group_size]
        _, scales, mins = quantize_int4(w.t(), self.group_size, self.symmetric, energy, dtype=dtype)
        return _Levels(scales[:, 0], torch.zeros_like(scales[:, 0]) if mins is None else mins[:, 0], self.symmetric)


class _Levels:
    """The 16 levels of one group in every row: code 0 is `low`, a step is `step`. [N] each."""

    def __init__(self, scales: Tensor, mins: Tensor, symmetric: bool) -> None:
        self.scales, self.mins = scales, mins
        self._step = scales.float()
        self._low = -8 * self._step if symmetric else mins.float()
        self._divisor = torch.where(self._step == 0, 1.0, self._step)  # all levels of a group of zeros are one

    def round(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """One column [N] -> its codes 0..15 (float), and what they stand for."""
        codes = torch.sub(w, self._low).div_(self._divisor).round_().clamp_(0, 15)
        return codes, torch.addcmul(self._low, codes, self._step)


def _order(energy: Tensor, group_size: int) -> Tensor:
    """A permutation of the columns that leaves the groups where they are: in each the most energy first. int64 [K]."""
    inside = energy.view(-1, group_size).argsort(dim=1, descending=True, stable=True)
    return (inside + torch.arange(0, len(energy), group_size, device=energy.device)[:, None]).flatten()


def _factor(hessian: Tensor, order: Tensor) -> Tensor:
    """U, upper triangular with H^-1 = U^T U, of H with rows and columns in `order` and some damping on its diagonal.
    Always finite.

    With J the reversal of rows: if J H J = L L^T, then U = J L^-1 J. So H itself is never inverted. At most four
    matrices as large as H live at once, H among them: one of qwen3.5-27b's down_proj is 1.2 GB.
    """
    reverse = order.flip(0)
    turned = hessian.index_select(0, reverse).index_select(1, reverse)
    diagonal = turned.diagonal().clone()
    mean = float(diagonal.mean())
    for part in _DAMPING:
        turned.diagonal().copy_(diagonal + part * mean)
        lower, failed = torch.linalg.cholesky_ex(turned)
        if int(failed) == 0:
            del turned
            upper = torch.eye(len(lower), device=lower.device).t()  # columns in one piece, so it is solved in place
            torch.linalg.solve_triangular(lower, upper, upper=False, out=upper)
            if bool(torch.isfinite(upper).all()):
                del lower
                return upper.flip(0, 1)
            del lower, upper
            turned = hessian.index_select(0, reverse).index_select(1, reverse)
    energy = diagonal.flip(0)
    return torch.diag(torch.where(energy > 0, energy, 1.0).rsqrt())  # each column on its own
