"""Prints a reply while it is made: plain into a pipe, with a live bottom line on a terminal.

On a terminal every finished row is printed once, through the console, and never touched again; only the unfinished
row and the status line are in a transient rich `Live`. So the cost of a token does not grow with the reply, and the
scrollback holds each row exactly once. Rows are wrapped here, at word boundaries, one column before the edge: a
`Live` can only be redrawn if its height is known.
"""

import contextlib
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from localchat.statusline import Reply, closing_line, prefill_line, status_line
from localchat.text_safety import VisibleStream

if TYPE_CHECKING:
    from localchat.chat import Chunk

REFRESH_SECONDS = 0.1


class Printer(Protocol):
    """Shows chunks between __enter__ and __exit__; `finish` is called after a reply that ended or was cut."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def push(self, chunk: "Chunk") -> None: ...
    def finish(self, reply: Reply) -> None: ...


def stream_reply(chunks: Iterator["Chunk"], printer: Printer) -> Reply:
    """Print `chunks` until they end or Ctrl-C is pressed; the generator is closed either way.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    last = None
    with StopOnCtrlC() as ctrl_c:
        try:
            with printer:
                for chunk in chunks:
                    last = chunk
                    printer.push(chunk)
                    if ctrl_c.pressed:
                        break
        finally:
            if isinstance(chunks, Generator):
                chunks.close()
        reply = Reply(last, interrupted=ctrl_c.pressed and (last is None or last.kind != "end"))
        printer.finish(reply)
    return reply


@dataclass(frozen=True)
class Look:
    """How replies are shown. color: "auto", "on" or "off". device: whose memory the status line tells."""

    color: str = "auto"
    hide_thinking: bool = False
    verbose: bool = False
    device: str = "cpu"


def console_for(look: Look, out: TextIO | None = None) -> Console:
    """A rich console that prints text as it is: no markup, no emoji codes, nothing highlighted."""
    return Console(
        file=out or sys.stdout,
        markup=False,
        emoji=False,
        highlight=False,
        color_system="truecolor" if look.color == "on" else "auto",
        no_color={"auto": None, "on": False, "off": True}[look.color],
    )


def printer_for(look: Look, console: Console | None = None) -> Printer:
    """The printer for what stdout is: a pipe, a terminal that only knows lines, or a real one."""
    if not sys.stdout.isatty():
        return PlainPrinter(sys.stdout)
    console = console or console_for(look)
    if console.is_dumb_terminal:
        return DumbPrinter(sys.stdout, hide_thinking=look.hide_thinking, device=look.device)
    return TerminalPrinter(console, hide_thinking=look.hide_thinking, device=look.device)


class StopOnCtrlC:
    """While this is entered, the first Ctrl-C only sets `pressed`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> Self:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _on_sigint(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


class PlainPrinter:
    """The answer and exactly one final newline, flushed as it comes: for a pipe, where thoughts have no place."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._safe = VisibleStream()
        self._newlines = ""  # held back: they may be the last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._write(self._safe.flush())
            self._out.write("\n")
            self._out.flush()

    def push(self, chunk: "Chunk") -> None:
        if chunk.kind == "answer":
            self._write(self._safe.push(chunk.text))

    def finish(self, reply: Reply) -> None:
        """Nothing is added to a pipe."""

    def _write(self, text: str) -> None:
        body = text.rstrip("\r\n")
        if body:
            self._out.write(self._newlines + body)
            self._out.flush()
            self._newlines = ""
        self._newlines += text[len(body) :]


class DumbPrinter(PlainPrinter):
    """For a terminal that cannot move its cursor: plain text, thoughts between two headings, the numbers at the end."""

    def __init__(self, out: TextIO, *, hide_thinking: bool, device: str) -> None:
        super().__init__(out)
        self._hide_thinking, self._device = hide_thinking, device
        self._kind = ""

    def push(self, chunk: "Chunk") -> None:
        if chunk.kind not in ("thought", "answer") or (chunk.kind == "thought" and self._hide_thinking):
            return
        if chunk.kind != self._kind and (chunk.kind == "thought" or self._kind):
            self._out.write(("\n" if self._kind else "") + f"[{chunk.kind}]\n")
            self._newlines = ""
        self._kind = chunk.kind
        self._write(self._safe.push(chunk.text))

    def finish(self, reply: Reply) -> None:
        if reply.last is not None:
            self._out.write(f"[{closing_line(reply, self._device)}]\n")


