"""scripts/forty_turns: every turn of its conversation reads as much as the one before, and nothing again."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from localchat.chat import Chat


def test_turns_read_what_is_new(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    turns, figures = rows_of(script("forty_turns"), tmp_path / "figures.json", monkeypatch)
    later = turns[1:]
    assert max(turn["read"] for turn in later) - min(turn["read"] for turn in later) <= 16  # an answer in fewer bytes
    assert not any(turn["reread"] for turn in turns)
    assert [turn["snapshots"] for turn in turns] == sorted({turn["snapshots"] for turn in turns})
    assert capsys.readouterr().out.startswith("turn  tokens") and figures.exists()


def test_a_chat_that_reads_all_of_it_again_is_seen(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(Chat, "_boundary", lambda self, *args: 0)
    turns, _ = rows_of(script("forty_turns"), tmp_path / "figures.json", monkeypatch)
    assert turns[-1]["read"] > 2 * turns[1]["read"]


def rows_of(module: ModuleType, figures: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, int]], Path]:
    monkeypatch.setattr(sys, "argv", ["forty_turns", "--turns", "6", "--json", str(figures)])
    module.main()
    return json.loads(figures.read_text()), figures
