"""The command line as argparse parsers, one per command. Imports nothing heavy: `--help` takes no time.

Usage errors are raised as UsageError with a hint ("did you mean") and end in `cli.main` like every other error.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from localchat import __version__
from localchat.config import GROUP_SIZES
from localchat.errors import UsageError
from localchat.parameters import PARAMETERS, Parameter, parse
from localchat.text_safety import one_line

COMMANDS = {
    "run": "chat with a model, or answer one prompt",
    "pull": "download a model and quantise it, without running it",
    "list": "list the models that can be run",
    "show": "describe a model and the memory it needs",
    "quantize": "convert a checkpoint to a packed INT4 folder",
    "bench": "measure prefill and decode speed",
    "doctor": "look whether a model can run here, and what is in its way",
}
ALIASES = {"chat": "run", "ls": "list", "quantise": "quantize"}
_MISSING = "the following arguments are required: "  # argparse's words


class Parser(argparse.ArgumentParser):
    """argparse, with errors that are raised instead of printed, and flags between and after the positionals."""

    def __init__(self, command: str) -> None:
        description = COMMANDS[command].capitalize() + "."
        super().__init__(prog=f"localchat {command}", description=description, allow_abbrev=False)
        self.flags: list[str] = ["-h", "--help"]
        self.command = command

    def flag(self, *names: str, **options: Any) -> None:
        """`add_argument` for an option; remembers its names for "did you mean"."""
        self.flags += self.add_argument(*names, **options).option_strings

    def error(self, message: str) -> NoReturn:
        """Raises UsageError instead of printing and exiting."""
        missing = message.removeprefix(_MISSING).partition(",")[0]
        if message.startswith(_MISSING):
            message = f"`localchat {self.command}` needs {missing}"
        raise UsageError(f"{one_line(message).removesuffix('.')}.", f"`{self.prog} --help` lists the flags.")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Raises UsageError for anything that is not understood."""
        args, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            word = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(word, self.flags, n=1)
            if not word.startswith("-"):
                raise UsageError(f"{one_line(word)!r} is one argument too many for `localchat {self.command}`.")
            raise UsageError(
                f"there is no flag {one_line(word)!r} of `localchat {self.command}`.",
                f"did you mean {near[0]}?" if near else f"`localchat {self.command} --help` lists the flags.",
            )
        return args


def parse_command_line(words: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments; `command` is "" for `localchat` alone.

    Raises:
        UsageError: the command, a flag or a value is not understood.
        SystemExit: after --help and --version, with code 0.
    """
    if words and words[0] in ("-h", "--help", "help"):
        print(overview())
        raise SystemExit(0)
    if words and words[0] in ("-V", "--version", "version"):
        print(f"localchat {__version__}")
        raise SystemExit(0)
    debug = argparse.Namespace(command="", json=False, debug="--debug" in words)
    if not words or list(words) == ["--debug"]:
        return debug
    if words[0] == "--debug":
        words = [*words[1:], "--debug"]
    command = ALIASES.get(words[0], words[0])
    if command not in COMMANDS:
        near = difflib.get_close_matches(words[0], [*COMMANDS, *ALIASES], n=1)
        hint = f"did you mean `localchat {near[0]}`?" if near else "`localchat --help` lists the commands."
        raise UsageError(f"there is no command {one_line(words[0])!r}.", hint)
    return parser_for(command).parse(words[1:])


def overview() -> str:
    """The text of `localchat --help`."""
    rows = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
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
    parser = Parser(command)
    parser.set_defaults(command=command)
    if command == "quantize":
        _quantize_flags(parser)
    elif command in ("list", "doctor"):
        parser.flag("--json", action="store_true", help="print one JSON document")
    else:
        text = "an alias, a hub id (owner/name[@revision]), a folder or a .gguf"
        parser.add_argument("model", metavar="MODEL", help=text)
        if command == "run":
            _run_flags(parser)
        elif command in ("show", "bench"):
            parser.flag("--json", action="store_true", help="print one JSON document")
    if command not in ("list", "show", "doctor"):  # these never download
        parser.flag("--offline", action="store_true", help="use only what is on the disk")
        parser.flag("-y", "--yes", action="store_true", help="do not ask before a large download")
    if command in ("run", "bench", "show"):
        parser.flag(
            "--gpu", default="auto", metavar="N|cpu", help="which card, or the processor (default: a card if any)"
        )
        parser.flag("--vram", type=_gigabytes, metavar="GB", help="take at most this much of the card's memory")
    if command == "bench":
        parser.flag("--synthetic", action="store_true", help="random weights of the model's shapes, nothing downloaded")
        parser.flag("-p", "--prompt-tokens", type=_positive, default=512, metavar="N", help="prompt length (512)")
        parser.flag("-n", "--tokens", type=_positive, default=128, metavar="N", help="tokens to decode (128)")
    if command in ("show", "run"):
        parser.flag("-c", "--ctx", "--ctx-size", "--num-ctx", type=_positive, metavar="N", help="context in tokens")
    parser.flag("--debug", action="store_true", help="print a traceback with an error")
    return parser


def _run_flags(parser: Parser) -> None:
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="answer this and exit; without it, chat")
    parser.flag("-s", "--system", metavar="TEXT", help="system prompt")
    for parameter in PARAMETERS:
        names = [f"--{name.replace('_', '-')}" for name in parameter.names]
        parser.flag(
            *(["-n"] if parameter.field == "max_tokens" else []),
            *names,
            dest=parameter.field,
            type=_typed(parameter),
            default=argparse.SUPPRESS if parameter.field not in ("max_tokens", "stop") else None,
            action="append" if parameter.field == "stop" else "store",
            metavar="TEXT" if parameter.kind is str else "N" if parameter.kind is int else "X",
            help=parameter.help,
        )
    parser.flag("--think", dest="think", action="store_true", default=None, help="ask the model to think first")
    parser.flag("--no-think", dest="think", action="store_false", help="ask the model not to think")
    parser.flag("--hide-thinking", action="store_true", help="do not show thoughts")
    parser.flag("--no-stdin", action="store_true", help="do not read a prompt from stdin")
    parser.flag("--color", choices=("auto", "on", "off"), default="auto", help="colours on a terminal")
    parser.flag("--verbose", action="store_true", help="print counts, timings and the seed on stderr")


def _quantize_flags(parser: Parser) -> None:
    parser.add_argument("source", metavar="SRC", help="a folder with safetensors, a .gguf, an alias or a hub id")
    parser.flag("-o", "--output", metavar="DIR", help="the folder to write (default: the user's cache)")
    parser.flag("--group-size", type=int, choices=GROUP_SIZES, help="weights per scale")
    parser.flag("--sym", action="store_true", help="one scale per group (default for large models, groups of 128)")
    parser.flag("--min", action="store_true", help="scale and minimum (default for small models, groups of 32)")
    parser.flag(
        "--keep", action="append", type=_keep, default=[], metavar="REGEX=bf16|int8", help="tensors to keep wider"
    )
    parser.flag("--max-shard-size", type=_bytes, metavar="SIZE", help="longest file, such as 5GB or 500MB")
    parser.flag("--overwrite", action="store_true", help="replace DIR")


def _typed(parameter: Parameter) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(parameter, text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _gigabytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GB")
    return size


def _keep(text: str) -> tuple[str, int]:
    pattern, _, form = text.rpartition("=")
    bits = {"bf16": 16, "int8": 8}.get(form.lower())
    if not pattern or bits is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not REGEX=bf16 or REGEX=int8")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r} is not a regular expression ({error})") from error
    return pattern, bits


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ") if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 2GiB")
    return int(size)
