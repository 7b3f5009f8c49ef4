"""Replies on a pipe, on a terminal, and cut by Ctrl-C."""

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyte
import pytest
from rich.cells import cell_len
from rich.console import Console

from localchat import stream
from localchat.chat import Chunk
from localchat.rows import split_rows
from localchat.stats import Stats

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")

STATS = Stats(prompt_tokens=10, prefilled_tokens=10, prefill_seconds=0.1, ttft_seconds=0.2, context_size=100)


def chunks(*parts: str, kind: Any = "answer", finish: Any = "stop") -> Iterator[Chunk]:
    yield Chunk("prefill", "", STATS)
    for i, part in enumerate(parts, start=1):
        yield Chunk(kind, part, replace(STATS, generated_tokens=i, decode_seconds=i / 100, context_used=i))
    yield Chunk("end", "", replace(STATS, generated_tokens=len(parts), decode_seconds=1), finish)


def piped(*parts: str, **more: Any) -> str:
    out = io.StringIO()
    stream.stream_reply(chunks(*parts, **more), stream.PlainPrinter(out))
    return out.getvalue()


def shown(
    *parts: str, columns: int = 40, rows: int = 12, thoughts: str = "", hide: bool = False, markdown: bool = False
) -> tuple[str, str]:
    """(screen with scrollback as text, everything written) of a reply on a terminal that is redrawn at each chunk."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=columns, height=rows, legacy_windows=False, _environ={})
    printer = stream.TerminalPrinter(console, stream.Look(hide_thinking=hide, markdown=markdown))
    thinking = list(chunks(*thoughts, kind="thought"))[:-1] if thoughts else []
    stream.stream_reply(iter([*thinking, *chunks(*parts)]), printer)
    screen = pyte.HistoryScreen(columns, rows, history=10_000)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    history = ["".join(line[x].data for x in range(columns)) for line in screen.history.top]
    return "\n".join(line.rstrip() for line in [*history, *screen.display]).rstrip(), out.getvalue()


@pytest.fixture(autouse=True)
def _every_chunk_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "REFRESH_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("parts", "written"),
    [
        (["Hel", "lo"], "Hello\n"),
        (["a\n", "b\n\n", "\n"], "a\nb\n"),
        (["a\r", "\nb\r\n"], "a\r\nb\n"),
        (["a\x1b[", "31mb\x1b]0;t\x07"], "a^[[31mb^[]0;t^G\n"),
        (["  x", "  "], "  x  \n"),
        ([], "\n"),
    ],
)
def test_pipe_holds_the_answer_and_one_newline(parts: list[str], written: str) -> None:
    assert piped(*parts) == written


def test_pipe_has_no_thoughts() -> None:
    assert piped("hm", kind="thought") == "\n"


def test_pipe_stays_empty_without_an_answer() -> None:
    """Where the thought never ended, and where Ctrl-C came before the answer."""
    thought = Chunk("thought", "hm", STATS)

    def cut() -> Iterator[Chunk]:
        yield thought
        os.kill(os.getpid(), signal.SIGINT)
        yield thought

    for reply in (iter([thought, Chunk("end", "", STATS, "length", in_thought=True)]), cut()):
        out = io.StringIO()
        stream.stream_reply(reply, stream.PlainPrinter(out))
        assert out.getvalue() == ""


def test_pipe_is_flushed_at_every_chunk() -> None:
    events: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            events.append(text)
            return len(text)

        def flush(self) -> None:
            events.append("flush")

    stream.stream_reply(chunks("a", "b"), stream.PlainPrinter(Pipe()))
    assert events == ["a", "flush", "b", "flush", "\n", "flush"]


def test_terminal_prints_each_row_once() -> None:
    lines = [f"line {i} of the reply" for i in range(40)]
    screen, _ = shown(*(character for line in lines for character in line + "\n"))
    assert screen.split("\n")[:-2] == lines
    assert screen.split("\n")[-2] == "829.0 tok/s - ttft 0.20 s - 830 tok -"


def test_terminal_long_line_is_wrapped_at_words_and_never_lost() -> None:
    words = [f"word{i} " for i in range(400)]
    screen, _ = shown(*words)
    rows = screen.split("\n")[:-2]
    assert max(map(len, rows)) < 40
    assert " ".join(rows).split() == "".join(words).split()
    assert all(row.startswith("word") for row in rows)


def test_what_is_said_so_far_is_on_the_screen() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=12, _environ={})
    said = ""
    with stream.TerminalPrinter(console, stream.Look(markdown=False)) as printer:
        for chunk in chunks(*(f"word{i} " for i in range(30))):
            printer.push(chunk)
            said += chunk.text
            screen = pyte.Screen(40, 12)
            pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
            assert [word for word in " ".join(screen.display).split() if "word" in word] == said.split()


def test_cost_of_a_token_does_not_grow() -> None:
    short, long = (len(shown(*["word "] * n)[1]) / n for n in (200, 2000))
    assert long < 1.2 * short


def test_terminal_makes_control_characters_visible() -> None:
    screen, raw = shown("\x1b]0;evil", "\x07 \x1b[2J", "\x9b31m")
    assert screen.startswith("^[]0;evil^G ^[[2J<U+009B>31m")
    assert "\x1b]0" not in raw
    assert "\x07" not in raw


def test_terminal_does_not_read_markup() -> None:
    assert shown("[bold]x[/bold] :smile:")[0].startswith("[bold]x[/bold] :smile:\n")


def test_thoughts_are_dim_and_come_first() -> None:
    screen, raw = shown("yes", thoughts="hmm")
    assert screen.startswith("hmm\n\nyes\n")
    assert "\x1b[2;3mhmm" in raw


def test_hidden_thoughts() -> None:
    screen, raw = shown("yes", thoughts="hmm", hide=True)
    assert screen.startswith("yes\n")
    assert "hmm" not in raw


def test_blank_lines_around_an_answer_are_not_shown() -> None:
    rows = shown("\n\n", "yes", "\n", "\n")[0].split("\n")
    assert rows[0] == "yes"
    assert rows[1].startswith("300.0 tok/s - ttft") or rows[1].startswith("tok/s") or "ttft" in rows[1]


def test_wide_characters_are_wrapped_by_cells() -> None:
    text = "汉字" * 60 + "🙂" * 30 + "é" * 50
    screen, _ = shown(*text)
    assert "".join(screen.split("\n")[:-2]).replace(" ", "") == text


@pytest.mark.parametrize("line", ["", "a", "one two three four", "x" * 50, "ab " * 20, "\ttwo\ttabs", "汉" * 30])
def test_split_rows_keeps_the_text_and_finished_rows(line: str) -> None:
    rows = split_rows(line, 10)
    assert "".join(rows) == line
    assert all(cell_len(row.rstrip().expandtabs(8)) <= 10 or "\t" in row for row in rows)
    for end in range(len(line)):
        assert split_rows(line[:end], 10)[:-1] == rows[: len(split_rows(line[:end], 10)) - 1]


def test_ctrl_c_stops_at_the_next_chunk_and_closes_the_generator() -> None:
    closed = []

    def source() -> Iterator[Chunk]:
        try:
            yield Chunk("answer", "partial", STATS)
            os.kill(os.getpid(), signal.SIGINT)
            yield Chunk("answer", " more", STATS)
            yield Chunk("answer", " never", STATS)
        finally:
            closed.append(True)

    out, reply_chunks = io.StringIO(), source()  # named, or leaving the scope would close it
    before = signal.getsignal(signal.SIGINT)
    reply = stream.stream_reply(reply_chunks, stream.PlainPrinter(out))
    assert out.getvalue() == "partial more\n"
    assert reply.interrupted
    assert closed == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_raises() -> None:
    def source() -> Iterator[Chunk]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        yield Chunk("answer", "never", STATS)

    with pytest.raises(KeyboardInterrupt):
        stream.stream_reply(source(), stream.PlainPrinter(io.StringIO()))


def test_ctrl_c_after_the_end_is_no_interruption() -> None:
    def source() -> Iterator[Chunk]:
        os.kill(os.getpid(), signal.SIGINT)
        yield Chunk("end", "", STATS, "stop")

    assert not stream.stream_reply(source(), stream.PlainPrinter(io.StringIO())).interrupted


def test_an_error_inside_a_reply_ends_the_live_display() -> None:
    def source() -> Iterator[Chunk]:
        yield Chunk("answer", "partial", STATS)
        raise ValueError("broken")

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, _environ={})
    with pytest.raises(ValueError, match="broken"):
        stream.stream_reply(source(), stream.TerminalPrinter(console, stream.Look(markdown=False)))
    assert out.getvalue().count("\x1b[?25h") == out.getvalue().count("\x1b[?25l") == 1
    assert "partial\n" in out.getvalue()


def test_dumb_terminal_gets_lines_only() -> None:
    out = io.StringIO()
    stream.stream_reply(
        iter([Chunk("thought", "hm", STATS), *chunks("yes")]),
        stream.DumbPrinter(out, stream.Look()),
    )
    assert re.fullmatch(
        r"\[thought\]\nhm\n\[answer\]\nyes\n\[ttft 0.20 s - 1 tok - ctx 0 % - [\d.]+/[\d.]+ GB\]\n", out.getvalue()
    )


SLOW_REPLY = """
import time
from localchat import stream
from localchat.chat import Chunk
from localchat.stats import Stats
def slow():
    for i in range(1, 101):
        time.sleep(0.03)
        yield Chunk("answer", f"w{i} ", Stats(generated_tokens=i, decode_seconds=0.03 * i, context_size=1000))
    yield Chunk("end", "", Stats(generated_tokens=100, decode_seconds=3.0, context_size=1000), "stop")
