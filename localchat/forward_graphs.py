"""Forwards of a few tokens as CUDA graphs: one for each number of tokens, captured once a forward of as many has run.

What the card does for 2 to 32 tokens of a 27B takes it some 14 ms (29 behind 128K); launching its 400 kernels one by
one takes the host 36 (kernels/NOTES.md). The first forward of so many tokens is launched one by one and compiles what
it needs. Before the second it is recorded, which costs the host as much again, and from then on it is replayed. Tokens
and their positions are values in tensors, so a graph serves every context; how many tokens there are is part of it.

Messages of the same length are rare; prompts of a benchmark, and tokens that are proposed and verified together, not.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

    from localchat.cache import KVCache
    from localchat.model import Model

MOST = 32  # tokens; of more the card's own work is longer than the host's
KEPT = 4  # graphs, those that were captured last


class _Captured(NamedTuple):
    """A graph, and the tensors that it reads and leaves: ids and positions int64 [T], hidden fp32 [T, H]."""

    graph: "torch.cuda.CUDAGraph"
    ids: Tensor
    positions: Tensor
    hidden: Tensor


class ForwardGraphs:
    """Those of one model over one cache, for 2 to `most` tokens.

    most: no more than take the packed products, whose memory is theirs alone (cuda_ops.py).
    """

    def __init__(self, model: "Model", cache: "KVCache", most: int = MOST) -> None:
        self._model, self._cache, self._most = model, cache, min(most, MOST)
        self._ran: set[int] = set()  # numbers of tokens of which a whole forward has run: all of it is compiled
        self._captured: dict[int, _Captured] = {}
        self._pool: _POOL_HANDLE | None = None  # one memory for all: they run one after the other

    def takes(self, tokens: int) -> bool:
        """Whether a forward of so many may become a graph, so that nothing in it may depend on the context's length."""
        return 2 <= tokens <= self._most

    def ready(self, tokens: int) -> bool:
        """Whether `forward` serves so many; they are captured here if it is time. The cache does not change.

        Where memory does not suffice for a graph they are launched one by one as before.
        """
        if tokens in self._captured:
            return True
        if tokens not in self._ran:
            return False
        try:
            captured = self._capture(tokens)
        except torch.OutOfMemoryError:
            self._ran.discard(tokens)  # tried again after the next whole forward
            return False
        while len(self._captured) >= KEPT:
            del self._captured[next(iter(self._captured))]
        self._captured[tokens] = captured
        return True

    def ran(self, tokens: int) -> None:
        """Say that a forward of so many was launched one by one, to its end."""
        if self.takes(tokens):
            self._ran.add(tokens)

    def forward(self, ids: Sequence[int], start: int) -> Tensor:
        """The hidden states [T, H] of `ids` at the positions from `start` on; they last until the next call.

        The cache is changed. `ready` has said yes to so many.
        """
        found = self._captured[len(ids)]
        found.ids.copy_(torch.tensor(ids))
        torch.arange(start, start + len(ids), out=found.positions)
        found.graph.replay()
        return found.hidden

    def _capture(self, tokens: int) -> _Captured:
        """Record a forward; nothing runs, so cache and states stay as they are."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        ids, positions = (torch.zeros(tokens, dtype=torch.int64, device=self._model.device) for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._model(ids, positions, self._cache)
        return _Captured(graph, ids, positions, hidden)
