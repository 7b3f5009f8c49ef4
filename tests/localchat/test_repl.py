"""The chat in a pseudo-terminal: files, the clipboard, other models, unusual terminals, and every way out."""

import base64
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
Scripted = Callable[..., Path]
CTRL_C, CTRL_D = "\x03", "\x04"


def at_prompt(text: str) -> bool:
    return text.endswith(">>>")


def prompts(count: int) -> Callable[[str], bool]:
    return lambda text: text.count(">>>") == count and at_prompt(text)


@pytest.fixture
def chat(terminal: Callable[..., Any], scripted: Scripted) -> Callable[..., Any]:
    """chat("Hello"): the chat with a model that says this, at its first prompt."""

    def start(*says: str | bytes, flags: tuple[str, ...] = (), loop: bool = False, **more: Any) -> Any:
        window = terminal("run", scripted(*says, loop=loop), *flags, **more)
        window.wait_for(at_prompt)
        return window

    return start


def test_files_go_with_a_message_and_their_tokens_are_told_before(chat: Callable[..., Any], tmp_path: Path) -> None:
    notes, binary, big = (tmp_path / name for name in ("notes.txt", "image.png", "big.txt"))
    notes.write_text("12345\n")
    binary.write_bytes(b"\0\1\2")
    big.write_text("x" * 9000)
    window = chat("abc", rows=60, columns=200)
    window.send(f"/read {notes}\r")
    window.wait_for(f"{notes}: 5 tokens\n>>> @{notes}")
    window.send(f"/read {notes}\r")
    window.wait_for(f"/read is a command where it stands first: inside a message write @{notes}")
    window.wait_for(lambda text: text.endswith(f">>> @{notes} @{notes}"))
    window.send(CTRL_C)
    window.send(f"@{notes} sum it up\r")
    screen = window.wait_for(lambda text: "abc" in text and at_prompt(text))
    assert re.search(rf">>> @{notes} sum it up\n{notes}: 5 tokens\nabc\n.* tok/s", screen)
    window.send(f"see @{binary}\r")
    window.wait_for(f"{binary} holds 1 NUL byte in 3, so it is binary or UTF-16.")
    window.wait_for(lambda text: text.endswith(f">>> see @{binary}"))
    window.send(CTRL_C)
    window.send(f"/read {big}\r")
    window.wait_for(f"{big} has 9,000 tokens and the context holds 8,192.")
    window.send("/edit\r")
    window.wait_for(lambda text: text.endswith(f">>> @{notes} sum it up"))


def test_keys_and_values_are_kept_as_int8_from_now_on(chat: Callable[..., Any]) -> None:
    window = chat("abc", rows=60, columns=160)
    window.send("one\r")
    window.wait_for(prompts(2))
    window.send("/set kv_cache int8\r")
    assert "context 8,192 in INT8" in window.wait_for(prompts(3))
    window.send("two\r")
    window.wait_for(prompts(4))
    window.send("/show parameters\r")
    screen = window.wait_for(prompts(5))
    assert screen.count("\nabc\n") == 2
    assert re.search(r"\nkv_cache +int8 +/set\n", screen)
    window.send("/show memory\r")
    assert "KV cache, 8,192 tokens, INT8" in window.wait_for(prompts(6))
    window.send("/set kv_cache bf16\r")
    assert "context 8,192 - " in window.wait_for(prompts(7)).rpartition("/set")[2]


def test_copy(chat: Callable[..., Any]) -> None:
    window = chat("abc\x1b", columns=100)
    window.send("/copy\r")
    window.wait_for("the conversation has 0 answers, so there is none to copy at 1.")
    window.send("hi\r")
    window.wait_for(prompts(3))
    window.send("/copy\r")
    window.wait_for("copied the last answer, 4 characters, if this terminal allows it (OSC 52)")
    assert b"\x1b]52;c;" + base64.b64encode(b"abc^[") + b"\x07" in window.raw
    window.send("/copy x\r")
    window.wait_for("/copy takes a number of answers back, not 'x'.")


