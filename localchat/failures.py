"""What is said about an exception, and the exit code it stands for."""

import re
from dataclasses import dataclass

from localchat.errors import UserError
from localchat.text_safety import one_line

# PyTorch's words when the CPU's allocator gets nothing; a card's own error is torch.OutOfMemoryError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
_LESS = {  # what needs less memory, in the flags of the command that ran out of it
    "run": "a smaller context (--ctx) or a smaller model needs less.",
    "bench": "fewer tokens (-p, -n, --prompt, --depth) or a smaller model need less.",
}
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Failure:
    """One sentence, perhaps a hint, and an exit code. Control characters are visible already."""

    sentence: str
    hint: str
    exit_code: int

    def __str__(self) -> str:
        return f"localchat: error: {self.sentence}" + (f"\n{self.hint}" if self.hint else "")


def failure_of(error: BaseException, command: str = "run") -> Failure:
    """`error` as a Failure; what is not a UserError is a fault of the program, or of the machine, and named as such.

    command: the one that failed, whose flags a hint may name.
    """
    if isinstance(error, UserError):
        return Failure(one_line(str(error)), one_line(error.hint), error.exit_code)
    text = one_line(str(error))
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or any(w in text.lower() for w in _NO_MEMORY):
        sentence = _memory_sentence(text, on_card=name == "OutOfMemoryError" or "cuda" in text.lower())
        return Failure(sentence, _LESS.get(command, "a smaller model needs less."), 4)
    if isinstance(error, OSError) and error.strerror:
        where = f"{one_line(str(error.filename))}: " if error.filename else ""
        return Failure(f"{where}{error.strerror}.", "run again with --debug for a traceback.", 1)
    return Failure(f"{name}: {text}" if text else name, "run again with --debug for a traceback.", 1)


def _memory_sentence(text: str, *, on_card: bool) -> str:
    """Whose memory ran out, and the numbers. `text` is the error's; of a card's it says how much was asked for."""
    from localchat.stats import card_memory, memory_used

    card = card_memory() if on_card else None
    if card is None:
        used, total = (f"{size / 1e9:.1f} GB" for size in memory_used())
        return f"memory ran out: this process holds {used} of the machine's {total}."
    held, free, total = (f"{size / 1e9:.1f} GB" for size in card)
    asked = re.search(r"allocate ([\d.]+) ([KMG]iB)", text)
    wanted = f"{float(asked[1]) * _UNITS[asked[2]] / 1e9:.1f} GB more were asked for, " if asked else ""
    return f"the card's memory ran out: {wanted}this process holds {held}, and {free} of {total} are free."
