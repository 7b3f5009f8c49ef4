"""The user's editor: which it is, and what goes wrong with it."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat import editor
from localchat.errors import UserError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """program("name", "shell text"): a program, which the variable in `variable` names, $EDITOR if not given."""
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)

    def make(name: str, text: str, variable: str | None = "EDITOR", arguments: str = "") -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        if variable:
            monkeypatch.setenv(variable, f"{path} {arguments}")
        return path

    return make


def test_the_text_goes_out_and_comes_back(program: Callable[..., Path]) -> None:
    program("mine", 'test "$1" = -w && cat "$2" > "$0.saw"; echo "${2##*.}" >> "$2"', arguments="-w")
    assert editor.edited("é\n") == "é\nmd"
    path = program("mine", 'cp "$1" "$0.saw"; echo two > "$1"')
    assert editor.edited("one") == "two"
    assert path.with_name("mine.saw").read_text() == "one"


@pytest.mark.parametrize("ending", ["true", "exit 3", "printf '\\377' > $1"])
def test_no_message_stays_behind_in_the_temporary_folder(
    program: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    program("mine", f'ls "$1" > "$0.saw"; {ending}')
    with contextlib.suppress(UserError):
        editor.edited("a secret")
    assert str(folder) in (tmp_path / "mine.saw").read_text()
    assert list(folder.iterdir()) == []


def test_visual_comes_before_editor_and_both_before_the_usual_ones(
    program: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("nano", 'echo usual > "$1"', None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(editor, "_EDITORS", ("nothing-is-called-so", "nano"))
    assert editor.edited("") == "usual"
    program("line", 'echo line > "$1"')
    assert editor.edited("") == "line"
    program("screen", 'echo screen > "$1"', "VISUAL")
    assert editor.edited("") == "screen"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("exit 3", "ended with exit code 3, so"),
        ("kill -9 $$", "ended by signal 9, so"),
        ("printf '\\377' > $1", "UTF-8"),
    ],
)
def test_an_editor_that_fails(program: Callable[..., Path], text: str, sentence: str) -> None:
    program("bad", text)
    with pytest.raises(UserError, match=f"{sentence}.*the text stays as it was|the text stays as it was") as caught:
        editor.edited("draft")
    assert sentence in str(caught.value)


def test_what_is_no_editor(program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    program("other", 'echo other > "$1"')  # a name that is wrong is told, no other editor is taken
    for value, sentence in (
        ("/no/such\x1b", "VISUAL is '/no/such^[', and there is no"),
        ("'open", "no shell understands"),
    ):
        monkeypatch.setenv("VISUAL", value)
        with pytest.raises(UserError, match="VISUAL is ") as caught:
            editor.edited("")
        assert sentence in str(caught.value)
    monkeypatch.delenv("VISUAL")
    monkeypatch.delenv("EDITOR")
    monkeypatch.setattr(editor, "_EDITORS", ("nothing-is-called-so",))
    with pytest.raises(UserError, match="there is no editor here"):
        editor.edited("")
