"""One use of a model: loads it into a Chat, then answers one prompt or opens the chat at the terminal."""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localchat import conversation_settings, ledger, one_answer, parameters, settings, slash, tuning
from localchat.chat import Chat
from localchat.checkpoint import load_model
from localchat.config import load_config, read_json
from localchat.device import choose_device
from localchat.engine import Engine
from localchat.fitting import Fit, fit
from localchat.limit import card_limit
from localchat.listing import describe_config
from localchat.memory_table import Memory, measure, memory_on, table_text
from localchat.model_switch import ModelSwitch
from localchat.prepare import registry_name, say
from localchat.prompt_bar import with_bar
from localchat.sampling import Sampling
from localchat.saved import Saved
from localchat.slash_conversations import ConversationCommands, resumed
from localchat.stats import memory_used
from localchat.statusline import notices, stats_block
from localchat.stream import Look, TerminalPrinter, console_for, stream_reply
from localchat.template import ChatTemplate
from localchat.text_safety import one_line
from localchat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Opened:
    """A loaded model: its conversation, and what the terminal says about it. `load_seconds` is wall time."""

    chat: Chat
    banner: str
    about: slash.About
    look: Look
    load_seconds: float
    folder: Path
    args: argparse.Namespace
    generation_config: dict[str, Any]


def open_chat(folder: Path, args: argparse.Namespace) -> Opened:
    """Load the packed model in `folder` for `run`'s arguments.

    Raises:
        UserError: the folder is damaged, the context does not fit, or a file of it makes no sense.
    """
    start = time.perf_counter()
    config = load_config(folder)
    device = choose_device(args.gpu, args.vram, vram_asked="vram" in args.given, say=say)
    tuning.settle(device, say)
    memory, before = memory_on(device, args.vram), memory_used(device)[0]
    chosen = _fit(args, folder, memory)
    context, int8_kv = chosen.context, chosen.int8_kv
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else {}
    name = registry_name(args.model)
    with loading(name):
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer)
        model = load_model(folder, device)
        engine = Engine(model, context, vocab_size=tokenizer.vocab_size, int8_kv=int8_kv)
    chat = Chat(engine, tokenizer, template, Sampling())
    conversation_settings.apply(chat, args, generation_config)
    for notice in filter(None, [chosen.notice, *settings.unheard(args, template.source, device)]):
        say(notice)
    used, total = memory_used(device)
    room = f"context {context:,}{' in INT8' * int8_kv}"
    summary = f"{name} - {describe_config(config)} - {room} - {used / 1e9:.1f}/{total / 1e9:.1f} GB"
    return Opened(
        chat=chat,
        banner=f"{summary}\n/help for commands, Ctrl-D to leave",
        about=slash.About(
            info=f"{summary}\n{one_line(str(folder))}",
            memory=lambda: table_text(
                ledger.ledger_of_folder(folder, context, memory.kind, int8_kv=int8_kv),
                memory,
                measure(engine, memory, before),
            ),
            origins=parameters.sampling_origins(settings.given_origins(args), generation_config),
            fixed=(
                ("ctx", context, args.origins["ctx"]),
                _kept_as(args, chosen, memory.kind),
                ("gpu", device, args.origins["gpu"]),
                ("vram", args.vram, args.origins["vram"]),
            ),
        ),
        look=Look(
            args.color,
            hide_thinking=args.hide_thinking,
            verbose=args.verbose,
            device=device,
            limit=card_limit(engine.model, int8_kv=int8_kv),
            markdown=not args.raw,
        ),
        load_seconds=time.perf_counter() - start,
        folder=folder,
        args=args,
        generation_config=generation_config,
    )


def _fit(args: argparse.Namespace, folder: Path, memory: Memory) -> Fit:
    """How long a context, and in which form it is kept; see fitting.fit."""

    def ledger_with(int8_kv: bool, kind: str = memory.kind) -> ledger.Ledger:
        return ledger.ledger_of_folder(folder, 1, kind, int8_kv=int8_kv)

    return fit(ledger_with, memory, args.ctx, args.kv_cache, on_cpu=lambda int8_kv: ledger_with(int8_kv, "cpu"))


def _kept_as(args: argparse.Namespace, chosen: Fit, kind: str) -> tuple[str, str, str]:
    """The row of /show parameters that says how keys and values are kept, and who decided that."""
    origin = "what fits" if chosen.int8_kv and args.kv_cache is None else args.origins["kv_cache"]
    return "kv_cache", chosen.form(kind), origin


def answer(opened: Opened, prompt: str, saved: Saved) -> int:
    """Answer one prompt on stdout: 0, or 130 where Ctrl-C stopped it. It is saved if a conversation was asked for.

    Raises:
        UserError: the reply has no answer, or with --extract no code block.
    """
    (autosave, conversation), args = saved, opened.args
    chunks = opened.chat.reply(prompt)
    if autosave.name:
        autosave.attach(opened.chat, conversation)
        chunks = autosave.record(prompt, chunks)
    if conversation is not None and sys.stderr.isatty():
        for line in resumed(opened.chat, conversation, autosave.model).splitlines():
            say(line)
    printer = one_answer.printer_of(args, opened.look)
    if not isinstance(printer, TerminalPrinter):  # which has a bar of its own
        chunks = with_bar(chunks)
    reply = stream_reply(chunks, printer)
    if reply.last is not None and args.verbose:
        print(stats_block(reply.last.stats, opened.chat.sampling.seed, opened.load_seconds), file=sys.stderr)
    if reply.last is not None and reply.last.finish_reason == "context":
        say("the answer stops here because the context is full")
    for notice in [*notices(reply), *filter(None, [autosave.fault])]:
        say(notice)
    one_answer.finish(printer, reply, opened.chat.sampling, args, opened.folder, opened.load_seconds)
    return 130 if reply.interrupted else 0


def converse(opened: Opened, args: argparse.Namespace, saved: Saved) -> int:
    """The chat at the terminal, until the user leaves it. `args` are the flags, without a conversation's settings."""
    from localchat import line_editor, terminal

    history, notice = line_editor.open_history()
    if notice:
        say(notice)
    chat, (autosave, conversation) = opened.chat, saved

    def settle(name: str, saved_settings: Mapping[str, Any]) -> None:
        own = conversation_settings.adopted(args, saved_settings, name)
        conversation_settings.apply(chat, own, opened.generation_config)
        commands.origins = parameters.sampling_origins(settings.given_origins(own), opened.generation_config)
        commands.seed_is_fixed = hasattr(own, "seed")
        autosave.chosen.clear()
        autosave.chosen.update(conversation_settings.chosen_by(own))

    commands = slash.SlashCommands(
        chat,
        opened.about,
        seed_is_fixed=hasattr(opened.args, "seed"),
        chosen=autosave.chosen,
        saved=ConversationCommands(chat, autosave, settle),
    )
    autosave.attach(chat, conversation)
    banner = opened.banner
    if conversation is not None:
        banner += f"\n{resumed(chat, conversation, autosave.model)}"
    switch = ModelSwitch(chat, opened.folder, opened.args)
    repl = terminal.Repl(chat, commands, console_for(opened.look), opened.look, history, switch, autosave)
    return repl.run(banner, conversation.unanswered if conversation else "")


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
