"""What is said about an exception, and the exit code it stands for."""

from dataclasses import dataclass

from localchat.errors import UserError
from localchat.text_safety import one_line

# PyTorch's words when the CPU's allocator gets nothing; a card's own error is torch.OutOfMemoryError.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass(frozen=True)
class Failure:
    """One sentence, perhaps a hint, and an exit code. Control characters are visible already."""

    sentence: str
    hint: str
    exit_code: int

    def __str__(self) -> str:
        return f"localchat: error: {self.sentence}" + (f"\n{self.hint}" if self.hint else "")


def failure_of(error: BaseException) -> Failure:
    """`error` as a Failure; what is not a UserError is a fault of the program, or of the machine, and named as such."""
    if isinstance(error, UserError):
        return Failure(one_line(str(error)), one_line(error.hint), error.exit_code)
    text = one_line(str(error))
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or any(w in text.lower() for w in _NO_MEMORY):
        return Failure("memory ran out.", "a smaller context (--ctx) or a smaller model needs less.", 4)
    if isinstance(error, OSError) and error.strerror:
        where = f"{one_line(str(error.filename))}: " if error.filename else ""
        return Failure(f"{where}{error.strerror}.", "run again with --debug for a traceback.", 1)
    return Failure(f"{name}: {text}" if text else name, "run again with --debug for a traceback.", 1)
