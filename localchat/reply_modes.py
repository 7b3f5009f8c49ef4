"""The terminal's modes for the time of a reply: nothing is echoed, and Ctrl-Z gives the terminal back meanwhile.

With `single_keys` each key arrives at once, for keys.py. Ctrl-C and Ctrl-Z stay signals, so that they work in the
middle of a computation too. Where stdin is no terminal only Ctrl-Z is cared for.
"""

import os
import signal
import sys
import termios
import threading
from types import FrameType
from typing import Any, Self

from localchat.live import ERASE, HIDE_CURSOR, SHOW_CURSOR

# A paste during the reply is to arrive as one, as at the prompt.
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"


class ReplyModes:
    """A context manager that sets the modes and restores what it found, also around a suspension."""

    def __init__(self, *, single_keys: bool = False) -> None:
        self._single_keys = single_keys
        self._found: list[Any] | None = None
        self._found_handler: Any = None

    def __enter__(self) -> Self:
        try:
            self._found = termios.tcgetattr(sys.stdin.fileno())
        except (AttributeError, OSError, ValueError, termios.error):
            self._found = None
        self._set()
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
            self._found_handler = signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        if self._found_handler is not None:
            signal.signal(signal.SIGTSTP, self._found_handler)
        self._found = self._found_handler = None

    def _set(self) -> None:
        if self._found is None:
            return
        modes = [*self._found]
        modes[3] &= ~termios.ECHO
        if self._single_keys:
            modes[0] &= ~termios.ICRNL  # or Enter could not be told from Ctrl-J
            modes[3] &= ~(termios.ICANON | termios.IEXTEN)
            modes[6] = [*modes[6]]
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            _tell(_PASTE_ON)
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, modes)

    def _restore(self) -> None:
        if self._found is None:
            return
        if self._single_keys:
            _tell(_PASTE_OFF)
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._found)

    def _suspend(self, number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: stop as any program does, and go on in the foreground as if nothing had been."""
        _tell(ERASE + SHOW_CURSOR)
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)
        self._set()
        _tell(HIDE_CURSOR)


def _tell(sequence: str) -> None:
    """Write to the terminal past Python's buffer, in which a signal may have come."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        os.write(sys.stdout.fileno(), sequence.encode())
