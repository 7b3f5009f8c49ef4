"""Numbers of things."""

import pytest

from localchat.counted import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1024, "1,024 tokens")])
def test_counted(number: int, text: str) -> None:
    assert counted(number, "token") == text
