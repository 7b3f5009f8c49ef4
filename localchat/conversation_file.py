"""The file of one saved conversation: lines of JSON that are only ever appended.

    {"localchat": 1, "at": TIME}                                 the first line
    {"at": TIME, "model": NAME, "settings": {...}}               who answers from here on, and what the user set
    {"at": TIME, "start": S, "keep": K, "add": [MESSAGE, ...]}   messages = messages[S : S + K] + add
    {"at": TIME, "keep": K, "begin": MESSAGE or null}            behind K messages an answer to this one begins, or
                                                                 (null) more of the last answer
    {"thought": TEXT}, {"answer": TEXT}                          its pieces, until a line with "add" settles it

Undoing, editing, continuing and dropping are all such changes, one line each. Appending was chosen over rewriting and
renaming: a crash can cost no more than the line that was being written, a turn costs what it adds and not what the
conversation holds, and the lock stays on one file for the whole chat. A line that was cut off is cut away by the next
writer, and told.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localchat.errors import UserError
from localchat.text_safety import one_line

VERSION = 1


class InUse(UserError):
    """Another process has the conversation open."""


@dataclass
class Conversation:
    """What a file says. Messages carry the time they were written as "at".

    `settled` are the messages without an answer that was being written when the program ended; `messages` have it,
    marked interrupted. `unanswered` is a message whose answer had not begun. `size` is the bytes of whole lines;
    `torn` says that more follow.
    """

    name: str
    created: str = ""
    updated: str = ""
    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    settled: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    unanswered: str = ""
    pending: bool = False
    size: int = 0
    torn: bool = False

    @property
    def turns(self) -> int:
        """How many messages of the user's it has."""
        return sum(message["role"] == "user" for message in self.messages)


def read(path: Path) -> Conversation:
    """The conversation in `path`; a last line that was cut off is left out.

    Raises:
        UserError: the file cannot be read, is of a newer version, or another line than the last is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{one_line(str(path))} cannot be read ({error.strerror}).") from error
    *lines, rest = data.split(b"\n")
    conversation = Conversation(path.stem, torn=bool(rest))
    reader = _Reader(conversation)
    for number, line in enumerate(lines, 1):
        try:
            reader.take(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines) and not rest:
                conversation.torn = True
                break
            raise UserError(f"line {number} of {one_line(str(path))} is damaged ({one_line(str(error))}).") from error
        conversation.size += len(line) + 1
    reader.settle()
    return conversation


class _Reader:
    """Applies one line after the other to `conversation`."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._begin: dict[str, Any] | None = None
        self._keep = 0
        self._pieces = {"thought": "", "answer": ""}

    def take(self, line: dict[str, Any]) -> None:
        into = self._conversation
        if "localchat" in line:
            if line["localchat"] != VERSION:
                raise UserError(f"the conversation {into.name} was written by a newer version of this program.")
            into.created = str(line["at"])
        elif "settings" in line:
            into.model, into.settings = str(line["model"]), dict(line["settings"])
        elif "add" in line:
            start, keep = int(line["start"]), int(line["keep"])
            into.settled = into.settled[start : start + keep] + [_message(m, line["at"]) for m in line["add"]]
            into.pending = False
        elif "begin" in line:
            self._begin = _message(line["begin"], line["at"]) if line["begin"] is not None else None
            self._keep, self._pieces = int(line["keep"]), {"thought": "", "answer": ""}
            into.pending = True
        else:
            (kind, text), *_ = line.items()
            self._pieces[kind] += text
        into.updated = str(line.get("at", into.updated))

    def settle(self) -> None:
        """What is left at the end of the file."""
        into = self._conversation
        into.messages = list(into.settled)
        if not into.pending:
            return
        thought, content = self._pieces["thought"], self._pieces["answer"]
        kept = into.settled[: self._keep]
        if thought or content:
            old = {"content": ""} if self._begin is not None or not kept else kept.pop()
            thought = old.get("reasoning_content", "") + thought
            answer = {"role": "assistant", "content": old["content"] + content, "at": into.updated}
            answer |= {"reasoning_content": thought} if thought else {}
            begun = [self._begin] if self._begin is not None else []
            into.messages = [*kept, *begun, answer | {"interrupted": True}]
        elif self._begin is not None and self._keep == len(into.settled):
            into.unanswered = self._begin["content"]


def _message(value: Any, at: str) -> dict[str, Any]:
    """A message of a file, as far as it is one."""
    if value["role"] not in ("user", "assistant") or not isinstance(value["content"], str):
        raise ValueError("that is no message")
    if not isinstance(value.get("reasoning_content", ""), str):
        raise ValueError("that is no thought")
    return {"at": str(at), **value}


class ConversationFile:
    """A file that this process alone may write, as long as it is open."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open and lock `path`.

        Raises:
            InUse: another process has it open.
            OSError: it cannot be opened; FileExistsError where it is to be created and exists.
        """
        self.path = path
        self._fd = _open_locked(path, create=create)
        if create:
            _sync_folder(path.parent)
            self.append({"localchat": VERSION, "at": now()})

    def append(self, line: Mapping[str, Any], *, durable: bool = True) -> None:
        """Write one line; it is on the disk afterwards, or (durable=False) in the system's hands.

        Raises:
            OSError: it cannot be written; then nothing of it stays.
        """
        before = os.fstat(self._fd).st_size
        data = memoryview(json.dumps(line, ensure_ascii=True).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            if durable:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, before)
            raise

    def change(self, start: int, keep: int, add: Sequence[Mapping[str, Any]]) -> None:
        """messages = messages[start : start + keep] + add."""
        self.append({"at": now(), "start": start, "keep": keep, "add": list(add)})

    def cut(self, size: int) -> None:
        """Remove what a writer left behind that was stopped in the middle of a line."""
        os.ftruncate(self._fd, size)

    def rename(self, path: Path) -> None:
        """Give the file another name; the lock goes with it.

        Raises:
            FileExistsError: that name is taken.
        """
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        self.path.rename(path)
        self.path = path
        _sync_folder(path.parent)

    def close(self, *, remove: bool = False) -> None:
        """Let others have it; `remove` deletes it first."""
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def now() -> str:
    """The time as a line's "at"."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _open_locked(path: Path, *, create: bool) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(fd, 0o600)
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return fd  # and not one that was renamed or removed since
        except BlockingIOError:
            os.close(fd)
            name = one_line(path.stem)
            raise InUse(f"the conversation {name} is open in another process.", "close it there first.") from None
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk only when its folder is."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
