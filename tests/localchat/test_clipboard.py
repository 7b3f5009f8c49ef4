"""The sequence that copies."""

import base64

import pytest

from localchat.clipboard import MOST_BYTES, copy_sequence


def test_copy_sequence() -> None:
    data = base64.b64encode("grüße\n".encode()).decode()
    assert copy_sequence("grüße\n") == f"\x1b]52;c;{data}\x07"
    assert base64.b64decode(copy_sequence("a\x1b[2J")[7:-1]) == b"a^[[2J"


def test_what_is_too_long() -> None:
    copy_sequence("x" * (MOST_BYTES * 3 // 4))
    with pytest.raises(ValueError, match="wanted at most 74000"):
        copy_sequence("x" * MOST_BYTES)
