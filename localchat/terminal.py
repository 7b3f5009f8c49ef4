"""The chat on a terminal: reads messages with prompt_toolkit, prints replies with `stream`, keeps both going.

Keys become text here and slash commands end here; the model sees messages only. Only this file needs prompt_toolkit.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import create_confirm_session
from rich.console import Console
from rich.text import Text

from localchat import context_room, conversations, parameters, slash
from localchat.autosave import Autosave
from localchat.chat import Chat, Chunk
from localchat.errors import InputTooLong, UserError
from localchat.failures import failure_of
from localchat.statusline import Reply, notices, stats_block
from localchat.stream import Look, printer_for, stream_reply
from localchat.text_safety import visible

LEAVE_SECONDS = 2.0
_QUOTES = '"""'


class Repl:
    """One chat at a terminal; `run` returns the process's exit code."""

    def __init__(
        self,
        chat: Chat,
        commands: slash.SlashCommands,
        console: Console,
        look: Look,
        session: PromptSession[str],
        autosave: Autosave | None = None,
    ) -> None:
        self._chat, self._commands, self._console, self._look = chat, commands, console, look
        self._session, self._autosave = session, autosave
        self._given_back = ""  # a message whose turn was interrupted before it began
        self._fill = context_room.FillNotice()

    def run(self, banner: str, unanswered: str = "") -> int:
        """Read and answer until the user leaves: 0 after Ctrl-D or /bye, 130 after two Ctrl-C.

        `unanswered` is a message to begin with on the line.
        """
        self._say(banner)
        self._given_back = slash.escaped(unanswered)
        hinted = -LEAVE_SECONDS
        while True:
            try:
                text = self._session.prompt(">>> ", default=self._given_back)
            except KeyboardInterrupt:
                if time.monotonic() - hinted < LEAVE_SECONDS:
                    return 130
                hinted = time.monotonic()
                self._say("Ctrl-D or /bye to leave, or Ctrl-C again")
                continue
            except EOFError:
                return 0
            self._given_back = ""
            stays = self._handle(text)
            self._save()
            if not stays:
                return 0

    def _handle(self, text: str) -> bool:
        """One entry; False where it ends the chat."""
        text = unquoted(text)
        if not text.strip():
            return True
        if not slash.is_command(text):
            self._answer(slash.unescaped(text))
            return True
        try:
            result = self._commands.run(text)
        except UserError as error:
            result = str(failure_of(error))
        if isinstance(result, slash.Retry):
            self._retry(result)
        elif isinstance(result, slash.Edit):
            if result.note:
                self._say(result.note)
            self._given_back = slash.escaped(result.text)
        elif isinstance(result, slash.Continue):
            self._turn(self._chat.resume, None)
        elif result is not None:
            self._say(result)
        return result is not None

    def _retry(self, retry: slash.Retry) -> None:
        """Answer a message anew; the turn that was taken back for it returns if no new one stays."""
        if not self._answer(retry.text):
            self._chat.messages += retry.undone
            self._given_back = ""
            self._say("the earlier answer stays")

    def _answer(self, text: str) -> bool:
        """One turn; whether it stays. Whatever goes wrong in it, the chat has rolled it back, and goes on."""
        if not self._commands.seed_is_fixed:
            self._chat.sampling = replace(self._chat.sampling, seed=parameters.draw_seed())
        last = self._chat.messages[-1:]
        stopped = self._turn(lambda: self._chat.reply(text), text)
        stays = bool(self._chat.messages) and not (last and self._chat.messages[-1] is last[0])
        if stopped and not stays:
            self._given_back = slash.escaped(text)
        return stays

    def _turn(self, start: Callable[[], Iterator[Chunk]], asked: str | None) -> bool:
        """Show a reply to `asked`, or more of the last one; whether it was stopped."""
        try:
            chunks = self._autosave.record(asked, start()) if self._autosave else start()
            reply = stream_reply(chunks, printer_for(self._look, self._console))
        except InputTooLong as error:
            if self._make_room(asked, str(failure_of(error))):
                return self._turn(start, asked)
            return True
        except KeyboardInterrupt:  # the second Ctrl-C within a reply
            self._say("interrupted")
            return False
        except Exception as error:  # noqa: BLE001 - a fault inside a turn is told, it does not end the chat
            kept = "\n(the message was not kept: Up brings it back)" if asked is not None else ""
            self._say(f"{failure_of(error)}{kept}")
            return False
        self._after(reply)
        if reply.last is not None and reply.last.finish_reason == "context" and self._make_room(None, ""):
            return self._turn(self._chat.resume, None)
        return reply.interrupted

    def _after(self, reply: Reply) -> None:
        """What is said below a reply."""
        for notice in notices(reply):
            self._say(notice)
        if reply.last is not None and self._look.verbose:
            self._say(stats_block(reply.last.stats, self._chat.sampling.seed))
        if reply.last is not None:
            stats = reply.last.stats
            full = self._fill.after(stats.context_used, stats.context_size)
            if full and reply.last.finish_reason != "context":
                self._say(full)

    def _make_room(self, asked: str | None, refusal: str) -> bool:
        """The context is full: let the user choose whether the oldest turns go. Whether they went."""
        try:
            offer = context_room.offer(self._chat, asked)
        except UserError as error:
            refusal, offer = str(failure_of(error)), None
        if offer is None:
            self._say(refusal or "the context is full, and there is no older turn to drop: /clear begins anew")
            return False
        self._say(str(offer))
        if not confirmed("drop them and go on?"):
            self._say(
                "nothing was dropped" if asked is None else "nothing was dropped, the message is on the line again"
            )
            return False
        self._chat.drop(len(offer.turns))
        return True

    def _save(self) -> None:
        """Keep the saved conversation up to date, and tell once if that cannot be done."""
        if self._autosave is None:
            return
        self._autosave.save()
        if self._autosave.fault:
            self._say(self._autosave.fault)
            self._autosave.fault = ""

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def unquoted(text: str) -> str:
    '''The message inside """ and """; other text as it is.'''
    inner = text.strip()
    if len(inner) >= 2 * len(_QUOTES) and inner.startswith(_QUOTES) and inner.endswith(_QUOTES):
        return inner.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text


