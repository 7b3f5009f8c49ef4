"""One decode step as one CUDA graph: forward, logits, and the draw, with nothing read on the host but the drawn id.

The step's inputs live in a few device tensors. The graph ends by making the drawn id its own next input and moving the
position on, so the host only replays it, and need not know an id for its step to begin: `launch` and `finish` are two,
and a card never waits for a host that shows the token before. The graph is captured once, at the first step, and serves
every prompt, context length and sampling setting: those are values in tensors, not parts of the graph.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localchat.kernels.advance import advance
from localchat.kernels.sampling import mark_seen, sample, sampling_scratch, sampling_settings

if TYPE_CHECKING:
    from localchat.cache import KVCache
    from localchat.model import Model
    from localchat.sampling import Sampling


class DecodeGraph:
    """The captured step of one model over one cache. `seen` is the engine's record of ids, uint8 [V]."""

    def __init__(self, model: "Model", cache: "KVCache", seen: Tensor) -> None:
        self._model, self._cache, self._seen = model, cache, seen
        device = seen.device
        self._token, self._position, self._draw_position, self._drawn = (
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._settings_f = torch.zeros(8, device=device)
        self._settings_i = torch.zeros(4, dtype=torch.int64, device=device)
        self._scratch = sampling_scratch(seen.numel(), device)
        # Two steps at most are launched and not finished; they take turns.
        self._host_drawn = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._launched = self._finished = 0
        self.hidden: Tensor | None = None  # of the last step's token, [1, H], where each step puts it
        self._graph: torch.cuda.CUDAGraph | None = None
        self._now: tuple[int, int, Sampling | None] = (-1, -1, None)  # what the device tensors hold

    def draw(self, hidden: Tensor, sampling: "Sampling", position: int) -> int:
        """Draw the token at `position` from the hidden state [1, H] of the one before: the first of a reply."""
        self._set(0, position - 1, sampling)
        self._draw(hidden)
        token = int(self._drawn)
        self._set(token, position, sampling)
        return token

    def capture(self) -> None:
        """Record the step, once. The cache stays as it is, so this comes before a step begins."""
        if self._graph is None:
            self._graph = self._capture()

    def launch(self, token: int | None, position: int, sampling: "Sampling") -> None:
        """Begin a step: forward `token` at `position` and draw its successor. None: what the step before draws.

        Raises:
            ValueError: there was no `capture` yet, or two steps are not finished.
        """
        if self._graph is None or self._launched - self._finished == 2:
            raise ValueError("DecodeGraph.launch: got no captured graph or two unfinished steps, wanted another order")
        if token is not None:
            self._set(token, position, sampling)
        self._now = (-1, -1, sampling)  # the step moves them on
        self._graph.replay()
        turn = self._launched % 2
        self._host_drawn[turn : turn + 1].copy_(self._drawn, non_blocking=True)
        self._copied[turn].record()
        self._launched += 1

    def finish(self) -> int:
        """Wait for the oldest unfinished step, and return what it drew.

        Raises:
            ValueError: there is none.
        """
        if self._launched == self._finished:
            raise ValueError("DecodeGraph.finish: got no unfinished step, wanted a launch first")
        turn = self._finished % 2
        self._copied[turn].synchronize()
        self._finished += 1
        return int(self._host_drawn[turn])

    def forget(self) -> None:
        """What unfinished steps draw is of no interest. Whatever they change, they change before later work runs."""
        self._finished = self._launched

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Run the step once, so that every kernel is compiled, and then record it.

        What the first run did is undone: `seen` and the recurrent states, which it changed in place, are brought back
        to the same addresses, and the cache rows it wrote are overwritten by the first real step.
        """
        self._set(0, self._cache.length, None)
        seen = self._seen.clone()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with self._cache.preserved():
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    self._step()
            finally:
                torch.cuda.current_stream().wait_stream(stream)
                self._seen.copy_(seen)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._now = (-1, -1, None)
        return graph

    def _step(self) -> None:
        mark_seen(self._token, self._seen)  # a plain launch: steps do not overlap (kernels/pdl.py)
        self.hidden = self._model(self._token, self._position, self._cache)
        self._draw(self.hidden)
        advance(self._drawn, self._token, self._position, self._draw_position)

    def _draw(self, hidden: Tensor) -> None:
        logits = self._model.logits(hidden)
        settings = (self._settings_f, self._settings_i)
        sample(logits, self._seen, *settings, self._draw_position, self._drawn, self._scratch)

    def _set(self, token: int, position: int, sampling: "Sampling | None") -> None:
        """Bring the device tensors to these values; nothing to do while a reply goes on."""
        held_token, held_position, held_sampling = self._now
        self._now = (-1, -1, None)  # whatever interrupts this has changed some of them
        if (held_token, held_position) != (token, position):
            self._token.fill_(token)
            self._position.fill_(position)
            self._draw_position.fill_(position + 1)
        if sampling is not None and sampling != held_sampling:
            floats, integers = sampling_settings(**vars(sampling))
            self._settings_f.copy_(floats)
            self._settings_i.copy_(integers)
        self._now = (token, position, sampling)
