"""How a one-shot answer leaves the program: as text, as the first code block alone, or as one JSON object."""

import argparse
import json
import sys
from pathlib import Path

from localchat.envelope import Collector, envelope, with_code
from localchat.errors import UserError
from localchat.extract import ExtractPrinter
from localchat.prepare import registry_name, say
from localchat.sampling import Sampling
from localchat.statusline import Reply, without_answer
from localchat.stream import Look, Printer, printer_for

_MORE = {"length": "-n allows more tokens, ", "context": "--ctx allows more tokens, "}


def printer_of(args: argparse.Namespace, look: Look) -> Printer:
    """The printer that `run`'s flags ask for. With --json there is nothing to see before the end."""
    if args.json:
        return Collector()
    return ExtractPrinter(sys.stdout) if args.extract else printer_for(look)


def finish(
    printer: Printer, reply: Reply, sampling: Sampling, args: argparse.Namespace, folder: Path, load_seconds: float
) -> None:
    """Print what was collected; says where an extracted block was cut.

    Raises:
        UserError: there is no answer, since the reply ended inside its thought; or with --extract no code block in it.
    """
    if isinstance(printer, Collector):
        name = registry_name(args.model)
        document = envelope(printer.texts, reply, sampling, name=name, folder=folder, load_seconds=load_seconds)
        print(json.dumps(with_code(document) if args.extract else document, indent=2), flush=True)
    if fault := without_answer(reply):
        more = _MORE.get(reply.last.finish_reason or "", "") if reply.last is not None else ""
        hint = f"{more}--think N ends a thought after N tokens, --no-think asks for none."
        raise UserError(f"{fault}.", hint)
    if isinstance(printer, ExtractPrinter) and not reply.interrupted:
        if not printer.block.found:
            hint = f"--seed {sampling.seed} without --extract shows the same answer whole."
            raise UserError("the answer has no code block, so nothing was extracted.", hint)
        if not printer.block.closed:
            say("the code block was not finished")
