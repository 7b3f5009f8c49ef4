"""From what the user calls a model to a packed folder: looks in the cache, downloads, quantises, and says so.

This is where the command line reaches into `quantize`. Notices and progress go to stderr; bars only to a terminal.
"""

import argparse
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localchat import registry, store
from localchat.config import ModelConfig, load_config, packed_format
from localchat.errors import BadCheckpoint, ModelNotFound, UsageError, UserError
from localchat.text_safety import one_line
from localchat.transfer import Fetched, Notice, Plan

if TYPE_CHECKING:
    from rich.progress import Progress

    from localchat.quantize.convert import Recipe
    from localchat.quantize.source import Source
    from localchat.streamed_shards import StreamedShards
    from localchat.transfer import Progress as Download

# A person is asked before more than this is downloaded.
LARGE_DOWNLOAD = 2_000_000_000


def packed_folder(name: str, *, offline: bool, yes: bool) -> Path:
    """The packed folder of MODEL `name`; what is missing is downloaded and quantised by rounding, into the cache.

    Raises:
        ModelNotFound: there is no such model, or it could not be had.
        UserError: it cannot be run, or the user does not want the download.
    """
    path = store.as_path(name)
    if path is None:
        announce(name)
    elif packed_format(path):
        return path
    elif path.name.endswith(".partial"):
        raise UserError(
            f"{one_line(name)} is an unfinished conversion.", "`localchat quantize --resume` goes on with it."
        )
    if found := store.find(name):
        return found
    source = store.local_source(path) if path else fetch(name, offline=offline, yes=yes)
    _check_texts(source.path)
    return _rounded(source, title=registry_name(name))


def announce(name: str) -> None:
    """Say what the registry has to say about `name`."""
    entry = registry.lookup(name)
    if entry is not None and entry.notice:
        say(entry.notice)


def synthetic_entry(name: str) -> registry.Entry:
    """The registry entry whose shapes a synthetic model gets.

    Raises:
        ModelNotFound: `name` is not an alias.
    """
    announce(name)
    entry = registry.lookup(name)
    if entry is None:
        near = registry.suggest(name)
        hint = f"did you mean {near}?" if near else "`localchat list` names them."
        raise ModelNotFound(f"--synthetic takes the name of a known model, {one_line(name)} is none.", hint)
    return entry


def registry_name(name: str) -> str:
    """`name`, safe to print; a path without its folders."""
    path = store.as_path(name)
    return one_line(path.resolve().name if path else name)


def fetch(name: str, *, offline: bool, yes: bool) -> Fetched:
    """Download a model by alias or hub id, with its size announced before and a bar meanwhile.

    Raises:
        ModelNotFound: see hub.fetch.
        UserError: the user declined, or the disk is too small.
    """
    from localchat import hub

    with ExitStack() as stack:
        records = hub.fetch(name, offline=offline)
        stack.enter_context(closing(records))  # type: ignore[type-var]
        bar = None
        for record in records:
            if isinstance(record, Fetched):
                return record
            if isinstance(record, Notice):
                say(record.text)
            elif isinstance(record, Plan):
                here = record.total_bytes - record.missing_bytes
                more = f" ({size_text(here)} is here already)" if here > record.total_bytes // 100 else ""
                say(f"downloading {one_line(record.source_id)}, {size_text(record.missing_bytes)}{more}")
                _confirm(record, yes=yes)
            else:
                if bar is None:  # not before the question, whose line it would draw over
                    bar = stack.enter_context(progress_bar())
                    # What is here already is no part of the rate.
                    task = bar.add_task("downloading", completed=record.done_bytes, total=record.total_bytes)
                bar.update(task, completed=record.done_bytes, total=record.total_bytes)
    raise ModelNotFound(f"{one_line(name)} was not downloaded.")


