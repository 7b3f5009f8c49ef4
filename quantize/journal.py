"""What a conversion has done so far, kept in the unfinished folder so that a killed one can go on.

A file of JSON lines: first what is being converted and how, then for every step (one matrix, or one tensor that is
stored as it is) the entries of the tensors that it wrote. A line is added when its tensors have been handed to the
system, so a process may be killed at any moment; the line that it was writing is dropped. After a power failure lines
may be there whose tensors are not: the entries' checksums tell.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from localchat.errors import UserError
from localchat.quantize.writer import Entry

NAME = "journal.jsonl"


@dataclass(frozen=True)
class Done:
    """A step that was written, and its tensors."""

    step: str
    entries: tuple[Entry, ...]


class Journal:
    """The journal in `folder`. `read` it, then `begin`, then `add`; close it, or use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file: FileIO | None = None

    def read(self, identity: Mapping[str, Any]) -> list[Done]:
        """The steps that an earlier conversion has written; none where there was no earlier one.

        Raises:
            UserError: that one was of another source or made otherwise, so that its work cannot be used.
        """
        lines = self._lines()
        if not lines:
            return []
        first = lines.pop(0)
        differing = [key for key in identity if first.get(key) != identity[key]]
        if differing:
            raise UserError(
                f"{self._path.parent}: was begun with another {differing[0]} ({first.get(differing[0])}, now "
                f"{identity[differing[0]]}), so it cannot be continued.",
                f"delete {self._path.parent} to begin anew.",
            )
        return [Done(line["step"], tuple(map(_entry, line["entries"]))) for line in lines]

    def begin(self, identity: Mapping[str, Any], done: Iterable[Done]) -> None:
        """Start the file anew, with these steps done already."""
        lines = [dict(identity), *map(asdict, done)]
        new = self._path.with_name(f"new_{NAME}")
        new.write_text("".join(map(_line, lines)))
        new.replace(self._path)
        self._file = FileIO(self._path, "a")

    def add(self, step: str, entries: Sequence[Entry]) -> None:
        """One more step is done."""
        if self._file is None:
            raise ValueError("add: the journal was not begun")
        self._file.write(_line(asdict(Done(step, tuple(entries)))).encode())

    def remove(self) -> None:
        """Close and delete it: the conversion is complete."""
        self.close()
        self._path.unlink()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _lines(self) -> list[dict[str, Any]]:
        """Every complete line, up to the first that is damaged."""
        if not self._path.is_file():
            return []
        lines = []
        for line in self._path.read_bytes().split(b"\n")[:-1]:  # behind the last newline is a line that was cut off
            try:
                lines.append(json.loads(line))
            except ValueError:  # zeros, after a power failure
                break
        return lines


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content) + "\n"


def _entry(raw: Mapping[str, Any]) -> Entry:
    return Entry(**{**raw, "shape": tuple(raw["shape"])})
