"""Where the prompt comes from: the command line, stdin, files, all joined, or the keyboard.

stdin and files are read as bytes here and nowhere else, because what they hold may not be text at all.
"""

import os
import re
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from localchat.counted import counted
from localchat.errors import UsageError
from localchat.text_safety import one_line

WAIT_SECONDS = 2.0
_READ_SIZE = 1 << 20
# Latin-1 prose has a few invalid bytes per hundred; compressed data has dozens.
_MOST_INVALID = 0.3
_LARGEST_FILE = 100_000_000  # bytes; a context of 262,144 tokens is about a megabyte


def read_prompt(argument: str | None, *, files: Sequence[str] = (), use_stdin: bool, notices: TextIO) -> str | None:
    """The prompt of a one-shot answer, or None where a person is to be asked for it.

    stdin that is not a terminal comes first, then the files, then `argument`, with a blank line between them.
    Warnings go to `notices`.

    Raises:
        UsageError: there is no prompt, a file cannot be read, or stdin or a file holds something else than text.
    """
    named = [named_file(file, read_file(file, notices)) for file in files]
    on_terminal = sys.stdin is not None and sys.stdin.isatty()
    if argument is None and not named and on_terminal and use_stdin:
        if sys.stdout.isatty():
            return None
        raise UsageError("there is no prompt, and an answer that goes into a pipe needs one as an argument.")
    piped = _read_stdin(notices) if use_stdin and sys.stdin is not None and not on_terminal else ""
    parts = [part for part in (piped.rstrip("\n"), *named, argument or "") if part.strip()]
    if not parts:
        nothing = "stdin is empty" if use_stdin else "--no-stdin is given"
        got = "the prompt is empty" if argument is not None else f"{nothing} and there is no prompt argument"
        raise UsageError(f"{got}, so there is nothing to answer.", 'try: localchat run MODEL "your question"')
    return "\n\n".join(parts)


def read_file(name: str, notices: TextIO) -> str:
    """The text of a file, a pipe or a device, decoded as stdin is.

    Raises:
        UsageError: it is absent, unreadable, too large, or no text.
    """
    shown = one_line(name) or repr(name)
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{shown} cannot be read: {one_line(reason)}.") from error
    if len(data) > _LARGEST_FILE:
        raise UsageError(f"{shown} holds more than {_LARGEST_FILE:,} bytes, which no context has room for.")
    return decode(data, notices, name)


def named_file(name: str, text: str) -> str:
    """A file's text as it stands in a prompt: a block of Markdown, fenced with more backticks than it holds."""
    longest = max((len(run) for run in re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return "\n".join([f"{one_line(name)}:", fence, text.rstrip("\n"), fence])


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
            f"{one_line(name)} holds {counted(zeros, 'NUL byte')} in {len(data):,}, so it is binary or UTF-16.",
            "convert it to UTF-8 text first (`iconv -t utf-8`).",
        )
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    invalid = text.count("\N{REPLACEMENT CHARACTER}") - data.count("\N{REPLACEMENT CHARACTER}".encode())
    if invalid > _MOST_INVALID * len(text):
        faults = f"{counted(len(data), 'byte')} with {counted(invalid, 'fault')} in its UTF-8"
        raise UsageError(f"{one_line(name)} holds {faults}, so it is not text.")
    if invalid:
        replaced = (
            f"{counted(invalid, 'sequence')} in {one_line(name)} that {'is' if invalid == 1 else 'are'} not UTF-8"
        )
        print(f"localchat: warning: replaced {replaced}", file=notices)
    return text.replace("\r\n", "\n")
