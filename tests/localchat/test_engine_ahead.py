"""On a card the step that takes an id begins before the host knows the id: same replies, and `ids` is what is so."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.chat import Chat
from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.kernels.sampling import SEEN_IN_CONTEXT, SEEN_IN_REPLY
from localchat.sampling import Sampling
from localchat.template import ChatTemplate
from localchat.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0.0)
PROMPT = [(7 * i + i * i // 3) % 260 for i in range(60)]
SETTINGS = [GREEDY, Sampling(seed=3), Sampling(temperature=0.0, presence_penalty=3.0, repetition_penalty=1.3)]


class EagerCard:
    """In place of DecodeGraph, without a card: a launched step runs at once, and its id can be had later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._drawn = -1
        self._unread: deque[int] = deque()
        self.hidden: torch.Tensor | None = None
        self.tokens: list[int] = []

    def capture(self) -> None:
        """Nothing to record."""

    def forget(self) -> None:
        self._unread.clear()

    def draw(self, hidden: torch.Tensor, sampling: Sampling, position: int) -> int:
        engine = self._engine
        logits = engine.model.logits(hidden)[0, : engine.vocab_size]
        self._drawn = int(engine.model.ops.sample(logits, engine._seen, sampling, position))
        return self._drawn

    def launch(self, token: int | None, position: int, sampling: Sampling) -> None:
        assert len(self._unread) < 2
        engine, taken = self._engine, self._drawn if token is None else token
        engine._seen[taken] |= SEEN_IN_CONTEXT | SEEN_IN_REPLY
        self.tokens.append(taken)
        self.hidden = engine.model(torch.tensor([taken]), torch.tensor([position]), engine.cache)
        self._unread.append(self.draw(self.hidden, sampling, position + 1))

    def finish(self) -> int:
        return self._unread.popleft()


def on_a_card(engine: Engine, monkeypatch: Any) -> EagerCard:
    """Let `engine` take the way that it takes on a card."""

    class Event:
        def record(self) -> None: ...
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...
        def elapsed_time(self, end_event: Any) -> float:
            return 1.0

    monkeypatch.setattr("localchat.engine._timed_event", Event)
    card = EagerCard(engine)
    engine._graph = card  # type: ignore[assignment]
    return card


def engine_after(hybrid: Any, monkeypatch: Any = None, *, length: int = 300) -> Engine:
    engine = Engine(hybrid, length)
    if monkeypatch is not None:
        on_a_card(engine, monkeypatch)
    list(engine.prefill(PROMPT, snapshot_at=50))
    return engine


def same_state(a: Engine, b: Engine) -> bool:
    used = a.cache.length
    rows = zip(a.cache.rows, b.cache.rows, strict=True)
    return (
        a.ids == b.ids
        and a.cache.is_at(len(a.ids))
        and b.cache.is_at(len(b.ids))
        and all(torch.equal(x, y) for x, y in zip(a.cache.recurrent, b.cache.recurrent, strict=True))
        and all(torch.equal(x[:, :, :used], y[:, :, :used]) for x, y in rows)
    )


