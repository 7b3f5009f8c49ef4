"""What Tab offers."""

from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from localchat import conversations
from localchat.completer import ChatCompleter


def completed(text: str) -> list[str]:
    """The lines that Tab would make of `text`."""
    found = ChatCompleter().get_completions(Document(text), CompleteEvent(completion_requested=True))
    return [text[: len(text) + completion.start_position] + completion.text for completion in found]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "note book.md", ".hidden", "sub/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("/h", ["/help"]),
        ("/s", ["/set", "/show", "/save", "/sessions", "/stats"]),
        ("/show m", ["/show memory"]),
        ("/set temp", ["/set temperature", "/set temp"]),
        ("/set parameter se", ["/set parameter seed"]),
        ("/set kv", ["/set kv_cache"]),
        ("/set kv_cache i", ["/set kv_cache int8"]),
        ("/model smol", ["/model smollm2-135m", "/model smollm2-360m", "/model smollm2-1.7b"]),
        ("hello /s", []),
        ("/set temp 1", []),
        ("/read no", ["/read note book.md", "/read notes.txt"]),
        ("/read note b", ["/read note book.md"]),
        ("see @no", ['see @"note book.md"', "see @notes.txt"]),
        ('see @"note b', ['see @"note book.md"']),
        ("first\n@sub/", ["first\n@sub/inner.py"]),
        ("@s", ["@sub/"]),
        ("@.h", ["@.hidden"]),
        ("/read ", ["/read note book.md", "/read notes.txt", "/read sub/"]),
        ("@absent/", []),
        ("me@no", []),
        ("@../nowhere/x", []),
    ],
)
def test_completion(text: str, lines: list[str]) -> None:
    assert completed(text) == lines


def test_the_home_and_the_root(_private_home: Path) -> None:
    (_private_home / "letter").write_text("")
    assert completed("@~/let") == ["@~/letter"]
    assert "@/tmp/" in completed("@/tm")


def test_saved_conversations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("mine", "my other", "yours"):
        conversations.create(name).close()
    for text, names in (("/load ", ["mine", "my other", "yours"]), ("/load my o", ["my other"]), ("/load x", [])):
        assert completed(text) == [f"/load {name}" for name in names]