def test_another_model_goes_on_with_the_conversation(chat: Callable[..., Any], scripted: Scripted) -> None:
    other = scripted("xyz")
    window = chat("abc", rows=60, columns=160)
    window.send("one\r")
    window.wait_for(prompts(2))
    window.send("/set top_k 3\r")
    window.wait_for(prompts(3))
    for name, sentence in (("smollm2-135n", "the model stays"), ("./absent", "./absent: there is no such file or")):
        window.send(f"/model {name}\r")
        window.wait_for(sentence)
    window.send(f"/model {other}\r")
    assert "tiny - INT4" in window.wait_for(prompts(6)).rpartition("/model")[2]
    window.send("two\r")
    screen = window.wait_for(prompts(7))
    assert screen.count("\nabc\n") == screen.count("\nxyz\n") == 1
    window.send("/set\r")
    window.wait_for("top_k              3")
    window.send("/undo 2\r")
    window.wait_for("took back 2 turns")


def test_a_model_that_cannot_be_loaded_leaves_the_old_one(
    chat: Callable[..., Any], scripted: Scripted, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(scripted("xyz"), tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{}")
    window = chat("abc", rows=60, columns=160)
    window.send(f"/model {broken}\r")
    assert "tokenizer" in window.wait_for("the model stays\n>>>")
    window.send("hi\r")
    window.wait_for("\nabc\n")


def test_ctrl_c_while_the_prompt_is_read_gives_the_text_back(chat: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 11_000)
    window = chat("abc", flags=("-c", "60000"), columns=120)
    window.send(f"@{tmp_path}/long.txt\r")
    window.wait_for(lambda text: "prefill [" in text)
    window.send(CTRL_C)
    window.wait_for(lambda text: text.endswith(f">>> @{tmp_path}/long.txt"))
    window.send(CTRL_C)
    window.wait_for(at_prompt)
    window.send("/undo\r")
    window.wait_for("there is no turn to take back")


@pytest.mark.parametrize("after", [0.15, 0.5, 1.0, 2.0])
def test_ctrl_c_while_the_model_is_loaded(terminal: Callable[..., Any], scripted: Scripted, after: float) -> None:
    window = terminal("run", scripted("abc"))
    end = time.monotonic() + after
    while time.monotonic() < end:
        window.read(0.05)
    if ">>>" in window.text:
        pytest.skip("it was loaded already")
    window.send(CTRL_C)
    started = time.monotonic()
    code = window.end()
    assert code in (130, -signal.SIGINT)  # a shell says 130 of both; Python ends by the signal where it was half way in
    assert time.monotonic() - started < 2.5
    assert "Traceback" not in window.text or after < 0.2
    assert window.raw.rfind(b"\x1b[?25l") <= window.raw.rfind(b"\x1b[?25h")


def test_wide_characters_and_emoji_split_over_tokens(chat: Callable[..., Any]) -> None:
    window = chat("漢🙂é")
    window.send("日本語 🙂\r")
    screen = window.wait_for(prompts(2))
    assert ">>>日本語🙂\n漢🙂é\n" in screen.replace(" ", "")
    assert b"\xef\xbf\xbd" not in window.raw


@pytest.mark.parametrize("variables", [{"LANG": "C"}, {"LC_ALL": "C", "LANG": "C"}, {"NO_COLOR": "1"}])
def test_terminals_with_less(chat: Callable[..., Any], variables: dict[str, str]) -> None:
    window = chat("- aé`", **variables)
    window.send("hi\r")
    screen = window.wait_for(prompts(2))
    assert re.search(r"\n[•-] aé`\n", screen)
    if "NO_COLOR" in variables:
        colours = re.compile(rb"\x1b\[[\d;]*(?:3[0-7]|38;[25];[\d;]+)m")
        assert not colours.search(window.raw.partition(b"hi")[2])
    window.send(CTRL_D)
    assert window.end() == 0


def test_a_dumb_terminal_can_chat(terminal: Callable[..., Any], scripted: Scripted) -> None:
    window = terminal("run", scripted("# a"), TERM="dumb")
    window.wait_for(at_prompt)
    window.send("hi\r")
    window.wait_for(lambda text: "\n# a\n" in text and "tok" in text and at_prompt(text))
    window.send("/copy\r")
    window.wait_for("no clipboard")
    window.send(CTRL_D)
    assert window.end() == 0
    assert b"\x1b" not in window.raw


def test_a_dumb_terminal_shows_what_was_put_on_the_line(terminal: Callable[..., Any], scripted: Scripted) -> None:
    window = terminal("run", scripted("abc"), TERM="dumb")
    window.wait_for(at_prompt)
    window.send("some\r")
    window.wait_for(lambda text: text.count(">>>") == 2 and at_prompt(text))
    window.send("/edit\r")
    window.wait_for(lambda text: text.endswith(">>> some"))
    window.send(" more\r")
    window.wait_for(lambda text: text.count("\nabc\n") == 2 and at_prompt(text))
    window.send("/edit\r")
    window.wait_for(lambda text: text.endswith(">>> some more"))


def test_escape_sequences_in_a_model_s_name(terminal: Callable[..., Any], scripted: Scripted, tmp_path: Path) -> None:
    model = Path(shutil.copytree(scripted("abc"), tmp_path / "ev\x1b]0;il\x07"))
    window = terminal("run", model)
    window.wait_for("ev^[]0;il^G - INT4")
    window.wait_for(at_prompt)
    window.send("/show\r")
    window.wait_for(prompts(2))
    window.send(f"/model {model}\r".replace("\x1b", "\x16\x1b").replace("\x07", "\x16\x07"))
    window.wait_for(lambda text: at_prompt(text) and text.count(">>>") == 3)
    assert b"\x1b]0;il" not in window.raw


CRASH = """
import sys
from localchat import cli, stream, terminal
if sys.argv[1] == "reply":
    def push(self, chunk):
        if chunk.stats.generated_tokens > 5:
            raise SystemError("crashed")
        whole(self, chunk)
    whole, stream.TerminalPrinter.push = stream.TerminalPrinter.push, push
else:
    def handle(self, text):
        raise SystemError("crashed")
    terminal.Repl._handle = handle
sys.exit(cli.main(["run", sys.argv[2]]))
"""


@pytest.mark.parametrize("where", ["reply", "chat"])
def test_the_terminal_is_restored_after_a_crash(
    terminal: Callable[..., Any], scripted: Scripted, where: str, tmp_path: Path
) -> None:
    (tmp_path / "crash.py").write_text(CRASH)
    program = f"{sys.executable} {tmp_path}/crash.py {where} {scripted('abcdefghij', loop=True)}"
    window = terminal(program=["bash", "-c", f"stty -a; {program}; echo code $?; stty -a"], rows=60)
    window.wait_for(at_prompt)
    window.send("hi\r")
    if where == "reply":  # a fault inside a turn does not end the chat
        window.wait_for(lambda text: "SystemError: crashed" in text and at_prompt(text))
        window.send(CTRL_D)
    assert window.end() == 0
    before, _, after = window.text.replace("\n", " ").partition("tiny - INT4")
    assert f"code {0 if where == 'reply' else 1} " in after
    modes = re.compile(r"-?\b(?:echo|icanon|isig|icrnl|ixon|iexten|opost|onlcr)\b")
    assert modes.findall(before) == modes.findall(after.partition("code ")[2])
    assert window.raw.rfind(b"\x1b[?25l") <= window.raw.rfind(b"\x1b[?25h")
    assert window.raw.rfind(b"\x1b[?2004h") < window.raw.rfind(b"\x1b[?2004l")


@pytest.mark.parametrize("key", [CTRL_C, CTRL_D])
def test_leaving_restores_the_terminal(chat: Callable[..., Any], key: str) -> None:
    window = chat("abc")
    window.send(key)
    if key == CTRL_C:
        window.wait_for("Ctrl-C again\n>>>")
        window.send(key)
    assert window.end() == (130 if key == CTRL_C else 0)
    assert window.raw.rfind(b"\x1b[?2004h") < window.raw.rfind(b"\x1b[?2004l")


def test_keys_that_are_typed_while_it_loads_are_the_first_message(
    terminal: Callable[..., Any], scripted: Scripted
) -> None:
    window = terminal("run", scripted("abc"))
    window.send("hi")
    window.wait_for(lambda text: text.endswith(">>> hi"))
    os.kill(window.process.pid, signal.SIGTERM)
    assert window.end() == 143


def test_lines_typed_ahead_are_not_sent_after_ctrl_c(terminal: Callable[..., Any], scripted: Scripted) -> None:
    window = terminal("run", scripted("abcdefgh", loop=True), rows=60)
    window.wait_for(prompts(1))
    window.send("go on\r")
    window.wait_for("abcdefghabcdefgh")
    window.send("line one\rline two\r\x04")
    time.sleep(0.5)  # they arrive as keys of the reply
    window.send(CTRL_C)
    screen = window.wait_for(lambda text: text.endswith("line oneline two"))
    assert screen.count("\n>>>") == 2  # nothing of it was sent, and the chat goes on
    window.send(CTRL_C + "/show template\r")
    window.wait_for("{%")
    window.send("/show context\r")
    window.wait_for("1 turn, ")
