"""What each command takes: the rows of its `--help`, and its usage line. The types are in values.py.

Where a flag has a row in settings.py, the environment and the user's config can set it too.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from localchat import parameters, values
from localchat.config import GROUP_SIZES

if TYPE_CHECKING:
    from localchat.arguments import Parser

SHELLS = ("bash", "zsh", "fish")
COLORS = ("auto", "on", "off")
SESSION_ACTIONS = ("list", "show", "rm", "export")
KV_CACHES = ("bf16", "int8")
METHODS = ("rtn", "gptq")  # as in quantize/plan.py (which imports torch)
THINK = ("on", "off", *values.EFFORTS)

USAGE = {
    "run": "MODEL [PROMPT ...] [flags]",
    "pull": "MODEL [flags]",
    "list": "[--json]",
    "show": "MODEL [flags]",
    "doctor": "[--tune] [--json]",
    "rm": "MODEL [flags]",
    "quantize": "SRC [-o DIR] [flags]",
    "bench": "MODEL [flags]",
    "sessions": "[list | show NAME | rm NAME ... | export NAME] [flags]",
    "completion": " | ".join(SHELLS),
}
_RUN = """\
Without PROMPT, and with nothing piped in, this is a chat.

  localchat run qwen3-8b                                 chat
  localchat run qwen3-8b "Why is the sky blue?"          one answer
  git diff | localchat run qwen3-8b "Review this."       stdin, then the prompt
  localchat run qwen3-8b -f a.py -f b.py "Compare them." files, then the prompt
  localchat run qwen3-8b -x "fizzbuzz in bash" | bash    its code alone

Where a value comes from, the first that has it: the flag; LOCALCHAT_NAME in the
environment (LOCALCHAT_TOP_P=0.9); the session that is continued; the config
file ~/.config/localchat/config.toml (top_p = 0.9); the model's own
generation_config.json; the built-in value. /show parameters in a chat tells.
--no-NAME takes back a switch that the environment or the config file has set:
--no-raw, --no-verbose, --no-hide-thinking, --no-offline, --no-yes."""
_COMPLETION = """\
To keep it:
  bash  localchat completion bash \\
          > ~/.local/share/bash-completion/completions/localchat
  zsh   localchat completion zsh > ~/.zfunc/_localchat
          (in ~/.zshrc, before compinit: fpath+=~/.zfunc)
  fish  localchat completion fish > ~/.config/fish/completions/localchat.fish

