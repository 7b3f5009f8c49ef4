"""Keys while a reply is made, in a pseudo-terminal: stopping, folding, answering now, suspending, resizing."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyte
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
Scripted = Callable[..., Path]
ESCAPE, CTRL_C, CTRL_L, CTRL_N, CTRL_T, CTRL_Z = "\x1b", "\x03", "\x0c", "\x0e", "\x14", "\x1a"
LOOP = ("abcdefghij",)


def at_prompt(text: str) -> bool:
    return text.endswith(">>>")


@pytest.fixture
def chat(terminal: Callable[..., Any], scripted: Scripted) -> Callable[..., Any]:
    """chat("Hello"): the chat with a model that says this, at its first prompt."""

    def start(*says: str, flags: tuple[str, ...] = (), loop: bool = False, **more: Any) -> Any:
        window = terminal("run", scripted(*says, loop=loop), *flags, **more)
        window.wait_for(at_prompt)
        return window

    return start


@pytest.fixture
def endless(chat: Callable[..., Any]) -> Callable[..., Any]:
    """A chat in which a reply runs that does not end by itself."""

    def start(*says: str, **more: Any) -> Any:
        window = chat(*(says or LOOP), loop=True, flags=("-c", "60000"), **more)
        window.send("hi\r")
        window.wait_for(lambda text: "tok/s" in text)
        return window

    return start


@pytest.mark.parametrize("key", [ESCAPE, CTRL_C])
def test_a_key_stops_the_reply(endless: Callable[..., Any], key: str) -> None:
    window = endless()
    window.send(key)
    assert "- interrupted\n>>>" in window.wait_for(lambda text: "interrupted" in text and at_prompt(text))
    window.send("/copy\r")
    window.wait_for("copied the last answer")


def test_an_arrow_key_does_not_stop_it_and_what_is_typed_ahead_is_the_next_message(endless: Callable[..., Any]) -> None:
    window = endless()
    window.send("\x1b[A\x1b[B/show sys\x7f\x7f\x7fsystem\r")
    for _ in range(20):
        window.read(0.1)
    assert "interrupted" not in window.text
    assert "/show" not in window.text
    window.send(ESCAPE)
    window.wait_for(lambda text: text.endswith(">>> /show system"))  # a reply that was stopped sends nothing by itself
    window.send("\r")
    window.wait_for("there is no system prompt")


def test_a_paste_during_a_reply_is_one_message(endless: Callable[..., Any]) -> None:
    window = endless()
    window.send("\x1b[200~/show system\rone\x1b[201~")
    for _ in range(5):
        window.read(0.1)
    window.send(ESCAPE)
    window.wait_for(lambda text: text.endswith(">>> /show system\n... one"))


def test_ctrl_l_during_a_reply(endless: Callable[..., Any]) -> None:
    window = endless()
    window.send(CTRL_L)
    window.wait_for(lambda text: text and ">>> hi" not in text)
    window.send(ESCAPE)
    window.wait_for("interrupted")


def test_thoughts_are_folded_and_shown_again(endless: Callable[..., Any]) -> None:
    window = endless("<think>", "hmz")
    window.wait_for("hmz")
    window.send(CTRL_T)
    window.wait_for(lambda text: re.search(r"thinking, [\d,]+ tokens\n[\d.]+ tok/s", text))
    window.send(ESCAPE)
    window.wait_for(lambda text: re.search(r"\nthought for \d+ s, [\d,]+ tokens\n.*interrupted\n>>>$", text))
    window.send(CTRL_T)
    assert "hmzhmzhmz" in window.wait_for("thoughts are shown\n>>>").partition("interrupted")[2]
    window.send(CTRL_T)
    window.wait_for("thoughts are folded\n>>>")


@pytest.mark.parametrize("ending", ["key", "budget"])
def test_a_thought_without_end_is_ended(terminal: Callable[..., Any], scripted: Scripted, ending: str) -> None:
    window = terminal("run", scripted("<think>", "hmz", loop=True), "-c", "60000")
    window.wait_for(at_prompt)
    if ending == "budget":
        window.send("/set think 200\r")
        window.wait_for("for at most 200 tokens\n>>>")
    window.send("hi\r")
    window.wait_for("hmzhmzhmz")
    if ending == "key":
        window.send(CTRL_N)
    screen = window.wait_for(lambda text: "tok/s" in text and at_prompt(text))
    assert "interrupted" not in screen and "inside its thought" not in screen
    if ending == "budget":
        assert " - 202 tok - " in screen  # with what opened it, and the stop token
        window.send("/stats\r")
        window.wait_for(lambda text: re.search(r"eval count: +202 token", text))


@pytest.mark.parametrize("columns", [40, 200])
def test_a_resize_during_a_reply_loses_and_repeats_nothing(endless: Callable[..., Any], columns: int) -> None:
    window = endless("abcdefg ")
    window.wait_for("abcdefg\nabcdefg")
    window.process.setwinsize(24, columns)
    for _ in range(15):
        window.read(0.1)
    window.send(ESCAPE)
    window.wait_for(lambda text: "interrupted" in text.replace("\n", ""))
    screen = pyte.Screen(220, 2000)  # what was drawn needs no other width than its own
    pyte.ByteStream(screen).feed(window.raw)
    rows = [line.rstrip() for line in screen.display]
    reply = rows[rows.index(">>> hi") + 1 :]
    end = next(n for n, row in enumerate(reply) if " tok/s" in row)
    said = " ".join(reply[:end])
    assert said == ("abcdefg " * len(said))[: len(said)]
    (tokens,) = re.findall(r" ([\d,]+) tok ", reply[end]) or ["1"]
    assert columns == 40 or abs(len(said) - int(tokens.replace(",", ""))) <= 1  # a blank at the end
    assert len(reply[end - 2]) == columns - 1


def test_suspended_and_resumed(terminal: Callable[..., Any], scripted: Scripted) -> None:
    window = terminal(program=["bash", "--norc", "-i"], PS1="$ ", rows=60)
    window.send(f"{sys.executable} -m localchat run {scripted(*LOOP, loop=True)} -c 60000\r")
    window.wait_for(at_prompt)
    for keys in ("hi\r", ""):
        window.send(keys)
        if keys:
            window.wait_for("tok/s")
        window.send(CTRL_Z)
        window.wait_for(lambda text: "Stopped" in text and text.endswith("$"))
        assert window.raw.rfind(b"\x1b[?25l") < window.raw.rfind(b"\x1b[?25h")
        window.send("stty -a | grep -ow '.\\?echo'; stty -a | grep -ow '.\\?icanon'\r")
        window.wait_for(lambda text: re.search(r"\necho\nicanon\n", text.rpartition("Stopped")[2]))
        window.send("clear; fg\r")
        if keys:
            window.wait_for(lambda text: "abcdefghij" in text and "tok/s" in text)
            window.send(CTRL_C)
            window.wait_for(lambda text: "interrupted" in text and at_prompt(text))
    window.send("\x04")
    window.wait_for(lambda text: text.endswith("$"))


def test_a_piped_prompt_can_be_suspended_too(terminal: Callable[..., Any], scripted: Scripted) -> None:
    window = terminal(program=["bash", "--norc", "-i"], PS1="$ ", rows=60)
    window.send(f"echo hi | {sys.executable} -m localchat run {scripted(*LOOP, loop=True)} -c 60000\r")
    window.wait_for(" tok/s")
    window.send(CTRL_Z)
    window.wait_for(lambda text: "Stopped" in text and text.endswith("$"))
    assert window.raw.rfind(b"\x1b[?25l") < window.raw.rfind(b"\x1b[?25h")
    window.send("clear; fg\r")
    window.wait_for(lambda text: "abcdefghij" in text and " tok/s" in text)
    window.send(CTRL_C)
    window.wait_for(lambda text: "interrupted" in text and text.endswith("$"))
