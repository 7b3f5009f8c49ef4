"""Markdown for a terminal while it is written: each finished line becomes rows that are never drawn again.

Models end a line where a thought ends and rarely wrap paragraphs, so a line is a block here, and what has to be drawn
again is one unfinished line, or one unfinished table. Code is printed as it is, without border, margin or wrapping, so
that it can be copied. What is inside a line is read by markdown-it; a backslash stays, for it begins LaTeX.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from rich.cells import chop_cells
from rich.text import Text

from localchat.rows import wrapped
from localchat.text_safety import visible

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*")
_RULE = re.compile(r" {0,3}([-*_])(?:\s*\1){2,}\s*")
_MARKED = re.compile(r"(\s*)((?:>\s?)+|[-*+]\s+|\d{1,9}[.)]\s+|)(.*)")
_DELIMITERS = re.compile(r"\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*")
_CELLS = re.compile(r"(?<!\\)\|")
_STYLES = {"em": "italic", "strong": "bold", "s": "strike", "link": "underline"}
_CODE = "cyan"
_LONGEST_TABLE = 40  # rows; what comes behind them is a new table with the same head
_LONGEST_TAIL = 12  # rows of an unfinished line, after which its beginning is finished anyway
_LONGEST_COLOURED = 2000  # characters of a line of code


class MarkdownRows:
    """Markdown as rows. `width` is asked for whenever something is wrapped; `ascii_only`: no bullets, no lines."""

    def __init__(self, width: Callable[[], int], *, ascii_only: bool = False) -> None:
        self._width, self._ascii = width, ascii_only
        self._line = ""
        self._begun: tuple[Text, Text] | None = None  # of a long line: the margin of its rows, the row it goes on in
        self._fence = ""  # that closes the code
        self._indent = 0  # of the fence
        self._language = ""
        self._table: list[str] = []
        self._blank, self._gap = True, False  # the last row was blank; code stands apart from what surrounds it

    def push(self, text: str) -> list[Text]:
        """The rows that `text` has finished."""
        *lines, self._line = (self._line + text).split("\n")
        rows = [row for line in lines for row in self._finish(line.rstrip("\r"))]
        if not self._fence and len(self._line) > _LONGEST_TAIL * self._width():
            rows += self._begin()
        return rows

    def tail(self) -> list[Text]:
        """The rows of the unfinished line, or of the unfinished table."""
        if self._fence:
            return self._code_tail()
        if self._table:
            return self._table_rows([*self._table, self._line] if self._line else self._table)
        return [] if not self._line or _FENCE.fullmatch(self._line) else self._text_rows(self._line)

    def flush(self) -> list[Text]:
        """The text has ended: the last rows."""
        rows = self._finish(self._line.rstrip("\r")) if self._line.strip() or self._begun else []
        self._line = ""
        return [*rows, *self._end_table()]

    def _finish(self, line: str) -> list[Text]:
        """The rows of a whole line, and of a table that ends before it."""
        if self._fence:
            if line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence, self._gap = "", True
                return []
            return self._spaced([self._code(self._dedented(line))])
        opening = None if self._begun else _FENCE.fullmatch(line)
        if opening is None and not self._begun and line.lstrip().startswith("|"):
            self._table.append(line)
            return self._end_table() if len(self._table) > _LONGEST_TABLE else []
        rows = self._end_table()
        if opening is not None:
            self._indent, self._fence, self._language = len(opening[1]), opening[2], opening[3]
            self._gap = True
            return rows
        rows += self._spaced(self._text_rows(line))
        self._begun = None
        return rows

    def _spaced(self, rows: list[Text]) -> list[Text]:
        """`rows`, behind a blank one where code begins or has ended and there is none yet."""
        if self._gap and not self._blank and rows and rows[0].plain:
            rows = [Text(), *rows]
        self._gap = self._gap and not rows
        if rows:
            self._blank = not rows[-1].plain
        return rows

    def _text_rows(self, line: str) -> list[Text]:
        """A line outside of code: heading, rule, list item, quotation or paragraph."""
        width = self._width()
        if self._begun is not None:
            margin, row = self._begun
            return _with_margin(wrapped(row + _inline(line), max(width - len(margin), 2)), margin, margin)
        if heading := _HEADING.fullmatch(line):
            text = _inline(heading[2])
            text.stylize("bold underline" if len(heading[1]) == 1 else "bold")
            return wrapped(text, width)
        if _RULE.fullmatch(line):
            return [Text(("-" if self._ascii else "─") * min(width, 40), style="dim")]
        first, margin, content = self._marked(line)
        return _with_margin(wrapped(_inline(content), max(width - len(margin), 2)), first, margin)

    def _marked(self, line: str) -> tuple[Text, Text, str]:
        """What stands before the first row and before the others, and the text itself."""
        match = _MARKED.fullmatch(line)
        space, mark, content = (match[1].expandtabs(4), match[2], match[3]) if match else ("", "", line)
        space = space[: self._width() // 2]
        if mark.startswith(">"):
            bar = Text(space + ("| " if self._ascii else "│ ") * mark.count(">"), style="dim")
            return bar, bar, content
        sign = mark.rstrip() if mark[:1].isdigit() or self._ascii else "•" if mark else ""
        first = Text(f"{space}{sign} " if sign else space)
        return first, Text(" " * len(first)), content

    def _begin(self) -> list[Text]:
        """Finish the beginning of a line that has become long, where no markup is open if there is such a place."""
        cut = end = self._line.rfind(" ", 0, (_LONGEST_TAIL - 2) * self._width()) + 1
        while cut and _is_open(self._line[:cut]):
            cut = self._line.rfind(" ", 0, cut - 1) + 1
        cut = cut or end or (_LONGEST_TAIL - 2) * self._width()
        margin = self._begun[0] if self._begun else self._marked(self._line)[1]
        rows = self._text_rows(self._line[:cut].rstrip())
        goes_on = rows.pop()[len(margin) :] + Text(" " * self._line[:cut].endswith(" "))
        self._line, self._begun = self._line[cut:], (margin, goes_on)
        return self._spaced(rows)

    def _dedented(self, line: str) -> str:
        return line[min(self._indent, len(line) - len(line.lstrip(" "))) :]

    def _code(self, line: str) -> Text:
        """A line of code as it is, coloured by itself."""
        if not self._language or len(line) > _LONGEST_COLOURED:
            return Text(line, style=_CODE)
        from rich.syntax import Syntax

        text = Syntax("", self._language, theme="ansi_dark", tab_size=8).highlight(line.expandtabs(8))
        text.right_crop(text.plain.endswith("\n"))
        return text if text.plain == line.expandtabs(8) else Text(line, style=_CODE)

    def _code_tail(self) -> list[Text]:
        """The last rows of an unfinished line of code, cut at the edge."""
        if not self._line or self._fence.startswith(self._line.strip()):
            return []
        line = self._dedented(self._line).expandtabs(8)[-_LONGEST_TAIL * self._width() :]
        return [Text(row, style=_CODE) for row in chop_cells(line, self._width())]

    def _end_table(self) -> list[Text]:
        """The rows of the table that has ended; a long one goes on under the same head."""
        lines, self._table = self._table, []
        if len(lines) > _LONGEST_TABLE and _DELIMITERS.fullmatch(lines[1]):
            self._table = lines[:2]
        return self._spaced(self._table_rows(lines)) if len(lines) > 2 or not self._is_head(lines) else []

    def _is_head(self, lines: list[str]) -> bool:
        """Whether this is what a long table goes on with, or a table without a body."""
        return len(lines) == 2 and bool(_DELIMITERS.fullmatch(lines[1]))

    def _table_rows(self, lines: list[str]) -> list[Text]:
        """A table as rich lays it out, or the lines as they are where they make none."""
        if len(lines) < 2 or not _DELIMITERS.fullmatch(lines[1]):
            return [row for line in lines for row in wrapped(_inline(line), self._width())]
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.ASCII2 if self._ascii else box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        head = _cells(lines[0])
        for cell in head:
            table.add_column(_inline(cell), overflow="fold")
        for line in lines[2:]:
            table.add_row(*(_inline(cell) for cell in (_cells(line) + [""] * len(head))[: len(head)]))
        console = Console(width=self._width(), color_system=None)
        rows = [Text.assemble(*((part.text, part.style or "") for part in row)) for row in console.render_lines(table)]
        for row in rows:
            row.rstrip()
        return rows


def _cells(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip().replace("\\|", "|") for cell in _CELLS.split(line.strip().strip("|"))]


def _with_margin(rows: list[Text], first: Text, others: Text) -> list[Text]:
    """`rows` behind their margins; blank rows stay blank."""
    return [
        (first if n == 0 else others) + row if row.plain or first.plain.strip() else row for n, row in enumerate(rows)
    ]


def _is_open(text: str) -> bool:
    """Whether `text` may end inside of markup."""
    strong, stars = text.count("**"), text.count("*")
    odd = (strong, stars - 2 * strong, text.count("`"), text.count("~~"), text.count("[") - text.count("]"))
    return any(count % 2 for count in odd)


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable("strikethrough").disable(["escape", "entity"])


def _inline(text: str) -> Text:
    """One line with its emphasis, code and links. A link shows its address, for it cannot be clicked."""
    shown, styles, addresses = Text(), list[str](), list[str]()
    for token in _parser().parseInline(text)[0].children or ():
        name = token.type.partition("_")[0]
        style = " ".join(styles)
        if token.type == "link_open":
            addresses.append(visible(str(token.attrs.get("href", ""))))
        if token.nesting:
            if token.nesting > 0:
                styles.append(_STYLES.get(name, ""))
            else:
                styles.pop()
            if name == "link" and token.nesting < 0 and not shown.plain.endswith(addresses[-1]):
                shown.append(f" ({addresses[-1]})", style="dim")
        elif token.type == "image":
            shown.append(f"{token.content} ({visible(str(token.attrs.get('src', '')))})", style=style)
        elif token.type == "code_inline":
            shown.append(token.content, style=f"{style} {_CODE}")
        else:
            shown.append(token.content, style=style)
    return shown
