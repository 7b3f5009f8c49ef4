"""The line editor of the chat: prompt_toolkit with this program's keys, and the history file."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.utils import is_dumb_terminal

from localchat.completer import ChatCompleter
from localchat.editor import edited
from localchat.errors import UserError
from localchat.failures import failure_of
from localchat.text_safety import visible

_QUOTES = '"""'
_OFF = ("off", "0", "no", "false")


def unquoted(text: str) -> str:
    '''The message inside """ and """; other text as it is.'''
    inner = text.strip()
    if len(inner) >= 2 * len(_QUOTES) and inner.startswith(_QUOTES) and inner.endswith(_QUOTES):
        return inner.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text


def is_open(text: str) -> bool:
    '''Whether `text` has opened a """ block (at its start, or as a value of /set) and not closed it.'''
    return text.lstrip().startswith((_QUOTES, f"/set system {_QUOTES}")) and text.count(_QUOTES) % 2 == 1


def prompt_session(
    history: History,
    *,
    on_fold: Callable[[], None] | None = None,
    on_clear: Callable[[], None] | None = None,
    input: Input | None = None,
    output: Output | None = None,
) -> PromptSession[str]:
    """The line editor, with this program's keys. `on_fold` is for Ctrl-T. `input` and `output` are the terminal where
    not given."""
    return PromptSession(
        history=history,
        key_bindings=key_bindings(on_fold, on_clear),
        multiline=True,
        prompt_continuation="... ",
        completer=ChatCompleter(),
        complete_while_typing=False,
        enable_open_in_editor=False,
        enable_suspend=True,
        input=input,
        output=output,
    )


def key_bindings(on_fold: Callable[[], None] | None = None, on_clear: Callable[[], None] | None = None) -> KeyBindings:
    """Enter sends, the new-line keys, the editor, folding, and what Ctrl-C does at the prompt."""
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _ctrl_c(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
            if on_clear is not None:
                on_clear()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add("c-g", filter=~is_searching)
    def _editor(event: KeyPressEvent) -> None:
        event.app.create_background_task(_edit(event.current_buffer))

    @keys.add("c-t")
    def _ctrl_t(_event: KeyPressEvent) -> None:
        if on_fold is not None:
            run_in_terminal(on_fold)

    return keys


async def _edit(buffer: Buffer) -> None:
    """Open the user's editor on the text of the line. What goes wrong is said above the prompt, the text stays."""

    def edit() -> str | None:
        try:
            return edited(buffer.text)
        except (UserError, OSError) as error:
            print(failure_of(error))
            return None

    text = await run_in_terminal(edit, in_executor=True)
    if text is not None:
        buffer.document = Document(text, len(text))


def plain_where_dumb() -> AbstractContextManager[object]:
    """While this is entered, prompt_toolkit writes no escape sequences to a terminal that knows none (TERM=dumb)."""
    return create_app_session(output=PlainTextOutput(sys.stdout)) if is_dumb_terminal() else nullcontext()


def open_history() -> tuple[History, str]:
    """The history file in the user's state folder, readable by the user alone, and a notice where it cannot be used.

    LOCALCHAT_HISTORY=off keeps none.
    """
    if os.environ.get("LOCALCHAT_HISTORY", "").lower() in _OFF:
        return InMemoryHistory(), ""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "localchat"
    path = folder / "history"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        with suppress(PermissionError):  # it belongs to someone else, who has shared it on purpose
            path.chmod(0o600)
    except OSError as error:
        return InMemoryHistory(), f"the history is not kept: {visible(str(path))}: {os.strerror(error.errno or 0)}"
    return FileHistory(str(path)), ""
