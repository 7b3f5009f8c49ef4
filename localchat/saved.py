"""What -C and --session open, before a model is loaded or downloaded: nothing here imports torch."""

import argparse

from localchat import conversation_settings, conversations
from localchat.autosave import Autosave
from localchat.conversation_file import Conversation
from localchat.prepare import registry_name

Saved = tuple[Autosave, Conversation | None]


def open_saved(args: argparse.Namespace) -> Saved:
    """Where the conversation is saved, and what -C or --session goes on with. It is locked from now on.

    Raises:
        UsageError: there is none, or that can be no name.
        UserError: it is damaged, or open in another process.
    """
    autosave = Autosave(registry_name(args.model), conversation_settings.chosen_by(args))
    name = conversations.latest() if args.continue_last else args.session
    if name is None:
        return autosave, None
    conversation = autosave.open(name, create=not args.continue_last)
    autosave.chosen |= conversation_settings.chosen_by(settings_of(args, conversation))
    return autosave, conversation


def settings_of(args: argparse.Namespace, conversation: Conversation | None) -> argparse.Namespace:
    """`args` with the settings of a conversation that goes on."""
    return conversation_settings.adopted(args, conversation.settings, conversation.name) if conversation else args
