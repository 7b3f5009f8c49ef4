"""Markdown in pieces: the same rows however it is cut, code as it is, and a flat cost."""

from typing import Any

import pytest

from localchat.markdown import MarkdownRows
from localchat.rows import PlainRows, Rows

TEXT = """\
# Title with **bold**
Some *text*, `code`, [a link](http://x.y/z) and \\( a_1 * b \\).
- item one that is so long that it is wrapped at the edge
  - nested
10. tenth
> quoted
---
```python
def f(x):
\treturn "hello"  # long long long long long long long
```
After <b>it</b>.
| a | b |
|---|:-:|
| 1 | `x` |
| longer | 2 |

  ~~~
  **no markup** here
  ~~~
end **unclosed"""
ROWS = """\
Title with bold
Some text, code, a link (http://x.y/z)
and \\( a_1 * b \\).
• item one that is so long that it is
  wrapped at the edge
  • nested
10. tenth
│ quoted
───────────────────────────────────────

def f(x):
        return "hello"  # long long long long long long long

After <b>it</b>.
a        b
──────────
1        x
longer   2

**no markup** here

end **unclosed"""


def rows_of(rows: Rows, text: str, size: int = 1) -> list[Any]:
    finished = []
    for start in range(0, len(text), size):
        finished += rows.push(text[start : start + size])
        assert all(len(row.plain) <= 39 for row in rows.tail())
    return [*finished, *rows.flush()]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_however_it_is_cut(size: int) -> None:
    assert "\n".join(row.plain for row in rows_of(MarkdownRows(lambda: 39), TEXT, size)) == ROWS


def test_ascii_only() -> None:
    assert "\n".join(row.plain for row in rows_of(MarkdownRows(lambda: 39, ascii_only=True), TEXT)).isascii()


@pytest.mark.parametrize(
    ("text", "word", "style"),
    [
        ("a **b** c", "b", "bold"),
        ("a *b* c", "b", "italic"),
        ("a `b` c", "b", "cyan"),
        ("a ~~b~~ c", "b", "strike"),
        ("## b", "b", "bold"),
        ("- x **b**", "b", "bold"),
        ("> x **b**", "b", "bold"),
        ("a **x *b* y**", "b", "italic"),
        ("[b](http://a)", "b", "underline"),
        ("| b | c |\n|---|---|\n| **d** | e |", "d", "bold"),
    ],
)
def test_styles(text: str, word: str, style: str) -> None:
    rows = rows_of(MarkdownRows(lambda: 39), text)
    (row,) = [row for row in rows if word in row.plain]
    at = row.plain.index(word)
    assert any(style in str(span.style) for span in row.spans if span.start <= at < span.end) or style in str(row.style)
    assert "*" not in row.plain and "`" not in row.plain


@pytest.mark.parametrize("text", ["**bold", "a * b * c", "`open", "snake_case_name", "~", "a <b> c", "&lt;", "|"])
def test_what_is_no_markup_stays(text: str) -> None:
    (row,) = rows_of(MarkdownRows(lambda: 39), text)
    assert row.plain == text


@pytest.mark.parametrize("language", ["", "python", "nosuchlanguage", "c++"])
def test_code_is_as_it_is(language: str) -> None:
    code = ["", "    x = [1,  2]   ", "\u00e4 \U0001f642 " + "long " * 30, "", "```", "    ", "* a *b*", "> c"]
    text = f"````{language}\n" + "\n".join(code) + "\n````\n"
    rows = [row.plain for row in rows_of(MarkdownRows(lambda: 39), text)]
    assert rows == code


def test_code_that_never_ends() -> None:
    rows = MarkdownRows(lambda: 39)
    assert [row.plain for row in rows.push("```\none\ntwo")] == ["one"]
    assert [row.plain for row in rows.tail()] == ["two"]
    assert [row.plain for row in rows.flush()] == ["two"]


def test_a_line_without_end_is_finished_piece_by_piece() -> None:
    text = "- " + "word **bold words here** and `some code` then [two x](y) " * 100
    markdown, rows, longest = MarkdownRows(lambda: 39), [], 0
    for character in text:
        rows += markdown.push(character)
        longest = max(longest, len(markdown.tail()))
    rows += markdown.flush()
    said = " ".join(row.plain.strip() for row in rows)
    assert said.split() == ("• " + "word bold words here and some code then two x (y) " * 100).split()
    assert max(len(row.plain) for row in rows) <= 39
    assert min(len(row.plain) for row in rows[:-1]) > 20  # no row is broken off
    assert longest <= 14


def test_a_word_without_end() -> None:
    rows = rows_of(MarkdownRows(lambda: 39), "x" * 5000)
    assert "".join(row.plain for row in rows) == "x" * 5000


def test_a_long_table_goes_on_under_its_head() -> None:
    text = "| n | m |\n|---|---|\n" + "".join(f"| {n} | x |\n" for n in range(100)) + "end"
    markdown, rows, longest = MarkdownRows(lambda: 39), [], 0
    for character in text:
        rows += markdown.push(character)
        longest = max(longest, len(markdown.tail()))
    rows += markdown.flush()
    numbers = [row.plain.split()[0] for row in rows if row.plain[:1].isdigit()]
    assert numbers == [str(n) for n in range(100)]
    assert sum(row.plain.startswith("n ") for row in rows) == 3
    assert longest < 50
    assert rows[-1].plain == "end"


def test_lines_that_make_no_table() -> None:
    assert [row.plain for row in rows_of(MarkdownRows(lambda: 39), "| a\n| b\nc")] == ["| a", "| b", "c"]


def test_plain_rows() -> None:
    rows = rows_of(PlainRows(lambda: 39, "dim"), "**a**\n\n" + "word " * 20)
    assert [row.plain for row in rows[:2]] == ["**a**", ""]
    assert " ".join(row.plain for row in rows[2:]) == ("word " * 20).strip()
    assert all(row.style == "dim" for row in rows)
