"""Ctrl-C where other people's code cannot bear it.

Code that is interrupted inside an import or a destructor may swallow the KeyboardInterrupt, and torch's own import ends
the process with a core dump.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def none_lost(*, at_once: bool = True) -> Iterator[None]:
    """For work of a second or two that runs much of other people's code. Where SIGINT is ignored it stays so.

    at_once: Ctrl-C interrupts the work; else it waits for its end.

    Raises:
        KeyboardInterrupt: one came inside, and was swallowed or has waited.
    """
    seen = []

    def note(signum: int, frame: FrameType | None) -> None:
        seen.append(signum)
        if at_once:
            signal.default_int_handler(signum, frame)

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt
