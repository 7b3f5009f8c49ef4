"""Tab in the chat: slash commands and what they take, models, and `@path`."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from localchat import attachments, conversations, parameters, registry, slash, store
from localchat.flags import KV_CACHES


class ChatCompleter(Completer):
    """Continues the last word before the cursor."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The names that the last word may become."""
        text = document.text_before_cursor
        start = max(text.rfind(" "), text.rfind("\n")) + 1
        if (quote := text.rfind('@"')) >= 0 and (quote == 0 or text[quote - 1].isspace()) and text.count('"') % 2:
            start = quote  # a name with blanks
        word = text[start:]
        if word.startswith("@"):
            yield from self._replacing(word, map(attachments.reference, _paths(word[1:].lstrip('"'))))
        elif text.startswith("/") and "\n" not in text:
            name, blank, rest = text.partition(" ")
            if blank and name == "/read":
                yield from self._replacing(rest, _paths(rest))
            elif blank and name == "/load":  # a name may have blanks
                yield from self._replacing(rest, (n for n in conversations.names() if n.startswith(rest)))
            else:
                names = [n for n in _words_after(tuple(text[:start].split())) if n.startswith(word)]
                yield from self._replacing(word, names)

    def _replacing(self, word: str, names: Iterable[str]) -> Iterator[Completion]:
        for name in names:
            yield Completion(name, start_position=-len(word))


def _words_after(before: tuple[str, ...]) -> Iterable[str]:
    """What can follow the words of a command."""
    if before == ("/model",):
        return dict.fromkeys([*registry.MODELS, *(stored.name for stored in store.listing())])
    candidates: dict[tuple[str, ...], Iterable[str]] = {
        (): slash.NAMES,
        ("/show",): slash.SHOWN,
        ("/set",): (*parameters.NAMES, "parameter", "system", "think", "nothink", "verbose", "quiet", "kv_cache"),
        ("/set", "kv_cache"): KV_CACHES,
        ("/set", "parameter"): parameters.NAMES,
    }
    return candidates.get(before, ())


def _paths(start: str) -> Iterator[str]:
    """The files and folders (with a slash at the end) whose path begins with `start`; hidden ones if it says so."""
    folder, _, name = start.rpartition("/")
    prefix = start[: len(start) - len(name)]
    try:
        with os.scandir(Path(prefix or ".").expanduser() if folder or not prefix else Path(prefix)) as entries:
            found = sorted((entry.name, entry.is_dir()) for entry in entries if entry.name.startswith(name))
    except (OSError, RuntimeError):
        return
    for entry, is_folder in found:
        if not entry.startswith(".") or name.startswith("."):
            yield prefix + entry + "/" * is_folder
