"""The user's editor, for a message that is written better there than on the line."""

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from localchat.errors import UserError
from localchat.text_safety import one_line

_EDITORS = ("editor", "nano", "vim", "vi", "emacs")  # where neither variable names one


def edited(text: str) -> str:
    """`text` after the editor, without the newline that editors put at the end. It runs in the foreground.

    The editor is $VISUAL, else $EDITOR, else the first usual one; arguments may stand behind its name.

    Raises:
        UserError: there is no such editor, it failed, or what it left is not UTF-8.
    """
    command = _command()
    fd, name = tempfile.mkstemp(prefix="localchat-", suffix=".md")
    path = Path(name)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        try:
            code = subprocess.run([*command, name], check=False).returncode
        except OSError as error:
            raise UserError(f"the editor {one_line(command[0])!r} cannot be started ({error.strerror}).") from error
        if code != 0:
            ended = f"with exit code {code}" if code > 0 else f"by signal {-code}"
            raise UserError(f"the editor {one_line(command[0])!r} ended {ended}, so the text stays as it was.")
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError("what the editor left is not UTF-8, so the text stays as it was.") from error
    finally:
        path.unlink(missing_ok=True)


def _command() -> list[str]:
    for variable in ("VISUAL", "EDITOR"):
        value = os.environ.get(variable, "").strip()
        if not value:
            continue
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise UserError(f"{variable} is {one_line(value)!r}, which no shell understands ({error}).") from error
        if not words or shutil.which(words[0]) is None:
            raise UserError(
                f"{variable} is {one_line(value)!r}, and there is no such program.", "set it to your editor."
            )
        return words
    found = next(filter(shutil.which, _EDITORS), None)
    if found is None:
        raise UserError("there is no editor here that is known.", "set EDITOR to yours.")
    return [found]
