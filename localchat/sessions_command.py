"""`localchat sessions`: the saved conversations listed, shown, exported and removed."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localchat import conversations
from localchat.conversation_file import Conversation
from localchat.errors import UsageError, UserError
from localchat.removal import ask
from localchat.slash_conversations import table
from localchat.text_safety import one_line, visible


def run(args: argparse.Namespace) -> int:
    """One action on the conversations that are named; the exit code.

    Raises:
        UsageError: a name is missing, one too many, or unknown.
        UserError: a conversation is damaged or open elsewhere, or a file cannot be written.
    """
    if args.output and args.action != "export":
        raise UsageError("-o is where `localchat sessions export` writes to.")
    if args.action == "list":
        _no_names(args)
        rows = conversations.listing()
        print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else table(rows))
    elif args.action == "rm":
        _remove(args)
    else:
        conversation = conversations.load(_one_name(args))
        if args.action == "show":
            print(json.dumps(as_json(conversation), indent=2) if args.json else visible(as_text(conversation)))
        else:
            _export(conversation, args.output, as_document=args.json)
    return 0


def as_json(conversation: Conversation) -> dict[str, Any]:
    """A conversation as one JSON document."""
    keys = ("name", "created", "updated", "model", "settings", "messages")
    return {key: getattr(conversation, key) for key in keys} | (
        {"unanswered": conversation.unanswered} if conversation.unanswered else {}
    )


def as_text(conversation: Conversation) -> str:
    """A conversation for reading on a terminal."""
    head = f"{conversation.name} - {conversation.model} - {conversation.created} to {conversation.updated}"
    settings = [f"{name} = {value}" for name, value in conversation.settings.items()]
    blocks = ["\n".join([head, *settings])]
    for message in conversation.messages:
        mark = ">>> " if message["role"] == "user" else ""
        thought = [f"[thought]\n{message['reasoning_content']}"] if message.get("reasoning_content") else []
        blocks += [*thought, f"{mark}{message['content']}{_note(message)}"]
    if conversation.unanswered:
        blocks.append(f">>> {conversation.unanswered}\n(not answered)")
    return "\n\n".join(blocks)


def as_markdown(conversation: Conversation) -> str:
    """A conversation as a Markdown document; thoughts are folded."""
    lines = [f"# {conversation.name}", "", f"{conversation.model}, {conversation.created}", ""]
    if conversation.settings.get("system"):
        lines += ["## System", "", str(conversation.settings["system"]), ""]
    for message in conversation.messages:
        lines += ["## User" if message["role"] == "user" else "## Assistant", ""]
        if message.get("reasoning_content"):
            lines += ["<details><summary>Thought</summary>", "", message["reasoning_content"], "", "</details>", ""]
        lines += [message["content"] + _note(message), ""]
    if conversation.unanswered:
        lines += ["## User", "", conversation.unanswered, ""]
    return "\n".join(lines)


def _note(message: dict[str, Any]) -> str:
    if message.get("interrupted"):
        return "\n(interrupted)"
    return "\n(stopped at a limit)" if message.get("ended") else ""


def _export(conversation: Conversation, output: str | None, *, as_document: bool) -> None:
    text = json.dumps(as_json(conversation), indent=2) + "\n" if as_document else as_markdown(conversation)
    if output is None:
        sys.stdout.write(visible(text))
        return
    try:
        fd = os.open(Path(output), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}).") from error
    with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def _remove(args: argparse.Namespace) -> None:
    if not args.names:
        raise UsageError("`localchat sessions rm` needs the name of a conversation.")
    for name in args.names:
        conversations.existing(name)  # all of them, before anything is asked or removed
    if not args.sure:
        ask(f"remove {', '.join(map(one_line, args.names))}? [y/N] ")
    for name in args.names:
        conversations.remove(name)
        print(f"removed {name}", file=sys.stderr)
    if args.json:
        print(json.dumps({"removed": args.names}))


def _one_name(args: argparse.Namespace) -> str:
    if len(args.names) != 1:
        raise UsageError(
            f"`localchat sessions {args.action}` takes the name of one conversation, got {len(args.names)}.",
            "`localchat sessions list` lists them.",
        )
    return str(args.names[0])


def _no_names(args: argparse.Namespace) -> None:
    if args.names:
        raise UsageError("`localchat sessions list` takes no name.", f"localchat sessions show {args.names[0]}")
