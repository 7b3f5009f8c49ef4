"""The bar of a long prompt on stderr, where stdout is a file or a pipe and shows nothing before the answer."""

import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from localchat.live import LiveArea
from localchat.statusline import prefill_line
from localchat.stream import REFRESH_SECONDS

if TYPE_CHECKING:
    from localchat.chat import Chunk


def with_bar(chunks: Iterator["Chunk"], console: Console | None = None) -> Iterator["Chunk"]:
    """`chunks`, and a bar on `console` (stderr) while the prompt is read, gone before anything else comes.

    Nothing is shown where that is no terminal, or one that cannot move its cursor.
    """
    console = console or Console(stderr=True)
    return _with_bar(chunks, console) if console.is_terminal and not console.is_dumb_terminal else chunks


def _with_bar(chunks: Iterator["Chunk"], console: Console) -> Generator["Chunk", None, None]:
    area, drawn = LiveArea(console), 0.0  # when the bar was drawn; 0: it is not there
    try:
        for chunk in chunks:
            if chunk.kind != "prefill" and drawn:
                area.stop()
                drawn = 0.0
            due = chunk.kind == "prefill" and time.monotonic() - drawn >= REFRESH_SECONDS
            if due and (line := prefill_line(chunk.stats, max(console.width - 1, 1))):
                area.draw([], [Text(line, style="dim")])
                drawn = time.monotonic()
            yield chunk
    finally:
        if drawn:
            area.stop()
        if isinstance(chunks, Generator):
            chunks.close()
