"""Which turns could go when the context is full, and when that is said."""

from typing import Any

import pytest

from localchat.chat import Chat
from localchat.context_room import FillNotice, offer
from localchat.sampling import Sampling

NOTHING: Any = None


class Counting(Chat):
    """A chat whose every message has as many tokens as it has characters, in a context of 100."""

    def __init__(self, *texts: str) -> None:
        super().__init__(NOTHING, NOTHING, NOTHING, Sampling())
        self.engine = type("Sized", (), {"max_length": 100})()  # type: ignore[assignment]
        for n, text in enumerate(texts):
            self.messages.append({"role": "assistant" if n % 2 else "user", "content": text})

    def tokens(self, asked: str | None = None, *, without: int = 0) -> int:
        return sum(len(message["content"]) for message in self.messages[2 * without :]) + len(asked or "")


def test_the_fewest_that_leave_room_are_offered() -> None:
    chat = Counting("a" * 10, "b" * 10, "c" * 10, "d" * 30, "e" * 10, "f" * 20)
    found = offer(chat, "g" * 20)
    assert found is not None
    assert found.turns == (("a" * 10, 20), ("c" * 10, 40))  # one would do, but leave no room to speak of
    assert (found.before, found.after, found.size) == (110, 50, 100)
    assert "dropping the 2 oldest turns:\n  'aaaaaaaaaa': 20 tokens\n  'cccccccccc': 40 tokens\n50 tokens" in str(found)


def test_as_little_room_as_there_is_will_do() -> None:
    found = offer(Counting("a" * 10, "b" * 10), "g" * 90)
    assert found is not None
    assert (found.turns, found.after) == ((("a" * 10, 20),), 90)


@pytest.mark.parametrize(
    ("texts", "asked"),
    [((), "g" * 100), (("a", "b"), "g" * 100), (("a" * 50, "b" * 60), None), (("a", "b", "c" * 50, "d" * 60), None)],
)
def test_what_dropping_cannot_help(texts: tuple[str, ...], asked: str | None) -> None:
    assert offer(Counting(*texts), asked) is None


def test_the_turn_of_an_answer_that_goes_on_stays() -> None:
    found = offer(Counting("a" * 30, "b" * 30, "c" * 20, "d" * 21), None)
    assert found is not None
    assert (len(found.turns), found.after) == (1, 41)


def test_a_long_message_with_escapes_is_shown_as_one_safe_line() -> None:
    found = offer(Counting("x\x1b[1m\n" + "y" * 100, "b"), "g" * 50)
    assert found is not None
    ((text, _),) = found.turns
    assert len(text) == 50
    assert text.startswith("x^[[1m yyy")


def test_the_notice_comes_once_each_time() -> None:
    notice = FillNotice()
    assert notice.after(79, 100) == ""
    assert notice.after(80, 100).startswith("the context is 80 % full (80 of 100 tokens)")
    assert notice.after(95, 100) == ""
    assert notice.after(20, 100) == ""
    assert notice.after(99, 100)
    assert FillNotice().after(0, 0) == ""
