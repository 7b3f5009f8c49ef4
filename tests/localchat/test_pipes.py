"""The table of pipes, byte for byte: what stdin is, what stdout is, and whether there is a prompt argument."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
Scripted = Callable[..., Path]
Command = Callable[..., Any]
NO_PROMPT = "localchat: error: there is no prompt, and an answer that goes into a pipe needs one as an argument."


def prompt_tokens(stderr: bytes) -> int:
    return int(stderr.decode().partition("prompt eval count:")[2].split()[0])


@pytest.mark.parametrize(
    ("stdin", "words", "prompt"),
    [
        (b"one", ["two"], "one\n\ntwo"),
        (b"one\n\n", ["two", "three"], "one\n\ntwo three"),
        (b"one", [], "one"),
        (b"", ["two"], "two"),
        (b" \n\t", ["two"], "two"),
        (b"a\r\nb\r\n", [], "a\nb"),
        (b"a\rb", [], "a\rb"),
        (b"\xef\xbb\xbfa", [], "a"),
        ("\ufeffgr\u00fc\u00dfe \U0001f642\n".encode(), ["x"], "gr\u00fc\u00dfe \U0001f642\n\nx"),
        (b"  indented\n", [], "  indented"),
        (b"one", ["--no-stdin", "two"], "two"),
        (b"/help", [], "/help"),
        (b"@/etc/passwd", [], "@/etc/passwd"),
    ],
)
def test_the_prompt(command: Command, scripted: Scripted, stdin: bytes, words: list[str], prompt: str) -> None:
    done = command("run", scripted("abc"), "--verbose", *words, stdin=stdin)
    assert (done.returncode, done.stdout) == (0, b"abc\n")
    around = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|go|>"
    special = sum(around.count(token) * (len(token) - 1) for token in ("<|im_start|>", "<|im_end|>", "<|go|>"))
    assert prompt_tokens(done.stderr) == len(around) - special - 1 + len(prompt.encode())


@pytest.mark.parametrize(
    ("stdin", "words", "sentence"),
    [
        (b"", [], "stdin is empty and there is no prompt argument"),
        (b" \r\n", [], "stdin is empty and there is no prompt argument"),
        (b"", [""], "the prompt is empty"),
        (b"one", ["--no-stdin"], "--no-stdin is given and there is no prompt argument"),
        (b"\0", ["x"], "stdin holds 1 NUL byte in 1,"),
        (os.urandom(4096).replace(b"\0", b"\xff"), ["x"], "faults in its UTF-8, so it is not text."),
    ],
)
def test_usage_errors(command: Command, scripted: Scripted, stdin: bytes, words: list[str], sentence: str) -> None:
    done = command("run", scripted("abc"), *words, stdin=stdin)
    assert (done.returncode, done.stdout) == (2, b"")
    assert sentence in done.stderr.decode().splitlines()[0]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("{run} | cat; echo code ${{PIPESTATUS[0]}}", f"{NO_PROMPT}\ncode 2"),
        ("{run} hi | cat; echo code ${{PIPESTATUS[0]}}", "abc\ncode 0"),
        ("{run} hi > out; echo code $?; cat out", "code 0\nabc"),
        ("echo one | {run} hi | cat -A", "abc$"),
        ("{run} hi 2>&1 | cat -A", "abc$"),
        ("{run} hi </dev/null 2>/dev/null | od -c", "0000000   a   b   c  \\n\n0000004"),
    ],
)
def test_a_terminal_at_one_end(
    terminal: Callable[..., Any], scripted: Scripted, tmp_path: Path, line: str, shown: str
) -> None:
    run = f"PYTHONPATH={Path.cwd()} {sys.executable} -m localchat run {scripted('abc')}"
    window = terminal(program=["bash", "-c", f"cd {tmp_path}; {line.format(run=run)}"], columns=200)
    assert window.end() == 0
    assert window.text.replace("try: localchat run MODEL", "").strip().endswith(shown)


def test_50_mb_are_refused_with_the_counts_at_once(command: Command, scripted: Scripted) -> None:
    started = time.monotonic()
    done = command("run", scripted("abc"), "sum up", stdin=b"words, words \n" * (50_000_000 // 14))
    assert (done.returncode, done.stdout) == (5, b"")
    sentence = "the prompt has about 49,999,999 tokens in 49,999,999 characters and the context holds 8,192 "
    assert sentence in done.stderr.decode()
    assert time.monotonic() - started < 60


def test_50_mb_of_binary_and_of_one_line(command: Command, scripted: Scripted) -> None:
    model = scripted("abc")
    done = command("run", model, stdin=b"\0" * 50_000_000)
    assert (done.returncode, done.stdout) == (2, b"")
    assert "stdin holds 50,000,000 NUL bytes in 50,000,000" in done.stderr.decode()
    done = command("run", model, stdin=b"x" * 50_000_000)
    assert (done.returncode, done.stdout) == (5, b"")
    assert "about 50,000,000 tokens" in done.stderr.decode()


def test_the_answer_is_streamed(environment: dict[str, str], scripted: Scripted) -> None:
    words = [sys.executable, "-m", "localchat", "run", str(scripted("abcdefghij", loop=True)), "-c", "65000", "hi"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        assert process.stdout.read(20) == b"abcdefghij" * 2
        assert process.poll() is None
        process.stdout.close()  # a closed pipe ends it, silently
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_stderr_that_is_full_or_closed_does_not_matter(environment: dict[str, str], scripted: Scripted) -> None:
    run = f"{sys.executable} -m localchat run {scripted('abc')} --verbose hi </dev/null"
    for redirected in ("2>/dev/full", "2>&-"):
        line = f"{run} {redirected}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment, check=False)
        assert done.stdout == b"abc\n"


def test_a_closed_stdin_without_a_prompt(environment: dict[str, str], scripted: Scripted) -> None:
    line = f"{sys.executable} -m localchat run {scripted('abc')} <&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"localchat: error: ")


def test_stdin_that_never_closes_is_said_once_and_can_be_interrupted(
    environment: dict[str, str], scripted: Scripted
) -> None:
    words = [sys.executable, "-m", "localchat", "run", str(scripted("abc"))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        assert process.stderr.readline() == b"localchat: waiting for stdin to end (--no-stdin ignores it)\n"
        process.stdin.write(b"some")
        process.stdin.flush()
        time.sleep(2.5)
        process.terminate()
        assert process.wait() == 143
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


def test_markup_is_not_rendered_in_a_pipe(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("<think>", "hm", "</think>", "# a\n|`b*\x1b[1"), "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"# a\n|`b*^[[1\n", b"")
