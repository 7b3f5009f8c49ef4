"""An answer that was stopped goes on as if nothing had happened, and no more is read than the cache lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat.chat import Chat
from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.errors import InputTooLong, UsageError
from localchat.open_answer import answer_ids
from localchat.sampling import Sampling
from localchat.template import ChatTemplate
from localchat.tokenizer import Tokenizer

LETTERS = "abcdefgh"


@pytest.fixture
def open_chat(scripted: Callable[..., Path]) -> Callable[..., Chat]:
    """open_chat("abc", loop=True, context=200): a chat over the real engine with a scripted model."""

    def make(*says: Any, loop: bool = False, context: int = 300, **options: Any) -> Chat:
        folder = scripted(*says, loop=loop)
        tokenizer = Tokenizer.load(folder)
        engine = Engine(load_model(folder, "cpu"), context, vocab_size=tokenizer.vocab_size)
        sampling = options.pop("sampling", Sampling(temperature=0))
        return Chat(engine, tokenizer, ChatTemplate.load(folder, tokenizer), sampling, **options)

    return make


def drain(chunks: Any, letters: int = 10_000) -> tuple[str, Any]:
    """The text of a reply and its last chunk; the reply is stopped behind so many letters."""
    text, last = "", None
    for last in chunks:
        text += last.text
        if len(text) >= letters:
            break
    chunks.close()
    return text, last


@pytest.mark.parametrize("letters", [1, 5, 20])
def test_an_interrupted_answer_goes_on_from_the_same_state(open_chat: Callable[..., Chat], letters: int) -> None:
    chat = open_chat(LETTERS, loop=True, max_tokens=30)
    whole, _ = drain(open_chat(LETTERS, loop=True, max_tokens=letters + 30).reply("q"))
    first, _ = drain(chat.reply("q"), letters)
    assert chat.messages[1] == {"role": "assistant", "content": first, "interrupted": True}
    forwarded = chat.engine.tokens_forwarded
    rest, end = drain(chat.resume())
    assert first + rest == whole
    assert chat.messages[1] == {"role": "assistant", "content": whole, "ended": "length"}
    assert len(chat.messages) == 2
    assert (end.stats.prefilled_tokens, end.stats.reread_tokens) == (1, 0)  # the id that was drawn, but not read
    assert chat.engine.tokens_forwarded - forwarded == 1 + 29


def test_what_was_said_counts_as_said(open_chat: Callable[..., Chat]) -> None:
    """The loop's second round is penalised away, in one reply or in two."""
    options = {"loop": True, "sampling": Sampling(temperature=0, presence_penalty=100)}
    whole, _ = drain(open_chat(LETTERS, max_tokens=14, **options).reply("q"))
    assert whole == LETTERS + "\0"
    chat = open_chat(LETTERS, max_tokens=7, **options)
    drain(chat.reply("q"))
    drain(chat.resume())
    assert chat.messages[1]["content"] == whole


def test_one_that_reached_a_limit_goes_on_twice_and_may_end(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat("<think>", "hmz", "</think>", "yes é", max_tokens=2)
    texts = [drain(chat.reply("q"))[0]]
    while chat.messages[-1].get("ended"):
        texts.append(drain(chat.resume())[0])
        assert chat.messages[-1].get("reasoning_content", "") in "hmz"
    assert "".join(texts).replace("\ufffd", "") == "hmzyes é"
    assert chat.messages[1] == {"role": "assistant", "content": "yes é", "reasoning_content": "hmz"}
    assert drain(chat.reply("again"))[0]
    assert "ended" not in chat.tokenizer.decode(chat.engine.ids)


def test_a_loaded_answer_goes_on_from_its_text(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(LETTERS, loop=True, max_tokens=10)
    drain(chat.reply("q"))
    loaded = open_chat(LETTERS, loop=True, max_tokens=10)
    loaded.messages += [dict(message) for message in chat.messages]
    assert loaded.tokens() == len(chat.engine.ids) + 1
    text, end = drain(loaded.resume())
    assert loaded.messages[1]["content"] == ((LETTERS * 3)[:20])
    assert text == (LETTERS * 3)[10:20]
    assert end.stats.prefilled_tokens == end.stats.prompt_tokens
    loaded.messages[1] = dict(loaded.messages[1])  # another message than the one that was just drawn
    assert drain(loaded.resume())[0] == (LETTERS * 4)[20:30]


def test_stopping_before_anything_new_keeps_the_answer(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(LETTERS, loop=True, max_tokens=5)
    drain(chat.reply("q"))
    before = dict(chat.messages[1])
    chunks = chat.resume()
    assert next(chunks).kind == "prefill"
    chunks.close()  # type: ignore[attr-defined]
    assert chat.messages[1:] == [before]
    assert drain(chat.resume())[0] == "fghab"


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "q"}]])
def test_without_an_answer(open_chat: Callable[..., Chat], messages: list[dict[str, str]]) -> None:
    chat = open_chat("abc")
    chat.messages += messages
    with pytest.raises(UsageError, match="no answer"):
        next(chat.resume())


def test_a_complete_answer_and_a_full_context(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat("abc")
    drain(chat.reply("q"))
    with pytest.raises(UsageError, match="complete"):
        next(chat.resume())
    chat = open_chat(LETTERS, loop=True, context=60)
    _, end = drain(chat.reply("q"))
    assert (end.finish_reason, chat.messages[1]["ended"]) == ("context", "context")
    before = dict(chat.messages[1])
    with pytest.raises(InputTooLong, match=r"has 61 tokens and the context holds 60"):
        next(chat.resume())
    assert chat.messages[1] == before


def test_dropping_keeps_the_system_prompt_and_the_newest(open_chat: Callable[..., Chat]) -> None:
    chat = open_chat("abc", system="S")
    for text in ("one", "two", "three"):
        drain(chat.reply(text))
    lengths = [chat.tokens("four", without=turns) for turns in range(5)]
    assert lengths[0] > lengths[1] > lengths[2] > lengths[3] == lengths[4]
    chat.drop(2)
    assert [m["content"] for m in chat.messages] == ["three", "abc"]
    _, end = drain(chat.reply("four"))
    assert end.stats.prompt_tokens == lengths[2]
    assert chat.tokenizer.decode(chat.engine.ids).startswith("system\nSuser\nthree")


@pytest.mark.parametrize(
    ("opened", "message", "text"),
    [
        (False, {"content": "x<|im_end|>"}, "x<|im_end|>"),
        (False, {"content": "y", "reasoning_content": "h"}, "<think>\nh</think>\n\ny"),
        (False, {"content": "", "reasoning_content": "h"}, "<think>\nh"),
        (True, {"content": "", "reasoning_content": "h"}, "h"),
        (True, {"content": "y", "reasoning_content": "h"}, "h</think>\n\ny"),
    ],
)
def test_the_ids_of_an_answer(tiny_tokenizer: Tokenizer, opened: bool, message: dict[str, str], text: str) -> None:
    prompt = tiny_tokenizer.encode_text("a<think>" if opened else "a<think>b</think>")
    ids = answer_ids(tiny_tokenizer, prompt, message)
    assert "".join(tiny_tokenizer._backend.decode([i], skip_special_tokens=False) for i in ids) == text
    assert (2 in ids) is False  # what looks like a control token stays text
