"""What stdin's bytes become."""

import io

import pytest

from localchat.errors import UsageError
from localchat.prompt_input import decode


@pytest.mark.parametrize(
    ("data", "text", "warning"),
    [
        (b"", "", ""),
        (b"\xef\xbb\xbfab", "ab", ""),
        (b"a\r\nb\rc", "a\nb\rc", ""),
        ("a\N{REPLACEMENT CHARACTER}".encode(), "a\N{REPLACEMENT CHARACTER}", ""),
        (b"abcdefgh\xff", "abcdefgh\N{REPLACEMENT CHARACTER}", "replaced 1 sequences"),
    ],
)
def test_decode(data: bytes, text: str, warning: str) -> None:
    notices = io.StringIO()
    assert decode(data, notices) == text
    assert warning in notices.getvalue()
    assert bool(warning) == bool(notices.getvalue())


@pytest.mark.parametrize(
    ("data", "counts"),
    [("ab".encode("utf-16-le"), "2 NUL bytes in 4"), (bytes(range(128, 256)), "128 bytes with")],
)
def test_what_is_not_text(data: bytes, counts: str) -> None:
    with pytest.raises(UsageError, match=counts):
        decode(data, io.StringIO())
