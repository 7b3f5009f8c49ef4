"""Refuses a prompt that is far longer than the context before anything is made of it.

50 MB of text take minutes to tokenise, and a chat template may not even copy them; a person who piped the wrong file
should know at once.
"""

from typing import TYPE_CHECKING

from localchat.errors import InputTooLong

if TYPE_CHECKING:
    from localchat.tokenizer import Tokenizer

_PIECE = 1 << 16  # characters
_SHORT = 16  # characters for each token of the context: what is not longer is counted exactly, with its template


def refuse_what_cannot_fit(text: str, tokenizer: "Tokenizer", context: int) -> None:
    """Count the tokens of a long `text` piece by piece, until they are more than `context`.

    Raises:
        InputTooLong: they are; the sentence estimates the rest by what was counted.
    """
    if len(text) <= _SHORT * context:
        return
    tokens = 0
    for start in range(0, len(text), _PIECE):
        tokens += len(tokenizer.encode_text(text[start : start + _PIECE], special=False))
        if tokens > context:
            about = tokens * len(text) // min(start + _PIECE, len(text))
            raise InputTooLong(
                f"the prompt has about {about:,} tokens in {len(text):,} characters and the context holds {context:,} "
                "with the answer: shorten it, or enlarge the context."
            )
