"""Text that arrives in pieces as rows of a terminal: finished rows come out once, the unfinished rest can be asked for.

`PlainRows` shows text as it is, markdown.py as its author meant it. Rows are wrapped here, at word boundaries, one
column before the edge, with the width of the moment: a row that has come out is never touched again.
"""

import re
from collections.abc import Callable
from typing import Protocol

from rich.cells import cell_len, chop_cells
from rich.text import Text

# A wide character may be followed by a line break, a word of narrow ones may not.
_WIDE = r"\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_PIECES = re.compile(rf"\s+|[{_WIDE}]|[^\s{_WIDE}]+")


class Rows(Protocol):
    """What turns pieces of text into rows."""

    def push(self, text: str) -> list[Text]:
        """The rows that `text` has finished."""

    def tail(self) -> list[Text]:
        """The rows of what is unfinished, as of now."""

    def flush(self) -> list[Text]:
        """The text has ended: the last rows."""


class PlainRows:
    """Text as it is, in one style. `width` is asked for whenever something is wrapped."""

    def __init__(self, width: Callable[[], int], style: str = "") -> None:
        self._width, self._style = width, style
        self._tail = ""

    def push(self, text: str) -> list[Text]:
        """The rows that `text` has finished: only the last row of an unfinished line can still change."""
        *lines, self._tail = (self._tail + text).split("\n")
        rows = [row for line in lines for row in split_rows(line, self._width())]
        *finished, self._tail = split_rows(self._tail, self._width())
        return [self._styled(row) for row in [*rows, *finished]]

    def tail(self) -> list[Text]:
        """The unfinished row, or nothing."""
        return [self._styled(row) for row in split_rows(self._tail, self._width())] if self._tail else []

    def flush(self) -> list[Text]:
        """The unfinished row, which is one now."""
        rows, self._tail = self.tail() if self._tail.strip() else [], ""
        return rows

    def _styled(self, row: str) -> Text:
        text = Text(row.rstrip(), style=self._style)
        text.expand_tabs(8)
        return text


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


def wrapped(text: Text, width: int) -> list[Text]:
    """A styled line as rows of at most `width` cells."""
    text.expand_tabs(8)
    ends, end = [], 0
    for row in split_rows(text.plain, width)[:-1]:
        end += len(row)
        ends.append(end)
    rows = list(text.divide(ends))
    for styled in rows:
        styled.rstrip()
    return rows
