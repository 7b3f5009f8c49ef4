"""`--extract`: the first code block of an answer on stdout, its lines as they are finished, and nothing else."""

import re
from typing import TYPE_CHECKING, Self, TextIO

from localchat.statusline import Reply
from localchat.text_safety import visible

if TYPE_CHECKING:
    from localchat.chat import Chunk

# As CommonMark has it, but indented as deep as a list may put it. A fence of backticks has none behind it.
_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})")


class FirstCodeBlock:
    """The lines of the first fenced block in a text that arrives in pieces. Longer fences may hold shorter ones."""

    def __init__(self) -> None:
        self._rest = ""  # of a line that is not finished
        self._fence: str | None = None
        self._indent = ""
        self.found = self.closed = False

    def push(self, text: str) -> str:
        """What the next piece adds to the block, whole lines only."""
        *lines, self._rest = (self._rest + text).split("\n")
        return "".join(self._line(line.removesuffix("\r")) for line in lines)

    def flush(self) -> str:
        """The last line, at the end of the text."""
        rest, self._rest = self._rest, ""
        return self._line(rest) if rest else ""

    def _line(self, line: str) -> str:
        if self.closed:
            return ""
        if self._fence is None:
            if opening := _FENCE.match(line):
                self.found, self._indent, self._fence = True, opening[1], opening[2]
            return ""
        bare = line.strip()
        if len(bare) >= len(self._fence) and set(bare) == {self._fence[0]}:
            self.closed = True
            return ""
        indent = len(line) - len(line.lstrip(" \t"))
        return line[min(indent, len(self._indent)) :] + "\n"


class ExtractPrinter:
    """Prints the block's lines and flushes each; thoughts and prose are dropped."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.block = FirstCodeBlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._write(self.block.flush())

    def push(self, chunk: "Chunk") -> None:
        if chunk.kind == "answer":
            self._write(self.block.push(chunk.text))

    def finish(self, reply: Reply) -> None:
        """Nothing is added."""

    def _write(self, text: str) -> None:
        if text:
            self._out.write(visible(text))
            self._out.flush()
