"""What stdin's bytes become."""

import io
import os
from pathlib import Path

import pytest

from localchat import prompt_input
from localchat.errors import UsageError
from localchat.prompt_input import decode, named_file, read_file


@pytest.mark.parametrize(
    ("data", "text", "warning"),
    [
        (b"", "", ""),
        (b"\xef\xbb\xbfab", "ab", ""),
        (b"a\r\nb\rc", "a\nb\rc", ""),
        ("a\N{REPLACEMENT CHARACTER}".encode(), "a\N{REPLACEMENT CHARACTER}", ""),
        (b"abcdefgh\xff", "abcdefgh\N{REPLACEMENT CHARACTER}", "replaced 1 sequence in"),
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


def test_a_file_stands_under_its_name_in_a_fence_that_it_cannot_close() -> None:
    assert named_file("a\x1b[1m\n.md", "x\n````\n") == "a^[[1m .md:\n`````\nx\n````\n`````"


def test_what_cannot_be_read_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sentence in (
        ("", "'' cannot be read"),
        ("a\0b", "null byte"),
        ("~nobody-at-all/x", "home"),
        ("/", "Is a"),
    ):
        with pytest.raises(UsageError, match=sentence):
            read_file(name, io.StringIO())
    monkeypatch.setattr(prompt_input, "_LARGEST_FILE", 3)
    (tmp_path / "four").write_text("four")
    with pytest.raises(UsageError, match="holds more than 3 bytes"):
        read_file(str(tmp_path / "four"), io.StringIO())


def test_a_pipe_is_read_as_a_file_too() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\xef\xbb\xbfab\r\n")
    os.close(writer)
    assert read_file(f"/dev/fd/{reader}", io.StringIO()) == "ab\n"
    os.close(reader)
