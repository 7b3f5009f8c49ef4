"""The counters of one turn, from which each Chunk gets its Stats."""

import time
from typing import TYPE_CHECKING

from localchat.stats import Stats

if TYPE_CHECKING:
    from localchat.chat import Engine


class Turn:
    """The prompt of one turn, the ids of the answer behind it, and the clock.

    `boundary` is where a snapshot belongs (None: nowhere). `drawn` are the answer's ids, `generated` and
    `thought_tokens` count those that the model drew: the closing of a thought may be put in.
    """

    def __init__(self, engine: "Engine", prompt: list[int], boundary: int | None, started: float) -> None:
        self.prompt = prompt
        self.boundary = boundary
        self.cached = 0
        self.reread = 0
        self.prefilled = 0
        self.drawn: list[int] = []
        self.generated = 0
        self.thought_tokens = 0
        self._engine = engine
        self._forwarded_before = engine.tokens_forwarded
        self._started = started
        self._prefill_started = self._prefill_ended = time.perf_counter()
        self._first_token = self._last_thought = self._prefill_started

    def count_prefilled(self, done: int) -> None:
        """To be called with each number that the engine's prefill yields; within a chunk it is ahead of the count."""
        self.prefilled = max(done, self._engine.tokens_forwarded - self._forwarded_before)
        self._prefill_ended = time.perf_counter()

    def count_generated(self, token: int, *, thinking: bool) -> None:
        """To be called with each drawn id; `thinking`: it was drawn inside a thought."""
        self.drawn.append(token)
        self.generated += 1
        now = time.perf_counter()
        if self.generated == 1:
            self._first_token = now
        if thinking:
            self.thought_tokens += 1
            self._last_thought = now

    def stats(self) -> Stats:
        """The numbers as of now."""
        decoding = self.generated > 0
        return Stats(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            prefilled_tokens=self.prefilled,
            reread_tokens=self.reread,
            generated_tokens=self.generated,
            thought_tokens=self.thought_tokens,
            prefill_seconds=self._prefill_ended - self._prefill_started,
            decode_seconds=time.perf_counter() - self._first_token if decoding else 0.0,
            thought_seconds=self._last_thought - self._prefill_ended if self.thought_tokens else 0.0,
            ttft_seconds=self._first_token - self._started if decoding else 0.0,
            context_used=len(self._engine.ids),
            context_size=self._engine.max_length,
        )
