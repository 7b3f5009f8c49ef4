"""An answer that did not end by itself, and the ids to go on from.

Of the turn just taken they are known: the prompt, and every id that was drawn. Of a conversation that was loaded only
the text is left, and is turned into ids as a model would have written it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localchat.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenAnswer:
    """`message` in the conversation, the ids of the prompt that it answers, and its own."""

    message: Mapping[str, Any]
    prompt: list[int]
    drawn: list[int]


def answer_ids(tokenizer: "Tokenizer", prompt: Sequence[int], message: Mapping[str, Any]) -> list[int]:
    """The ids of an unfinished answer behind `prompt`, which may have opened the thought already."""
    opening, closing = (tokenizer.added_tokens.get(tag) for tag in ("<think>", "</think>"))
    marks = [token for token in prompt if token in (opening, closing)]
    in_thought = bool(marks) and marks[-1] == opening
    thought, content = message.get("reasoning_content", ""), message["content"]
    ids: list[int] = []
    if thought and not in_thought and opening is not None:
        ids += [opening, *tokenizer.encode_text("\n")]
        in_thought = True
    ids += tokenizer.encode_text(thought, special=False)
    if in_thought and content and closing is not None:
        ids += [closing, *tokenizer.encode_text("\n\n")]
    return ids + tokenizer.encode_text(content, special=False)
