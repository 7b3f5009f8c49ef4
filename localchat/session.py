"""One use of a model: loads it into a Chat, then answers one prompt or opens the chat at the terminal."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localchat import ledger, parameters, registry, slash
from localchat.chat import Chat
from localchat.checkpoint import load_model
from localchat.config import ModelConfig, load_config, read_json
from localchat.device import choose_device
from localchat.engine import Engine
from localchat.errors import DoesNotFit, UsageError
from localchat.limit import card_limit
from localchat.listing import describe_config, ledger_text
from localchat.model_switch import ModelSwitch
from localchat.prepare import registry_name, say, size_text
from localchat.stats import memory_used
from localchat.statusline import notices, stats_block
from localchat.stream import Look, console_for, printer_for, stream_reply
from localchat.template import ChatTemplate
from localchat.text_safety import one_line
from localchat.tokenizer import Tokenizer

# Tokens; less where the model or the memory has less. A processor reads slowly, and its cache is fp32.
DEFAULT_CONTEXT = {"cpu": 8192, "cuda": 32768}


@dataclass(frozen=True)
class Opened:
    """A loaded model: its conversation, and what the terminal says about it. `load_seconds` is wall time."""

    chat: Chat
    folder: Path
    banner: str
    about: slash.About
    look: Look
    load_seconds: float
    seed_is_fixed: bool


def open_chat(folder: Path, args: argparse.Namespace) -> Opened:
    """Load the packed model in `folder` for `run`'s arguments.

    Raises:
        UserError: the folder is damaged, the context does not fit, or a file of it makes no sense.
    """
    start = time.perf_counter()
    config = load_config(folder)
    device = choose_device(args.gpu, args.vram)
    context = context_length(args.ctx, config, folder, device, args.vram)
    generation = folder / "generation_config.json"
    flags = sampling_flags(args)
    sampling = parameters.sampling_for(flags, read_json(generation) if generation.exists() else {})
    name = registry_name(args.model)
    with loading(name):
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer)
        engine = Engine(load_model(folder, device), context, vocab_size=tokenizer.vocab_size)
    chat = Chat(
        engine,
        tokenizer,
        template,
        sampling,
        system=args.system,
        max_tokens=args.max_tokens,
        stop=args.stop or (),
        template_variables={} if args.think is None else {"enable_thinking": bool(args.think)},
        think_budget=args.think if type(args.think) is int else None,
    )
    used, total = memory_used(device)
    summary = f"{name} - {describe_config(config)} - context {context:,} - {used / 1e9:.1f}/{total / 1e9:.1f} GB"
    return Opened(
        chat=chat,
        folder=folder,
        banner=f"{summary}\n/help for commands, Ctrl-D to leave",
        about=slash.About(
            info=f"{summary}\n{one_line(str(folder))}",
            memory=ledger_text(ledger.ledger_of_folder(folder, context, _kind(device)), device),
        ),
        look=Look(
            args.color,
            hide_thinking=args.hide_thinking,
            verbose=args.verbose,
            device=device,
            limit=card_limit(engine.model),
            markdown=not getattr(args, "raw", False),
        ),
        load_seconds=time.perf_counter() - start,
        seed_is_fixed="seed" in flags,
    )


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Field -> value of the sampling flags that were given (the parser leaves the others out)."""
    fields = {p.field for p in parameters.PARAMETERS} - {"max_tokens", "stop"}
    return {name: value for name, value in vars(args).items() if name in fields}


def context_length(
    wanted: int | None, config: ModelConfig, folder: Path, device: str = "cpu", vram: float | None = None
) -> int:
    """The context in tokens: what was asked for, or DEFAULT_CONTEXT, within the model's limit and the memory.

    Raises:
        UsageError: more was asked for than the model was trained for.
        DoesNotFit: memory does not hold the model with this context.
    """
    limit = config.max_position_embeddings
    used, total = memory_used(device)
    if device != "cpu":  # what other programs hold of a card is not ours; our CUDA context is counted in the ledger
        total = min(total - used + ledger.CUDA_CONTEXT, total)
    total = total if vram is None else min(total, int(vram * 1e9))
    if wanted is not None and wanted > limit:
        raise UsageError(f"--ctx {wanted:,} is more than the {limit:,} tokens that this model was made for.")
    largest = ledger.ledger_of_folder(folder, 1, _kind(device)).largest_context(total)
    if largest < (wanted or 1):
        fixes = [f"--ctx {largest} fits"] if largest else []
        if device != "cpu" and used > 2 * ledger.CUDA_CONTEXT:
            fixes.append(f"other programs hold {size_text(used - ledger.CUDA_CONTEXT)} of the card: close them")
        smaller = largest_model(total, wanted or 1, _kind(device))
        if smaller:
            fixes.append(f"`localchat run {smaller}` fits")
        if device != "cpu":
            fixes.append("--gpu cpu takes the machine's memory")
        raise DoesNotFit(
            f"the model and a context of {wanted or 1:,} tokens do not fit into {size_text(total)} of memory.",
            "; ".join(fixes[:3]) + "." if fixes else "take a smaller model (`localchat list`).",
        )
    return wanted or min(limit, DEFAULT_CONTEXT[_kind(device)], largest)


def largest_model(available: int, context: int, kind: str) -> str | None:
    """The name of the registry's largest model that fits into `available` bytes with `context` tokens, or None."""
    sizes = {entry.alias: ledger.ledger(entry, context, device=kind).total for entry in registry.MODELS.values()}
    return max((alias for alias, size in sizes.items() if size <= available), key=sizes.__getitem__, default=None)


def _kind(device: str) -> str:
    return device.partition(":")[0]


def answer(opened: Opened, prompt: str, args: argparse.Namespace) -> int:
    """Answer one prompt on stdout: 0, or 130 where Ctrl-C stopped it."""
    reply = stream_reply(opened.chat.reply(prompt), printer_for(opened.look))
    if reply.last is not None and args.verbose:
        print(stats_block(reply.last.stats, opened.chat.sampling.seed, opened.load_seconds), file=sys.stderr)
    if reply.last is not None and reply.last.finish_reason == "context":
        say("the answer stops here because the context is full")
    for notice in notices(reply):
        say(notice)
    return 130 if reply.interrupted else 0


def converse(opened: Opened, args: argparse.Namespace) -> int:
    """The chat at the terminal, until the user leaves it."""
    from localchat import terminal

    history, notice = terminal.open_history()
    if notice:
        say(notice)
    commands = slash.SlashCommands(opened.chat, opened.about, seed_is_fixed=opened.seed_is_fixed)
    switch = ModelSwitch(opened.chat, opened.folder, args)
    repl = terminal.Repl(opened.chat, commands, console_for(opened.look), opened.look, history, switch)
    return repl.run(opened.banner)


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """A spinner on stderr while the model loads; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(f"loading {name}")):
        yield
