"""The chat as a person uses it, in a pseudo-terminal, and the line editor's keys one by one."""

import io
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from localchat import line_editor, slash
from localchat import terminal as room
from localchat.chat import Chat
from localchat.sampling import Sampling
from localchat.stream import Look

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
Scripted = Callable[..., Path]
CTRL_C, CTRL_D, CTRL_R, ALT_ENTER = "\x03", "\x04", "\x12", "\x1b\r"


def entered(keys: str) -> str:
    """The message that these keys send."""
    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        return line_editor.prompt_session(InMemoryHistory(), input=pipe, output=DummyOutput()).prompt(">>> ")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("hello\r", "hello"),
        ("a\nb\r", "a\nb"),
        (f"a{ALT_ENTER}b\r", "a\nb"),
        ("a\\\rb\r", "a\nb"),
        ('"""a\rb\r"""\r', '"""a\nb\n"""'),
        ('/set system """a\rb"""\r', '/set system """a\nb"""'),
        ('say """ here\r', 'say """ here'),
        ("\x1b[200~a\r\nb\nc\x1b[201~\r", "a\nb\nc"),
        (f"wrong{CTRL_C}right\r", "right"),
    ],
)
def test_keys(keys: str, text: str) -> None:
    assert entered(keys) == text


@pytest.mark.parametrize(("keys", "error"), [(CTRL_C, KeyboardInterrupt), (CTRL_D, EOFError)])
def test_keys_on_an_empty_line(keys: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        entered(keys)


@pytest.mark.parametrize(
    ("text", "message"), [('"""a\nb\n"""', "a\nb"), ('""" a """', " a "), ('a """b"""', 'a """b"""'), ('"""', '"""')]
)
def test_unquoted(text: str, message: str) -> None:
    assert line_editor.unquoted(text) == message


def test_history_is_readable_by_its_owner_alone(_private_home: Path) -> None:
    history, notice = line_editor.open_history()
    history.append_string("two\nlines")
    path = _private_home / ".local/state/localchat/history"
    assert notice == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(line_editor.open_history()[0].load_history_strings()) == ["two\nlines"]


def test_history_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    history, notice = line_editor.open_history()
    assert isinstance(history, InMemoryHistory)
    assert "Not a directory" in notice


def test_history_can_be_switched_off(_private_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALCHAT_HISTORY", "off")
    history, notice = line_editor.open_history()
    history.append_string("secret")
    assert notice == ""
    assert not list(_private_home.rglob("history"))


def test_ctrl_r_searches_messages_of_several_lines() -> None:
    history = InMemoryHistory(["first\nneedle here", "other"])
    with create_pipe_input() as pipe:
        pipe.send_text(f"{CTRL_R}need\r more\r")
        found = line_editor.prompt_session(history, input=pipe, output=DummyOutput()).prompt(">>> ")
    assert sorted(found.replace("needle here", "").split()) == ["first", "more"]
    assert "\n" in found


def test_ctrl_g_opens_the_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "$1" > name; cat "$1" > before; printf "two\\nlines" > "$1"\n')
    editor.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(editor))
    with create_pipe_input() as pipe:
        pipe.send_text("draft\x07")
        session = line_editor.prompt_session(InMemoryHistory(), input=pipe, output=DummyOutput())

        def send_when_edited() -> None:
            while not (tmp_path / "before").exists() or session.default_buffer.text != "two\nlines":
                time.sleep(0.05)
            pipe.send_text("\r")

        thread = threading.Thread(target=send_when_edited, daemon=True)
        thread.start()
        assert session.prompt(">>> ") == "two\nlines"
    assert (tmp_path / "before").read_text() == "draft"
    assert (tmp_path / "name").read_text().strip().endswith(".md")


def test_an_editor_that_is_not_there_is_told_and_the_text_stays(
    terminal: Callable[..., Any], scripted: Scripted
) -> None:
    window = terminal("run", scripted("abc"), EDITOR="/no/such --wait", VISUAL="")
    window.wait_for(lambda text: text.endswith(">>>"))
    window.send("some draft\x07")
    said = "localchat: error: EDITOR is '/no/such --wait', and there is no such program.\nset it to your editor.\n"
    window.wait_for(lambda text: said in text and text.endswith(">>> some draft"))


def test_ctrl_t_is_told() -> None:
    pressed = []
    with create_pipe_input() as pipe:
        pipe.send_text("a\x14b\r")
        session = line_editor.prompt_session(
            InMemoryHistory(), on_fold=lambda: pressed.append(1), input=pipe, output=DummyOutput()
        )
        assert session.prompt(">>> ") == "ab"
    assert pressed == [1]


@pytest.fixture
def chat(terminal: Callable[..., Any], scripted: Scripted) -> Iterator[Callable[..., Any]]:
    """chat("Hello"): the chat with a model that says this, at its first prompt."""

    def start(*says: str, flags: tuple[str, ...] = (), loop: bool = False, **more: Any) -> Any:
        window = terminal("run", scripted(*says, loop=loop), *flags, **more)
        window.wait_for(lambda text: text.endswith(">>>"))
        return window

    return start


def prompts(count: int) -> Callable[[str], bool]:
    return lambda text: text.count(">>>") == count and text.endswith(">>>")


def test_a_conversation(chat: Callable[..., Any], _private_home: Path) -> None:
    window = chat("Helo\nyu")
    assert re.match(r"tiny - INT4 groups of 32, symmetric - context 8,192 - [\d.]+/[\d.]+ GB\n/help", window.text)
    window.send("hi\r")
    screen = window.wait_for(prompts(2))
    numbers = r"[\d.]+ tok/s - ttft [\d.]+ s - 8 tok - ctx 0 % - [\d.]+/[\d.]+ GB"
    assert re.search(rf">>> hi\nHelo\nyu\n{numbers}\n>>>$", screen)
    window.send("again\r")
    window.wait_for(prompts(3))
    window.send(CTRL_D)
    assert window.end() == 0
    history = _private_home / ".local/state/localchat/history"
    assert "+hi\n" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_stops_the_reply_and_keeps_the_chat(chat: Callable[..., Any]) -> None:
    window = chat("abcdefghij", loop=True, flags=("-c", "60000"))
    window.send("hi\r")
    window.wait_for("abcdefghij")
    window.send(CTRL_C)
    screen = window.wait_for(lambda text: text.endswith(">>>") and "interrupted" in text)
    assert re.search(r"ctx \d+ % - [\d.]+/[\d.]+ GB - interrupted\n>>>$", screen)
    window.send("/show system\r")
    window.wait_for("there is no system prompt")
    window.send("/bye\r")
    assert window.end() == 0


def test_ctrl_c_at_the_prompt(chat: Callable[..., Any]) -> None:
    window = chat("abc")
    window.send("some text")
    window.wait_for(">>> some text")
    window.send(CTRL_C)
    window.wait_for(lambda text: text.endswith(">>>"))
    assert "to leave, or" not in window.text
    window.send(CTRL_C)
    window.wait_for("Ctrl-D or /bye to leave, or Ctrl-C again\n>>>")
    window.send(CTRL_C)
    assert window.end() == 130


def test_slash_commands(chat: Callable[..., Any]) -> None:
    window = chat("abc", rows=110)
    for line, answer in (
        ("/set temp 0.25", "temperature = 0.25"),
        ("/set parameter top_k 7", "top_k = 7"),
        ("/set temp hot", "localchat: error: temperature is 'hot', wanted a number."),
        ("/set tmep 1", "did you mean temp?"),
        ("/set", "top_k              7"),
        ("/set system Be brief.", "system prompt set, conversation cleared"),
        ("/clear", "cleared"),
        ("/show system", "Be brief."),
        ("/show memory", "largest context that fits"),
        ("/hlep", "did you mean /help?"),
        ("/?", "Ctrl-C or Esc stops it"),
    ):
        before = window.text.count(">>>")
        window.send(line + "\r")
        assert answer in window.wait_for(prompts(before + 1))
    assert "tok/s" not in window.text
    window.send("//text\r")
    window.wait_for("\nabc\n")
    window.send("/exit\r")
    assert window.end() == 0


def test_an_error_inside_a_turn_keeps_the_chat(chat: Callable[..., Any]) -> None:
    window = chat("abc", flags=("-c", "64"))
    window.send("x" * 70 + "\r")
    window.wait_for("localchat: error: the conversation has 89 tokens")
    window.wait_for(lambda text: text.endswith("x" * 70))
    window.send(CTRL_C + "hi\r")
    window.wait_for("\nabc\n")
    window.send(CTRL_D)
    assert window.end() == 0


def test_escape_sequences_cannot_act(chat: Callable[..., Any]) -> None:
    window = chat("\x1b]0;evil\x07")
    window.send("hi\r")
    window.wait_for("^[]0;evil^G")
    assert b"\x1b]0;evil" not in window.raw


def test_thoughts_are_dim_and_can_be_hidden(chat: Callable[..., Any]) -> None:
    says = ("<think>", "\nhmz", "</think>", "yes")
    window = chat(*says)
    window.send("q\r")
    window.wait_for("\nhmz\n\nyes\n")
    assert b"\x1b[2;3mhmz" in window.raw
    window = chat(*says, flags=("--hide-thinking",))
    window.send("q\r")
    assert "hmz" not in window.wait_for("\nyes\n")


def test_a_thought_that_the_template_opens_is_dim_and_its_end_is_told(
    terminal: Callable[..., Any], opening: Scripted
) -> None:
    window = terminal("run", opening("hmz", "</think>", "yes"), "-n", "2")
    window.wait_for(lambda text: text.endswith(">>>"))
    window.send("q\r")
    screen = window.wait_for("the reply ended inside its thought, before an answer\n>>>")
    assert "\nhm\n" in screen
    assert b"\x1b[2;3mhm" in window.raw
    window.send("/set max_tokens -1\r")
    window.wait_for(prompts(3))
    window.send("/retry\r")
    assert "\nhmz\n\nyes\n" in window.wait_for(prompts(4))


def test_turns_are_taken_back_edited_and_tried_again(chat: Callable[..., Any]) -> None:
    window = chat("abc", rows=60)
    steps = (
        ("/retry", "localchat: error: there is no turn to take back."),
        ("one", "\nabc\n"),
        ("two", "\nabc\n"),
        ("/retry", "\nabc\n"),
        ("/undo 3", "has 2 turns, so 3 cannot be taken back."),
        ("/undo", "took back the last turn"),
    )
    for count, (line, answer) in enumerate(steps, 2):
        seen = len(window.text)
        window.send(line + "\r")
        assert answer in window.wait_for(prompts(count))[seen:]
    assert "cached" in window.text
    window.send("//three\r")
    window.wait_for(prompts(8))
    window.send("/edit\r")
    window.wait_for(lambda text: text.endswith(">>> //three"))
    window.send(" more\r")
    window.wait_for(prompts(10))
    assert window.text.count("\nabc\n") == 5
    window.send("/undo 2\r")
    window.wait_for("took back 2 turns")


def test_a_retry_that_fails_keeps_the_earlier_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "A"}]
    chat = Chat(nothing, nothing, nothing, Sampling())
    chat.messages += turn
    asked = []

    def failing(text: str) -> Iterator[Any]:
        asked.append((text, list(chat.messages)))
        raise RuntimeError("the card is gone")

    monkeypatch.setattr(chat, "reply", failing)
    out = io.StringIO()
    commands = slash.SlashCommands(chat, slash.About("", ""), seed_is_fixed=True)
    repl = room.Repl(chat, commands, Console(file=out), Look(), nothing)
    assert repl._handle("/retry")
    assert asked == [("a", [])]
    assert chat.messages == turn
    assert out.getvalue().endswith("the earlier answer stays\n")