stream.stream_reply(slow(), stream.printer_for(stream.Look()))
"""


def test_the_live_line_moves_while_a_slow_reply_streams(terminal: Callable[..., Any]) -> None:
    program = [sys.executable, "-c", SLOW_REPLY]
    window = terminal(program=program)
    assert window.end() == 0
    counts = re.findall(rb" (\d+) tok - ", window.raw)
    assert len(set(counts)) >= 10
    assert window.text.count("w100") == 1
    assert len(re.findall(r"tok/s", window.text)) == 1


MIXED = [
    "## Head\n",
    "Some **bold** words ",
    "and more of them. ",
    "\n\n- item\n",
    "```py\nx = 1\n```\n",
    "| a | b |\n",
]


@pytest.mark.parametrize(
    ("unit", "tokens"),
    [(["word "], 5000), (MIXED, 20_000), (["```\n", *["code = 1\n"] * 9, "```\n"], 5000), (["- item **x**\n"], 5000)],
)
def test_the_bytes_for_a_token_are_the_same_over_20000_tokens(unit: list[str], tokens: int) -> None:
    """Counted, not timed: what is written for each thousand tokens, every one of which is drawn."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, _environ={})
    written: list[int] = []
    with stream.TerminalPrinter(console, stream.Look()) as printer:
        for n in range(tokens):
            printer.push(Chunk("answer", unit[n % len(unit)], replace(STATS, generated_tokens=n)))
            if n % 1000 == 999:
                written.append(out.tell())
    costs = [after - before for before, after in zip([0, *written], written, strict=False)]
    assert max(costs[1:]) < 1.15 * costs[1]
    assert max(costs) < 1000 * 24 * 100


