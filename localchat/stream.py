"""Prints a reply while it is made: plain into a pipe, with a live bottom line on a terminal.

On a terminal every finished row is printed once and never touched again; only the unfinished rows and the status line
are drawn again (live.py). So the cost of a token does not grow with the reply, and the scrollback holds each row
exactly once. What is a row is the business of rows.py and markdown.py.
"""

import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from rich.console import Console
from rich.text import Text

from localchat.counted import counted
from localchat.limit import CardLimit
from localchat.live import LiveArea
from localchat.markdown import MarkdownRows
from localchat.reply_modes import ReplyModes
from localchat.reply_text import Part
from localchat.rows import PlainRows, Rows
from localchat.statusline import Reply, closing_line, prefill_line, status_line, thought_line
from localchat.text_safety import VisibleStream

if TYPE_CHECKING:
    from localchat.chat import Chunk
    from localchat.keys import ReplyKeys

REFRESH_SECONDS = 0.1


class Printer(Protocol):
    """Shows chunks between __enter__ and __exit__; `finish` is called after a reply that ended or was cut."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def push(self, chunk: "Chunk") -> None: ...
    def finish(self, reply: Reply) -> None: ...


def stream_reply(chunks: Iterator["Chunk"], printer: Printer, keys: "ReplyKeys | None" = None) -> Reply:
    """Print `chunks` until they end, or Ctrl-C or Esc is pressed; the generator is closed either way.

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
                    if keys is not None and keys.poll():
                        ctrl_c.pressed = True
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
    """How replies are shown. color: "auto", "on" or "off". device: whose memory the status line tells. limit: what the
    card allows. markdown: render it."""

    color: str = "auto"
    hide_thinking: bool = False
    verbose: bool = False
    device: str = "cpu"
    limit: CardLimit | None = None
    markdown: bool = True


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


