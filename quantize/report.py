"""What packing has cost: a packed folder against its source over a text, one layer of both in memory at a time.

    KL divergence    mean over positions of sum_v p_v (log p_v - log q_v), p of the source, q of the packed model, nats
    top-1 agreement  part of the positions at which both find the same token likeliest
    perplexity       exp of the mean negative log likelihood of each next token inside a window
    error of a matrix  |W - Q| / |W|, Frobenius

Positions times vocabulary is never held: the vocabulary is taken in chunks, and what a softmax needs of the chunks so
far is a maximum and sums, which are scaled when the maximum grows (online softmax, arXiv 1805.02867).
"""

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from localchat.config import load_config
from localchat.kernels.rms_norm import rms_norm_reference
from localchat.model import Block, Linear
from localchat.quantize.layerwise import PackedWeights, SourceWeights, Stream, Weights, fast_products
from localchat.quantize.source import Source
from localchat.quantize.threads import worker_pool
from localchat.shards import open_shards

_VOCABULARY = 1 << 14  # rows of the head at once, a multiple of a tile's
_POSITIONS = 512


@dataclass(frozen=True)
class Quality:
    """The figures of the module, over `tokens` positions. kl_99: the divergence that 1 % of the positions are above."""

    tokens: int
    kl: float
    kl_99: float
    agreement: float
    source_perplexity: float
    perplexity: float
    errors: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Reference:
    """What the unquantised model says of a text: the residual stream behind its last layer, one [T, H] a window."""

    windows: Sequence[Sequence[int]]
    hidden: Sequence[Tensor]


def reference(
    weights: Weights, windows: Sequence[Sequence[int]], device: str, pool: Executor | None = None
) -> Reference:
    """Run a model over a text, to `compare` several others with it. pool: workers that share the windows, on a CPU.

    Raises:
        BadCheckpoint: a tensor cannot be read.
    """
    stream = weights.stream(windows, device)
    for i in range(weights.config.num_hidden_layers):
        _run(stream, weights.block(i, device), pool)
    return Reference(windows, stream.hidden)


def compare(
    source: Weights,
    packed: Weights,
    text: Sequence[Sequence[int]] | Reference,
    device: str,
    pool: Executor | None = None,
) -> Quality:
    """A packed model against its source. text: windows of ids, or what `reference` made of them with the source.

    Raises:
        BadCheckpoint: a tensor cannot be read.
    """
    known = text if isinstance(text, Reference) else None
    windows = text.windows if isinstance(text, Reference) else text
    theirs = None if known else source.stream(windows, device)
    ours = packed.stream(windows, device)
    errors: dict[str, float] = {}
    for i in range(source.config.num_hidden_layers):
        unquantised, quantised = source.block(i, device), packed.block(i, device)
        errors |= _errors(f"layers.{i}", unquantised, quantised)
        if theirs is not None:
            _run(theirs, unquantised, pool)
        del unquantised
        _run(ours, quantised, pool)
    hidden = known.hidden if known else theirs.hidden if theirs else ()
    return _score(source, packed, windows, hidden, ours.hidden, errors)


def compare_folder(source: Source, folder: Path, windows: Sequence[Sequence[int]] | Reference, device: str) -> Quality:
    """`compare` for the packed folder that was made from `source`."""
    with open_shards(folder) as shards, worker_pool() as pool:
        return compare(SourceWeights(source), PackedWeights(load_config(folder), shards), windows, device, pool)


def _run(stream: Stream, block: Block, pool: Executor | None) -> None:
    with fast_products():
        stream.mix(block, pool)
        stream.feed_forward(block, pool)


def _errors(layer: str, source: Block, packed: Block) -> dict[str, float]:
    """|W - Q| / |W| of every matrix of a block."""
    pairs = zip(source.named_modules(), packed.modules(), strict=True)
    both = [(name, a, b) for (name, a), b in pairs if isinstance(a, Linear) and isinstance(b, Linear)]
    return {f"{layer}.{name}": _relative(a.weight, b.weight) for name, a, b in both}