@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "seed", "penalties"])
def test_the_reply_is_the_same(hybrid: Any, monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    plain, ahead = engine_after(hybrid), engine_after(hybrid, monkeypatch)
    assert list(ahead.generate(sampling, (), 30)) == list(plain.generate(sampling, (), 30))
    assert same_state(ahead, plain)
    assert ahead.tokens_forwarded == plain.tokens_forwarded == 60 + 29


def test_it_ends_when_the_cache_is_full(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_after(hybrid, monkeypatch, length=64)
    assert len(list(engine.generate(GREEDY, (), 99))) == 5
    assert engine.cache.length == len(engine.ids) == 64
    assert len(list(engine_after(hybrid, monkeypatch, length=60).generate(GREEDY, (), 99))) == 1


def test_a_stop_id_was_read_when_it_is_known(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list(engine_after(hybrid).generate(GREEDY, (), 12))
    at = said.index(said[6]) + 1
    engine = engine_after(hybrid, monkeypatch)
    assert list(engine.generate(GREEDY, {said[6]}, 12)) == said[:at]
    assert engine.ids == PROMPT + said[:at]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_closed_anywhere_it_goes_on_from_there(hybrid: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    said = list(engine_after(hybrid).generate(GREEDY, (), 20))
    engine = engine_after(hybrid, monkeypatch)
    replies = engine.generate(GREEDY, (), 20)
    assert [next(replies) for _ in range(count)] == said[:count]
    replies.close()
    assert engine.ids == PROMPT + said[:count]
    assert engine.cache.is_at(60 + count)
    assert engine.ready
    assert list(engine.generate(GREEDY, (), 20 - count, replied=count)) == said[count:]
    forwarded = engine.tokens_forwarded
    assert engine.rewind(70) == 50
    assert not engine.ready
    list(engine.prefill(PROMPT[50:]))
    assert list(engine.generate(GREEDY, (), 20)) == said
    assert engine.tokens_forwarded == forwarded + 10 + 19


def test_an_interruption_between_launch_and_id_heals(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list(engine_after(hybrid).generate(GREEDY, (), 20))
    engine = engine_after(hybrid, monkeypatch)
    card: Any = engine._graph
    replies = engine.generate(GREEDY, (), 20)
    assert [next(replies) for _ in range(5)] == said[:5]

    def interrupted() -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(card, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(replies)
    assert engine.ids == PROMPT[:50]  # its states were ahead of what the host knew
    assert engine.cache.is_at(50)
    list(engine.prefill(PROMPT[50:]))
    assert list(engine.generate(GREEDY, (), 20)) == said


@pytest.fixture
def chats(scripted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Chat]]:
    """chats("says", ...): the same chat twice, the second as on a card."""

    def make(*says: Any, loop: bool = False, **options: Any) -> list[Chat]:
        folder = scripted(*says, loop=loop)
        tokenizer = Tokenizer.load(folder)
        model = load_model(folder, "cpu")
        engines = [Engine(model, 300, vocab_size=tokenizer.vocab_size) for _ in range(2)]
        on_a_card(engines[1], monkeypatch)
        template = ChatTemplate.load(folder, tokenizer)
        return [Chat(engine, tokenizer, template, GREEDY, **options) for engine in engines]

    return make


def text_of(chunks: Any, letters: int = 10_000) -> str:
    """What a reply says, stopped behind so many letters."""
    text = ""
    for chunk in chunks:
        text += chunk.text
        if len(text) >= letters:
            break
    chunks.close()
    return text


def test_an_interrupted_answer_goes_on_and_nothing_is_read_twice(chats: Callable[..., list[Chat]]) -> None:
    _, chat = chats("abcdefgh", loop=True, max_tokens=30)
    assert text_of(chat.reply("q"), 5) == "abcde"
    forwarded = chat.engine.tokens_forwarded
    chunks = list(chat.resume())
    assert chat.messages[1]["content"] == ("abcdefgh" * 9)[:35]
    assert chunks[-1].stats.prefilled_tokens == 0
    assert chat.engine.tokens_forwarded - forwarded == 29


def test_two_turns_and_a_retry(chats: Callable[..., list[Chat]]) -> None:
    plain, card = chats("<think>", "hm", "</think>", "yes")
    for chat in (plain, card):
        text_of(chat.reply("one"))
        text_of(chat.reply("two"))
    assert card.messages == plain.messages
    assert card.engine.ids[: len(plain.engine.ids)] == plain.engine.ids
    assert len(card.engine.ids) == len(plain.engine.ids) + 1  # the stop id
    assert card.engine.cache.is_at(len(card.engine.ids))


def test_a_thought_is_closed_behind_what_was_drawn(chats: Callable[..., list[Chat]]) -> None:
    both = chats("<think>", "abcdefgh", loop=True, think_budget=4, max_tokens=12)
    texts = [text_of(chat.reply("q")) for chat in both]
    assert texts[0] == texts[1]
    plain, card = (chat.tokenizer.decode(chat.engine.ids) for chat in both)
    assert plain == card
    assert card.count("</think>") == 1