class TerminalPrinter:
    """Finished rows once, the unfinished row and the status line live below them, one dim line at the end."""

    def __init__(self, console: Console, *, hide_thinking: bool = False, device: str = "cpu") -> None:
        self._console, self._hide_thinking, self._device = console, hide_thinking, device
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._safe = VisibleStream()
        self._rows: list[Text] = []  # finished, not printed yet
        self._tail = ""
        self._kind = "answer"
        self._started = False  # whether this kind of text has shown anything yet
        self._last: Chunk | None = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._quiet = no_echo()
        self._quiet.__enter__()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_kind()
            if rows := self._take_rows(keep_blank=True):
                self._console.print(Text("\n").join(rows))
        finally:
            self._live.stop()
            self._quiet.__exit__(None, None, None)

    def push(self, chunk: "Chunk") -> None:
        """Take one chunk; draws at most every REFRESH_SECONDS."""
        self._last = chunk
        if chunk.kind in ("thought", "answer"):
            if chunk.kind != self._kind:
                self._end_kind()
                self._kind = chunk.kind
            if chunk.kind == "answer" or not self._hide_thinking:
                self._add(self._safe.push(chunk.text))
        now = time.monotonic()
        if now - self._drawn >= REFRESH_SECONDS:
            self._draw(chunk)
            self._drawn = now

    def finish(self, reply: Reply) -> None:
        """The dim line that stays."""
        if reply.last is not None:
            line = Text(closing_line(reply, self._device), style="dim")
            self._console.print(line, no_wrap=True, overflow="ellipsis")

    def _add(self, text: str) -> None:
        if not self._started:  # the blank lines a template puts around thoughts
            text = text.lstrip("\r\n")
            self._started = bool(text)
        *finished, self._tail = (self._tail + text).split("\n")
        for line in finished:
            self._rows += map(self._styled, split_rows(line, self._width()))
        *finished, self._tail = split_rows(self._tail, self._width())
        self._rows += map(self._styled, finished)

    def _end_kind(self) -> None:
        """The last row of the thoughts or of the answer is finished, with or without a newline."""
        self._add(self._safe.flush())
        if self._tail.strip():
            self._rows.append(self._styled(self._tail))
        while self._rows and not self._rows[-1].plain:
            self._rows.pop()
        if self._started and self._kind == "thought":
            self._rows.append(Text())
        self._tail, self._started = "", False

    def _draw(self, chunk: "Chunk") -> None:
        line = prefill_line(chunk.stats) if chunk.kind == "prefill" else status_line(chunk.stats, self._device)
        status = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        rows = self._take_rows(keep_blank=not self._tail.strip())
        with self._console:  # one write: a print alone would draw the old live part below the new rows
            if rows:
                self._console.print(Text("\n").join(rows))
            self._live.update(Group(self._styled(self._tail), status) if self._tail else status, refresh=True)

    def _take_rows(self, *, keep_blank: bool) -> list[Text]:
        """The rows to print now; blank ones at the end can wait, since they may be the reply's end."""
        count = len(self._rows)
        while keep_blank and count and not self._rows[count - 1].plain:
            count -= 1
        rows, self._rows = self._rows[:count], self._rows[count:]
        return rows

    def _styled(self, row: str) -> Text:
        style = "dim italic" if self._kind == "thought" else ""
        text = Text(row.rstrip(), style=style, no_wrap=True, overflow="ignore")
        text.expand_tabs(8)
        return text

    def _width(self) -> int:
        return max(self._console.width - 1, 2)


# A wide character may be followed by a line break, a word of narrow ones may not.
_WIDE = r"\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_PIECES = re.compile(rf"\s+|[{_WIDE}]|[^\s{_WIDE}]+")


def split_rows(line: str, width: int) -> list[str]:
    """`line` (no newline) cut into rows of at most `width` cells; joined they are `line` again.

    Greedy from the left, so every row but the last stays the same when text is added. White space hangs over the
    edge; a word longer than a row starts a new one and is cut.
    """
    rows, row, used = [], "", 0
    for piece in _PIECES.findall(line):
        cells = 8 * piece.count("\t") + cell_len(piece.replace("\t", ""))
        if used and used + cells > width and not piece.isspace():
            rows.append(row)
            row, used = "", 0
        if cells > width and not piece.isspace():
            *full, piece = chop_cells(piece, width)
            rows += full
            cells = cell_len(piece)
        row, used = row + piece, used + cells
    return [*rows, row]


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Keys pressed during a reply are not echoed into it; they are kept for the next prompt. Does nothing elsewhere."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (AttributeError, OSError, ValueError, termios.error):
        yield
        return
    after = [*before]
    after[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSANOW, after)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