def _confirm(plan: Plan, *, yes: bool) -> None:
    """Ask before a large download, if somebody is there to answer."""
    if yes or plan.missing_bytes < LARGE_DOWNLOAD or not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print("continue? [Y/n] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
        raise UserError("nothing was downloaded.", "-y downloads without asking.")


def _check_texts(source: Path) -> None:
    """Refuse a model folder that could not be chatted with before its weights are converted.

    Raises:
        BadCheckpoint: tokenizer, chat template or generation config are missing or damaged.
    """
    if not source.is_dir():
        return  # a .gguf's are rebuilt during the conversion
    from localchat.template import ChatTemplate
    from localchat.tokenizer import Tokenizer

    load_config(source)
    ChatTemplate.load(source, Tokenizer.load(source))


def _say_what_is_mute(source: Path) -> None:
    """Say, before the weights are converted, why `run` will not take what comes of them."""
    try:
        _check_texts(source)
    except BadCheckpoint as error:
        say(f"{error} `run` will refuse what is packed.")


def _rounded(source: Fetched, title: str) -> Path:
    """The packed folder of `source` in the cache, converted by plain rounding if it is not there."""
    from localchat.quantize.convert import default_recipe

    recipe = replace(default_recipe(source.path), search=False)
    out = store.target(source, repr(recipe))
    if store.is_locked(out):
        say(f"another localchat is quantising {title}: waiting for it")
    with store.locked(out):
        if not packed_format(out):
            say(what_happens(source.path, title, recipe) or f"quantising {title} to INT4 by rounding, once")
            run_conversion(source, out, recipe)
    return out


def what_happens(source: "Path | Source", title: str, recipe: "Recipe") -> str:
    """What packing does to a checkpoint that is quantised already, in a sentence; "" for others."""
    from localchat.quantize.convert import what_is_lost

    lost = what_is_lost(source, recipe)
    return f"packing {title}, once: {lost}" if lost else ""


def run_conversion(
    source: Fetched, out: Path, recipe: "Recipe", *, overwrite: bool = False, resume: bool = False
) -> None:
    """Convert with a bar. An interruption leaves nothing behind, or with `resume` what the next one goes on with."""
    from localchat.quantize.convert import convert

    steps = convert(
        source.path,
        out,
        recipe,
        overwrite=overwrite,
        resume=resume,
        source_id=source.source_id,
        revision=source.revision,
    )
    with progress_bar() as bar, closing(steps):  # type: ignore[type-var]
        task = bar.add_task("quantising", total=None)
        for step in steps:
            bar.update(task, completed=step.done_bytes, total=step.total_bytes)


def quantize(args: argparse.Namespace) -> Path | None:
    """The `quantize` command: convert with searched scales into --output, or into the cache; returns the folder.

    None: nothing was written, because --dry-run asked for the plan alone.

    Raises:
        UsageError: the source is packed already, or the recipe or a combination of flags has no meaning.
        UserError: see packed_folder.
    """
    path = store.as_path(args.source)
    if args.calib and args.method != "gptq":
        raise UsageError("--calib is for --method gptq; rounding reads no text.")
    if args.json and args.report is None:
        raise UsageError("--json is how a report is printed, and none is asked for.", "add --report.")
    if path is None:
        announce(args.source)
    elif packed_format(path):
        raise UsageError(f"{one_line(args.source)} is quantised already.", "give the checkpoint that it was made from.")
    if args.stream and args.method == "gptq":
        raise UsageError(
            "--method gptq runs a text through the whole model, and --stream never has all of it.",
            "leave one of them out.",
        )
    if args.report is not None and (args.stream or args.dry_run):
        raise UsageError(
            f"--report compares what was written with its source: {'--stream' if args.stream else '--dry-run'} leaves "
            "nothing to compare."
        )
    if args.stream and (path or args.offline):
        raise UsageError("--stream downloads a model of the hub: it takes neither a path nor --offline.")
    out = Path(args.output).expanduser() if args.output else None
    if out and out.exists() and not (args.overwrite or args.dry_run):
        raise UserError(f"{one_line(args.output)} exists already.", "choose another folder or pass --overwrite.")
    if args.dry_run:
        _print_plan(args, path, out)
        return None
    if args.stream:
        return _streamed(args, out)
    source = store.local_source(path) if path else fetch(args.source, offline=args.offline, yes=args.yes)
    recipe = _recipe(args, source.path)
    windows = None
    if args.report is not None:  # before an hour's work, of which it might turn out useless
        from localchat import quality

        windows = quality.windows_of(source.path, Path(args.report).expanduser() if args.report else None)
    _say_what_happens(args, source.path, recipe)
    _say_what_is_mute(source.path)
    flags = {"overwrite": args.overwrite, "resume": args.resume}
    if out:
        run_conversion(source, out, recipe, **flags)
    else:
        out = store.target(source, repr(recipe))
        with store.locked(out):
            run_conversion(source, out, recipe, **flags)
    if windows is not None:
        quality.print_report(quality.report(source.path, out, windows), as_json=args.json)
    return out


def _streamed(args: argparse.Namespace, out: Path | None) -> Path:
    """The same for files that are converted while they come. What is done stays until it is complete."""
    from localchat.quantize.convert import convert
    from localchat.quantize.streamed import open_streamed
    from localchat.quantize.target import downloads_path
    from localchat.streamed_shards import stream

    with ExitStack() as stack:
        shards, todo = _run_out(stream(args.source), yes=args.yes)
        source = open_streamed(shards)
        recipe = _recipe(args, source)
        _say_what_happens(args, source, recipe)
        _say_what_is_mute(shards.texts)
        fetched = Fetched(shards.texts, todo.source_id, todo.revision)
        if out is None:
            out = store.target(fetched, repr(recipe))
            stack.enter_context(store.locked(out))
        stack.enter_context(shards.feed)
        shards.feed.folder = downloads_path(out)
        stack.enter_context(source)
        names = {"source_id": fetched.source_id, "revision": fetched.revision}
        steps = convert(source, out, recipe, overwrite=args.overwrite, resume=True, **names)
        stack.enter_context(closing(steps))  # type: ignore[type-var]
        bar = stack.enter_context(progress_bar())
        coming = bar.add_task("downloading", total=sum(map(shards.feed.size, shards.feed.files)))
        task = bar.add_task("quantising", total=None)
        for step in steps:
            for notice in shards.feed.take_notices():
                say(notice)
            bar.update(coming, completed=step.arrived_bytes)
            bar.update(task, completed=step.done_bytes, total=step.total_bytes)
        return out


def _run_out(
    records: "Generator[Plan | Notice | Download, None, StreamedShards]", *, yes: bool
) -> "tuple[StreamedShards, Plan]":
    """Announce what the records say; returns what the generator does, and its plan."""
    todo: Plan | None = None
    with closing(records):
        while True:
            try:
                record = next(records)
            except StopIteration as end:
                if todo is None:
                    raise ModelNotFound("the hub has not said what the model consists of.") from None
                return end.value, todo
            if isinstance(record, Notice):
                say(record.text)
            elif isinstance(record, Plan):
                todo = record
                say(f"converting {one_line(todo.source_id)} while it comes, {size_text(todo.missing_bytes)}")
                _confirm(todo, yes=yes)


def _print_plan(args: argparse.Namespace, path: Path | None, out: Path | None) -> None:
    """The plan on stdout: nothing is downloaded but config.json, nothing is written."""
    from localchat.quantize.convert import open_source
    from localchat.quantize.dry_run import plan_lines

    if path is None and args.offline:
        path = fetch(args.source, offline=True, yes=args.yes).path
    with ExitStack() as stack:
        if path:
            source = stack.enter_context(open_source(path))
            config, recipe = source.model_config, _recipe(args, source)
            _say_what_happens(args, source, recipe)
        else:
            from localchat import hub

            source, config = None, hub.config_of(args.source)
            recipe = _recipe(args, config)
        for line in plan_lines(config, recipe, source, out.absolute().parent if out else store.cache_dir()):
            print(line)


def _say_what_happens(args: argparse.Namespace, source: "Path | Source", recipe: "Recipe") -> None:
    if notice := what_happens(source, registry_name(args.source), recipe):
        say(notice)


def _recipe(args: argparse.Namespace, source: "Path | Source | ModelConfig") -> "Recipe":
    """The default for the model, with what the flags say."""
    from localchat.quantize.convert import default_recipe, recipe_for, with_placement

    if args.sym and args.min:
        raise UsageError("--sym and --min exclude each other: choose one scale, or a scale and a minimum, per group.")
    given = {
        "group_size": args.group_size,
        "symmetric": args.sym if args.sym or args.min else None,
        "max_shard_size": args.max_shard_size,
        "keep": tuple(args.keep) or None,
        "exact": False if args.fp16_scales else None,
        "method": args.method,
        "calibration": Path(args.calib).expanduser() if args.calib else None,
    }
    default = recipe_for(source) if isinstance(source, ModelConfig) else default_recipe(source)
    recipe = replace(default, **{name: v for name, v in given.items() if v is not None})
    return recipe if args.uniform else with_placement(source, recipe)


def say(text: str) -> None:
    """One notice on stderr."""
    print(f"localchat: {one_line(text)}", file=sys.stderr, flush=True)


def size_text(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


@contextmanager
def progress_bar() -> Iterator["Progress"]:
    """A rich bar on stderr that is gone when it is done; silent where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar
