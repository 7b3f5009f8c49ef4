"""Keys that are pressed while a reply is made.

Some act at once; all others are what the person types ahead, and are handed to the next prompt as if typed there.
"""

import os
import select
import sys
from collections.abc import Callable, Mapping

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys

_READ_SIZE = 4096


class ReplyKeys:
    """Reads keys in single-key mode (reply_modes.py). `actions`: what a key does; Esc stops the reply.

    `prompt` is the input whose next prompt gets the keys that were typed ahead.
    """

    def __init__(self, actions: Mapping[Keys, Callable[[], None]], prompt: Input) -> None:
        self._actions, self._prompt = actions, prompt
        self._pressed: list[KeyPress] = []
        self._parser = Vt100Parser(self._pressed.append)
        self._escape = False  # the last byte may be Esc, or the start of an arrow key

    def poll(self) -> bool:
        """Do what the keys pressed since say; True where the reply is to stop."""
        data = self._read()
        if data:
            self._parser.feed(data.decode(errors="replace"))
        elif self._escape:  # nothing followed: it was the key
            self._parser.flush()
        self._escape = data.endswith(b"\x1b")
        ahead, stop = [], False
        for press in self._pressed:
            if press.key == Keys.Escape:
                stop = True
            elif press.key in self._actions:
                self._actions[Keys(press.key)]()
            else:
                ahead.append(press)
        self._pressed.clear()
        store_typeahead(self._prompt, ahead)
        return stop

    def _read(self) -> bytes:
        fd = sys.stdin.fileno()
        return os.read(fd, _READ_SIZE) if select.select([fd], [], [], 0)[0] else b""
