"""The conversation: a person's text in, a stream of Chunks out.

This is the loop that the program is about. A turn renders the whole conversation with the model's template, finds
how much of it the cache holds already, prefills the rest and generates; ids become text one by one (reply_text.py).
It knows neither tensors nor the terminal: the engine takes and gives ids, and whoever shows the text reads Chunks.

A model with recurrent layers goes back only to where a snapshot was taken. The next turn renders this one as history,
without the thought and without what opened it, so the snapshot belongs where the two renderings part.
"""

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from localchat.counted import counted
from localchat.errors import InputTooLong, UsageError, UserError
from localchat.open_answer import OpenAnswer, answer_ids
from localchat.prompt_size import refuse_what_cannot_fit
from localchat.reply_text import ReplyText
from localchat.stats import Stats
from localchat.turn import Turn

if TYPE_CHECKING:  # so that importing this file loads neither torch nor jinja2
    from localchat.sampling import Sampling
    from localchat.template import ChatTemplate
    from localchat.tokenizer import Segment, Tokenizer

Kind = Literal["prefill", "thought", "answer", "end"]
FinishReason = Literal["stop", "length", "context"]

# An answer that stands for the one to come, as plain as answers begin, without and with a thought before it.
_PLACEHOLDER = "x"
_PLACEHOLDER_ANSWERS: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": _PLACEHOLDER},
    {"role": "assistant", "content": _PLACEHOLDER, "reasoning_content": _PLACEHOLDER},
)
# What stands between a thought and its answer where the template does not tell: as Qwen's models were trained.
_CLOSING = "\n</think>\n\n"

_OWN_KEYS = ("interrupted", "ended")  # of a message; the rest is the template's


class Engine(Protocol):
    """What a chat needs of localchat.engine.Engine; a test drives it with a script."""

    ids: list[int]
    max_length: int
    tokens_forwarded: int

    @property
    def ready(self) -> bool:
        """Whether the next id can be drawn with nothing prefilled before."""

    @property
    def recurrent(self) -> bool:
        """Whether `rewind` reaches only the start and where `prefill` was told to keep a snapshot."""

    def rewind(self, length: int) -> int:
        """Go back to at most `length` ids and return how many are left."""

    def prefill(self, ids: Sequence[int], snapshot_at: int | None = None) -> Iterator[int]:
        """Append `ids`, yielding now and then how many are done; keep the state of the first `snapshot_at` in all."""

    def generate(
        self, sampling: "Sampling", stop_ids: Collection[int], max_tokens: int, *, replied: int = 0
    ) -> Iterator[int]:
        """Draw ids, up to and with the first stop id, behind `replied` ids of the same reply."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a reply. There is one for each prefilled chunk and each generated token, often with empty text.

    The last one has kind "end" and says why the reply ended: "stop" (the model's stop token, or a stop string),
    "length" (max_tokens) or "context" (the cache is full). `in_thought` there: the thought never ended.
    """

    kind: Kind
    text: str
    stats: Stats
    finish_reason: FinishReason | None = None
    in_thought: bool = False


