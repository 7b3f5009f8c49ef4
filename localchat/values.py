"""Text to values: what a flag, an environment variable and a line of the config file are checked with, all three.

Each function returns the value or raises UsageError with a sentence; who calls it knows where the text came from.
"""

import re
from collections.abc import Callable

from localchat.errors import UsageError
from localchat.text_safety import one_line

EFFORTS = ("low", "medium", "high")
Think = bool | str | int  # on or off, one of EFFORTS, or the most tokens of a thought
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def path(text: str) -> str:
    """What names a file or a folder: an empty variable of a shell does not."""
    if not text.strip():
        raise UsageError("an empty text is no path.")
    return text


def positive(text: str) -> int:
    """A whole number from 1."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise UsageError(f"{one_line(text)!r} is not a positive whole number.")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens with commas between them, smallest first, each once; 0 is one."""
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise UsageError(f"{one_line(text)!r} is no list of lengths such as 512,8192.")
    return tuple(sorted({int(word) for word in text.split(",")}))


def gigabytes(text: str) -> float:
    """A size in GB."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise UsageError(f"{one_line(text)!r} is not a size in GB.")
    return size


def size_in_bytes(text: str) -> int:
    """5GB, 500MB, 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ") if match else 0
    if size < 1:
        raise UsageError(f"{one_line(text)!r} is not a size such as 5GB, 500MB or 2GiB.")
    return int(size)


def switch(text: str) -> bool:
    """On or off, in the words that people use for it."""
    value = _SWITCH.get(text.lower())
    if value is None:
        raise UsageError(f"{one_line(text)!r} is neither on nor off.")
    return value


def think(text: str) -> Think:
    """on, off, an effort, or the most tokens that a thought may have."""
    if text in EFFORTS:
        return text
    if text in ("on", "off", "true", "false"):
        return _SWITCH[text]
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
        return int(text)
    raise UsageError(f"{one_line(text)!r} is not on, off, {', '.join(EFFORTS)} or a number of tokens from 1.")


def one_of(*choices: str) -> Callable[[str], str]:
    """A function that takes one of `choices`."""

    def convert(text: str) -> str:
        if text not in choices:
            raise UsageError(f"{one_line(text)!r} is not {' or '.join(choices)}.")
        return text

    return convert


def text(text: str) -> str:
    """Any text with something in it."""
    if not text.strip():
        raise UsageError("the text is empty.")
    return text


def keep(text: str) -> tuple[str, int]:
    """REGEX=bf16 or REGEX=int8, as (pattern, bits)."""
    pattern, _, form = text.rpartition("=")
    bits = {"bf16": 16, "int8": 8}.get(form.lower())
    if not pattern or bits is None:
        raise UsageError(f"{one_line(text)!r} is not REGEX=bf16 or REGEX=int8.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{one_line(pattern)!r} is not a regular expression ({error}).") from error
    return pattern, bits
