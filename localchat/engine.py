"""The engine: token ids in, token ids out, over one conversation's cache.

`prefill` appends ids, `generate` draws new ones, `rewind` goes back. Text, templates and stop strings are none of its
business, so a test drives it with a few integers. `ids` always says exactly which tokens the cache holds, whenever a
generator is closed or an exception arrives.

A model with recurrent layers goes back only to where a snapshot was taken, or to the start. A step of it that is
broken off leaves states of no use, so the conversation falls back to a snapshot then.
"""

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.forward_graphs import ForwardGraphs
from localchat.graph import DecodeGraph
from localchat.kernels.cards import card_of
from localchat.kernels.padding import padded
from localchat.kernels.sampling import SEEN_IN_CONTEXT, SEEN_IN_REPLY
from localchat.ledger import default_snapshot_budget
from localchat.model import Model
from localchat.pace import Pace
from localchat.sampling import Sampling
from localchat.snapshots import Snapshots

# Seconds between two moments of a prefill in which its caller can look up, and stop it.
LOOK_UP = 0.02


class Engine:
    """A model with the cache of one conversation, preallocated for `max_length` tokens.

    `vocab_size`, where given, is the number of ids the tokenizer knows: padding rows behind it are never drawn.
    `tokens_forwarded` counts every id that a forward has received, which is what turn reuse is measured by.
    `int8_kv` keeps keys and values as INT8.
    `snapshot_budget` is the host memory, in bytes, that a recurrent model may use for states to return to; by default
    what snapshots.py chooses.
    """

    def __init__(
        self,
        model: Model,
        max_length: int,
        *,
        vocab_size: int | None = None,
        int8_kv: bool = False,
        snapshot_budget: int | None = None,
    ) -> None:
        self.model = model
        self.max_length = max_length
        self.vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
        dtype, device = model.ops.cache_dtype, model.device
        self.cache = KVCache(model.config, max_length, dtype=dtype, device=device, int8=int8_kv)
        budget = default_snapshot_budget() if snapshot_budget is None else snapshot_budget
        self.snapshots = Snapshots(self.cache, budget)
        self.ids: list[int] = []
        self.tokens_forwarded = 0
        self._hidden: Tensor | None = None  # of the last token in the cache, [1, H]
        # For the sampler: `ids` once more (the first `_copied` of them), and what they mark in the vocabulary.
        self._ids_there = torch.zeros(max_length, dtype=torch.int64, device=model.device)
        self._copied = 0
        self._marks = torch.zeros(model.config.vocab_size, dtype=torch.uint8, device=model.device)
        self._seen = self._marks[: self.vocab_size]
        on_card = model.device.type == "cuda"
        self._graph = DecodeGraph(model, self.cache, self._seen) if on_card else None
        few = card_of(model.device).settings.crossover if on_card and model.ops.takes_padding else 0
        self._graphs = ForwardGraphs(model, self.cache, few)

    @property
    def ready(self) -> bool:
        """Whether the next id can be drawn as it is, with nothing prefilled before."""
        return self._hidden is not None

    @property
    def recurrent(self) -> bool:
        """Whether `rewind` can only go back to a snapshot."""
        return bool(self.cache.recurrent)

    def rewind(self, length: int) -> int:
        """Cut the conversation back to at most `length` tokens and return the length reached.

        The caller prefills at least one id afterwards: the state behind the last token is not kept.
        """
        length = min(length, len(self.ids))
        if length == len(self.ids) and self.cache.is_at(length):
            return length
        self._hidden = None
        snapshot = self.snapshots.newest(length) if self.recurrent else None
        if self.recurrent:
            length = 0 if snapshot is None else snapshot.length
        self._copied = min(self._copied, length)
        del self.ids[length:]  # first, so that the cache is never the shorter one, whenever Ctrl-C comes
        if snapshot is None:
            self.cache.truncate(length)
        else:
            self.cache.restore(snapshot)
        return length

    def prefill(self, ids: Sequence[int], snapshot_at: int | None = None) -> Iterator[int]:
        """Append `ids` in chunks; yields how many are done.

        That is after each chunk, and within one whenever LOOK_UP seconds have passed: then as many as the layers that
        are done are worth, and none of the chunk is in `ids` yet. Closed there, the chunk was never begun. On a card
        the work is at most pace.AHEAD behind what is said, and done when the last number comes.

        A recurrent model's state is kept where the conversation is `snapshot_at` tokens long, to rewind there later;
        others need none and ignore it.

        Raises:
            ValueError: the cache has no room for them, or an id is outside the vocabulary.
        """
        if len(self.ids) + len(ids) > self.max_length:
            raise ValueError(f"prefill: got {len(ids)} ids behind {len(self.ids)}, wanted at most {self.max_length}")
        if ids and not 0 <= min(ids) <= max(ids) < self.model.config.vocab_size:
            raise ValueError(f"prefill: got ids {min(ids)}..{max(ids)}, wanted 0..{self.model.config.vocab_size - 1}")
        done, size = 0, self.model.ops.prefill_chunk
        pace = Pace(min(len(ids), size), _timed_event) if self._graph is not None else None
        while True:
            to_boundary = snapshot_at - len(self.ids) if snapshot_at is not None and self.recurrent else -1
            if to_boundary == 0:
                self.snapshots.take()
            if done == len(ids):
                return
            chunk = list(ids[done : done + (min(size, to_boundary) if to_boundary > 0 else size)])
            with closing(self._layers(chunk)) as layers:
                for share in self._moments(layers, pace):
                    yield done + int(len(chunk) * share)
            done += len(chunk)
            if pace is not None and done == len(ids):
                pace.drain()
            yield done

    def generate(
        self, sampling: Sampling, stop_ids: Collection[int], max_tokens: int, *, replied: int = 0
    ) -> Iterator[int]:
        """Draw up to `max_tokens` ids.

        The last `replied` ids of the conversation are the beginning of this reply, for the presence penalty.
        Ends after a stop id, after `max_tokens`, or when the cache is full. The last id is never cached then, but for
        one case: on a card, which works on the next step while the caller looks at an id, an id that is not known to
        be the last is in the cache (and in `ids`) when it is yielded, a stop id too.

        Raises:
            ValueError: nothing was prefilled since the last rewind.
        """
        if self._hidden is None:
            raise ValueError("generate: got no prefilled token, wanted a call of prefill first")
        self._mark_seen(replied)
        most = min(max_tokens, self.max_length - len(self.ids) + 1)  # all but the last need room
        if self._graph is not None:
            yield from self._draw_ahead(self._graph, sampling, stop_ids, most)
            return
        token = self._sample(sampling)
        for drawn in range(1, most + 1):
            yield token
            if token in stop_ids or drawn == most:
                return
            token = self.decode_one_token(token, sampling)

    @torch.inference_mode()
    def decode_one_token(self, token: int, sampling: Sampling) -> int:
        """One step without a graph: put `token` into the cache and draw its successor."""
        self._seen[token] |= SEEN_IN_CONTEXT | SEEN_IN_REPLY
        self._forward([token])
        return self._sample(sampling)

    def _draw_ahead(
        self, graph: DecodeGraph, sampling: Sampling, stop_ids: Collection[int], most: int
    ) -> Iterator[int]:
        """`generate` on a card: the step that takes an id is launched before the host knows the id."""
        graph.forget()
        known: int | None = self._sample(sampling)
        for drawn in range(1, most + 1):
            token = self._next(graph, known, sampling, last=drawn == most)
            yield token
            if token in stop_ids:
                return
            known = None

    @torch.inference_mode()
    def _next(self, graph: DecodeGraph, known: int | None, sampling: Sampling, *, last: bool) -> int:
        """The next id: `known`, or what the step in flight draws. Its own step is launched first, but for the last."""
        if last:
            return graph.finish() if known is None else known
        graph.capture()
        with self._step(ids := [] if known is None else [known]):
            graph.launch(known, len(self.ids), sampling)
            if known is None:
                ids.append(graph.finish())
        self._hidden = graph.hidden
        return ids[0]

    def _forward(self, ids: list[int]) -> None:
        for _ in self._layers(ids):
            continue

    @torch.inference_mode()
    def _layers(self, ids: list[int]) -> Generator[float, None, None]:
        """A forward of `ids`, with a pause after each layer; yields which share of the layers is done."""
        start, graphs = len(self.ids), self._graphs
        size = graphs.size(len(ids), start)
        captured = size is not None and graphs.ready(size)  # before the step begins: it may fail
        with self._step(ids):
            if size is not None and captured:
                hidden = graphs.forward(ids, start, size)
                yield 1.0
            else:
                rows, positions = padded(ids, start, size or len(ids), self.model.device)
                # A graph does not know the length, and what comes before it goes the same way.
                length = start + len(ids) if size is None else None
                steps = self.model.layer_by_layer(rows, positions, self.cache, length)
                for layer, hidden in enumerate(steps, 1):  # noqa: B007 -- the last one is what is wanted
                    yield layer / len(self.model.layers)
        if size is not None:
            graphs.ran(size)
        self._hidden = hidden[len(ids) - 1 : len(ids)].clone()  # so that the others' memory is free

    def _moments(self, layers: Iterator[float], pace: Pace | None) -> Iterator[float]:
        """Those of `layers` (all but the last) that are LOOK_UP seconds apart; all are launched at `pace`."""
        looked = time.perf_counter()
        for share in layers:
            if pace is not None:
                pace.mark()
            if share < 1 and time.perf_counter() - looked >= LOOK_UP:
                yield share
                looked = time.perf_counter()

    @torch.inference_mode()
    def _mark_seen(self, replied: int) -> None:
        """Bring `_seen` to what `ids` says. A long conversation is not sent to the card anew for each reply."""
        length = len(self.ids)
        if self._copied < length:
            self._ids_there[self._copied : length] = torch.tensor(self.ids[self._copied :], device=self._marks.device)
            self._copied = length
        self._marks.zero_()
        self._marks.index_fill_(0, self._ids_there[:length], SEEN_IN_CONTEXT)
        self._marks.index_fill_(0, self._ids_there[length - replied : length], SEEN_IN_CONTEXT | SEEN_IN_REPLY)

    @contextmanager
    def _step(self, ids: list[int]) -> Iterator[None]:
        """A forward of `ids` runs inside: afterwards they are part of the conversation, or it is what it was.

        They need not be known before the end.

        `ids` is what counts: after Ctrl-C in the wrong moment the cache may be longer, but never shorter. Where that
        leaves a recurrent state that cannot be cut, the conversation goes back to a snapshot.
        """
        self.cache.truncate(len(self.ids))
        self._hidden = None
        self.cache.begin()
        try:
            yield
            self.cache.append(len(ids))
            self.ids += ids
        except BaseException:
            self.rewind(len(self.ids))
            raise
        self.tokens_forwarded += len(ids)

    @torch.inference_mode()
    def _sample(self, sampling: Sampling) -> int:
        if self._hidden is None:
            raise ValueError("sample: got no prefilled token, wanted a call of prefill first")
        if self._graph is not None:
            return self._graph.draw(self._hidden, sampling, self.cache.length)
        logits = self.model.logits(self._hidden)[0, : self.vocab_size]
        return int(self.model.ops.sample(logits, self._seen, sampling, self.cache.length))


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
