"""Forwards of a few tokens as CUDA graphs: one for each number of tokens, captured when it comes for the second time.

What the card does for 2 to 32 tokens of a 27B takes it 10 to 20 ms; launching its 400 kernels one by one takes the
host 36 (kernels/NOTES.md). The first forward of so many tokens is launched one by one and compiles what it needs; the
second is recorded, which costs the host as much again, and replayed; all after it are replays. Tokens and their
positions are values in tensors, so a graph serves every context; how many tokens there are is part of it.

Messages of the same length are rare; prompts of a benchmark, and tokens that are proposed and verified together, not.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from localchat.cache import KVCache
    from localchat.model import Model

MOST = 32  # tokens; of more the card's own work is longer than the host's


class _Captured(NamedTuple):
    """A graph, and the tensors that it reads and leaves: ids and positions int64 [T], hidden fp32 [T, H]."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    positions: Tensor
    hidden: Tensor


class ForwardGraphs:
    """Those of one model over one cache."""

    def __init__(self, model: "Model", cache: "KVCache") -> None:
        self._model, self._cache = model, cache
        self._captured: dict[int, _Captured | None] = {}  # by the number of tokens; None: was launched one by one
        self._pool = torch.cuda.graph_pool_handle()  # one memory for all: they run one after the other

    def forward(self, ids: Sequence[int], start: int) -> Tensor | None:
        """The hidden states [T, H] of `ids` at the positions from `start` on; they last until the next call.

        The cache is changed. None: nothing was done, the caller launches them one by one.
        """
        tokens = len(ids)
        if not 2 <= tokens <= MOST:
            return None
        if tokens not in self._captured:
            self._captured[tokens] = None
            return None
        found = self._captured[tokens]
        if found is None:
            found = self._captured[tokens] = self._capture(tokens)
        found.ids.copy_(torch.tensor(ids))
        torch.arange(start, start + tokens, out=found.positions)
        found.graph.replay()
        return found.hidden

    def _capture(self, tokens: int) -> _Captured:
        """Record a forward; nothing runs, so cache and states stay as they are."""
        ids, positions = (torch.zeros(tokens, dtype=torch.int64, device=self._model.device) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._model(ids, positions, self._cache)
        return _Captured(graph, ids, positions, hidden)
