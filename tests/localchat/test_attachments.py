"""Files in a message: what is taken, what is refused with its counts, and what is only text."""

import os
from pathlib import Path

import pytest

from localchat import attachments
from localchat.errors import InputTooLong, UsageError, UserError
from localchat.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "my file").write_text("three ```` four")
    (tmp_path / "sub").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("message", "text", "tokens"),
    [
        ("sum up @notes.txt", "notes.txt:\n```\none\ntwo\n```\n\nsum up notes.txt", [7]),
        ("@notes.txt, please (@notes.txt)", "notes.txt:\n```\none\ntwo\n```\n\nnotes.txt, please (@notes.txt)", [7]),
        ('@"my file"\nhere', "my file:\n`````\nthree ```` four\n`````\n\nmy file\nhere", [15]),
        ("me@notes.txt @absent @sub @", "me@notes.txt @absent @sub @", []),
        ("@property\n@app.get('/x')", "@property\n@app.get('/x')", []),
        ("@\x00", "@\x00", []),
    ],
)
def test_attach(tiny_tokenizer: Tokenizer, message: str, text: str, tokens: list[int]) -> None:
    attached, files = attachments.attach(message, tiny_tokenizer, 100)
    assert attached == text
    assert [file.tokens for file in files] == tokens


def test_several_files_and_what_is_told(tiny_tokenizer: Tokenizer, folder: Path) -> None:
    (folder / "b\x1b[2J").write_bytes(b"gr\xfc\xdfe aus der Ferne")
    text, files = attachments.attach("@notes.txt and @b\x1b[2J", tiny_tokenizer, 100)
    assert [str(file) for file in files] == [
        "notes.txt: 7 tokens",
        "b^[[2J: 23 tokens (replaced 2 sequences in b^[[2J that are not UTF-8)",
    ]
    assert text.startswith("notes.txt:\n")


def test_the_home(tiny_tokenizer: Tokenizer, _private_home: Path) -> None:
    (_private_home / "x").write_text("y")
    assert attachments.attach("@~/x", tiny_tokenizer, 100)[0] == "~/x:\n```\ny\n```\n\n~/x"


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        (b"\x7fELF\0\0", UsageError, "big holds 2 NUL bytes in 6, so it is binary"),
        (bytes(range(128, 256)) * 3, UsageError, "big holds 384 bytes with"),
        (b"x" * 100, InputTooLong, "big has 100 tokens and the context holds 100."),
        (b"x" * 6401, InputTooLong, "big has 6,401 bytes and the context holds 100 tokens."),
    ],
)
def test_what_is_refused(
    tiny_tokenizer: Tokenizer, folder: Path, data: bytes, error: type[UserError], sentence: str
) -> None:
    (folder / "big").write_bytes(data)
    with pytest.raises(error) as caught:
        attachments.attach("@big", tiny_tokenizer, 100)
    assert str(caught.value).startswith(sentence)


def test_a_file_without_end_is_not_read(tiny_tokenizer: Tokenizer, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert attachments.attach("@pipe @/dev/zero", tiny_tokenizer, 100) == ("@pipe @/dev/zero", [])
    for name in ("pipe", "/dev/zero", "sub", "absent\x1b"):
        with pytest.raises(UsageError, match="is not a file here"):
            attachments.read(name, tiny_tokenizer, 100)
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputTooLong, match=r"1,099,511,627,776 bytes"):
        attachments.read("sparse", tiny_tokenizer, 100)


@pytest.mark.parametrize("name", ["notes.txt", "my file", "~/x", "end."])
def test_what_is_typed_for_a_file(name: str, tiny_tokenizer: Tokenizer, folder: Path) -> None:
    if name == "end.":
        (folder / name).write_text("x")
    if not name.startswith("~"):
        assert len(attachments.attach(f"see {attachments.reference(name)}", tiny_tokenizer, 100)[1]) == 1


def test_words_that_look_like_a_file_and_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("x")
    message = 'see @a.txt, @b.txt, @folder and @"my notes.txt"; ask @anna, use @dataclass(frozen=True) and @/dev/null'
    assert attachments.missed(message) == ["b.txt", "folder", "my notes.txt", "/dev/null"]


@pytest.mark.parametrize(
    ("typed", "name", "given_back"),
    [
        ("@a.txt /read b c.txt ", "b c.txt", '@a.txt @"b c.txt"'),
        ("compare it to\n/read a.txt", "a.txt", "compare it to\n@a.txt"),
        ('@a.txt @"b c.txt" /read absent', "absent", '@a.txt @"b c.txt" @absent'),
    ],
)
def test_a_command_inside_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, name: str, given_back: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("a.txt", "b c.txt"):
        (tmp_path / file).write_text("x")
    assert attachments.read_inside(typed) == (name, given_back)


@pytest.mark.parametrize(
    "text", ["what does /read absent do?", "use /read", "/read a.txt", "see x/read a.txt", "/read a.txt\nand so on", ""]
)
def test_a_message_that_speaks_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    assert attachments.read_inside(text) is None
