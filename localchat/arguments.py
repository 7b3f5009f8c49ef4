"""The command line as argparse parsers, one per command; flags.py says what each takes. Imports nothing heavy.

Usage errors are raised as UsageError with a hint ("did you mean") and end in `cli.main` like every other error.
"""

import argparse
import difflib
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from localchat import __version__, flags, parameters, registry
from localchat.errors import UsageError
from localchat.text_safety import one_line

COMMANDS = {
    "run": "chat with a model, or answer one prompt",
    "pull": "download a model and quantise it, without running it",
    "list": "list the models that can be run",
    "show": "describe a model and the memory it needs",
    "rm": "remove a model from this machine",
    "quantize": "convert a checkpoint to a packed INT4 folder",
    "bench": "measure prefill and decode speed",
    "sessions": "list, show, export or remove saved conversations",
    "doctor": "look whether a model can run here, and what is in its way",
    "completion": "print a script that completes commands in your shell",
}
ALIASES = {"chat": "run", "ls": "list", "quantise": "quantize"}
COMPLETE = "__complete"  # what the shells' scripts call; not for people
_MISSING = "the following arguments are required: "  # argparse's words


class _Help(argparse.RawDescriptionHelpFormatter):
    """argparse's layout, with a flag's names before one metavar, and room for them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if not names or action.nargs == 0:
            return names or super()._format_action_invocation(action)
        metavar = self._format_args(action, action.dest.upper())
        return f"{names}{metavar}" if metavar.startswith("[=") else f"{names} {metavar}"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "?" and action.option_strings:
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """argparse, with errors that are raised instead of printed, and flags between and after the positionals.

    The Namespace that `parse` returns has `given`, the names of the values that the command line itself gave.
    """

    def __init__(self, command: str, usage: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"localchat {command}",
            usage=f"localchat {command} {usage}".rstrip(),
            description=COMMANDS[command].capitalize() + ".",
            epilog=epilog,
            formatter_class=_Help,
            allow_abbrev=False,
            add_help=False,
        )
        self.command = command
        self._positionals.title, self._optionals.title = "arguments", "flags"
        self.actions: dict[str, argparse.Action] = {}  # by flag, those that help does not show left out
        self.takes_file: set[str] = set()  # flags whose value is a file's name
        self.positionals: list[argparse.Action] = []
        self._fallback: dict[str, Any] = {}
        self._section: Any = None
        self._rivals: dict[str, Any] = {}
        self._words: Sequence[str] = ()

    def section(self, title: str) -> None:
        """The flags that follow stand under `title` in the help."""
        self._section = self.add_argument_group(title)

    def positional(self, name: str, **options: Any) -> None:
        """`add_argument` for a word without a flag."""
        self.positionals.append(self.add_argument(name, **options))

    def flag(self, *names: str, convert: Callable[[str], Any] | None = None, **options: Any) -> None:
        """`add_argument` for an option. `convert` raises UsageError; `file=True`: the value names a file.

        Two flags with the same word as `excludes` exclude each other.
        """
        takes_file, excludes = options.pop("file", False), options.pop("excludes", None)
        default = options.pop("default", False if options.get("action") == "store_true" else None)
        if convert is not None:
            options["type"] = _typed(convert)
        holder = self._section or self
        if excludes:
            holder = self._rivals.setdefault(excludes, holder.add_mutually_exclusive_group())
        action = holder.add_argument(*names, default=argparse.SUPPRESS, **options)
        if default is not argparse.SUPPRESS:
            self._fallback.setdefault(action.dest, default)
        self.actions |= dict.fromkeys(action.option_strings, action)
        self.takes_file |= set(action.option_strings) if takes_file else set()

    def switch(self, *names: str, **options: Any) -> None:
        """A flag without a value that the environment or the config may set, so `--no-X` takes it back."""
        self.flag(*names, action="store_true", **options)
        dest = self.actions[names[0]].dest
        self.add_argument(
            f"--no-{names[-1].removeprefix('--')}",
            dest=dest,
            action="store_false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )

    def error(self, message: str) -> NoReturn:
        """Raises UsageError instead of printing and exiting."""
        missing = message.removeprefix(_MISSING).partition(",")[0]
        if message.startswith(_MISSING):
            self._refuse_unknown_flags()
            message = f"`localchat {self.command}` needs {missing}"
        raise UsageError(f"{one_line(message).removesuffix('.')}.", f"`{self.prog} --help` lists the flags.")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Raises UsageError for anything that is not understood."""
        self._words = flags.with_think_values(words)
        args, unknown = self.parse_known_intermixed_args(self._words)
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                raise UsageError(f"{one_line(word)!r} is one argument too many for `localchat {self.command}`.")
            raise self._no_flag(word)
        given = frozenset(vars(args))
        for name, value in self._fallback.items():
            if name not in given:
                setattr(args, name, value)
        args.command, args.given, args.settable = self.command, given, frozenset(self._dests())
        args.origins = dict.fromkeys(given, parameters.FLAG)  # settings.py adds the rest
        return args

    def _refuse_unknown_flags(self) -> None:
        """Before something is said to be missing: argparse would name a wrong flag only after that."""
        for word in takewhile(lambda word: word != "--", self._words):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                raise self._no_flag(name)

    def _no_flag(self, name: str) -> UsageError:
        near = difflib.get_close_matches(name, self.actions, n=1)
        return UsageError(
            f"there is no flag {one_line(name)!r} of `localchat {self.command}`.",
            f"did you mean {near[0]}?" if near else f"`localchat {self.command} --help` lists the flags.",
        )

    def _dests(self) -> set[str]:
        return {action.dest for action in self.actions.values()}


