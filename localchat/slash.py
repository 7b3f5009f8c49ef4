"""The slash commands of the chat: text in, text to show out. They are never sent to the model.

`run` returns what is to be printed or done, or None where the chat is to end; it prints nothing itself.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from localchat import attachments, parameters, settings, values
from localchat.chat import Chat
from localchat.counted import counted
from localchat.errors import UsageError
from localchat.flags import KV_CACHES
from localchat.stats import Stats
from localchat.statusline import stats_block
from localchat.text_safety import one_line, visible
from localchat.values import Think

if TYPE_CHECKING:
    from localchat.slash_conversations import ConversationCommands

HELP = """\
/help, /?            this text
/retry, /regen       answer the last message anew
/edit                put the last message on the line; sent, it replaces it
/undo [N]            take back the last turn, or the last N
/continue            go on with an answer that was stopped or reached a limit
/clear               forget the conversation, keep the system prompt
/save [NAME]         where the conversation is saved (by itself, always);
                     NAME gives it a name
/load NAME           go on with a saved conversation
/sessions            list the saved conversations
/set                 the parameters now
/set NAME VALUE      set a parameter, as in /set temp 0.2
/set system TEXT     set the system prompt (clears the conversation)
/set think           ask the model to think first; /set nothink asks it not to
/set think N         the same, for at most N tokens; or low, medium, high
/set kv_cache int8   keep keys and values in half the memory; bf16: no more
/set verbose         counts and timings below each reply; /set quiet: no more
/show info           the model; also parameters, system, template, memory,
                     context
/read FILE           take a file into the next message, as @FILE in it does
/copy [N]            copy the last answer (N: the Nth from the end) to the
                     clipboard of this terminal
/stats               the figures of the last reply
/model NAME          go on with another model
/bye, /exit, /quit   end the chat, as Ctrl-D does

Enter sends. Alt-Enter, Ctrl-J or a \\ at the end of a line make a new line; so
does Enter between \"\"\" and \"\"\". @FILE in a message stands for that file's text.
Tab completes, Ctrl-R searches what was typed before, Ctrl-G opens the editor,
Ctrl-L clears the screen, Ctrl-T folds thoughts and unfolds them.
During a reply: Ctrl-C or Esc stops it, Ctrl-N ends the thought and has the
answer now, Ctrl-T and Ctrl-L as above.
A message that starts with / is written with //."""

