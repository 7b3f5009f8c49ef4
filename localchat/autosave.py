"""Keeps the file of a running conversation up to date: after every turn, and with everything that changes the past.

`save` writes what differs between the chat's messages and the file, whatever made them differ. Nothing is written
before the first turn has begun. A disk that is full does not end a chat: `fault` says so once, and what is missing is
written as soon as that is possible.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

from localchat import conversations
from localchat.chat import Chat, Chunk
from localchat.conversation_file import Conversation, ConversationFile, now
from localchat.errors import UsageError, UserError

PIECE_SECONDS = 1.0
_MARKS = ("at",)  # of a saved message, not of a chat's


class Autosave:
    """The saved side of one conversation at a time.

    `chosen` holds the settings that the user chose; whoever changes one changes it there, too.
    """

    def __init__(self, model: str, chosen: dict[str, Any]) -> None:
        self.model, self.chosen = model, chosen
        self.fault = ""
        self._chat: Chat | None = None
        self._file: ConversationFile | None = None
        self._failing = False
        self._written: list[dict[str, Any]] = []  # what the file says
        self._settings: tuple[str, Mapping[str, Any]] = ("", {})
        self._pending = False  # it also says that an answer has begun
        self._empty = True  # nothing was said since it was made

    @property
    def name(self) -> str:
        """What the conversation is called; "" while nothing of it is saved."""
        return self._file.path.stem if self._file else ""

    def attach(self, chat: Chat, conversation: Conversation | None = None) -> None:
        """Save `chat` from now on; it takes over the messages of `conversation`, which `open` has returned."""
        self._chat = chat
        if conversation is not None:
            chat.messages[:] = _unmarked(conversation.messages)
            if conversation.messages != conversation.settled:
                self.save()

    def open(self, name: str, *, create: bool = False) -> Conversation | None:
        """Make the conversation called `name` the one to be saved, and return it; None where it is new.

        Raises:
            UsageError: there is none and `create` is not given, or that can be no name.
            UserError: it is damaged, open in another process, or cannot be made.
        """
        path = conversations.path_of(name)
        if name == self.name:
            raise UsageError(f"{name} is this conversation.")
        if not path.exists() and not create:
            conversations.load(name)
        created = not path.exists()
        try:
            file = conversations.create(name) if created else ConversationFile(path)
        except OSError as error:
            raise UserError(f"the conversation {name} cannot be opened ({error.strerror}).") from error
        try:
            conversation = conversations.load(name)
            if conversation.torn:
                file.cut(conversation.size)
        except BaseException:
            file.close()
            raise
        self.close()
        self._file, self._written = file, _unmarked(conversation.settled)
        self._settings = (conversation.model, conversation.settings)
        self._pending = conversation.pending
        self._empty = created
        return None if created else conversation

    def record(self, asked: str | None, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The chunks of a turn, saved on their way: that it began, its text about every second, and what it left.

        `asked` is the message, None where an answer goes on.
        """
        pieces: dict[str, str] = {}
        began = 0.0
        try:
            for chunk in chunks:
                if not began:
                    self._guarded(partial(self._begin, asked))
                    began = time.monotonic()
                if chunk.text:
                    pieces[chunk.kind] = pieces.get(chunk.kind, "") + chunk.text
                    if time.monotonic() - began >= PIECE_SECONDS:
                        self._guarded(partial(self._write_pieces, pieces))
                        pieces, began = {}, time.monotonic()
                yield chunk
        finally:
            if isinstance(chunks, Generator):
                chunks.close()
            self.save()

    def save(self) -> None:
        """Bring the file up to date with the chat."""
        self._guarded(self._save)

    def rename(self, name: str) -> bool:
        """Call the conversation `name`; one that has a name already keeps it, and a copy goes on. Whether it is a copy.

        Raises:
            UsageError: the name is taken, or can be none.
            UserError: the file cannot be written.
        """
        path = conversations.path_of(name)
        taken = UsageError(f"there is a conversation {name!r} already.", "take another name, or /load it.")
        if path.exists() and name != self.name:
            raise taken
        copy = self._file is not None and name != self.name and not conversations.is_automatic(self.name)
        try:
            if self._file is None or copy:
                self._begin_file(name)
            elif name != self.name:
                self._file.rename(path)
        except FileExistsError:
            raise taken from None
        except OSError as error:
            raise UserError(f"the conversation cannot be saved as {name} ({error.strerror}).") from error
        return copy

    def _begin_file(self, name: str) -> None:
        """Go on in a new file, with what the one before it holds."""
        file = conversations.create(name)
        messages = conversations.load(self.name).messages if self._file else []
        self.close()
        self._file = file
        if messages:
            file.change(0, 0, messages)
            self._written, self._empty = _unmarked(messages), False
        self._save()

    def start_anew(self) -> str:
        """The conversation was cleared. One without a name of its own is left as it is, and the next message begins
        another; returns its name, "" where there is none or it was emptied."""
        if self._file is None or not conversations.is_automatic(self.name):
            self.save()
            return ""
        left = self.name
        self.close()
        return left

    def close(self) -> None:
        """Let others have the file. One that nothing was said in does not stay."""
        if self._file is not None:
            self._file.close(remove=self._empty)
        self._file = None
        self._forget()

    def _forget(self) -> None:
        self._written, self._settings, self._pending, self._empty = [], ("", {}), False, True

    def _guarded(self, write: Callable[[], None]) -> None:
        """Try it; the first failure in a row is a `fault`."""
        try:
            write()
            self._failing = False
        except (OSError, UserError) as error:
            if not self._failing:
                why = error.strerror if isinstance(error, OSError) else str(error)
                self.fault = f"the conversation cannot be saved at the moment ({why})"
            self._failing = True

    def _opened(self) -> ConversationFile:
        """The file, which is made when it is needed, with who answers and what was set."""
        if self._file is None:
            self._file = conversations.create()
        settings = (self.model, dict(self.chosen))
        if settings != self._settings:
            self._file.append({"at": now(), "model": self.model, "settings": self.chosen})
            self._settings = settings
        return self._file

    def _save(self) -> None:
        messages = self._chat.messages if self._chat else []
        if self._file is None and not messages:
            return
        file = self._opened()
        if messages != self._written or self._pending:
            self._write(file, messages)

    def _write(self, file: ConversationFile, messages: list[dict[str, Any]]) -> None:
        start, keep = _common(self._written, messages)
        file.change(start, keep, messages[keep:])
        self._written, self._pending = [dict(message) for message in messages], False
        self._empty = self._empty and not messages

    def _begin(self, asked: str | None) -> None:
        messages = self._chat.messages if self._chat else []
        keep = len(messages) - (asked is not None)
        file = self._opened()
        if messages[:keep] != self._written[:keep]:
            self._write(file, messages[:keep])
        file.append({"at": now(), "keep": keep, "begin": None if asked is None else messages[keep]})
        self._pending, self._empty = True, False

    def _write_pieces(self, pieces: Mapping[str, str]) -> None:
        if self._pending and self._file is not None:
            for kind, text in pieces.items():
                self._file.append({kind: text}, durable=False)


def _common(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> tuple[int, int]:
    """(start, keep) so that new begins with old[start : start + keep]: what stayed at the front, or, where the oldest
    were dropped, at the end."""
    front = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    if front or not old or not new:
        return 0, front
    for start in range(1, len(old)):
        if old[start:] == new[: len(old) - start]:
            return start, len(old) - start
    return 0, 0


def _unmarked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key not in _MARKS} for message in messages]
