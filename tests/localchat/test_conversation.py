"""Long conversations with a model that cannot be cut back: chat, engine, cache and snapshots together.

The template does what Qwen3.5's does: the prompt opens the thought, and history shows answers without theirs. So every
turn has to go back, and may read again only the answer before it.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from localchat.chat import Chat, Chunk
from localchat.engine import Engine
from localchat.sampling import Sampling
from localchat.stats import Stats
from localchat.template import ChatTemplate
from localchat.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
CAPACITY = 12  # snapshots that the budget holds


class Listening:
    """A model, and every id that its forward receives."""

    def __init__(self, model: Any) -> None:
        self._model, self.received = model, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def layer_by_layer(self, ids: torch.Tensor, *arguments: Any) -> Iterator[torch.Tensor]:
        self.received += ids.tolist()
        yield from self._model.layer_by_layer(ids, *arguments)


class SpeakingEngine(Engine):
    """The real engine, whose draws are replaced by a script: a random model would not end its thoughts."""

    script: deque[int]

    def _sample(self, sampling: Sampling) -> int:
        super()._sample(sampling)
        return self.script.popleft()


class Conversation:
    """A chat over a model with recurrent layers; `turn` has one turn of it and looks at what was computed."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = Listening(model), tokenizer
        one = Engine(model, 1).cache.snapshot_nbytes
        self.budget = CAPACITY * one + one // 2
        self.engine = SpeakingEngine(self.model, 20_000, snapshot_budget=self.budget)  # type: ignore[arg-type]
        template = ChatTemplate(TEMPLATE, tokenizer.added_tokens)
        self.chat = Chat(self.engine, tokenizer, template, Sampling(temperature=0.0), system="Be brief.")
        self.prefilled: list[int] = []

    def start(self, question: str, answer: str, thought: str = "hm") -> Iterator[Chunk]:
        self.model.received.clear()
        reply = f"{thought}</think>\n\n{answer}<|im_end|>"
        self.engine.script = deque(self.tokenizer.encode_text(reply))
        return self.chat.reply(question)

    def turn(self, question: str, answer: str, thought: str = "hm") -> Stats:
        *_, end = self.start(question, answer, thought)
        stats = end.stats
        self.prefilled = self.model.received[: stats.prefilled_tokens]
        assert (
            len(self.model.received) == stats.prefilled_tokens + stats.generated_tokens - 1
        )  # the stop id is not read
        assert stats.cached_tokens == stats.prompt_tokens - stats.prefilled_tokens
        assert self.engine.snapshots.nbytes <= self.budget
        assert self.chat.messages[-1]["content"] == answer
        return stats

    def opened(self, text: str) -> list[int]:
        return self.tokenizer.encode_text(f"{text}<|im_end|>\n<|im_start|>assistant\n<think>\n")

    def state(self) -> list[torch.Tensor]:
        return everything_in(self.engine)

    def check_state(self) -> None:
        """What the engine holds is what its ids leave in an engine that never went back."""
        fresh = Engine(self.model, 20_000)  # type: ignore[arg-type]
        for _ in fresh.prefill(self.engine.ids):
            continue
        for reached, wanted in zip(self.state(), everything_in(fresh), strict=True):
            torch.testing.assert_close(reached, wanted, rtol=1e-3, atol=1e-4)


def everything_in(engine: Engine) -> list[torch.Tensor]:
    """The states and the valid rows of an engine's cache."""
    cache = engine.cache
    rows = [cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]]
    return [tensor.clone() for tensor in (*cache.recurrent, *rows)]


@pytest.fixture
def conversation(hybrid: Any, tiny_tokenizer: Tokenizer) -> Conversation:
    return Conversation(hybrid, tiny_tokenizer)


def question(n: int) -> str:
    return f"question {n} " + "and more " * (n * 7 % 5)


def answer(n: int) -> str:
    return f"answer {n} " + "in some detail " * (n * 3 % 4) + "."


def test_forty_turns(conversation: Conversation) -> None:
    previous = None
    for n in range(40):
        stats = conversation.turn(question(n), answer(n), "a thought " * (n % 6))
        if previous is None:
            before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        else:
            before = f"{previous}<|im_end|>\n<|im_start|>user\n"
        assert conversation.prefilled == conversation.opened(before + question(n))
        assert stats.reread_tokens == 0
        previous = answer(n)
    assert conversation.engine.snapshots.nbytes == CAPACITY * conversation.engine.cache.snapshot_nbytes
    conversation.check_state()


