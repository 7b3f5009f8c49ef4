"""Control characters of foreign text are written out, everything else stays."""

import unicodedata

import pytest

from localchat.text_safety import VisibleStream, one_line, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "^[[2J"),
        ("\x1b]0;title\x07", "^[]0;title^G"),
        ("\x00\x08\x7f", "^@^H^?"),
        ("\x9b31m", "<U+009B>31m"),
        ("a\u202eb\u2066c", "a<U+202E>b<U+2066>c"),
        ("a\rb", "a^Mb"),
        ("a\r\nb\r\n", "a\r\nb\r\n"),
        ("a\r\r\nb", "a^M\r\nb"),
        ("bad \udcff", "bad \ufffd"),
        ("tab\tline\nend", "tab\tline\nend"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_no_control_character_is_left() -> None:
    shown = visible("".join(map(chr, range(0x3000))))
    assert {c for c in shown if unicodedata.category(c) == "Cc"} == {"\n", "\t"}
    assert not any(unicodedata.bidirectional(c) in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI"} for c in shown)


def test_ordinary_text_is_unchanged() -> None:
    text = "Grüße, 你好, \u200fשלום, 👩\u200d👩\u200d👧, é, 100 %, \\x1b"
    assert visible(text) == text


def test_stream_equals_whole_however_it_is_cut() -> None:
    text = "a\r\nb\rc\x1b[0m\r"
    for cut in range(len(text) + 1):
        stream = VisibleStream()
        assert stream.push(text[:cut]) + stream.push(text[cut:]) + stream.flush() == visible(text)


def test_one_line() -> None:
    assert one_line(" a\n\tb \x1b[1m") == "a b ^[[1m"
