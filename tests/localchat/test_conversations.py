"""Names, the list, and the last conversation."""

import os

import pytest

from localchat import conversations
from localchat.errors import UsageError, UserError


def make(name: str, *texts: str, age: int = 0) -> None:
    file = conversations.create(name)
    file.change(0, 0, [{"role": "user", "content": text} for text in texts])
    file.close()
    os.utime(conversations.path_of(name), (10**9 - age, 10**9 - age))


@pytest.mark.parametrize(
    "name", ["", " ", "../x", "a/b", ".hidden", "-x", "a\0", "a\nb", "a\x1b[1m", "x" * 81, "é" * 80 + "/", "a "]
)
def test_what_can_be_no_name(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a conversation"):
        conversations.path_of(name)


@pytest.mark.parametrize("name", ["x", "my chat", "2026-01-02", "naïve.md", "a@b+c_d"])
def test_names(name: str) -> None:
    make(name, "hello")
    assert conversations.load(name).turns == 1
    assert not conversations.is_automatic(name)


def test_two_in_one_second_have_two_names() -> None:
    files = [conversations.create() for _ in range(3)]
    names = {file.path.stem for file in files}
    assert len(names) == 3
    assert all(map(conversations.is_automatic, names))


def test_the_last_one_is_the_one_that_was_written_last() -> None:
    with pytest.raises(UsageError, match="no saved conversation to continue"):
        conversations.latest()
    make("old", "a", age=100)
    make("new", "b", age=50)
    conversations.create("empty").close()
    assert conversations.latest() == "new"
    make("old 2", "c", age=20)
    assert conversations.latest() == "old 2"


def test_the_list_names_what_cannot_be_read() -> None:
    make("good", "hello", "more")
    make("bad", "x", age=9)
    conversations.path_of("bad").write_text("nonsense\n{}\n")
    os.utime(conversations.path_of("bad"), (1, 1))
    good, bad = conversations.listing()
    assert (good.name, good.turns, good.first, good.fault) == ("good", 2, "hello", "")
    assert bad.name == "bad"
    assert "line 1 of" in bad.fault


def test_removing() -> None:
    make("x", "hello")
    held = conversations.ConversationFile(conversations.path_of("x"))
    with pytest.raises(UserError, match="open in another process"):
        conversations.remove("x")
    held.close()
    conversations.remove("x")
    with pytest.raises(UsageError, match="no saved conversation 'x'"):
        conversations.remove("x")


def test_a_state_folder_that_cannot_be_made(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/x")
    with pytest.raises(UserError, match=r"cannot be made \(Not a directory\): set XDG_STATE_HOME"):
        conversations.create()
