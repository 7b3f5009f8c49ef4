"""The slash commands over saved conversations: /save, /load, /sessions, and what /clear means for them."""

from collections.abc import Callable, Mapping
from typing import Any

from localchat import conversation_settings, conversations
from localchat.autosave import Autosave
from localchat.chat import Chat
from localchat.context_room import reading_again, resumable
from localchat.conversation_file import Conversation
from localchat.counted import counted
from localchat.errors import UsageError
from localchat.text_safety import one_line, visible

_LISTED = 20


class ConversationCommands:
    """`settle` gives the chat a conversation's settings (under what has precedence over them)."""

    def __init__(self, chat: Chat, autosave: Autosave, settle: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._chat, self._autosave, self._settle = chat, autosave, settle

    def save(self, rest: str) -> str:
        """/save [NAME]"""
        before = self._autosave.name
        if not rest:
            if not before:
                return "nothing was said yet; a conversation saves itself from its first message on"
            self._autosave.save()
            return f"saved as {before}; it saves itself after every turn"
        copy = self._autosave.rename(rest)
        if not before and not self._chat.messages:
            return f"it will be saved as {rest}, from its first message on"
        return f"goes on as {rest}; {before} stays as it is" if copy else f"saved as {rest}"

    def load(self, rest: str) -> tuple[str, str]:
        """/load NAME: what to say, and a message to put on the line."""
        if not rest:
            raise UsageError("/load needs the name of a conversation.", "/sessions lists them.")
        conversation = self._autosave.open(rest)
        if conversation is None:
            raise UsageError(f"there is no saved conversation {one_line(rest)!r}.", "/sessions lists them.")
        self._settle(conversation.name, conversation_settings.stored(conversation.settings))
        self._autosave.attach(self._chat, conversation)
        return resumed(self._chat, conversation, self._autosave.model), conversation.unanswered

    def sessions(self, rest: str) -> str:
        """/sessions"""
        if rest:
            raise UsageError("/sessions takes no argument.", "/load NAME opens one.")
        return table(conversations.listing(), self._autosave.name, _LISTED)

    def cleared(self) -> str:
        """What to add to the words of a command that has cleared the chat."""
        left = self._autosave.start_anew()
        return f"; {left} stays saved" if left else ""


def resumed(chat: Chat, conversation: Conversation, model: str) -> str:
    """What a user should know of a conversation that goes on."""
    other = f", now {one_line(model)}" if conversation.model and conversation.model != model else ""
    held = f", held with {one_line(conversation.model)}{other}" if conversation.model else ""
    count = conversation.turns
    if not chat.messages and not conversation.unanswered:
        return f"continues {conversation.name}, where nothing is said yet"
    lines = [
        f"continues {conversation.name}: {counted(count, 'turn')}{held}; "
        f"{reading_again(chat):,} tokens are read again with the next message"
    ]
    if conversation.torn:
        lines.append("the last line of its file was cut off when it was written, and is left out")
    if conversation.unanswered:
        lines.append("its last message was not answered")
    elif resumable(chat):
        lines.append("its last answer is not finished: /continue goes on with it")
    return "\n".join(lines)


def table(rows: list[conversations.Summary], current: str = "", limit: int | None = None) -> str:
    """The list of conversations, newest first."""
    if not rows:
        return "there are no saved conversations"
    shown = rows[:limit]
    width = max(len(row.name) for row in shown)
    lines = []
    for row in shown:
        name = f"{'*' if row.name == current else ' '} {visible(row.name):<{width}}"
        if row.fault:
            lines.append(f"{name}  {one_line(row.fault)}")
            continue
        first = one_line(row.first)
        first = first if len(first) <= 40 else first[:39] + "…"
        turns = counted(row.turns, "turn")
        lines.append(f"{name}  {row.updated[:16].replace('T', ' ')}  {turns:>9}  {one_line(row.model):<16}  {first}")
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more: localchat sessions list")
    return "\n".join(lines)