def _relative(weight: Tensor, stored: Tensor) -> float:
    return float((weight - stored).norm() / weight.norm().clamp_min(torch.finfo(torch.float32).tiny))


class _Softmax:
    """log sum exp of logits that come in chunks, and the likeliest of them. [T] each."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.peak = torch.full((positions,), -torch.inf, device=device)
        self.total = torch.zeros(positions, device=device)
        self.best = torch.zeros(positions, dtype=torch.int64, device=device)

    def add(self, rows: slice, logits: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """logits [t, c] of the ids from `first` on -> exp(logits - peak), and what older sums are multiplied with."""
        peak, index = logits.max(dim=-1)
        old = self.peak[rows]
        self.best[rows] = torch.where(peak > old, index + first, self.best[rows])
        new = torch.maximum(peak, old)
        shrink = (old - new).exp()
        powers = (logits - new[:, None]).exp()
        self.total[rows] = self.total[rows] * shrink + powers.sum(-1)
        self.peak[rows] = new
        return powers, shrink

    def log_total(self) -> Tensor:
        """log of the sum of the exponentials of all logits."""
        return self.peak + self.total.log()


def _score(
    source: Weights,
    packed: Weights,
    windows: Sequence[Sequence[int]],
    theirs: Sequence[Tensor],
    ours: Sequence[Tensor],
    errors: dict[str, float],
) -> Quality:
    config = source.config
    name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    device = ours[0].device
    states = [
        rms_norm_reference(
            torch.cat([x.float() for x in hidden]), weights.tensor("norm.weight", device).float(), config.rms_norm_eps
        )
        for hidden, weights in ((theirs, source), (ours, packed))
    ]
    positions = len(states[0])
    # -1: nothing is to be predicted at the end of a window.
    targets = torch.tensor([i for window in windows for i in (*window[1:], -1)], device=device)
    sums = [_Softmax(positions, device) for _ in states]
    wanted = [torch.zeros(positions, device=device) for _ in states]  # the targets' logits
    cross = torch.zeros(positions, device=device)  # sum of exp(p's logit - peak) * (p's logit - q's logit)
    squares = torch.zeros(2, dtype=torch.float64)
    for first in range(0, config.vocab_size, _VOCABULARY):
        heads = [model.rows(f"{name}.weight", slice(first, first + _VOCABULARY), device) for model in (source, packed)]
        squares += torch.tensor([float((heads[0] - heads[1]).square().sum()), float(heads[0].square().sum())])
        for start in range(0, positions, _POSITIONS):
            rows = slice(start, start + _POSITIONS)
            logits = [state[rows] @ head.t() for state, head in zip(states, heads, strict=True)]
            here = (targets[rows] >= first) & (targets[rows] < first + len(heads[0]))
            column = (targets[rows] - first).clamp(0, len(heads[0]) - 1)[:, None]
            for found, all_logits in zip(wanted, logits, strict=True):
                found[rows] = torch.where(here, all_logits.gather(1, column)[:, 0], found[rows])
            powers, shrink = sums[0].add(rows, logits[0], first)
            sums[1].add(rows, logits[1], first)
            cross[rows] = cross[rows] * shrink + (powers * (logits[0] - logits[1])).sum(-1)
    errors[name] = math.sqrt(float(squares[0] / squares[1].clamp_min(1e-300)))
    totals = [softmax.log_total() for softmax in sums]
    divergence = cross / sums[0].total - totals[0] + totals[1]
    predicted = targets >= 0
    losses = [float((total - logit)[predicted].mean()) for total, logit in zip(totals, wanted, strict=True)]
    return Quality(
        tokens=positions,
        kl=float(divergence.mean()),
        kl_99=float(divergence.sort().values[int(0.99 * (positions - 1))]),
        agreement=float((sums[0].best == sums[1].best).float().mean()),
        source_perplexity=_perplexity(losses[0]),
        perplexity=_perplexity(losses[1]),
        errors=errors,
    )


def _perplexity(loss: float) -> float:
    """exp(loss); infinite where a float has no room for it, as of a model whose logits are of no use."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
