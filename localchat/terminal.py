"""The chat on a terminal: reads messages with prompt_toolkit, prints replies with `stream`, keeps both going.

Keys become text here and slash commands end here; the model sees messages only. Of what is imported only for it,
line_editor.py, completer.py and keys.py need prompt_toolkit too.
"""

import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.history import History
from prompt_toolkit.input.typeahead import clear_typeahead, get_typeahead, store_typeahead
from prompt_toolkit.keys import Keys
from rich.console import Console
from rich.text import Text

from localchat import attachments, context_room, parameters, slash
from localchat.autosave import Autosave
from localchat.chat import Chat, Chunk
from localchat.clipboard import copy_sequence
from localchat.errors import InputTooLong, UserError
from localchat.failures import failure_of
from localchat.keys import ReplyKeys
from localchat.line_editor import plain_where_dumb, prompt_session, unquoted
from localchat.prepare import registry_name
from localchat.sampling import Sampling
from localchat.statusline import Reply, notices, stats_block, without_answer
from localchat.stream import Look, Printer, TerminalPrinter, printer_for, stream_reply
from localchat.text_safety import visible

if TYPE_CHECKING:
    from localchat.model_switch import ModelSwitch
    from localchat.session import Opened

LEAVE_SECONDS = 2.0


class Repl:
    """One chat at a terminal; `run` returns the process's exit code. `switch` loads another model into the chat."""

    def __init__(
        self,
        chat: Chat,
        commands: slash.SlashCommands,
        console: Console,
        look: Look,
        history: History,
        switch: "ModelSwitch | None" = None,
        autosave: Autosave | None = None,
    ) -> None:
        self._chat, self._commands, self._console, self._look = chat, commands, console, look
        self._history, self._switch, self._autosave = history, switch, autosave
        self._session: PromptSession[str] | None = None
        self._given_back = ""  # what the next prompt begins with: a message whose turn was interrupted, for example
        self._typed: dict[str, str] = {}  # messages with attached files, as they were typed
        self._folded = False  # thoughts are
        self._replacing = False  # the next message replaces the last turn
        self._fill = context_room.FillNotice()

    def run(self, banner: str, unanswered: str = "") -> int:
        """Read and answer until the user leaves: 0 after Ctrl-D or /bye, 130 after two Ctrl-C.

        `unanswered` is a message to begin with on the line.
        """
        with plain_where_dumb():
            return self._converse(banner, unanswered)

    def _converse(self, banner: str, unanswered: str) -> int:
        self._session = prompt_session(self._history, on_fold=self._fold, on_clear=self._keep_turn)
        self._say(banner)
        self._given_back = slash.escaped(unanswered)
        hinted = -LEAVE_SECONDS
        while True:
            draft, self._given_back = self._given_back, ""
            try:
                # A dumb terminal is not shown what the line begins with, so it stands in the prompt.
                prompt = f">>> {visible(draft)}" if self._console.is_dumb_terminal else ">>> "
                text = self._session.prompt(prompt, default=draft)
            except KeyboardInterrupt:
                self._replacing = False
                if time.monotonic() - hinted < LEAVE_SECONDS:
                    return 130
                hinted = time.monotonic()
                self._say("Ctrl-D or /bye to leave, or Ctrl-C again")
                continue
            except EOFError:
                return 0
            stays = self._handle(text)
            self._save()
            if not stays:
                return 0

    def _handle(self, text: str) -> bool:
        """One entry; False where it ends the chat."""
        text = unquoted(text)
        if not text.strip():
            return True
        replacing, self._replacing = self._replacing, False
        if not slash.is_command(text):
            if inside := attachments.read_inside(text):
                self._replacing = replacing
                self._say(f"/read is a command where it stands first: inside a message write @{inside[0]}")
                self._given_back = inside[1]
                return True
            self._send(slash.unescaped(text), replacing=replacing)
            return True
        try:
            result = self._commands.run(text)
        except (UserError, OSError) as error:
            result = str(failure_of(error))
        if isinstance(result, slash.Action):
            self._do(result)
        elif result is not None:
            self._say(result)
        return result is not None

    def _do(self, action: slash.Action) -> None:
        """What a slash command leaves to be done."""
        if isinstance(action, slash.Retry):
            self._retry(action)
        elif isinstance(action, slash.Continue):
            self._turn(self._chat.resume, None)
        elif isinstance(action, slash.Copy):
            self._copy(action)
        elif isinstance(action, slash.ChangeModel):
            self._change_model(lambda switch: switch(action.name), action.name)
        elif isinstance(action, slash.KeepAs):
            self._change_model(lambda switch: switch.keep_as(action.kv_cache))
        elif isinstance(action, slash.Verbose):
            self._look = replace(self._look, verbose=action.on)
            self._say(f"figures are {'shown' if action.on else 'not shown'} below each reply")
        else:
            self._replacing = action.replaces
            if action.said:
                self._say(action.said)
            self._given_back = slash.escaped(self._typed.get(action.text, action.text))

    def _send(self, typed: str, *, replacing: bool) -> None:
        """Answer a message, perhaps in place of the last turn; the files that it names go with it.

        Their tokens are told before.
        """
        try:
            text, files = attachments.attach(typed, self._chat.tokenizer, self._chat.engine.max_length)
        except (UserError, OSError) as error:
            self._say(str(failure_of(error)))
            self._given_back = slash.escaped(typed)
            return
        for file in files:
            self._say(str(file))
        for name in attachments.missed(typed):
            self._say(f"@{name} is no file here, so it is sent as text")
        if files:
            self._typed[text] = typed
        if replacing:
            self._retry(slash.Retry(text, self._chat.undo()))
        else:
            self._answer(text)

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
            self._given_back = slash.escaped(self._typed.get(text, text))
        return stays

    def _turn(self, start: Callable[[], Iterator[Chunk]], asked: str | None) -> bool:
        """Show a reply to `asked`, or more of the last one; whether it was stopped."""
        try:
            chunks = self._autosave.record(asked, start()) if self._autosave else start()
            printer = printer_for(self._look, self._console, folded=self._folded, single_keys=self._session is not None)
            reply = stream_reply(chunks, printer, self._keys(printer))
        except InputTooLong as error:
            if self._make_room(asked, str(failure_of(error))):
                return self._turn(start, asked)
            return True
        except KeyboardInterrupt:  # the second Ctrl-C within a reply
            self._say("interrupted")
            return True
        except Exception as error:  # noqa: BLE001 - a fault inside a turn is told, it does not end the chat
            kept = "\n(the message was not kept: Up brings it back)" if asked is not None else ""
            self._say(f"{failure_of(error)}{kept}")
            return False
        if reply.interrupted:
            self._hold_typeahead()
        self._after(reply)
        if reply.last is not None and reply.last.finish_reason == "context" and self._make_room(None, ""):
            return self._turn(self._chat.resume, None)
        return reply.interrupted

    def _after(self, reply: Reply) -> None:
        """What is said below a reply."""
        for notice in filter(None, [*notices(reply), without_answer(reply)]):
            self._say(notice)
        if reply.last is not None:
            stats = self._commands.last = reply.last.stats
            if self._look.verbose:
                self._say(stats_block(stats, self._chat.sampling.seed))
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
        if not self._confirmed("drop them and go on?"):
            self._say(
                "nothing was dropped" if asked is None else "nothing was dropped, the message is on the line again"
            )
            return False
        self._chat.drop(len(offer.turns))
        return True

    def _confirmed(self, question: str) -> bool:
        """Ask for a "y" and Enter; everything else is a no. What was typed ahead was not meant for this."""
        self._drop_typeahead()
        try:
            answer: str = PromptSession[str]().prompt(f"{question} (y and Enter, or Enter alone) ")
        except (KeyboardInterrupt, EOFError):
            return False
        return answer.strip().lower() in ("y", "yes")

    def _hold_typeahead(self) -> None:
        """After Ctrl-C nothing typed before is sent by itself, nor ends the chat; its text stays on the line."""
        if self._session is not None:
            ahead = get_typeahead(self._session.app.input)
            sending = (Keys.ControlM, Keys.ControlJ, Keys.ControlD)
            store_typeahead(self._session.app.input, [press for press in ahead if press.key not in sending])

    def _drop_typeahead(self) -> None:
        if self._session is not None:
            clear_typeahead(self._session.app.input)
            if sys.stdin.isatty():
                termios.tcflush(sys.stdin, termios.TCIFLUSH)

    def _save(self) -> None:
        """Keep the saved conversation up to date, and tell once if that cannot be done."""
        if self._autosave is None:
            return
        self._autosave.save()
        if self._autosave.fault:
            self._say(self._autosave.fault)
            self._autosave.fault = ""

    def _keys(self, printer: Printer) -> ReplyKeys | None:
        """What keys do during a reply; None where they cannot be read one by one."""
        if self._session is None or not isinstance(printer, TerminalPrinter):
            return None

        def fold() -> None:
            printer.fold()
            self._folded = printer.folded

        actions = {Keys.ControlT: fold, Keys.ControlN: self._chat.answer_now, Keys.ControlL: printer.clear}
        return ReplyKeys(actions, self._session.app.input)

    def _keep_turn(self) -> None:
        """Ctrl-C on a text that /edit put there: never mind."""
        self._replacing = False

    def _fold(self) -> None:
        """Ctrl-T at the prompt: fold the thoughts to come, or show them again, the last one at once."""
        self._folded = not self._folded
        thought = self._chat.messages[-1].get("reasoning_content", "") if self._chat.messages else ""
        if self._folded:
            self._say("thoughts are folded")
        else:
            self._console.print(Text(visible(thought.strip()), style="dim italic"), soft_wrap=True)
            self._say("thoughts are shown")

    def _copy(self, copy: slash.Copy) -> None:
        """Ask the terminal to put a text into its clipboard."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            self._say("localchat: error: this terminal has no clipboard that could be asked.")
            return
        try:
            sequence = copy_sequence(copy.text)
        except ValueError:
            self._say(f"localchat: error: {copy.what} has {len(copy.text):,} characters, too many for a clipboard.")
            return
        self._console.file.write(sequence)
        self._console.file.flush()
        self._say(f"copied {copy.what}, {len(copy.text):,} characters, if this terminal allows it (OSC 52)")

    def _change_model(self, change: "Callable[[ModelSwitch], Opened]", name: str = "") -> None:
        """Load another model, called `name`, or the same one otherwise; if it fails the chat goes on as it was."""
        if self._switch is None:
            self._say("localchat: error: the model cannot be changed here.")
            return
        stays = "the model stays" if name else "keys and values stay as they were"
        try:
            opened = change(self._switch)
        except KeyboardInterrupt:
            self._say(f"interrupted, {stays}")
        except Exception as error:  # noqa: BLE001 - the chat lives on
            self._say(f"{failure_of(error)}\n{stays}")
        else:
            chosen = {name: value for name, value in self._commands.chosen.items() if hasattr(Sampling, name)}
            self._chat.sampling = replace(opened.chat.sampling, **chosen)
            if self._autosave and name:
                self._autosave.model = registry_name(name)
            self._look, self._commands.about = opened.look, opened.about
            self._say(opened.banner)

    def _say(self, text: str) -> None:
        self._console.print(Text(visible(text)))  # wrapped at blanks
