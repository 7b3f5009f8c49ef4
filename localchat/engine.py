"""The engine: token ids in, token ids out, over one conversation's cache.

`prefill` appends ids, `generate` draws new ones, `rewind` goes back. Text, templates and stop strings are none of its
business, so a test drives it with a few integers. `ids` always says exactly which tokens the cache holds, whenever a
generator is closed or an exception arrives.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.graph import DecodeGraph
from localchat.kernels.sampling import SEEN_IN_CONTEXT, SEEN_IN_REPLY
from localchat.model import Model
from localchat.sampling import Sampling


class Engine:
    """A model with the cache of one conversation, preallocated for `max_length` tokens.

    `vocab_size`, where given, is the number of ids the tokenizer knows: padding rows behind it are never drawn.
    `tokens_forwarded` counts every id that a forward has received, which is what turn reuse is measured by.
    """

    def __init__(self, model: Model, max_length: int, *, vocab_size: int | None = None) -> None:
        self.model = model
        self.max_length = max_length
        self.vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
        self.cache = KVCache(model.config, max_length, dtype=model.ops.cache_dtype, device=model.device)
        self.ids: list[int] = []
        self.tokens_forwarded = 0
        self._hidden: Tensor | None = None  # of the last token in the cache, [1, H]
        self._seen = torch.zeros(self.vocab_size, dtype=torch.uint8, device=model.device)
        self._graph = DecodeGraph(model, self.cache, self._seen) if model.device.type == "cuda" else None

    def rewind(self, length: int) -> int:
        """Cut the conversation back to at most `length` tokens and return the length reached.

        The caller prefills at least one id afterwards: the state behind the last token is not kept.
        """
        length = min(length, len(self.ids))
        if length < len(self.ids):
            self._hidden = None
            del self.ids[length:]
            self.cache.truncate(length)
        return length

    def prefill(self, ids: Sequence[int]) -> Iterator[int]:
        """Append `ids` in chunks; yields how many are done after each chunk.

        Raises:
            ValueError: the cache has no room for them, or an id is outside the vocabulary.
        """
        if len(self.ids) + len(ids) > self.max_length:
            raise ValueError(f"prefill: got {len(ids)} ids behind {len(self.ids)}, wanted at most {self.max_length}")
        if ids and not 0 <= min(ids) <= max(ids) < self.model.config.vocab_size:
            raise ValueError(f"prefill: got ids {min(ids)}..{max(ids)}, wanted 0..{self.model.config.vocab_size - 1}")
        size = self.model.ops.prefill_chunk
        for start in range(0, len(ids), size):
            chunk = list(ids[start : start + size])
            self._forward(chunk)
            yield start + len(chunk)

    def generate(self, sampling: Sampling, stop_ids: Collection[int], max_tokens: int) -> Iterator[int]:
        """Draw up to `max_tokens` ids, each yielded before it is put into the cache.

        Ends after a stop id (yielded, never cached), after `max_tokens`, or when the cache is full.

        Raises:
            ValueError: nothing was prefilled since the last rewind.
        """
        if self._hidden is None:
            raise ValueError("generate: got no prefilled token, wanted a call of prefill first")
        self._seen.zero_()
        self._seen[[i for i in self.ids if i < self.vocab_size]] = SEEN_IN_CONTEXT
        token = self._sample(sampling)
        for drawn in range(1, max_tokens + 1):
            yield token
            if token in stop_ids or drawn == max_tokens or len(self.ids) == self.max_length:
                return
            token = self.decode_one_token(token, sampling)

    @torch.inference_mode()
    def decode_one_token(self, token: int, sampling: Sampling) -> int:
        """One step: put `token` into the cache and draw its successor."""
        if self._graph is not None:
            self.cache.truncate(len(self.ids))
            self._hidden = None  # it stays inside the graph
            drawn = self._graph.step(token, len(self.ids), sampling)
            self._appended([token])
            return drawn
        self._seen[token] |= SEEN_IN_CONTEXT | SEEN_IN_REPLY
        self._forward([token])
        return self._sample(sampling)

    @torch.inference_mode()
    def _forward(self, ids: list[int]) -> None:
        # `ids` is what counts: after Ctrl-C in the wrong moment the cache may be longer, but never shorter.
        start, device = len(self.ids), self.model.device
        self.cache.truncate(start)
        self._hidden = None
        positions = torch.arange(start, start + len(ids), device=device)
        hidden = self.model(torch.tensor(ids, device=device), positions, self.cache)
        self._appended(ids)
        self._hidden = hidden[-1:]

    def _appended(self, ids: list[int]) -> None:
        self.cache.append(len(ids))
        self.ids += ids
        self.tokens_forwarded += len(ids)

    @torch.inference_mode()
    def _sample(self, sampling: Sampling) -> int:
        if self._hidden is None:
            raise ValueError("sample: got no prefilled token, wanted a call of prefill first")
        if self._graph is not None:
            return self._graph.draw(self._hidden, sampling, self.cache.length)
        logits = self.model.logits(self._hidden)[0, : self.vocab_size]
        return int(self.model.ops.sample(logits, self._seen, sampling, self.cache.length))