def test_markdown_is_rendered_and_code_can_be_copied() -> None:
    long = "x = " + "1 + " * 20 + "1"
    screen, raw = shown(*f"# T\n\nSome **bold**.\n\n```\n{long}\n  y\n```\n\nEnd.", markdown=True, columns=60)
    assert screen.startswith(f"T\n\nSome bold.\n\n{long[:60].rstrip()}\n{long[60:]}\n  y\n\nEnd.\n")
    assert f"\r{long}\n" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", raw)  # the terminal wraps it: one line to copy


def test_a_folded_thought_is_one_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=12, _environ={})
    printer = stream.TerminalPrinter(console, stream.Look(), folded=True)
    thinking = [
        Chunk("thought", "hm\n", replace(STATS, generated_tokens=n, thought_tokens=n, thought_seconds=n / 10))
        for n in range(1, 35)
    ]
    stream.stream_reply(iter([*thinking, *list(chunks("yes"))[1:]]), printer)
    screen = pyte.Screen(60, 12)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    rows = [row.rstrip() for row in screen.display]
    assert rows[:3] == ["thought for 3 s, 34 tokens", "", "yes"]
    assert "hm" not in out.getvalue()
    assert "thinking, 20 tokens" in out.getvalue()


def test_a_thought_that_is_unfolded_again_is_whole() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=40, _environ={})
    printer = stream.TerminalPrinter(console, stream.Look())

    def source() -> Iterator[Chunk]:
        for n in range(20):
            if n in (5, 15):
                printer.fold()
            yield Chunk("thought", f"row {n}\n", STATS)
        yield from chunks("yes")

    replies = source()
    stream.stream_reply(replies, printer)
    screen = pyte.Screen(60, 40)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    rows = [row.rstrip() for row in screen.display]
    assert rows[:22] == [*(f"row {n}" for n in range(20)), "", "yes"]


def test_the_cursor_waits_at_the_start_of_the_live_rows() -> None:
    """So that a terminal which wraps the rows anew when it is made narrower leaves nothing to count."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=12, _environ={})
    with stream.TerminalPrinter(console, stream.Look()) as printer:
        for chunk in chunks("one\n", "two three\n", *["| a |\n"] * 4):
            printer.push(chunk)
            screen = pyte.Screen(40, 12)
            pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
            status = next(n for n, row in enumerate(screen.display) if "ttft" in row or "reading the prompt" in row)
            table = sum(row.startswith("| a |") for row in screen.display)
            assert (screen.cursor.x, screen.cursor.y) == (0, status - table)
            assert screen.cursor.hidden


def test_prompts_of_about_a_second_get_a_bar() -> None:
    for rate, shows in ((100, True), (100_000, False)):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=80, height=12, _environ={})
        stats = Stats(prompt_tokens=5000, prefilled_tokens=1000, prefill_seconds=1000 / rate)
        with stream.TerminalPrinter(console, stream.Look()) as printer:
            printer.push(Chunk("prefill", "", stats))
        assert ("prefill [####---" in out.getvalue()) == shows
        assert "reading the prompt" in out.getvalue()


def test_a_narrow_terminal_shows_the_time_left_of_a_long_prompt() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=20, height=12, _environ={})
    with stream.TerminalPrinter(console, stream.Look()) as printer:
        printer.push(Chunk("prefill", "", Stats(prompt_tokens=5000, prefilled_tokens=1000, prefill_seconds=10)))
    assert "20 % - 40 s left" in out.getvalue()