def test_a_thought_that_is_closed_early_goes_on_from_the_same_state(conversation: Conversation) -> None:
    conversation.turn("first", "yes")
    conversation.chat.think_budget = 5
    replies = conversation.start("second", "the answer", thought="never read")
    conversation.engine.script = deque(conversation.tokenizer.encode_text("hmmmm" + "the answer<|im_end|>"))
    *_, end = replies
    assert conversation.chat.messages[-1]["content"] == "the answer"
    assert conversation.tokenizer.decode(conversation.engine.ids).endswith("<think>\nhmmmm\n</think>\n\nthe answer")
    closing = len(conversation.tokenizer.encode_text("\n</think>\n\n"))
    read = end.stats.prefilled_tokens + end.stats.generated_tokens - 1 + closing
    assert len(conversation.model.received) == read  # nothing was read twice
    conversation.check_state()
    conversation.chat.think_budget = None
    assert conversation.turn("third", "no").reread_tokens == 0


def test_a_retry_is_bit_identical(conversation: Conversation) -> None:
    for n in range(5):
        conversation.turn(question(n), answer(n))
    state, ids = conversation.state(), list(conversation.engine.ids)
    for _ in range(3):
        conversation.chat.undo()
        stats = conversation.turn(question(4), answer(4))
        assert conversation.prefilled == conversation.tokenizer.encode_text("<think>\n")
        assert (conversation.engine.ids, stats.reread_tokens) == (ids, 0)
        assert all(torch.equal(a, b) for a, b in zip(conversation.state(), state, strict=True))


@pytest.mark.parametrize(("turns", "all_kept"), [(1, True), (6, True), (13, False), (24, False), (25, True)])
def test_taking_turns_back_returns_to_the_nearest_state_that_is_kept(
    conversation: Conversation, turns: int, all_kept: bool
) -> None:
    starts = []
    for n in range(25):
        conversation.turn(question(n), answer(n))
        starts.append(conversation.engine.snapshots.lengths[-1])
    kept = conversation.engine.snapshots.lengths
    conversation.chat.undo(turns)
    stats = conversation.turn("something else", "yes")
    boundary = starts[24 - turns] if turns < 25 else 0
    reached = max((length for length in kept if length <= boundary), default=0)
    assert stats.cached_tokens == reached
    assert stats.reread_tokens == boundary - reached
    assert (reached == boundary) == all_kept
    if all_kept and turns < 25:
        before = f"{answer(24 - turns)}<|im_end|>\n<|im_start|>user\n"
        assert conversation.prefilled == conversation.opened(f"{before}something else")
    conversation.check_state()


def test_a_second_return_says_as_well_what_it_reads_again(conversation: Conversation) -> None:
    """What the first one has read again has no state to return to either, but for its own turn's."""
    boundaries = []
    for n in range(25):
        conversation.turn(question(n), answer(n))
        boundaries.append(conversation.engine.snapshots.lengths[-1])
    conversation.chat.undo(13)
    first = conversation.turn("something else", "yes")
    conversation.chat.undo(2)
    second = conversation.turn("another thing", "no")
    assert first.cached_tokens == second.cached_tokens > 0
    assert first.reread_tokens == boundaries[11] - first.cached_tokens > 0
    assert second.reread_tokens == boundaries[10] - second.cached_tokens > 0
    conversation.check_state()


def test_going_back_in_a_loaded_conversation_says_what_is_read_again(
    conversation: Conversation, hybrid: Any, tiny_tokenizer: Tokenizer
) -> None:
    boundaries = []
    for n in range(4):
        conversation.turn(question(n), answer(n))
        boundaries.append(conversation.engine.snapshots.lengths[-1])
    loaded = Conversation(hybrid, tiny_tokenizer)
    loaded.chat.messages += conversation.chat.messages
    assert loaded.turn("one more", "yes").reread_tokens == 0  # it was never read here
    loaded.chat.undo(2)
    stats = loaded.turn("something else", "no")
    assert (stats.cached_tokens, stats.reread_tokens) == (0, boundaries[2])
    loaded.chat.undo(4)
    assert loaded.turn("from the start", "no").reread_tokens == 0  # the first question has nothing before it
    loaded.check_state()


