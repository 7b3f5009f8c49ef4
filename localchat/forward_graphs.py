"""Forwards of up to a few hundred tokens as CUDA graphs: a chat's turns, and what is proposed and verified together.

The card needs 9 ms for 16 tokens of a 27B and 36 for 200; launching their 400 to 850 kernels one by one takes the host
35 to 55 (kernels/NOTES.md). So they are filled up to one of a few sizes (kernels/padding.py), each of which becomes a
graph. The first forward of a size is launched one by one and compiles what it needs. Before the second it is recorded,
which costs the host as much again, and from then on it is replayed, whatever the context and the number of tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from localchat.kernels.padding import padded

if TYPE_CHECKING:
    from localchat.cache import KVCache
    from localchat.model import Model

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)  # rows; of more the card's own work is as long as the host's
# Rows times the length of the context, above which attention is what takes long: then launches hide behind it, an INT8
# cache is better dequantised first (kernels/attention_slabs.py), and Ctrl-C looks in between two layers.
_MOST_WORK = 2**25


class _Captured(NamedTuple):
    """A graph, and the tensors that it reads and leaves: ids and positions int64 [T], hidden fp32 [T, H]."""

    graph: "torch.cuda.CUDAGraph"
    ids: Tensor
    positions: Tensor
    hidden: Tensor


class ForwardGraphs:
    """Those of one model over one cache.

    most: tokens; no more than take the packed products, whose memory is theirs alone (cuda_ops.py). With 0 nothing
    becomes a graph.
    """

    def __init__(self, model: "Model", cache: "KVCache", most: int) -> None:
        self._model, self._cache = model, cache
        self._sizes = [size for size in SIZES if size <= most]
        self._ran: set[int] = set()  # sizes of which a whole forward has run: all of it is compiled
        self._captured: dict[int, _Captured] = {}

    def size(self, tokens: int, start: int) -> int | None:
        """To how many rows a forward of `tokens` behind `start` others is filled up; None: it is none for a graph.

        In such a forward nothing may depend on the context's length.
        """
        if tokens < 2:
            return None
        size = next((size for size in self._sizes if size >= tokens), None)
        return None if size is None or size * (start + tokens) > _MOST_WORK else size

    def ready(self, size: int) -> bool:
        """Whether `forward` serves this size; it is captured here if it is time. The cache does not change.

        Where memory does not suffice for a graph its kernels are launched one by one as before.
        """
        if size in self._captured:
            return True
        if size not in self._ran:
            return False
        try:
            self._captured[size] = self._capture(size)
        except torch.OutOfMemoryError:
            self._ran.discard(size)  # tried again after the next whole forward
            return False
        return True

    def ran(self, size: int) -> None:
        """Say that a forward of this size was launched one by one, to its end."""
        self._ran.add(size)

    def forward(self, ids: Sequence[int], start: int, size: int) -> Tensor:
        """The hidden states [size, H], first those of `ids` at the positions from `start` on; until the next call.

        The cache is changed. `ready` has said yes to this size.
        """
        found = self._captured[size]
        for kept, new in zip((found.ids, found.positions), padded(ids, start, size, found.ids.device), strict=True):
            kept.copy_(new)
        found.graph.replay()
        return found.hidden

    def _capture(self, size: int) -> _Captured:
        """Record a forward; nothing runs, so cache and states stay as they are.

        All have one memory, that of the first: they run one after the other.
        """
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        ids, positions = (torch.zeros(size, dtype=torch.int64, device=self._model.device) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = self._model(ids, positions, self._cache)
        return _Captured(graph, ids, positions, hidden)
