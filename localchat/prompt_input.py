"""Where the prompt comes from: the command line, stdin, both joined, or the keyboard.

stdin is read as bytes here and nowhere else, because what a pipe holds may not be text at all.
"""

import os
import select
import sys
from typing import TextIO

from localchat.errors import UsageError
from localchat.text_safety import one_line

WAIT_SECONDS = 2.0
_READ_SIZE = 1 << 20
# Latin-1 prose has a few invalid bytes per hundred; compressed data has dozens.
_MOST_INVALID = 0.3


def read_prompt(argument: str | None, *, use_stdin: bool, notices: TextIO) -> str | None:
    """The prompt of a one-shot answer, or None where a person is to be asked for it.

    stdin that is not a terminal comes first, then a blank line, then `argument`. Warnings go to `notices`.

    Raises:
        UsageError: there is no prompt, or stdin holds something else than text.
    """
    on_terminal = sys.stdin is not None and sys.stdin.isatty()
    if argument is None and on_terminal and use_stdin:
        if sys.stdout.isatty():
            return None
        raise UsageError("there is no prompt, and an answer that goes into a pipe needs one as an argument.")
    piped = _read_stdin(notices) if use_stdin and sys.stdin is not None and not on_terminal else ""
    parts = [part for part in (piped.rstrip("\n"), argument or "") if part.strip()]
    if not parts:
        nothing = "stdin is empty" if use_stdin else "--no-stdin is given"
        got = "the prompt is empty" if argument is not None else f"{nothing} and there is no prompt argument"
        raise UsageError(f"{got}, so there is nothing to answer.", 'try: localchat run MODEL "your question"')
    return "\n\n".join(parts)


def _read_stdin(notices: TextIO) -> str:
    """All of stdin as text; says so when it waits for a writer."""
    fd, said = sys.stdin.fileno(), False
    parts: list[bytes] = []
    while True:
        if not said and not select.select([fd], [], [], WAIT_SECONDS)[0]:
            print("localchat: waiting for stdin to end (--no-stdin ignores it)", file=notices, flush=True)
            said = True
        part = os.read(fd, _READ_SIZE)
        if not part:
            return decode(b"".join(parts), notices)
        parts.append(part)


def decode(data: bytes, notices: TextIO, name: str = "stdin") -> str:
    """The text in `data`: UTF-8 without a byte order mark and with LF line ends.

    Bytes that are not UTF-8 become U+FFFD, with a warning about `name`.

    Raises:
        UsageError: the bytes are not text.
    """
    zeros = data.count(0)
    if zeros:
        raise UsageError(
            f"{one_line(name)} holds {zeros:,} NUL bytes in {len(data):,}, so it is binary or UTF-16.",
            "convert it to UTF-8 text first (`iconv -t utf-8`).",
        )
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    invalid = text.count("\N{REPLACEMENT CHARACTER}") - data.count("\N{REPLACEMENT CHARACTER}".encode())
    if invalid > _MOST_INVALID * len(text):
        raise UsageError(
            f"{one_line(name)} holds {len(data):,} bytes with {invalid:,} faults in its UTF-8, so it is not text."
        )
    if invalid:
        print(
            f"localchat: warning: replaced {invalid:,} sequences in {one_line(name)} that are not UTF-8", file=notices
        )
    return text.replace("\r\n", "\n")
