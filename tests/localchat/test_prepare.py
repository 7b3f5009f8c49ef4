"""From a name to a packed folder, with the hub and the terminal played by the test."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localchat import hub, prepare
from localchat.errors import UserError
from localchat.transfer import Fetched, Notice, Plan, Progress

Capture = pytest.CaptureFixture[str]


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


def play(monkeypatch: pytest.MonkeyPatch, source: Path, nbytes: int) -> list[str]:
    """The hub yields one of each record; returns the list of what was asked and whether the download was closed."""
    events: list[str] = []

    def fetch(name: str, *, offline: bool) -> Iterator[Any]:
        events.append(f"{name} {offline}")
        try:
            yield Notice("from elsewhere")
            yield Plan("org/model", "main", (("model.safetensors", nbytes),), nbytes)
            yield Progress("model.safetensors", nbytes, nbytes)
            yield Fetched(source, "org/model", "main")
        finally:
            events.append("closed")

    monkeypatch.setattr(hub, "fetch", fetch)
    return events


def test_a_download_is_announced_and_quantised_once(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, scripted: Callable[..., Path]
) -> None:
    events = play(monkeypatch, scripted("abc").parent / "source", 93_000_000)
    capsys.readouterr()  # what making the checkpoint said
    first = prepare.packed_folder("org/model", offline=False, yes=False)
    assert capsys.readouterr() == (
        "",
        "localchat: from elsewhere\nlocalchat: downloading org/model, 93 MB\n"
        "localchat: quantising org/model to INT4 by rounding, once\n",
    )
    assert prepare.packed_folder("org/model", offline=False, yes=False) == first
    assert capsys.readouterr() == ("", "")
    assert events == ["org/model False", "closed"]


@pytest.mark.parametrize(("typed", "yes", "goes_on"), [("n\n", False, False), ("\n", False, True), ("n\n", True, True)])
def test_a_large_download_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: str, yes: bool, goes_on: bool
) -> None:
    events = play(monkeypatch, tmp_path, 54_000_000_000)
    screen = Keyboard()
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    monkeypatch.setattr("sys.stderr", screen)
    if goes_on:
        assert prepare.fetch("org/model", offline=False, yes=yes).path == tmp_path
    else:
        with pytest.raises(UserError, match="nothing was downloaded"):
            prepare.fetch("org/model", offline=False, yes=yes)
    assert "localchat: downloading org/model, 54.0 GB\n" in screen.getvalue()
    assert ("continue? [Y/n]" in screen.getvalue()) != yes
    assert events == ["org/model False", "closed"]


def test_an_unfinished_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(UserError, match=r"out\.partial is an unfinished conversion") as caught:
        prepare.packed_folder(str(tmp_path / "out.partial"), offline=True, yes=False)
    assert "--resume" in caught.value.hint


def test_a_name_that_is_another_models_is_said_to_be(capsys: Capture) -> None:
    with pytest.raises(UserError, match=r"Qwen/Qwen3\.5-27B"):
        prepare.packed_folder("qwen2.5-27b", offline=True, yes=False)
    notice = capsys.readouterr().err
    assert "Qwen2.5 was never released with 27B" in notice
    assert notice.count("\n") == 1
    assert prepare.synthetic_entry("qwen3.8-27b").hub_id == "Qwen/Qwen3.8-27B"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("count", "text"), [(93e6, "93 MB"), (1.5e9, "1.5 GB"), (0, "0 MB")])
def test_size_text(count: float, text: str) -> None:
    assert prepare.size_text(int(count)) == text
