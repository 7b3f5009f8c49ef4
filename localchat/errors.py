"""Errors a user can act on: one sentence that says what was got and what to do, and the process's exit code.

Everything below the command line raises these; only `cli.main` prints them. Any other exception is a fault of
the program and is reported as such.
"""


class UserError(Exception):
    """A problem the user can act on. `hint`, where given, is printed on the line after the sentence."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(UserError):
    """The command was called in a way that has no meaning (exit code 2)."""

    exit_code = 2


class ModelNotFound(UserError):
    """The model is unknown, could not be downloaded, or is absent while offline (exit code 3)."""

    exit_code = 3


class DoesNotFit(UserError):
    """The model or the context does not fit in memory (exit code 4)."""

    exit_code = 4


class InputTooLong(UserError):
    """The prompt has more tokens than the context (exit code 5)."""

    exit_code = 5


class BadCheckpoint(UserError):
    """A model's files are damaged, incomplete, unsafe or of a kind that would be computed wrongly (exit code 1)."""