def is_open(text: str) -> bool:
    '''Whether `text` has opened a """ block (at its start, or as a value of /set) and not closed it.'''
    return text.lstrip().startswith((_QUOTES, f"/set system {_QUOTES}")) and text.count(_QUOTES) % 2 == 1


def prompt_session(history: History, *, input: Input | None = None, output: Output | None = None) -> PromptSession[str]:
    """The line editor, with this program's keys. `input` and `output` are the terminal where not given."""
    return PromptSession(
        history=history,
        key_bindings=key_bindings(),
        multiline=True,
        prompt_continuation="... ",
        completer=SlashCompleter(),
        complete_while_typing=False,
        enable_open_in_editor=False,
        input=input,
        output=output,
    )


def confirmed(question: str) -> bool:
    """Ask for y or n; Ctrl-C and Ctrl-D are a no."""
    try:
        return create_confirm_session(question).prompt()
    except (KeyboardInterrupt, EOFError):
        return False


def key_bindings() -> KeyBindings:
    """Enter sends, the new-line keys, and what Ctrl-C does at the prompt."""
    keys = KeyBindings()

    @keys.add("enter")
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
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


class SlashCompleter(Completer):
    """Tab: the slash commands, and after /set and /show what they take."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The names that continue the last word before the cursor."""
        text = document.text_before_cursor
        *before, word = text.split(" ")
        if not text.startswith("/") or "\n" in text:
            return
        candidates: dict[tuple[str, ...], Iterable[str]] = {
            (): slash.NAMES,
            ("/show",): slash.SHOWN,
            ("/set",): (*parameters.NAMES, "parameter", "system", "think", "nothink"),
            ("/set", "parameter"): parameters.NAMES,
            ("/load",): conversations.names() if before == ["/load"] else (),
        }
        for name in candidates.get(tuple(before), ()):
            if name.startswith(word):
                yield Completion(name, start_position=-len(word))


def open_history() -> tuple[History, str]:
    """The history file in the user's state folder, readable by the user alone, and a notice where it cannot be used."""
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