def test_one_answer_on_a_terminal(terminal: Callable[..., Any], scripted: Scripted) -> None:
    window = terminal("run", scripted("Helo"), "hi")
    assert window.end() == 0
    assert re.search(r"^Helo\n[\d.]+ tok/s - ttft", window.text, re.MULTILINE)


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_dumb_terminal_gets_no_escapes(terminal: Callable[..., Any], scripted: Scripted, kind: str) -> None:
    window = terminal("run", scripted("Helo"), "hi", TERM=kind)
    assert window.end() == 0
    assert b"\x1b" not in window.raw
    assert re.search(r"^Helo\n\[[\d.]+ tok/s - ttft", window.text, re.MULTILINE)


@pytest.mark.parametrize("keys", ["", "hi\r"])
def test_the_terminal_is_restored_after_sigterm(terminal: Callable[..., Any], scripted: Scripted, keys: str) -> None:
    model = scripted("abcdefghij", loop=True)
    program = f"{sys.executable} -m localchat run {model} -c 60000"
    script = f"trap '' TERM; {program}; echo code $?; stty -a | grep -o '.echo '"
    window = terminal(program=["bash", "-c", script])
    window.wait_for(lambda text: text.endswith(">>>"))
    window.send(keys)
    if keys:
        window.wait_for("abcdefghij")
    process = window.process.pid
    child = Path(f"/proc/{process}/task/{process}/children").read_text().split()[0]
    os.kill(int(child), signal.SIGTERM)
    assert window.end() == 0
    assert re.search(r"code 143\n echo$", window.text)
    assert window.raw.rfind(b"\x1b[?25l") <= window.raw.rfind(b"\x1b[?25h")


@pytest.mark.real_model
def test_the_live_line_moves_with_a_real_model(terminal: Callable[..., Any], user_cache: Path) -> None:
    words = ("run", "smollm2-135m", "--temp", "0", "-n", "200", "Tell me a long story about a lighthouse.")
    window = terminal(*words, LOCALCHAT_CACHE=str(user_cache))
    assert window.end(seconds=600) == 0
    counts = re.findall(rb" (\d+) tok - ctx", window.raw)
    assert len(set(counts)) >= 5