@pytest.mark.parametrize("read", [70, 130, 250])
def test_an_interrupted_prefill(conversation: Conversation, read: int) -> None:
    for n in range(3):
        conversation.turn(question(n), answer(n))
    held, boundary = list(conversation.chat.messages), conversation.engine.snapshots.lengths[-1]
    chunks = conversation.start("a long question " * 20, "never")
    while len(conversation.model.received) < read:
        assert next(chunks).kind == "prefill"
    chunks.close()  # type: ignore[attr-defined]
    assert conversation.chat.messages == held
    assert conversation.engine.cache.is_at(len(conversation.engine.ids))
    stats = conversation.turn("a short one", "yes")
    assert (stats.cached_tokens, stats.reread_tokens) == (boundary, 0)
    conversation.check_state()


def test_the_same_question_goes_on_where_reading_it_was_interrupted(conversation: Conversation) -> None:
    conversation.turn(question(0), answer(0))
    chunks = conversation.start("a long question " * 20, "never")
    while len(conversation.model.received) < 200:
        next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    read = len(conversation.engine.ids)
    assert conversation.turn("a long question " * 20, "yes").cached_tokens == read
    conversation.check_state()


def test_an_interrupted_reply(conversation: Conversation) -> None:
    for n in range(3):
        conversation.turn(question(n), answer(n))
    chunks, text = conversation.start(question(3), "a long answer"), ""
    while text != "a long":
        chunk = next(chunks)
        text += chunk.text if chunk.kind == "answer" else ""
    chunks.close()  # type: ignore[attr-defined]
    stats = conversation.turn(question(4), answer(4))
    assert conversation.prefilled == conversation.opened(f"a long<|im_end|>\n<|im_start|>user\n{question(4)}")
    assert stats.reread_tokens == 0
    conversation.check_state()


def test_an_error_in_the_middle_of_a_step(
    conversation: Conversation, hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        conversation.turn(question(n), answer(n))
    boundary = conversation.engine.snapshots.lengths[-1]
    with monkeypatch.context() as patch:
        patch.setattr(conversation.model, "_model", _breaking(hybrid))
        with pytest.raises(RuntimeError, match="the card is gone"):
            list(conversation.start(question(3), answer(3)))
    assert len(conversation.engine.ids) == boundary
    assert conversation.engine.cache.is_at(boundary)
    stats = conversation.turn(question(3), answer(3))
    assert (stats.cached_tokens, stats.reread_tokens) == (boundary, 0)
    conversation.check_state()


def _breaking(model: Any) -> Any:
    """`model`, whose forward fails when all its states have been changed."""

    class Breaking:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def layer_by_layer(self, *arguments: Any) -> Iterator[torch.Tensor]:
            yield from model.layer_by_layer(*arguments)
            raise RuntimeError("the card is gone")

    return Breaking()


def test_without_room_for_snapshots_everything_is_read_again_and_said(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation.engine.snapshots, "_capacity", 0)
    conversation.turn(question(0), answer(0))
    first = len(conversation.prefilled) - 2  # up to the thought's opening
    stats = conversation.turn(question(1), answer(1))
    assert (stats.cached_tokens, stats.reread_tokens) == (0, first)
    conversation.check_state()


def test_an_interrupted_reply_goes_on_without_reading_again(conversation: Conversation) -> None:
    for n in range(3):
        conversation.turn(question(n), answer(n))
    chunks, text = conversation.start(question(3), "a long answer"), ""
    while text != "a long":
        chunk = next(chunks)
        text += chunk.text if chunk.kind == "answer" else ""
    chunks.close()  # type: ignore[attr-defined]
    held = len(conversation.engine.ids)
    conversation.engine.script.appendleft(conversation.tokenizer.encode_text(" ")[0])  # was drawn, is drawn again
    conversation.model.received.clear()
    *_, end = conversation.chat.resume()
    assert (end.stats.cached_tokens, end.stats.prefilled_tokens, end.stats.reread_tokens) == (held, 1, 0)
    assert conversation.chat.messages[-1]["reasoning_content"] == "hm"
    assert conversation.chat.messages[-1]["content"].startswith("a long")
    conversation.check_state()
    stats = conversation.turn(question(4), answer(4))
    assert stats.reread_tokens == 0
