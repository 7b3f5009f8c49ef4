"""Copies to the clipboard of whoever sits at the terminal, also from a machine far away: OSC 52.

The terminal does it, or ignores it; it does not answer.
"""

import base64

from localchat.text_safety import visible

# xterm and others drop a longer sequence without a word.
MOST_BYTES = 74_000


def copy_sequence(text: str) -> str:
    """The sequence with which a terminal takes `text` into its clipboard.

    Control characters are visible there too: what is pasted into a shell would act. ValueError: it is too long.
    """
    data = base64.b64encode(visible(text).encode())
    if len(data) > MOST_BYTES:
        raise ValueError(f"got {len(data)} bytes, wanted at most {MOST_BYTES}")
    return f"\x1b]52;c;{data.decode()}\x07"
