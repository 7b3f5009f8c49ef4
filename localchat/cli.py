"""The `localchat` command: understands the command line, runs one command, turns every ending into an exit code.

Exit codes: 0 done - 1 failed - 2 usage - 3 model not found - 4 does not fit in memory - 5 prompt over the context -
130 Ctrl-C - 141 the pipe was closed - 143 SIGTERM. Errors are one sentence on stderr, a hint on the next line.
Everything heavy is imported by the command that needs it, so that `--help` and usage errors take no time.
"""

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from localchat import interrupts
from localchat.arguments import ALIASES, COMPLETE, parse_command_line
from localchat.errors import UsageError
from localchat.failures import failure_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    with _sigterm_as_exit():
        try:
            code = _run(words)
            sys.stdout.flush()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BrokenPipeError:
            code = 141
        except KeyboardInterrupt:
            code = 130
            _complain("localchat: interrupted")
        except Exception as error:  # noqa: BLE001 - the last place that can turn a fault into a sentence
            code = _report(error, words)
        finally:
            _flush_or_discard(sys.stdout)
            _flush_or_discard(sys.stderr)
    return code


def _run(words: Sequence[str]) -> int:
    args = parse_command_line(words)
    _add_settings(args)
    _keep_compiled_kernels()
    if args.command in ("", "list"):
        from localchat import listing

        return listing.print_models(as_json=args.json, with_usage=not args.command)
    commands = {
        "run": _chat,
        "pull": _pull,
        "show": _show,
        "rm": _rm,
        "quantize": _quantize,
        "bench": _bench,
        "doctor": _doctor,
        "sessions": _sessions,
        "completion": _completion,
        COMPLETE: _complete,
    }
    return commands[args.command](args)


def _add_settings(args: argparse.Namespace) -> None:
    """What the environment and the config file say, for the commands that have such flags.

    A variable that nothing reads is told by every command but those that a shell reads.
    """
    if hasattr(args, "settable") and args.command != "completion":
        from localchat import settings

        for warning in settings.complete(args):
            _complain(f"localchat: {warning}")


def _keep_compiled_kernels() -> None:
    """Before anything imports Triton: its cache is part of ours, unless the user has said where it is."""
    from localchat import store

    folder = store.compiled_kernels()
    if folder is not None:
        os.environ["TRITON_CACHE_DIR"] = str(folder)


def _chat(args: argparse.Namespace) -> int:
    os.environ["TERM"] = os.environ.get("TERM") or "dumb"  # a terminal that does not say what it is gets no escapes
    from localchat.prepare import packed_folder
    from localchat.prompt_input import read_file, read_prompt
    from localchat.saved import open_saved, settings_of

    argument = " ".join(args.prompt) if args.prompt else None
    if args.system_file is not None:
        args.system = read_file(args.system_file, sys.stderr).strip()
        args.origins["system"] = "flag"
    prompt = read_prompt(argument, files=args.files or (), use_stdin=not args.no_stdin, notices=sys.stderr)
    if prompt is None and (args.json or args.extract):
        flag = "--json" if args.json else "--extract"
        raise UsageError(
            f"{flag} is for one answer, and there is no prompt.", "put the prompt behind the model's name."
        )
    saved = open_saved(args)  # before anything is downloaded
    try:
        folder = packed_folder(args.model, offline=args.offline, yes=args.yes)
        with interrupts.none_lost(at_once=False):  # it imports torch
            from localchat import session
        with interrupts.none_lost():
            opened = session.open_chat(folder, settings_of(args, saved[1]))
        return session.converse(opened, args, saved) if prompt is None else session.answer(opened, prompt, saved)
    finally:
        saved[0].close()


def _sessions(args: argparse.Namespace) -> int:
    from localchat.sessions_command import run

    return run(args)


def _pull(args: argparse.Namespace) -> int:
    from localchat.prepare import packed_folder, say

    folder = packed_folder(args.model, offline=args.offline, yes=args.yes)
    say(f"{args.model} is ready in {folder}: localchat run {args.model}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from localchat import listing

    where = {"gpu": args.gpu, "vram": args.vram, "vram_asked": "vram" in args.given}
    return listing.print_model(args.model, context=args.ctx, kv_cache=args.kv_cache, as_json=args.json, **where)


def _doctor(args: argparse.Namespace) -> int:
    if args.tune:
        from localchat import tune_command

        return tune_command.run(as_json=args.json)
    from localchat import doctor

    return doctor.print_findings(as_json=args.json)


def _rm(args: argparse.Namespace) -> int:
    from localchat import removal

    return removal.remove(args.model, downloads=args.downloads, sure=args.sure)


def _completion(args: argparse.Namespace) -> int:
    from localchat import completion

    print(completion.SCRIPTS[args.shell], end="")
    return 0


def _complete(args: argparse.Namespace) -> int:
    from localchat import completion

    return completion.print_candidates(args.words)


def _quantize(args: argparse.Namespace) -> int:
    from localchat.prepare import quantize

    folder = quantize(args)
    if folder is not None:
        print(f"localchat: wrote {folder}", file=sys.stderr)
    return 0


def _bench(args: argparse.Namespace) -> int:
    from localchat import listing
    from localchat.prepare import packed_folder, say, synthetic_entry

    what = (
        synthetic_entry(args.model) if args.synthetic else packed_folder(args.model, offline=args.offline, yes=args.yes)
    )
    from localchat import bench, bench_grid, tuning
    from localchat.device import choose_device

    device = choose_device(args.gpu, args.vram, vram_asked="vram" in args.given, say=say)
    tuning.settle(device, say)
    decode_tokens, where = args.tokens, {"device": device, "vram": args.vram, "int8_kv": args.kv_cache == "int8"}
    if args.prompt is None and args.depth is None:
        result = bench.run(what, prompt_tokens=args.prompt_tokens, decode_tokens=decode_tokens, **where)
        return listing.print_bench(args.model, result, as_json=args.json)
    prompts, depths = args.prompt or (args.prompt_tokens,), args.depth or (0,)
    grid = bench_grid.run_grid(what, prompts=prompts, depths=depths, decode_tokens=decode_tokens, **where)
    return listing.print_bench_grid(args.model, grid, as_json=args.json)


def _report(error: BaseException, words: Sequence[str]) -> int:
    """Say what went wrong with a command line and return the exit code."""
    if "--debug" in words:
        traceback.print_exception(error)
    command = next((word for word in words if not word.startswith("-")), "")
    failure = failure_of(error, ALIASES.get(command, command))
    _complain(str(failure))
    return failure.exit_code


def _complain(text: str) -> None:
    """Print to stderr, even if nobody reads it any more."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _flush_or_discard(stream: TextIO) -> None:
    """Flush; a stream that cannot take its rest is pointed at nothing, or the interpreter complains at its end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        _discard(stream)


def _discard(stream: TextIO) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        return


def _open_missing_streams() -> None:
    """`>&-` leaves no stdout at all; a character that a terminal's encoding lacks must not end the answer."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM unwinds the stack like an exception, so that files and the terminal are left in order."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(143)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
