"""`localchat sessions` without a model."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat import cli, conversations

MESSAGES = [
    {"role": "user", "content": "why\x1b[1m?"},
    {"role": "assistant", "content": "because", "reasoning_content": "hm", "interrupted": True},
]


@pytest.fixture
def mine() -> None:
    file = conversations.create("mine")
    file.append({"at": "2026-01-01T00:00:00+00:00", "model": "tiny", "settings": {"system": "Be brief."}})
    file.change(0, 0, MESSAGES)
    file.close()


@pytest.fixture
def sessions(capsys: pytest.CaptureFixture[str], mine: None) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(["sessions", *words])
        return code, *capsys.readouterr()

    return run


def test_listed(sessions: Callable[..., Any]) -> None:
    code, out, _ = sessions()
    assert code == 0
    assert out == sessions("list")[1]
    assert out.startswith("  mine  20")
    assert out.endswith("1 turn  tiny              why^[[1m?\n")
    (row,) = json.loads(sessions("list", "--json")[1])
    assert (row["name"], row["turns"], row["model"], row["fault"]) == ("mine", 1, "tiny", "")


def test_shown(sessions: Callable[..., Any]) -> None:
    _, out, _ = sessions("show", "mine")
    assert "system = Be brief." in out
    assert out.endswith(">>> why^[[1m?\n\n[thought]\nhm\n\nbecause\n(interrupted)\n")
    document = json.loads(sessions("show", "mine", "--json")[1])
    assert document["settings"] == {"system": "Be brief."}
    assert all(message.pop("at") for message in document["messages"])
    assert document["messages"] == MESSAGES


def test_exported(sessions: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "out.md"
    assert sessions("export", "mine", "-o", str(target)) == (0, "", "")
    text = target.read_text()
    assert "## User\n\nwhy\x1b[1m?\n\n## Assistant\n\n<details><summary>Thought</summary>\n\nhm\n" in text
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    code, _, error = sessions("export", "mine", "-o", str(target))
    assert (code, "File exists" in error) == (1, True)
    assert "\x1b" not in sessions("export", "mine")[1]
    assert json.loads(sessions("export", "mine", "--json")[1])["name"] == "mine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("show",), "takes the name of one conversation, got 0"),
        (("show", "mine", "other"), "got 2"),
        (("show", "other"), "no saved conversation 'other'"),
        (("rm",), "needs the name"),
        (("rm", "../mine", "-y"), "cannot name a conversation"),
        (("rm", "mine"), "nobody is there to be asked"),
        (("rm", "other"), "no saved conversation 'other'"),
        (("rm", "-y", "mine", "other"), "no saved conversation 'other'"),
        (("list", "mine"), "takes no name"),
        (("list", "-o", "x"), "-o is where"),
        (("shwo",), "shwo"),
    ],
)
def test_refused(sessions: Callable[..., Any], words: tuple[str, ...], sentence: str) -> None:
    code, out, error = sessions(*words)
    assert (code, out) == (2, "")
    assert sentence in error
    assert conversations.names() == ["mine"]


def test_removed(sessions: Callable[..., Any]) -> None:
    assert sessions("rm", "mine", "--json", "-y") == (0, '{"removed": ["mine"]}\n', "removed mine\n")
    assert conversations.names() == []
