"""Stop strings across borders, and thoughts told apart from answers."""

import itertools

import pytest

from localchat.errors import UsageError
from localchat.reply_text import ReplyText, StopStrings
from localchat.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("one END two", ["END"], "one "),
        ("aab aabaaac", ["aac"], "aab aaba"),
        ("aaaab", ["aab"], "aa"),
        ("first then", ["then", "st"], "fir"),
        ("no stop EN", ["END"], "no stop EN"),
        ("END", ["END"], ""),
        ("x\n\ny", ["\n\n"], "x"),
        ("abcabd", ["abd", "abcx"], "abc"),
        ("plain", [], "plain"),
    ],
)
def test_every_way_to_cut_a_text_gives_the_same(text: str, stops: list[str], wanted: str) -> None:
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces = [""]
        for character, cut in zip(text, [False, *cuts], strict=True):
            pieces = [*pieces, character] if cut else [*pieces[:-1], pieces[-1] + character]
        stop = StopStrings(stops)
        assert "".join(stop.push(piece) for piece in pieces) + stop.flush() == wanted
        assert stop.stopped == any(s in text for s in stops)


def test_only_a_possible_start_is_held_back() -> None:
    stop = StopStrings(["END"])
    assert [stop.push(piece) for piece in ("a", "E", "N", "x", "E")] == ["a", "", "", "ENx", ""]
    assert stop.flush() == "E"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["x", ""])


def run(tokenizer: Tokenizer, reply: str, prompt: str = "", stop: tuple[str, ...] = ()) -> ReplyText:
    """Feed a whole reply; the pieces must add up to the message."""
    text = ReplyText(tokenizer, tokenizer.encode_text(prompt), stop)
    pieces = [text.push(i) for i in tokenizer.encode_text(reply)] + [text.flush()]
    for kind, key in (("answer", "content"), ("thought", "reasoning_content")):
        assert "".join(piece for k, piece in pieces if k == kind) == text.message().get(key, "")
    return text


@pytest.mark.parametrize(
    ("prompt", "reply", "thought", "answer", "kind"),
    [
        ("", "plain\n", "", "plain\n", "answer"),
        ("", " kept", "", " kept", "answer"),
        ("", "<think>\nhm\n</think>\n\n yes\n", "hm\n", "yes\n", "answer"),
        ("<think>\n", "hm</think>\n\nyes", "hm", "yes", "answer"),
        ("<think>\n\n</think>\n\n", "yes", "", "yes", "answer"),
        ("<think>old</think>x<think>", "\nhm", "hm", "", "thought"),
        ("", "<think></think> \t\n", "", "", "answer"),
        ("", "a<think>b</think> c", "b", "ac", "answer"),
        ("", "é<think>😀", "😀", "é", "thought"),
    ],
)
def test_thought_and_answer(
    tiny_tokenizer: Tokenizer, prompt: str, reply: str, thought: str, answer: str, kind: str
) -> None:
    text = run(tiny_tokenizer, reply, prompt)
    assert text.message().get("reasoning_content", "") == thought
    assert ("reasoning_content" in text.message()) == bool(thought)
    assert text.message()["content"] == answer
    assert text.kind == kind
    assert text.empty == (not thought + answer)


def test_a_model_without_thinking_tokens(tiny_tokenizer: Tokenizer) -> None:
    del tiny_tokenizer.added_tokens["<think>"], tiny_tokenizer.added_tokens["</think>"]
    assert run(tiny_tokenizer, "<think>hm</think> x").message()["content"] == "<think>hm</think> x"


def test_stop_strings_end_answers_only(tiny_tokenizer: Tokenizer) -> None:
    text = run(tiny_tokenizer, "<think>a END b</think>c END d", stop=("END",))
    assert text.message() == {"role": "assistant", "content": "c ", "reasoning_content": "a END b"}
    assert text.stopped


def test_what_is_held_back_comes_before_a_thought(tiny_tokenizer: Tokenizer) -> None:
    text = run(tiny_tokenizer, "x EN<think>D", stop=("END",))
    assert text.message() == {"role": "assistant", "content": "x EN", "reasoning_content": "D"}
    assert not text.stopped