def parse_command_line(words: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments; `command` is "" for `localchat` alone.

    Raises:
        UsageError: the command, a flag or a value is not understood.
        SystemExit: after --help and --version, with code 0.
    """
    if words and words[0] == COMPLETE:
        return argparse.Namespace(command=COMPLETE, words=list(words[1:]), debug=False)
    if list(words[:1]) == ["help"] and ALIASES.get(words[-1], words[-1]) in COMMANDS:
        words = [words[-1], "--help"]
    if words and words[0] in ("-h", "--help", "help"):
        print(overview())
        raise SystemExit(0)
    if words and words[0] in ("-V", "--version", "version"):
        print(f"localchat {__version__}")
        raise SystemExit(0)
    alone = argparse.Namespace(command="", json=False, debug="--debug" in words)
    if not words or list(words) == ["--debug"]:
        return alone
    if words[0] == "--debug":
        words = [*words[1:], "--debug"]
    command = ALIASES.get(words[0], words[0])
    if command not in COMMANDS:
        harmless = [name for name in (*COMMANDS, *ALIASES) if name != "rm"]  # not what a slip should lead to
        near = difflib.get_close_matches(words[0], harmless, n=1)
        hint = f"did you mean `localchat {near[0]}`?" if near else "`localchat --help` lists the commands."
        if not near and (registry.lookup(words[0]) or "/" in words[0] or words[0].endswith(".gguf")):
            hint = f"did you mean `localchat run {one_line(words[0])}`?"
        raise UsageError(f"there is no command {one_line(words[0])!r}.", hint)
    return parser_for(command).parse(words[1:])


def overview() -> str:
    """The text of `localchat --help`."""
    rows = [f"  {name:<12}{text}" for name, text in COMMANDS.items()]
    names = ", ".join(f"{alias} = {command}" for alias, command in ALIASES.items())
    return "\n".join(
        [
            "usage: localchat COMMAND [...]",
            "",
            *rows,
            "",
            f"Other names: {names}. `localchat COMMAND --help` lists a command's flags.",
            "`localchat` alone lists the models, `localchat --version` says the version.",
            "",
            '  localchat run smollm2-135m "What is the capital of France?"',
            '  cat notes.txt | localchat run smollm2-135m "Summarise this."',
        ]
    )


def parser_for(command: str) -> Parser:
    """The parser of one of COMMANDS."""
    parser = Parser(command, flags.USAGE[command], flags.EPILOGS.get(command, ""))
    flags.OF_COMMAND[command](parser)
    if command == "run":
        parser.section("other flags")
    flags.common(parser)
    return parser


def _typed(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """`convert` for argparse, which prints its own exception's text."""

    def typed(text: str) -> Any:
        try:
            return convert(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed
