"""When a conversation reaches the end of its context: what is said before, and which turns could make room.

The system prompt and the newest message are never among them.
"""

from dataclasses import dataclass

from localchat.chat import Chat, is_open
from localchat.counted import counted
from localchat.errors import UserError
from localchat.text_safety import one_line

NOTICE_AT = 0.8
ROOM = 0.75  # of the context is what the conversation may take after a drop, where that is possible
_TEXT = 50  # characters of a turn's message that are shown


@dataclass(frozen=True)
class Offer:
    """The `turns` oldest turns could be dropped: what each is and takes, and the tokens before and after."""

    turns: tuple[tuple[str, int], ...]
    before: int
    after: int
    size: int

    def __str__(self) -> str:
        rows = [f"  {text!r}: {counted(tokens, 'token')}" for text, tokens in self.turns]
        count = len(self.turns)
        many = "the oldest turn" if count == 1 else f"the {count} oldest turns"
        return "\n".join(
            [
                f"the conversation has {self.before:,} tokens and the context holds {self.size:,} with the answer.",
                f"room could be made by dropping {many}:",
                *rows,
                f"{self.after:,} tokens would be left; those behind the dropped ones are read again once.",
                "dropped turns also leave the saved conversation; `localchat sessions export` keeps a copy of it.",
            ]
        )


def offer(chat: Chat, asked: str | None) -> Offer | None:
    """The fewest oldest turns that make room for an answer to `asked`, or (None) for more of the last one.

    None where nothing can be dropped, or dropping would not help.

    Raises:
        UserError: the template refuses the conversation.
    """
    size = chat.engine.max_length
    messages = chat.messages if asked is not None else chat.messages[:-2]  # an answer's own turn stays
    most = sum(message["role"] == "user" for message in messages)
    lengths = [chat.tokens(asked)]
    while len(lengths) <= most and lengths[-1] > ROOM * size:
        lengths.append(chat.tokens(asked, without=len(lengths)))
    if len(lengths) == 1 or lengths[-1] >= size:
        return None
    asked_before = [message["content"] for message in chat.messages if message["role"] == "user"]
    turns = [(_shortened(text), a - b) for text, a, b in zip(asked_before, lengths, lengths[1:], strict=False)]
    return Offer(tuple(turns), lengths[0], lengths[-1], size)


class FillNotice:
    """Says once that the context is nearly full, and again after it was emptier."""

    def __init__(self) -> None:
        self._said = False

    def after(self, used: int, size: int) -> str:
        """The notice for a context that holds `used` of `size` tokens, or ""."""
        full = size > 0 and used >= NOTICE_AT * size
        said, self._said = self._said, full
        if said or not full:
            return ""
        share = 100 * used // size
        return (
            f"the context is {share} % full ({used:,} of {size:,} tokens): when it is full you choose whether the "
            "oldest turns go; /clear begins anew"
        )


def reading_again(chat: Chat) -> int:
    """How many tokens a conversation that was loaded has to read before it goes on; 0 where that is not known."""
    try:
        return chat.tokens()
    except UserError:
        return 0


def resumable(chat: Chat) -> bool:
    """Whether the last answer can go on."""
    return bool(chat.messages) and is_open(chat.messages[-1])


def _shortened(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"