For this shell only:
  bash, zsh   source <(localchat completion bash)   (or zsh)
  fish        localchat completion fish | source"""
EPILOGS = {"run": _RUN, "completion": _COMPLETION}


def with_think_values(words: Sequence[str]) -> list[str]:
    """`words` with `--think` and a value behind it as one word; alone it is `--think=on`, and a prompt may follow."""
    end = words.index("--") if "--" in words else len(words)
    joined: list[str] = []
    for word in words[:end]:
        if joined[-1:] == ["--think"] and (word in THINK or re.fullmatch(r"[0-9]+", word)):
            joined[-1] = f"--think={word}"
        else:
            joined.append(word)
    return [*("--think=on" if word == "--think" else word for word in joined), *words[end:]]


def _run(parser: "Parser") -> None:
    _model(parser)
    parser.positional("prompt", nargs="*", metavar="PROMPT", help="answer this and exit; without it, chat")
    parser.section("prompt")
    parser.flag("-s", "--system", metavar="TEXT", excludes="system", help="system prompt")
    text = "system prompt from a file"
    parser.flag("--system-file", metavar="FILE", file=True, excludes="system", help=text)
    files = "put FILE, with its name, before the prompt (repeatable)"
    parser.flag("-f", "--file", dest="files", action="append", metavar="FILE", file=True, help=files)
    parser.flag("--no-stdin", action="store_true", help="do not read a prompt from stdin")
    parser.section("conversation")
    which: dict[str, Any] = {"excludes": "session"}
    text = "go on with the last conversation"
    parser.flag("-C", "--continue", dest="continue_last", action="store_true", help=text, **which)
    parser.flag("--session", metavar="NAME", help="go on with the conversation NAME, or begin it", **which)
    parser.section("sampling")
    for parameter in parameters.PARAMETERS:
        _parameter(parser, parameter)
    parser.section("thinking")
    think = "ask the model to think first, with an effort, or for at most N tokens"
    metavar = f"[={'|'.join(THINK)}|N]"
    parser.flag("--think", nargs="?", convert=values.think, metavar=metavar, help=think)
    parser.flag("--no-think", dest="think", action="store_const", const=False, help="ask the model not to think")
    parser.switch("--hide-thinking", help="do not show thoughts")
    parser.section("output")
    parser.flag("--json", action="store_true", help="print the answer, its counts, timings and seed as one JSON object")
    parser.flag("-x", "--extract", action="store_true", help="print the answer's first code block only")
    parser.switch("--raw", help="show the answer as the model wrote it, no Markdown")
    parser.switch("--verbose", help="print counts, timings and the seed on stderr")
    parser.flag("--color", choices=COLORS, default="auto", help="colours on a terminal (default: auto)")
    parser.section("memory and device")
    _context(parser)
    _device(parser)


def _pull(parser: "Parser") -> None:
    _model(parser)
    _download(parser)


def _list(parser: "Parser") -> None:
    _json(parser)


def _show(parser: "Parser") -> None:
    _model(parser)
    _json(parser)
    _context(parser)
    _card(parser)


def _doctor(parser: "Parser") -> None:
    parser.flag("--tune", action="store_true", help="measure how the card's kernels are launched best, and keep it")
    _json(parser)


def _rm(parser: "Parser") -> None:
    _model(parser)
    parser.flag("--downloads", action="store_true", help="also the download that it was made from, in the hub's cache")
    parser.flag("-y", "--yes", dest="sure", action="store_true", help="do not ask")


def _quantize(parser: "Parser") -> None:
    parser.positional("source", metavar="SRC", help="a folder with safetensors, a .gguf, an alias or a hub id")
    text = "the folder to write (default: the user's cache)"
    parser.flag("-o", "--output", metavar="DIR", file=True, convert=values.path, help=text)
    parser.flag("--group-size", type=int, choices=GROUP_SIZES, help="weights per scale")
    parser.flag("--sym", action="store_true", help="one scale per group (default for large models, groups of 128)")
    parser.flag("--min", action="store_true", help="scale and minimum (default for small models, groups of 32)")
    narrow = "of a 4-bit source with zero points: 6 %% smaller (groups of 128), off by 1/128 of a step instead of exact"
    parser.flag("--fp16-scales", action="store_true", help=narrow)
    method = "rtn rounds with searched scales; gptq calibrates, better and slower (default: rtn)"
    parser.flag("--method", choices=METHODS, default="rtn", help=method)
    calib = "a text to calibrate with, instead of the one that is shipped"
    parser.flag("--calib", metavar="FILE", file=True, convert=values.path, help=calib)
    uniform = "one format for all matrices, no exceptions for sensitive ones"
    parser.flag("--uniform", action="store_true", help=uniform)
    keep = {"metavar": "REGEX=bf16|int8", "help": "tensors to keep wider"}
    parser.flag("--keep", action="append", convert=values.keep, default=[], **keep)
    size = {"metavar": "SIZE", "help": "longest file, such as 5GB or 500MB"}
    parser.flag("--max-shard-size", convert=values.size_in_bytes, **size)
    parser.flag("--overwrite", action="store_true", help="replace DIR")
    text = "go on with what a killed conversion has left, and leave the same in turn"
    parser.flag("--resume", action="store_true", help=text)
    text = "a model of the hub: convert each file when it is here, then delete it"
    parser.flag("--stream", action="store_true", help=text)
    text = "print the plan, tensor by tensor, its size and its time; write nothing"
    parser.flag("--dry-run", action="store_true", help=text)
    report = "compare with the source over a text (FILE, or a shipped one): KL, top-1, perplexity, size, speed"
    parser.flag("--report", nargs="?", const="", metavar="[=FILE]", file=True, help=report)
    parser.flag("--json", action="store_true", help="print the report as one JSON document")
    _download(parser)


def _bench(parser: "Parser") -> None:
    _model(parser)
    synthetic = "random weights of the model's shapes, nothing downloaded"
    parser.flag("--synthetic", action="store_true", help=synthetic)
    number: dict[str, Any] = {"convert": values.positive, "metavar": "N"}
    parser.flag("-p", "--prompt-tokens", default=512, help="prompt length (default: 512)", **number)
    parser.flag("-n", "--tokens", default=128, help="tokens to decode (default: 128)", **number)
    _kv_cache(parser, "bf16")
    lists: dict[str, Any] = {"convert": values.lengths, "metavar": "N,N"}
    parser.flag("--prompt", help="a row for each: so many new tokens, behind every --depth", **lists)
    parser.flag("--depth", help="so many tokens are in the cache already, as if read (default: 0)", **lists)
    _json(parser)
    _device(parser)


def _sessions(parser: "Parser") -> None:
    what = f"{', '.join(SESSION_ACTIONS)} (default: list)"
    options: dict[str, Any] = {"choices": SESSION_ACTIONS, "default": "list", "metavar": "ACTION"}
    parser.positional("action", nargs="?", help=what, **options)
    parser.positional("names", nargs="*", metavar="NAME", help="which conversations")
    parser.flag("--json", action="store_true", help="print one JSON document (export: instead of Markdown)")
    parser.flag("-y", "--yes", dest="sure", action="store_true", help="rm: do not ask")
    text = "export into a new file instead of stdout"
    parser.flag("-o", "--output", metavar="FILE", file=True, help=text)


def _completion(parser: "Parser") -> None:
    parser.positional("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


OF_COMMAND: Mapping[str, Callable[["Parser"], None]] = {
    "run": _run,
    "pull": _pull,
    "list": _list,
    "show": _show,
    "doctor": _doctor,
    "rm": _rm,
    "quantize": _quantize,
    "bench": _bench,
    "sessions": _sessions,
    "completion": _completion,
}


def common(parser: "Parser") -> None:
    """The flags of every command."""
    parser.flag("--debug", action="store_true", help="print a traceback with an error")
    parser.flag("-h", "--help", action="help", help="show this text")


def _model(parser: "Parser") -> None:
    text = "an alias, a hub id (owner/name[@revision]), a folder or a .gguf"
    parser.positional("model", metavar="MODEL", help=text)


def _json(parser: "Parser") -> None:
    parser.flag("--json", action="store_true", help="print one JSON document")


def _context(parser: "Parser") -> None:
    names = ("-c", "--ctx", "--ctx-size", "--num-ctx")
    usual = "context in tokens (default: what fits, up to 32,768 on a card and 8,192 on a processor)"
    parser.flag(*names, convert=values.positive, metavar="N", help=usual)
    _kv_cache(parser, "bf16 where the context fits so")


def _kv_cache(parser: "Parser", default: str) -> None:
    text = f"how keys and values are kept (default: {default})"
    parser.flag("--kv-cache", choices=KV_CACHES, help=text)


def _card(parser: "Parser") -> None:
    which = "which card, or the processor (default: a card if any)"
    parser.flag("--gpu", default="auto", metavar="N|UUID|cpu", help=which)
    parser.flag("--vram", convert=values.gigabytes, metavar="GB", help="take at most this much of the card's memory")


def _device(parser: "Parser") -> None:
    _card(parser)
    _download(parser)


def _download(parser: "Parser") -> None:
    parser.switch("--offline", help="use only what is on the disk")
    parser.switch("-y", "--yes", help="do not ask before a large download")


def _parameter(parser: "Parser", parameter: parameters.Parameter) -> None:
    """The flag of one row of parameters.py; a sampling value that is not given is absent from the Namespace."""
    short = {"max_tokens": "-n"}.get(parameter.field)
    parser.flag(
        *([short] if short else []),
        *(f"--{name.replace('_', '-')}" for name in parameter.names),
        dest=parameter.field,
        convert=partial(parameters.parse, parameter),
        default=None if parameter.field in parameters.NOT_SAMPLING else argparse.SUPPRESS,
        action="append" if parameter.field == "stop" else "store",
        metavar={str: "TEXT", int: "N", float: "X"}[parameter.kind],
        help=parameter.help,
    )