def printer_for(
    look: Look, console: Console | None = None, *, folded: bool = False, single_keys: bool = False
) -> "PlainPrinter | TerminalPrinter":
    """The printer of one answer for what stdout is: a pipe, a terminal that only knows lines, or a real one.

    `folded` and `single_keys` are for the last one.
    """
    if not sys.stdout.isatty():
        return PlainPrinter(sys.stdout)
    console = console or console_for(look)
    if console.is_dumb_terminal:
        return DumbPrinter(sys.stdout, look)
    return TerminalPrinter(console, look, folded=folded, single_keys=single_keys)


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
    """The answer and exactly one final newline, flushed as it comes: for a pipe, where thoughts have no place.

    Nothing at all where a reply was cut, or ended inside its thought, before an answer.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._safe = VisibleStream()
        self._newlines = ""  # held back: they may be the last
        self._answered = False  # which may be with an empty text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._write(self._safe.flush())
            if self._answered:
                self._out.write("\n")
                self._out.flush()

    def push(self, chunk: "Chunk") -> None:
        self._answered |= chunk.kind == "end" and not chunk.in_thought
        if chunk.kind == "answer":
            self._write(self._safe.push(chunk.text))

    def finish(self, reply: Reply) -> None:
        """Nothing is added to a pipe."""

    def _write(self, text: str) -> None:
        body = text.rstrip("\r\n")
        if body:
            self._answered = True
            self._out.write(self._newlines + body)
            self._out.flush()
            self._newlines = ""
        self._newlines += text[len(body) :]


class DumbPrinter(PlainPrinter):
    """For a terminal that cannot move its cursor: plain text, thoughts between two headings, the numbers at the end."""

    def __init__(self, out: TextIO, look: Look) -> None:
        super().__init__(out)
        self._look = look
        self._kind = ""

    def push(self, chunk: "Chunk") -> None:
        if chunk.kind not in ("thought", "answer") or (chunk.kind == "thought" and self._look.hide_thinking):
            return
        if chunk.kind != self._kind and (chunk.kind == "thought" or self._kind):
            self._out.write(("\n" if self._kind else "") + f"[{chunk.kind}]\n")
            self._newlines = ""
        self._kind = chunk.kind
        self._write(self._safe.push(chunk.text))

    def finish(self, reply: Reply) -> None:
        if reply.last is not None:
            self._out.write(f"[{closing_line(reply, self._look.device, self._look.limit)}]\n")


class TerminalPrinter:
    """Finished rows once, the unfinished ones and the status line live below them, one dim line at the end.

    While `folded`, a thought is a count only, and one line when it has ended. With `single_keys` the keys pressed
    meanwhile can be read.
    """

    def __init__(self, console: Console, look: Look, *, folded: bool = False, single_keys: bool = False) -> None:
        self._console, self._look = console, look
        self.folded = folded
        self._area = LiveArea(console)
        self._modes = ReplyModes(single_keys=single_keys)
        self._safe = VisibleStream()
        self._kind: Part = "answer"
        self._rows = self._rows_for("answer")
        self._finished: list[Text] = []  # not printed yet
        self._hidden: list[Text] = []  # of a folded thought
        self._started = False  # whether this kind of text has shown anything yet
        self._last: Chunk | None = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._modes.__enter__()
        self._area.start()
        self._area.draw([], [Text("reading the prompt", style="dim")])
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end_kind()
            self._area.stop(self._take_finished(all_of_them=False))
        finally:
            self._modes.__exit__()

    def push(self, chunk: "Chunk") -> None:
        """Take one chunk; draws at most every REFRESH_SECONDS."""
        if chunk.kind in ("thought", "answer"):
            if chunk.kind != self._kind:
                self._end_kind()
                self._kind = "thought" if chunk.kind == "thought" else "answer"
                self._rows = self._rows_for(self._kind)
            self._add(self._safe.push(chunk.text))
        self._last = chunk
        now = time.monotonic()
        if now - self._drawn >= REFRESH_SECONDS:
            self._draw(chunk)
            self._drawn = now

    def finish(self, reply: Reply) -> None:
        """The dim line that stays."""
        if reply.last is not None:
            line = Text(closing_line(reply, self._look.device, self._look.limit), style="dim")
            self._console.print(line)  # wrapped at blanks

    def fold(self) -> None:
        """Fold thoughts from here on, or show them again; what was folded of this one comes first."""
        self.folded = not self.folded
        if not self.folded:
            self._finished += self._hidden
            self._hidden = []
        self._drawn = 0.0

    def clear(self) -> None:
        """Empty the screen."""
        self._area.clear()
        self._drawn = 0.0

    def _rows_for(self, kind: Part) -> Rows:
        if kind == "thought":
            return PlainRows(self._width, "dim italic")
        if self._look.markdown:
            return MarkdownRows(self._width, ascii_only=self._console.options.ascii_only)
        return PlainRows(self._width)

    def _add(self, text: str) -> None:
        if not self._started:  # the blank lines a template puts around thoughts
            text = text.lstrip("\r\n")
            self._started = bool(text)
        self._keep(self._rows.push(text))

    def _keep(self, rows: list[Text]) -> None:
        """Rows that are finished: to be printed, or to be folded away."""
        if self._kind == "thought" and self._look.hide_thinking:
            return
        (self._hidden if self._kind == "thought" and self.folded else self._finished).extend(rows)

    def _end_kind(self) -> None:
        """The last row of the thoughts or of the answer is finished, with or without a newline."""
        self._add(self._safe.flush())
        self._keep(self._rows.flush())
        while self._finished and not self._finished[-1].plain:
            self._finished.pop()
        if self._started and self._kind == "thought" and not self._look.hide_thinking:
            if self.folded and self._last is not None:
                self._finished.append(Text(thought_line(self._last.stats), style="dim"))
            self._finished.append(Text())
        self._started, self._hidden = False, []

    def _draw(self, chunk: "Chunk") -> None:
        tail = self._rows.tail()
        if self._kind == "thought" and (self.folded or self._look.hide_thinking):
            tail = [Text(f"thinking, {counted(chunk.stats.thought_tokens, 'token')}", style="dim")]
        device, limit = self._look.device, self._look.limit
        reading = chunk.kind == "prefill"
        line = prefill_line(chunk.stats, self._width()) if reading else status_line(chunk.stats, device, limit)
        status = Text(line or "reading the prompt", style="dim")
        self._area.draw(self._take_finished(all_of_them=any(row.plain for row in tail)), [*tail, status])

    def _take_finished(self, *, all_of_them: bool) -> list[Text]:
        """The rows to print now; blank ones at the end can wait, since they may be the reply's end."""
        count = len(self._finished)
        while not all_of_them and count and not self._finished[count - 1].plain:
            count -= 1
        rows, self._finished = self._finished[:count], self._finished[count:]
        return rows

    def _width(self) -> int:
        return max(self._console.width - 1, 2)
