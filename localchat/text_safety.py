"""Text that others wrote, made safe to show on a terminal.

A model, a file, a config or a name can hold escape sequences that move the cursor, set the window's title or hide
text. Whatever this program prints of them goes through `visible` (whole texts) or `VisibleStream` (pieces of a
stream). A pipe gets the same treatment, since `| cat` ends on a terminal too. Nothing else is changed.

Notation: C0 controls and DEL as `cat -v` writes them (ESC is `^[`), everything else as `less` does (`<U+009B>`).
"""

# Bidirectional embeddings, overrides and isolates reorder what is read (arXiv 2111.00169, "Trojan Source").
# The marks U+200E and U+200F only give direction to neutral characters and are part of ordinary text.
_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_KEPT = {ord("\n"), ord("\t")}


def _table() -> dict[int, str]:
    caret = {code: f"^{chr(code ^ 0x40)}" for code in (*range(0x20), 0x7F) if code not in _KEPT}
    named = {code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), *_BIDI)}
    # A lone surrogate (an undecodable byte of argv or of a file name) could not be written to any terminal.
    return caret | named | dict.fromkeys(range(0xD800, 0xE000), "\N{REPLACEMENT CHARACTER}")


_VISIBLE = _table()


def visible(text: str) -> str:
    """`text` with control characters written out; newline, tab and CR before a newline stay as they are."""
    if "\r\n" in text:
        return "\r\n".join(part.translate(_VISIBLE) for part in text.split("\r\n"))
    return text.translate(_VISIBLE)


def one_line(text: str) -> str:
    """`visible`, with every run of white space as one blank: for names, table cells and error messages."""
    return visible(" ".join(text.split()))


class VisibleStream:
    """`visible` over a text that arrives in pieces: a CR that ends a piece waits for what follows it."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The safe text of the next piece, as far as it is certain."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return visible(text[: len(text) - len(self._held)])

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return visible(held)