CONTEXT_NAMES = ("ctx", "ctx_size", "ctx-size", "num_ctx", "num-ctx")
SHOWN = ("info", "parameters", "system", "template", "memory", "context")
NAMES = (
    "/?", "/help", "/bye", "/exit", "/quit", "/clear", "/set", "/show", "/retry", "/regen", "/undo", "/edit",
    "/continue", "/save", "/load", "/sessions", "/read", "/copy", "/stats", "/model",
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """What /show can say of the model: a few lines each, of its memory as it is when somebody asks.

    `origins` says where the parameters' values are from (field -> words), `fixed` are (name, value, origin) of those
    that cannot be set any more.
    """

    info: str
    memory: str | Callable[[], str]
    origins: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[tuple[str, Any, str], ...] = ()


@dataclass(frozen=True)
class Retry:
    """To be done: answer `text` now, in place of the turn `undone`."""

    text: str
    undone: list[dict[str, Any]]


@dataclass(frozen=True)
class Edit:
    """To be done: put `text` on the line, below what is `said`. `replaces`: sent, it replaces the last turn."""

    text: str
    said: str = ""
    replaces: bool = False


@dataclass(frozen=True)
class Continue:
    """To be done: go on with the last answer."""


@dataclass(frozen=True)
class Copy:
    """To be done: copy `text` into the clipboard and say that `what` was copied."""

    text: str
    what: str


@dataclass(frozen=True)
class ChangeModel:
    """To be done: go on with the model called `name`."""

    name: str


@dataclass(frozen=True)
class KeepAs:
    """To be done: keep keys and values in the form `kv_cache`, "bf16" or "int8"."""

    kv_cache: str


@dataclass(frozen=True)
class Verbose:
    """To be done: from now on show the figures below each reply, or not."""

    on: bool


Action = Retry | Edit | Continue | Copy | ChangeModel | KeepAs | Verbose
Result = str | Action | None


def is_command(text: str) -> bool:
    """Whether a message is a slash command ("//..." is text)."""
    text = text.lstrip()
    return text.startswith("/") and not text.startswith("//")


def unescaped(text: str) -> str:
    """The message that a text stands for: a doubled slash at its start is one."""
    return text[1:] if text.startswith("//") else text


def escaped(text: str) -> str:
    """What is typed for a message: the opposite of `unescaped`."""
    return f"/{text}" if text.startswith("/") else text


class SlashCommands:
    """The commands over one chat. `seed_is_fixed` turns true once the user sets a seed.

    `chosen` collects what the user sets, `origins` says where each parameter's value is from (field -> words); `saved`
    has the commands over saved conversations (None: nothing is saved). `last` is the last reply's figures.
    """

    def __init__(
        self,
        chat: Chat,
        about: About,
        *,
        seed_is_fixed: bool,
        chosen: dict[str, Any] | None = None,
        saved: "ConversationCommands | None" = None,
    ) -> None:
        self._chat, self.about, self._saved = chat, about, saved
        self.origins = dict(about.origins)
        self.seed_is_fixed = seed_is_fixed
        self.chosen: dict[str, Any] = {} if chosen is None else chosen
        self.last: Stats | None = None

    def run(self, text: str) -> Result:
        """Do what `text` says and return what to show or to do, or None to leave the chat.

        Raises:
            UsageError: the command, its argument or a value is not understood; nothing has changed.
        """
        name, _, rest = text.strip().partition(" ")
        commands: dict[str, Callable[[str], Result]] = {
            "/?": self._help,
            "/help": self._help,
            "/clear": self._clear,
            "/set": self._set,
            "/show": self._show,
            "/retry": self._retry,
            "/regen": self._retry,
            "/undo": self._undo,
            "/edit": self._edit,
            "/continue": self._continue,
            "/save": lambda rest: self._conversations().save(rest),
            "/load": self._load,
            "/sessions": lambda rest: self._conversations().sessions(rest),
            "/read": self._read,
            "/copy": self._copy,
            "/stats": self._stats,
            "/model": self._model,
        }
        if name in ("/bye", "/exit", "/quit"):
            if rest.strip():
                raise UsageError(f"{name} takes no argument.", f"// starts a message with a slash: /{one_line(text)}")
            return None
        if name not in commands:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else "/help lists the commands, // starts a message with a slash."
            raise UsageError(f"there is no command {one_line(name)!r}.", hint)
        return commands[name](rest.strip())

    def _help(self, _rest: str) -> str:
        return HELP

    def _clear(self, _rest: str) -> str:
        self._chat.clear()
        return "cleared" + self._cleared()

    def _cleared(self) -> str:
        return self._saved.cleared() if self._saved else ""

    def _continue(self, rest: str) -> Continue:
        if rest:
            raise UsageError("/continue takes no argument.")
        return Continue()

    def _conversations(self) -> "ConversationCommands":
        if self._saved is None:
            raise UsageError("this conversation is not saved, nor can it load another.")
        return self._saved

    def _load(self, rest: str) -> Edit:
        note, text = self._conversations().load(rest)
        return Edit(text, note)

    def _retry(self, rest: str) -> Retry:
        undone = self._last_turn("/retry", rest)
        return Retry(undone[0]["content"], undone)

    def _edit(self, rest: str) -> Edit:
        undone = self._last_turn("/edit", rest)
        self._chat.messages += undone  # until the edited message is sent
        return Edit(undone[0]["content"], replaces=True)

    def _last_turn(self, name: str, rest: str) -> list[dict[str, Any]]:
        if rest:
            raise UsageError(f"{name} takes no argument.")
        return self._chat.undo()

    def _undo(self, rest: str) -> str:
        if rest and not rest.isdecimal():
            raise UsageError(f"/undo takes a number of turns, not {one_line(rest)!r}.")
        turns = int(rest or "1")
        self._chat.undo(turns)
        return f"took back {'the last turn' if turns == 1 else f'{turns} turns'}"

    def _read(self, rest: str) -> Edit:
        if not rest:
            raise UsageError("/read needs a file.", "try: /read notes.txt")
        file = attachments.read(rest, self._chat.tokenizer, self._chat.engine.max_length)
        return Edit(f"{attachments.reference(rest)} ", str(file))

    def _copy(self, rest: str) -> Copy:
        answers = [m["content"] for m in reversed(self._chat.messages) if m["role"] == "assistant"]
        if rest and not (rest.isdecimal() and int(rest)):
            raise UsageError(f"/copy takes a number of answers back, not {one_line(rest)!r}.")
        number = int(rest or "1")
        if number > len(answers):
            raise UsageError(
                f"the conversation has {counted(len(answers), 'answer')}, so there is none to copy at {number}."
            )
        what = "the last answer" if number == 1 else f"answer {number} from the end"
        return Copy(answers[number - 1], what)

    def _stats(self, rest: str) -> str:
        if rest:
            raise UsageError("/stats takes no argument.")
        if self.last is None:
            raise UsageError("there is no reply yet to tell the figures of.")
        return stats_block(self.last, self._chat.sampling.seed)

    def _model(self, rest: str) -> ChangeModel:
        if not rest:
            raise UsageError("/model needs the name of a model.", "`localchat list` names them, Tab completes.")
        return ChangeModel(rest)

    def _set(self, rest: str) -> "str | Verbose | KeepAs":
        if not rest:
            return self._parameters()
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        value = value.strip()
        if name == "system":
            return self._set_system(value)
        if name in ("verbose", "quiet") and value in ("", "on", "off"):
            return Verbose((name == "verbose") == (value != "off"))
        if name == "nothink" and not value:
            return self._think(False)
        if name == "think":
            return self._think(values.think(value or "on"))
        if name in ("kv_cache", "kv-cache"):
            if not value:
                raise UsageError(f"/set {name} needs a value.", f"try: /set {name} {KV_CACHES[-1]}")
            if value not in KV_CACHES:
                raise UsageError(f"kv_cache is {one_line(value)!r}, wanted {' or '.join(KV_CACHES)}.")
            return KeepAs(value)
        name = "ctx" if name in CONTEXT_NAMES else name
        if name in [fixed for fixed, *_ in self.about.fixed]:
            raise UsageError(f"{name} cannot be set in a chat.", f"leave it and go on with -C --{name} VALUE.")
        parameter = parameters.find(name)
        if not value:
            raise UsageError(f"/set {parameter.names[0]} needs a value.", f"try: /set {parameter.names[0]} VALUE")
        parsed = parameters.parse(parameter, value)
        self.chosen[parameter.field] = [parsed] if parameter.field == "stop" else parsed
        if parameter.field == "max_tokens":
            self._chat.max_tokens = parsed
        elif parameter.field == "stop":
            self._chat.stop = (parsed,)
        else:
            self._chat.sampling = replace(self._chat.sampling, **{parameter.field: parsed})
            self.seed_is_fixed = self.seed_is_fixed or parameter.field == "seed"
        self.origins[parameter.field] = parameters.SET
        return f"{parameter.names[0]} = {visible(value)}"

    def _think(self, think: Think) -> str:
        self._chat.template_variables = parameters.think_variables(think)
        self._chat.think_budget = think if type(think) is int else None
        self.chosen["think"] = think
        self.origins["think"] = parameters.SET
        set_ = "/set nothink" if think is False else "/set think"
        if fault := settings.think_unheard(think, self._chat.template.source, " ", set_):
            return f"{set_}{fault}"
        if type(think) is int:
            return f"the model is asked to think first, for at most {counted(think, 'token')}"
        effort = f", with {think} effort" if isinstance(think, str) else ""
        return f"the model is asked {'to think first' if think else 'not to think'}{effort}"

    def _set_system(self, text: str) -> str:
        self._chat.system = text.removeprefix('"""').removesuffix('"""').strip() or None
        self._chat.clear()
        note = self._cleared()  # the conversation so far had the other one
        self.chosen["system"] = self._chat.system
        return f"{'system prompt set' if self._chat.system else 'no system prompt'}, conversation cleared{note}"

    def _parameters(self) -> str:
        values = asdict(self._chat.sampling)
        values |= {"max_tokens": self._chat.max_tokens, "stop": list(self._chat.stop) or None}
        if not self.seed_is_fixed:
            values["seed"] = "drawn for each reply"
        rows = [(p.names[0], values[p.field], self._origin(p.field)) for p in parameters.PARAMETERS]
        think = {None: "as the model does by itself", True: "on", False: "off"}
        variables = self._chat.template_variables
        shown = variables.get("reasoning_effort") or think[variables.get("enable_thinking")]
        if self._chat.think_budget:
            shown += f", at most {counted(self._chat.think_budget, 'token')}"
        return parameters.table([*rows, ("think", shown, self._origin("think")), *self.about.fixed])

    def _origin(self, field: str) -> str:
        return self.origins.get(field, parameters.BUILT_IN)

    def _context(self) -> str:
        used, size = self._chat.tokens(), self._chat.engine.max_length
        turns = sum(message["role"] == "user" for message in self._chat.messages)
        held = len(self._chat.engine.ids)
        return f"{counted(turns, 'turn')}, {used:,} of {size:,} tokens ({100 * used // size} %); {held:,} are computed"

    def _show(self, rest: str) -> str:
        if rest == "parameters":
            return self._parameters()
        if rest == "system":
            return visible(self._chat.system or "there is no system prompt")
        if rest == "memory":
            memory = self.about.memory
            return memory if isinstance(memory, str) else memory()
        if rest == "template":
            return visible(self._chat.template.source)
        if rest == "context":
            return self._context()
        if rest in ("", "info"):
            return self.about.info
        raise UsageError(f"there is nothing called {one_line(rest)!r} to show.", f"there are {', '.join(SHOWN)}.")
