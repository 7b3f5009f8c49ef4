"""The bottom of the terminal while a reply is made: rows that are drawn again and again, below rows printed once.

The cursor, hidden, waits at the start of these rows. So taking them away means erasing from the cursor on, and needs
no count of rows: a terminal that was made narrower meanwhile has wrapped them anew, or has not, and either is right.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
ERASE = "\r\x1b[J"  # from the start of the row to the end of the screen
_CLEAR = "\x1b[H\x1b[2J"


class LiveArea:
    """The rows at the bottom of `console`. Every change is one write."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self) -> None:
        """Hide the cursor."""
        self._write(HIDE_CURSOR)

    def draw(self, finished: Sequence[Text], live: Sequence[Text]) -> None:
        """Print the `finished` rows for good, and below them `live` ones in place of those that were there."""
        # One row is left to the cursor; what would not fit could not be taken away again.
        shown = [row.copy() for row in live[-max(self._console.height - 1, 1) :]]
        for row in shown:
            row.truncate(max(self._console.width - 1, 1), overflow="ellipsis")
        up = f"\x1b[{len(shown) - 1}A" if len(shown) > 1 else ""
        self._write(ERASE + self._rendered(finished, end="\n") + self._rendered(shown, end="") + "\r" + up)

    def clear(self) -> None:
        """Empty the screen; what was printed stays in the scrollback."""
        self._write(_CLEAR)

    def stop(self, finished: Sequence[Text] = ()) -> None:
        """Print the last rows, take the live ones away and show the cursor."""
        self._write(ERASE + self._rendered(finished, end="\n") + SHOW_CURSOR)

    def _rendered(self, rows: Sequence[Text], end: str) -> str:
        """Rows with their colours. The terminal itself wraps one that is longer, which keeps it whole when copied."""
        if not rows:
            return ""
        with self._console.capture() as capture:
            self._console.print(Text("\n").join(rows), soft_wrap=True, end=end)
        return capture.get()

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
