"""One reply's ids to text: detokenising, thought and answer told apart, stop strings.

It sits between the ids that the engine draws and the chat that hands out pieces, and holds back only what may still
change: the bytes of an unfinished character, and text that may turn out to be the start of a stop string.
"""

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from localchat.errors import UsageError

if TYPE_CHECKING:
    from localchat.tokenizer import Tokenizer

Part = Literal["thought", "answer"]


class StopStrings:
    """Cuts a text that arrives in pieces before the first of `stops`, wherever the pieces' borders are.

    Raises:
        UsageError: a stop string is empty, which would end every reply at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string is empty: give it at least one character.")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """What can be shown now. After a stop string (`stopped`) nothing more comes."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = self._longest_start_of_a_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: what was held back was no stop string after all."""
        rest, self._held = self._held, ""
        return rest

    def _longest_start_of_a_stop(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class ReplyText:
    """The text of one reply, fed with ids.

    Where the tokenizer has "<think>" and "</think>" as single tokens, they switch `kind` and are not shown, nor is the
    white space that models put directly behind them. A template may open the thought itself, at the prompt's end.
    Stop strings end the answer only: a thought would run into most of them.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._open = tokenizer.added_tokens.get("<think>")
        self._close = tokenizer.added_tokens.get("</think>")
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopStrings(stop)
        self._parts: dict[Part, list[str]] = {"thought": [], "answer": []}
        self._leading = ""  # characters that are dropped until the first other one
        self.kind: Part = "answer"
        for token in reversed(prompt):
            if token in (self._open, self._close):
                if token == self._open:
                    self._switch("thought")
                break

    @property
    def stopped(self) -> bool:
        """A stop string was found; everything behind it is gone."""
        return self._stop.stopped

    @property
    def empty(self) -> bool:
        """Nothing has been shown yet."""
        return not any(text for parts in self._parts.values() for text in parts)

    def push(self, token: int) -> tuple[Part, str]:
        """The piece that `token` adds, and what it is a piece of."""
        if token in (self._open, self._close):
            piece = self.flush()
            self._switch("thought" if token == self._open else "answer")
            return piece
        return self._add(self._detokenizer.push(token))

    def flush(self) -> tuple[Part, str]:
        """The last piece of this part: what was held back."""
        kind, text = self._add(self._detokenizer.flush())
        if kind == "answer":
            rest = self._stop.flush()
            self._parts[kind].append(rest)
            text += rest
        return kind, text

    def message(self) -> dict[str, Any]:
        """The assistant's message as templates take it: exactly what the pieces showed."""
        message = {"role": "assistant", "content": "".join(self._parts["answer"])}
        thought = "".join(self._parts["thought"])
        return {**message, "reasoning_content": thought} if thought else message

    def _switch(self, kind: Part) -> None:
        self.kind = kind
        self._leading = "\n" if kind == "thought" else string.whitespace

    def _add(self, text: str) -> tuple[Part, str]:
        text = text.lstrip(self._leading) if self._leading else text
        if text:
            self._leading = ""
        if self.kind == "answer":
            text = self._stop.push(text)
        self._parts[self.kind].append(text)
        return self.kind, text
