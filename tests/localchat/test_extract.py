"""The first code block of an answer, whatever surrounds it and however it arrives."""

import io

import pytest

from localchat.chat import Chunk
from localchat.extract import ExtractPrinter, FirstCodeBlock
from localchat.stats import Stats


@pytest.mark.parametrize(
    ("text", "code", "closed"),
    [
        ("Here:\n```bash\necho 1\n```\nDone.\n```\nno\n```", "echo 1\n", True),
        ("```\na\n\n  b\n```", "a\n\n  b\n", True),
        ("~~~py\n```\nx\n~~~", "```\nx\n", True),
        ("````md\n```\nx\n```\n````", "```\nx\n```\n", True),
        ("1. do:\n   ```sh\n   a\n     b\n   ```\n", "a\n  b\n", True),
        ("```sh\r\na\r\n```\r\n", "a\n", True),
        ("```\n```\n```\nx\n```", "", True),
        ("```sh\na\nb", "a\nb\n", False),
        ("say ```x``` or `y`\n", None, False),
        ("```not a fence```\n```\na\n```", "a\n", True),
        ("``` x\n```y\n```", "```y\n", True),
        ("no code", None, False),
        ("", None, False),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_first_block(text: str, code: str | None, closed: bool, size: int) -> None:
    block = FirstCodeBlock()
    pieces = [block.push(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(pieces) + block.flush() == (code or "")
    assert (block.found, block.closed) == (code is not None, closed)


def test_lines_are_printed_as_they_are_finished_and_safe() -> None:
    out = io.StringIO()
    seen = []
    with ExtractPrinter(out) as printer:
        printer.push(Chunk("thought", "```\nno\n```\n", Stats()))
        for piece in ("```\n", "a\x1b[1m", "\nb", "c\n``", "`\nd"):
            printer.push(Chunk("answer", piece, Stats()))
            seen.append(out.getvalue())
    assert seen == ["", "", "a^[[1m\n", "a^[[1m\nbc\n", "a^[[1m\nbc\n"]
    assert out.getvalue() == "a^[[1m\nbc\n"