class Chat:
    """One conversation over one engine.

    `messages` holds the turns as templates take them ({"role", "content"} and, for an answer with a thought,
    "reasoning_content"). An answer that was stopped also has "interrupted": True, one that reached a limit has
    "ended": "length" or "context"; the template sees neither. `system`, `sampling`, `max_tokens`, `stop`,
    `think_budget` (the most tokens of a thought; None: as many as the model wants) and `template_variables` (such as
    enable_thinking) may be assigned between turns.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: "Tokenizer",
        template: "ChatTemplate",
        sampling: "Sampling",
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        template_variables: Mapping[str, Any] | None = None,
        think_budget: int | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.sampling = sampling
        self.system = system
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.template_variables = dict(template_variables or {})
        self.think_budget = think_budget
        self.messages: list[dict[str, Any]] = []
        self._open: OpenAnswer | None = None  # of the last turn, where it can be resumed
        self._answer_now = False
        self._encoded: tuple[list[Segment], list[int]] = ([], [])  # the last prompt, as text and as ids
        self._boundaries: list[int] = []  # of this chat's turns, in what the engine holds or has held

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.messages.clear()

    def change_model(self, engine: Engine, tokenizer: "Tokenizer", template: "ChatTemplate") -> None:
        """Go on with another model, which reads the conversation at its first turn."""
        self.engine, self.tokenizer, self.template = engine, tokenizer, template
        self._encoded = ([], [])
        self._boundaries = []
        self._open = None

    def answer_now(self) -> None:
        """End the thought of the running reply at its next token, or the one to come; an answer is not touched."""
        self._answer_now = True

    def undo(self, turns: int = 1) -> list[dict[str, Any]]:
        """Take back the last `turns` turns and return their messages, the user's first.

        Raises:
            UsageError: there are not so many.
        """
        starts = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not starts:
            raise UsageError("there is no turn to take back.")
        if not 1 <= turns <= len(starts):
            raise UsageError(f"the conversation has {counted(len(starts), 'turn')}, so {turns} cannot be taken back.")
        undone = self.messages[starts[-turns] :]
        del self.messages[starts[-turns] :]
        return undone

    def reply(self, text: str) -> Iterator[Chunk]:
        """One turn. What `text` and the answer add to `messages` depends on how the iteration ends:

        at its end both stay; closed (or KeyboardInterrupt) after some text was generated, both stay and the answer is
        marked interrupted; closed earlier, or on any error, the conversation is as it was before.

        Raises:
            UsageError: `text` is blank, or a stop string is empty.
            InputTooLong: the conversation leaves no room for an answer; nothing has changed.
            UserError: the template refuses the conversation.
        """
        if not text.strip():
            raise UsageError("the prompt is empty: write something to answer.")
        refuse_what_cannot_fit(text, self.tokenizer, self.engine.max_length)
        started = time.perf_counter()
        message = {"role": "user", "content": text}
        turn = self._turn([*self.messages, message], started)
        yield from self._take(turn, OpenAnswer({}, turn.prompt, []), [message])

    def resume(self) -> Iterator[Chunk]:
        """Go on with the last answer, which was interrupted or reached a limit: it grows in `messages`.

        What the cache still holds of it is not read again, so it goes on as if nothing had stopped it; one that was
        loaded is read again as its text. It ends as `reply` does; closed early, or on an error, the answer stays as
        it was.

        Raises:
            UsageError: there is no such answer.
            InputTooLong: it leaves no room for more; nothing has changed.
        """
        started = time.perf_counter()
        opened = self._open_answer()
        ids = self._fitting([*opened.prompt, *opened.drawn])
        boundary = None
        if self.engine.recurrent and opened is not self._open:
            asked = self.messages[:-1]
            boundary = self._boundary(asked, self._render(asked), opened.prompt)
        yield from self._take(Turn(self.engine, ids, boundary, started), opened, [])

    def tokens(self, asked: str | None = None, *, without: int = 0) -> int:
        """The length of the prompt that answers `asked`, if the `without` oldest turns were dropped.

        Where `asked` is None it is the prompt that goes on with an open answer, or else the conversation as it is.
        """
        messages = self.messages[self._start_of(without) :]
        if asked is not None:
            return len(self.tokenizer.encode(self._render([*messages, {"role": "user", "content": asked}])))
        if messages and is_open(messages[-1]):
            prompt = self.tokenizer.encode(self._render(messages[:-1]))
            return len(prompt) + len(answer_ids(self.tokenizer, prompt, messages[-1]))
        return len(self.tokenizer.encode(self._render(messages, open=False))) if messages else 0

    def drop(self, turns: int) -> None:
        """Forget the `turns` oldest turns; the system prompt stays."""
        del self.messages[: self._start_of(turns)]
        self._open = None  # its prompt has changed

    def _start_of(self, turn: int) -> int:
        """Where the `turn`-th turn (from 0) begins in `messages`; their number if there is no such turn."""
        starts = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        return 0 if turn == 0 else [*starts, *[len(self.messages)] * (turn + 1)][turn]

    def _open_answer(self) -> OpenAnswer:
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant":
            raise UsageError("there is no answer to continue.")
        if not is_open(last):
            raise UsageError("the last answer is complete, so there is nothing to continue.")
        if self._open is not None and self._open.message is last:
            return self._open
        prompt = self.tokenizer.encode(self._render(self.messages[:-1]))
        return OpenAnswer(last, prompt, answer_ids(self.tokenizer, prompt, last))

    def _take(self, turn: Turn, opened: OpenAnswer, asked: list[dict[str, Any]]) -> Iterator[Chunk]:
        """Run `turn`, an answer to `asked` or (where that is empty) more of the last message.

        `opened` is what there is of the answer so far.
        """
        answer = ReplyText(self.tokenizer, opened.prompt, self.stop)
        for token in opened.drawn:
            answer.push(token)
        before, answered = len(self.messages), None
        self.messages += asked
        try:
            yield from self._prefill(turn)
            finish_reason = yield from self._generate(turn, answer, len(opened.drawn))
            answered = answer.message() if finish_reason == "stop" else {**answer.message(), "ended": finish_reason}
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            if turn.generated and not answer.empty:
                answered = {**answer.message(), "interrupted": True}
            raise
        finally:
            if answered is None:
                del self.messages[before:]
            else:
                self.messages[before + 1 if asked else before - 1 :] = [answered]
                drawn = [*opened.drawn, *turn.drawn]
                self._open = OpenAnswer(answered, opened.prompt, drawn) if is_open(answered) else None
        yield Chunk("end", "", turn.stats(), finish_reason, in_thought=answer.kind == "thought")

    def _turn(self, messages: Sequence[dict[str, Any]], started: float) -> Turn:
        """The turn that answers the last of `messages`."""
        self._answer_now = False
        rendered = self._render(messages)
        prompt = self.tokenizer.encode_beside(rendered, *self._encoded)
        self._encoded = (rendered, prompt)
        self._fitting(prompt)
        boundary = self._boundary(messages, rendered, prompt) if self.engine.recurrent else None
        return Turn(self.engine, prompt, boundary, started)

    def _fitting(self, prompt: list[int]) -> list[int]:
        if len(prompt) >= self.engine.max_length:
            raise InputTooLong(
                f"the conversation has {len(prompt):,} tokens and the context holds {self.engine.max_length:,} with "
                "the answer: shorten it, clear the conversation, or enlarge the context."
            )
        return prompt

    def _render(self, messages: Sequence[dict[str, Any]], *, open: bool = True) -> "list[Segment]":
        """The conversation as the template writes it, `open` to be answered."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [{key: value for key, value in m.items() if key not in _OWN_KEYS} for m in messages]
        return self.template.render(system + turns, add_generation_prompt=open, **self.template_variables)

    def _boundary(self, messages: Sequence[dict[str, Any]], rendered: "list[Segment]", prompt: list[int]) -> int:
        """How much of `prompt` (all but one token at most) later turns will begin with, whatever the answer is.

        That is what it has in common with the same conversation one turn later. How the template writes an answer
        may depend on its thought, so the rendering that parts from the prompt first counts. A template that refuses
        these conversations still renders this one without its opening.
        """
        asked = {"role": "user", "content": _PLACEHOLDER}
        later = [self._render_or_none([*messages, answer, asked], open=True) for answer in _PLACEHOLDER_ANSWERS]
        histories = [h for h in later if h is not None] or [self._render_or_none(messages, open=False) or []]
        nearest = histories[0]
        if any(history != nearest for history in histories):
            text = _text(rendered)
            nearest = min(histories, key=lambda history: _common_prefix(text, _text(history)))
        ids = self.tokenizer.encode_beside(nearest, rendered, prompt)
        return min(_common_prefix(prompt, ids), len(prompt) - 1)

    def _boundary_before(self, reusable: int) -> int:
        """Where the turn before the last question has its boundary, if that is in the first `reusable` ids; else 0.

        Of a turn that this chat has taken itself it is known; this is for those of a conversation that was loaded.
        """
        answers = [n for n, message in enumerate(self.messages[:-1]) if message["role"] == "assistant"]
        if not answers:
            return 0
        asked = self.messages[: answers[-1]]
        rendered = self._render(asked)
        boundary = self._boundary(asked, rendered, self.tokenizer.encode(rendered))
        return boundary if boundary <= reusable else 0

    def _render_or_none(self, messages: Sequence[dict[str, Any]], *, open: bool) -> "list[Segment] | None":
        try:
            return self._render(messages, open=open)
        except UserError:
            return None

    def _prefill(self, turn: Turn) -> Iterator[Chunk]:
        """Bring the cache to the prompt: keep the longest common prefix, compute the rest.

        That is at least one token, unless the engine stands at the prompt's end and goes on from there.
        """
        reusable = _common_prefix(self.engine.ids, turn.prompt)
        if reusable == len(turn.prompt) and not (self.engine.ready and reusable == len(self.engine.ids)):
            reusable -= 1
        self._boundaries = [boundary for boundary in self._boundaries if boundary <= reusable]
        turn.cached = self.engine.rewind(reusable)
        if turn.cached < reusable:
            expected = max(self._boundaries) if self._boundaries else self._boundary_before(reusable)
            turn.reread = max(0, expected - turn.cached)
        if turn.boundary is not None:
            self._boundaries.append(turn.boundary)
        for done in self.engine.prefill(turn.prompt[turn.cached :], turn.boundary):
            turn.count_prefilled(done)
            yield Chunk("prefill", "", turn.stats())
        turn.cached = len(turn.prompt) - turn.prefilled

    def _generate(self, turn: Turn, answer: ReplyText, replied: int) -> Generator[Chunk, None, FinishReason]:
        """Stream the pieces of an answer that has `replied` ids already; returns why it ended."""
        limit = self.engine.max_length + 1 if self.max_tokens is None else self.max_tokens
        stop_token = False
        tokens = self.engine.generate(self.sampling, self.tokenizer.stop_ids, limit, replied=replied)
        while (token := next(tokens, None)) is not None:
            turn.count_generated(token, thinking=answer.kind == "thought")
            if stop_token := token in self.tokenizer.stop_ids:
                break
            kind, text = answer.push(token)
            yield Chunk(kind, text, turn.stats())
            if answer.stopped:
                break
            if answer.kind == "thought" and self._thought_is_over(turn) and turn.generated < limit:
                yield from self._close_thought(turn, answer)
                left, said = limit - turn.generated, replied + len(turn.drawn)
                tokens = self.engine.generate(self.sampling, self.tokenizer.stop_ids, left, replied=said)
        kind, text = answer.flush()
        if text:
            yield Chunk(kind, text, turn.stats())
        if stop_token or answer.stopped:
            return "stop"
        return "length" if turn.generated == limit else "context"

    def _thought_is_over(self, turn: Turn) -> bool:
        """Whether the thought has used its budget, or the user wants the answer; and the closing still fits."""
        over = self._answer_now or (self.think_budget is not None and turn.thought_tokens >= self.think_budget)
        so_far = len(turn.prompt) + len(turn.drawn)
        return over and so_far + len(self._closing_ids()) < self.engine.max_length

    def _close_thought(self, turn: Turn, answer: ReplyText) -> Iterator[Chunk]:
        """Put the closing of the thought behind what was drawn, of which the engine may not hold the last id yet."""
        closing = self._closing_ids()
        turn.drawn += closing
        for _ in self.engine.prefill([*turn.prompt, *turn.drawn][len(self.engine.ids) :]):
            continue
        for token in closing:
            kind, text = answer.push(token)
            yield Chunk(kind, text, turn.stats())

    def _closing_ids(self) -> list[int]:
        """What the template writes between a thought and its answer."""
        thought, answer = "[the thought]", "[the answer]"
        closed = {"role": "assistant", "content": answer, "reasoning_content": thought}
        rendered = self._render_or_none([{"role": "user", "content": _PLACEHOLDER}, closed], open=False) or []
        between = _text(rendered).partition(thought)[2].partition(answer)[0]
        return self.tokenizer.encode_text(between if "</think>" in between else _CLOSING)


def is_open(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that did not end by itself, so that it can go on."""
    return any(message.get(key) for key in _OWN_KEYS)


def _common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many ids (or characters) `a` and `b` have in common from the start."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _text(segments: "Sequence[Segment]") -> str:
    return "".join(segment.text for segment in segments)
