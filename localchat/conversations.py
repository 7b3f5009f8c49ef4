"""The saved conversations of a user: their folder, their names, which one was last.

    $XDG_STATE_HOME/localchat/conversations/<name>.jsonl     (~/.local/state where it is not set)

The folder is 0700 and the files are 0600. A conversation that nobody named has the time of its first message as name.
"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from localchat.conversation_file import Conversation, ConversationFile, read
from localchat.errors import UsageError, UserError
from localchat.text_safety import one_line

_NAME = re.compile(r"\w[\w .@+-]{0,79}")
_AUTOMATIC = re.compile(r"\d{4}-\d\d-\d\d-\d{6}(-\d+)?")
_LONGEST = 200  # bytes; most file systems take 255 with the suffix


@dataclass(frozen=True)
class Summary:
    """One row of the list. `fault` says why it cannot be read ("": it can)."""

    name: str
    updated: str
    model: str
    turns: int
    first: str
    fault: str = ""


def folder(*, create: bool = False) -> Path:
    """Where the conversations are.

    Raises:
        UserError: it is to be created and cannot be.
    """
    xdg = os.environ.get("XDG_STATE_HOME", "")
    path = (Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".local" / "state") / "localchat" / "conversations"
    if create:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.chmod(0o700)
            path.chmod(0o700)
        except OSError as error:
            raise UserError(f"{one_line(str(path))} cannot be made ({error.strerror}): set XDG_STATE_HOME.") from error
    return path


def path_of(name: str) -> Path:
    """The file of the conversation called `name`, whether it exists or not.

    Raises:
        UsageError: that can be no name.
    """
    if not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST or name != name.strip():
        raise UsageError(
            f"{one_line(name)!r} cannot name a conversation: take letters, digits, blanks and . _ - @ +, "
            "a letter or digit first."
        )
    return folder() / f"{name}.jsonl"


def is_automatic(name: str) -> bool:
    """Whether nobody has named it."""
    return _AUTOMATIC.fullmatch(name) is not None


def load(name: str) -> Conversation:
    """The conversation called `name`.

    Raises:
        UsageError: there is none.
        UserError: its file is damaged.
    """
    return read(existing(name))


def existing(name: str) -> Path:
    """The file of the conversation called `name`.

    Raises:
        UsageError: there is none.
    """
    path = path_of(name)
    if not path.exists():
        raise UsageError(
            f"there is no saved conversation {one_line(name)!r}.", "`localchat sessions list` or /sessions lists them."
        )
    return path


def latest() -> str:
    """The name of the conversation that was written last.

    Raises:
        UsageError: there is none.
    """
    for path in sorted(_files(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        conversation = read(path)
        if conversation.messages or conversation.unanswered:
            return path.stem
    raise UsageError("there is no saved conversation to continue.", "leave -C away to begin one.")


def names() -> list[str]:
    """The names of all conversations, without a look into their files."""
    return sorted(path.stem for path in _files())


def listing() -> list[Summary]:
    """All conversations, the one that was written last first."""
    rows = []
    for path in sorted(_files(), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            c = read(path)
        except UserError as error:
            rows.append(Summary(path.stem, "", "", 0, "", str(error)))
            continue
        first = c.messages[0]["content"] if c.messages else c.unanswered
        if first:
            rows.append(Summary(c.name, c.updated, c.model, c.turns, first))
    return rows


def create(name: str = "") -> ConversationFile:
    """A new, empty conversation; without a name it is called by the time.

    Raises:
        UserError: the folder cannot be made.
        OSError: the file cannot be made; FileExistsError where the name is taken.
    """
    folder(create=True)
    if name:
        return ConversationFile(path_of(name), create=True)
    stamp, number = time.strftime("%Y-%m-%d-%H%M%S"), 1
    while True:
        try:
            return ConversationFile(path_of(stamp if number == 1 else f"{stamp}-{number}"), create=True)
        except FileExistsError:
            number += 1


def remove(name: str) -> None:
    """Delete the conversation called `name`.

    Raises:
        UsageError: there is none.
        UserError: another process has it open, or it cannot be deleted.
    """
    path = path_of(name)
    try:
        ConversationFile(path).close(remove=True)
    except FileNotFoundError:
        raise UsageError(f"there is no saved conversation {one_line(name)!r}.") from None
    except OSError as error:
        raise UserError(f"{one_line(str(path))} cannot be removed ({error.strerror}).") from error


def _files() -> list[Path]:
    return [path for path in folder().glob("*.jsonl") if path.is_file()] if folder().is_dir() else []
