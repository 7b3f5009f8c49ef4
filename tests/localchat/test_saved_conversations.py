"""Saved conversations as a person meets them: killed and continued, two at a time, named, listed, and full."""

import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
Scripted = Callable[..., Path]
CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def chat(terminal: Callable[..., Any]) -> Callable[..., Any]:
    """chat(MODEL, "-C"): the chat at its first prompt."""

    def start(model: Path, *flags: str, **more: Any) -> Any:
        window = terminal("run", model, *flags, rows=50, columns=110, **more)
        window.wait_for(lambda text: re.search(r"^>>>", text, re.MULTILINE) is not None)
        return window

    return start


def say(window: Any, text: str) -> str:
    """Send one line, and return what came of it when the next prompt is there."""
    before, seen = window.text.count(">>>"), len(window.text)
    window.send(text + "\r")
    screen: str = window.wait_for(lambda text: text.count(">>>") > before and text.splitlines()[-1].startswith(">>>"))
    return screen[seen:]


def files(home: Path) -> list[Path]:
    return sorted((home / ".local/state/localchat/conversations").glob("*"))


def test_killed_in_the_middle_of_a_reply_and_continued(
    chat: Callable[..., Any], scripted: Scripted, _private_home: Path
) -> None:
    model = scripted("abcdefghij", loop=True)
    window = chat(model, "-n", "12", "--temp", "0.25", "-s", "Be brief.")
    say(window, "first")
    say(window, "/set max_tokens -1")
    window.send("second\r")
    (path,) = files(_private_home)
    window.wait_for(lambda text: text.count("abcdefghij") > 3)
    end = time.monotonic() + 30
    while '"answer"' not in path.read_text():
        assert time.monotonic() < end
        window.read(0.1)
    os.kill(window.process.pid, signal.SIGKILL)
    window.end()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("a") as file:
        file.write('{"answer": "cut o')
    window = chat(model, "-C", "-n", "10")
    match = re.search(rf"continues {path.stem}: 2 turns, held with tiny; ([\d,]+) tokens are read again", window.text)
    assert match
    assert "the last line of its file was cut off" in window.text
    assert "its last answer is not finished: /continue goes on with it" in window.text
    read_again = int(match[1].replace(",", ""))
    screen = say(window, "/continue")
    assert f"/{read_again:,}" not in screen  # nothing was cached
    assert re.search(r"[a-j]{10}\n", screen)
    assert re.search(r"- 10 tok -", screen)
    assert re.search(r"temperature +0.25", say(window, "/set"))
    assert "Be brief." in say(window, "/show system")
    window.send(CTRL_D)
    assert window.end() == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    answer = lines[-1]["add"][-1]
    assert answer["ended"] == "length"
    assert answer["content"] == ("abcdefghij" * (len(answer["content"]) // 10 + 1))[: len(answer["content"])]


def test_sigterm_in_the_middle_of_a_reply_keeps_what_was_said(
    chat: Callable[..., Any], scripted: Scripted, _private_home: Path
) -> None:
    window = chat(scripted("abcdefghij", loop=True))
    window.send("hi\r")
    window.wait_for("abcdefghij")
    os.kill(window.process.pid, signal.SIGTERM)
    assert window.end() == 143
    (path,) = files(_private_home)
    answer = json.loads(path.read_text().splitlines()[-1])["add"][-1]
    assert answer["interrupted"] is True
    assert answer["content"].startswith("abcdefghij")


def test_a_message_that_was_not_answered_is_on_the_line_again(
    chat: Callable[..., Any], scripted: Scripted, _private_home: Path
) -> None:
    model = scripted("abc")
    window = chat(model, "--session", "mine")
    say(window, "one")
    os.kill(window.process.pid, signal.SIGKILL)
    window.end()
    (path,) = files(_private_home)
    begin = {"at": "2026-01-01T00:00:00+00:00", "keep": 2, "begin": {"role": "user", "content": "/two"}}
    with path.open("a") as file:
        file.write(json.dumps(begin) + "\n")
    window = chat(model, "-C")
    window.wait_for(lambda text: text.endswith(">>> //two"))
    assert "its last message was not answered" in window.text
    assert "\nabc\n" in say(window, "")


def test_changes_of_the_past_are_in_the_file(
    chat: Callable[..., Any], scripted: Scripted, command: Callable[..., Any]
) -> None:
    window = chat(scripted("abc"), "--session", "mine")

    def texts() -> list[str]:
        shown = json.loads(command("sessions", "show", "mine", "--json").stdout)
        return [message["content"] for message in shown["messages"]]

    say(window, "one")
    say(window, "two")
    assert texts() == ["one", "abc", "two", "abc"]
    say(window, "/undo")
    assert texts() == ["one", "abc"]
    say(window, "/retry")
    assert texts() == ["one", "abc"]
    window.send("/edit\r")
    window.wait_for(lambda text: text.endswith(">>> one"))
    window.send(CTRL_C)
    window.wait_for(lambda text: text.endswith(">>>"))
    assert texts() == ["one", "abc"]  # never mind
    say(window, "two")
    assert texts() == ["one", "abc", "two", "abc"]
    window.send("/edit\r")
    window.wait_for(lambda text: text.endswith(">>> two"))
    say(window, " more")
    assert texts() == ["one", "abc", "two more", "abc"]
    say(window, "/undo")
    assert "nothing to continue" in say(window, "/continue")
    assert say(window, "/clear").strip().startswith("/clear\ncleared\n")
    assert texts() == []
    say(window, "new")
    assert texts() == ["new", "abc"]


def test_names_and_the_list(chat: Callable[..., Any], scripted: Scripted, _private_home: Path) -> None:
    model = scripted("abc")
    window = chat(model, "--temp", "0.5")
    assert "nothing was said yet" in say(window, "/save")
    say(window, "one")
    assert "saved as mine" in say(window, "/save mine")
    say(window, "/set temp 0.75")
    assert "cannot name a conversation" in say(window, "/save ../mine")
    assert "goes on as other; mine stays as it is" in say(window, "/save other")
    say(window, "two")
    screen = say(window, "/sessions")
    assert re.search(r"^\* other  20\d\d-\d\d-\d\d \d\d:\d\d +2 turns  tiny +one$", screen, re.MULTILINE)
    assert re.search(r"^  mine   .* 1 turn  tiny +one$", screen, re.MULTILINE)
    assert "there is no saved conversation 'minne'" in say(window, "/load minne")
    screen = say(window, "/load mine")
    assert re.search(r"continues mine: 1 turn, held with tiny; \d+ tokens are read again", screen)
    assert re.search(r"temperature +0.5\b", say(window, "/set"))  # the flag has precedence over what was set there
    assert "cleared" in say(window, "/clear")
    assert [path.name for path in files(_private_home)] == ["mine.jsonl", "other.jsonl"]


def test_clearing_begins_another_and_the_first_stays(
    chat: Callable[..., Any], scripted: Scripted, _private_home: Path
) -> None:
    window = chat(scripted("abc"), "-s", "S")
    say(window, "one")
    (first,) = files(_private_home)
    assert f"cleared; {first.stem} stays saved" in say(window, "/clear")
    say(window, "two")
    assert "S" in say(window, "/show system")
    assert len(files(_private_home)) == 2
    assert "two" not in first.read_text()


def test_two_processes(
    chat: Callable[..., Any], scripted: Scripted, command: Callable[..., Any], terminal: Callable[..., Any]
) -> None:
    model = scripted("abc")
    window = chat(model, "--session", "mine")
    say(window, "one")
    for flags in (("--session", "mine"), ("-C",)):
        second = command("run", model, *flags, "hello")
        assert second.returncode == 1
        assert second.stdout == b""
        assert second.stderr.decode() == (
            "localchat: error: the conversation mine is open in another process.\nclose it there first.\n"
        )
    third = command("sessions", "rm", "mine", "-y")
    assert (third.returncode, third.stdout) == (1, b"")
    assert b"open in another process" in third.stderr
    say(window, "two")
    assert json.loads(command("sessions", "--json").stdout)[0]["turns"] == 2
    window.send(CTRL_D)
    assert window.end() == 0
    assert command("run", model, "--session", "mine", "three").stdout == b"abc\n"
    assert json.loads(command("sessions", "--json").stdout)[0]["turns"] == 3
    done = command("sessions", "rm", "mine", "-y")
    assert (done.returncode, done.stderr) == (0, b"removed mine\n")
    assert command("sessions", "list").stdout == b"there are no saved conversations\n"


def test_an_answer_is_stopped_and_goes_on(chat: Callable[..., Any], scripted: Scripted, _private_home: Path) -> None:
    window = chat(scripted("abcdefghij", loop=True), "-c", "3000")
    window.send("hi\r")
    window.wait_for("abcdefghij")
    window.send(CTRL_C)
    window.wait_for(lambda text: text.endswith(">>>") and "interrupted" in text)
    (path,) = files(_private_home)
    before = json.loads(path.read_text().splitlines()[-1])["add"][-1]
    assert before["interrupted"] is True
    say(window, "/set max_tokens 15")
    screen = say(window, "/continue")
    after = json.loads(path.read_text().splitlines()[-1])
    assert (after["keep"], len(after["add"])) == (1, 1)
    grown = after["add"][0]["content"]
    assert grown.startswith(before["content"])
    assert len(grown) == len(before["content"]) + 15
    assert grown == ("abcdefghij" * 300)[: len(grown)]
    cached, prompt = (int(n.replace(",", "")) for n in re.findall(r"cached ([\d,]+)/([\d,]+)", screen)[-1])
    assert prompt - cached == 1


def test_a_full_context_is_the_user_s_choice(chat: Callable[..., Any], scripted: Scripted, _private_home: Path) -> None:
    window = chat(scripted("abc"), "-c", "200", "-s", "S")
    screen = ""
    for n in range(5):
        screen += say(window, f"question {n}")
    assert screen.count("% full") == 1
    assert re.search(r"the context is 8\d % full \(\d+ of 200 tokens\): when it is full you choose", screen)
    (path,) = files(_private_home)
    before = path.read_text()
    window.send("question " + "x" * 40 + "\ry\r")  # what is typed ahead is no answer to what nobody has read yet
    window.wait_for("drop them and go on? (y and Enter")
    counts = re.search(r"the conversation has (\d+) tokens and the context holds 200 with the answer", window.text)
    assert counts and int(counts[1]) >= 200
    assert re.search(r"by dropping the \d oldest turns:\n  'question 0': \d+ tokens\n  'question 1': ", window.text)
    window.send("n\r")
    window.wait_for("nothing was dropped, the message is on the line again")
    window.wait_for(lambda text: text.endswith(">>> question " + "x" * 40))
    assert path.read_text() == before
    window.send("\r")
    window.wait_for(lambda text: text.count("(y and Enter") == 2)
    window.send("y\r")
    window.wait_for(lambda text: text.endswith(">>>") and text.count("tok/s") + text.count("ttft") > 5)
    last = json.loads(path.read_text().splitlines()[-1])
    assert [message["content"] for message in last["add"]] == ["question " + "x" * 40, "abc"]
    assert "S" in say(window, "/show system")


def test_an_answer_at_the_end_of_the_context(chat: Callable[..., Any], scripted: Scripted) -> None:
    window = chat(scripted("abcdefghij", loop=True), "-c", "400", "-n", "20")
    say(window, "first question")
    say(window, "/set max_tokens -1")
    window.send("second\r")
    window.wait_for("drop them and go on? (y and Enter")
    assert "'first question': " in window.text
    assert "the context is full" in window.text
    window.send("y\r")
    window.wait_for("the context is full, and there is no older turn to drop: /clear begins anew\n>>>")
    assert "nothing to continue" not in window.text


def test_one_answer_in_a_conversation(command: Callable[..., Any], scripted: Scripted) -> None:
    model = scripted("abc")
    assert command("run", model, "hello").returncode == 0
    assert json.loads(command("sessions", "--json").stdout) == []  # an answer alone is not kept
    nothing = command("run", model, "-C", "more")
    assert nothing.returncode == 2
    assert b"there is no saved conversation to continue" in nothing.stderr
    assert command("run", model, "--session", "mine", "hello", "-s", "S").stdout == b"abc\n"
    assert command("run", model, "-C", stdin=b"more").stdout == b"abc\n"
    shown = json.loads(command("sessions", "show", "mine", "--json").stdout)
    assert [m["content"] for m in shown["messages"]] == ["hello", "abc", "more", "abc"]
    assert shown["settings"]["system"] == "S"
    unnamed = command("run", model, "--session", "", "x")
    assert (unnamed.returncode, unnamed.stdout) == (2, b"")
    assert b"'' cannot name a conversation: take letters" in unnamed.stderr
    both = command("run", model, "-C", "--session", "mine", "x")
    assert both.returncode == 2
    long = command("run", model, "-C", "-c", "64", "x" * 100)
    assert (long.returncode, long.stdout) == (5, b"")
    assert re.search(rb"has \d+ tokens and the context holds 64 ", long.stderr)
    exported = command("sessions", "export", "mine").stdout.decode()
    assert exported.startswith("# mine\n\ntiny, 20")
    assert "## System\n\nS\n\n## User\n\nhello\n\n## Assistant\n\nabc\n" in exported
    assert json.loads(command("sessions", "export", "mine", "--json").stdout) == shown


def test_where_nothing_can_be_saved_it_is_said_once(chat: Callable[..., Any], scripted: Scripted) -> None:
    window = chat(scripted("abc"), XDG_STATE_HOME="/dev/null/x")
    assert "\nabc\n" in say(window, "one")
    assert "\nabc\n" in say(window, "two")
    assert window.text.count("the conversation cannot be saved at the moment") == 1
    assert "set XDG_STATE_HOME" in window.text.replace("\n", "")
