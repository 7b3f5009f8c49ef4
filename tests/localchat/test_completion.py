"""Completion: the candidates, and the three scripts in the real shells, at a real prompt."""

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from localchat import completion, conversations
from localchat.arguments import ALIASES, COMMANDS
from localchat.config import QuantizationConfig, TensorFormat
from localchat.kernels.int4_packing import LAYOUT, VERSION

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
FILES = [completion.FILES]


def stored(cache: Path, name: str, source_id: str) -> None:
    folder = cache / "packed" / name
    folder.mkdir(parents=True)
    quantization = QuantizationConfig(LAYOUT, VERSION, TensorFormat(4, 32, False), source={"id": source_id})
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization.to_dict()}))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model of the registry, one from the hub, and one whose name would run a command."""
    monkeypatch.setenv("LOCALCHAT_CACHE", str(tmp_path / "cache"))
    stored(tmp_path / "cache", "one", "Qwen/Qwen3-8B")
    stored(tmp_path / "cache", "two", "zebra/Stripes-1B")
    stored(tmp_path / "cache", "evil", "zebra/$(touch pwned)")
    return tmp_path / "cache"


def values(*words: str) -> list[str]:
    return [value for value, _ in completion.candidates(words)]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["qu"], ["quantize", "quantise"]),
        (["--v"], ["--version"]),
        (["run", "--num"], ["--num-predict", "--num-ctx"]),
        (["run", "m", "--color", ""], ["auto", "on", "off"]),
        (["run", "m", "--color=o"], ["--color=on", "--color=off"]),
        (["run", "--think=l"], ["--think=low"]),
        (["run", "m", "-f", "a"], FILES),
        (["run", "m", "--system-file=a"], FILES),
        (["run", "--color", "on", "qwen3-8"], ["qwen3-8b"]),
        (["run", "--json", "qwen3-8"], ["qwen3-8b"]),
        (["chat", "zeb"], ["zebra/$(touch pwned)", "zebra/Stripes-1B"]),
        (["run", "./x"], FILES),
        (["run", "m", "hel"], []),
        (["run", "m", "--seed", ""], []),
        (["run", "--", "qwen3-8"], ["qwen3-8b"]),
        (["rm", "qwen3"], ["qwen3-8b"]),
        (["quantize", "s", "-o", ""], FILES),
        (["quantize", "s", "--group-size", ""], ["32", "64", "128"]),
        (["completion", "f"], ["fish"]),
        (["nothing", ""], []),
        (["list", ""], []),
    ],
)
def test_candidates(words: list[str], wanted: list[str]) -> None:
    assert values(*words) == wanted


def test_every_command_and_those_on_this_machine_first() -> None:
    assert values("") == [*COMMANDS, *ALIASES]
    described = dict(completion.candidates(["run", ""]))
    assert next(iter(described)) == "qwen3-8b"
    assert (described["qwen3-8b"], described["qwen3-4b"]) == ("on this machine", "to download")
    assert all(values(command, "-") for command in COMMANDS)


def test_saved_conversations() -> None:
    for name in ("holiday", "house"):
        conversations.create(name).close()
    assert values("sessions", "") == ["list", "show", "rm", "export"]
    assert values("sessions", "rm", "ho") == values("sessions", "rm", "house", "ho") == ["holiday", "house"]
    assert values("run", "m", "--session", "hol") == ["holiday"]
    assert values("run", "m", "--session=hol") == ["--session=holiday"]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["zsh", "2", "localchat", "run", "zeb"], ["zebra/Stripes-1B"]),
        (["zsh", "2", "localchat", "run", "--color=o", "left", "out"], ["--color=on", "--color=off"]),
        (["bash", "4", "localchat", "run", "--color", "=", "o"], ["on", "off"]),
        (["bash", "3", "localchat", "run", "--color", "="], ["auto", "on", "off"]),
        (["bash", "4", "localchat", "run", "--file", "=", "o"], FILES),
        (["bash", "1", "localchat"], [*COMMANDS, *ALIASES]),
        (["bash"], []),
        (["bash", "x", "localchat"], []),
    ],
)
def test_what_a_shell_gets(words: list[str], printed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.print_candidates(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("\t")[0] for line in lines] == printed
    assert all("\t" in line for line in lines if line != completion.FILES)


@pytest.fixture
def shell_home(tmp_path: Path, cache: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a shell that has `localchat` on its PATH, in a folder with one file."""
    program = tmp_path / "bin" / "localchat"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m localchat "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    work = tmp_path / "work"
    work.mkdir()
    (work / "notes.txt").touch()
    root = str(Path(completion.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    environment = environment | {"LOCALCHAT_CACHE": str(cache)}
    return environment | {"PATH": f"{program.parent}:{environment['PATH']}", "PYTHONPATH": paths, "work": str(work)}


SHELLS: dict[str, tuple[list[str], list[str]]] = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        ["PS1='$ '", "bind 'set enable-bracketed-paste off'", "source <(localchat completion bash)"],
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        ["PS1='$ '; unsetopt zle_bracketed_paste 2>/dev/null; unset zle_bracketed_paste; autoload -Uz compinit; "
         "compinit -u -D", "source <(localchat completion zsh)"],
    ),
    "zsh, from a file": (
        ["zsh", "-f", "-i"],
        ["PS1='$ '; mkdir ../zfunc; localchat completion zsh > ../zfunc/_localchat; fpath+=$PWD/../zfunc",
         "unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D"],
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        ["function fish_prompt; echo '$ '; end", "localchat completion fish | source"],
    ),
}  # fmt: skip


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, terminal: Callable[..., Any], shell_home: dict[str, str]) -> Iterator[Any]:
    """A shell at its prompt, with the script loaded."""
    program, setup = SHELLS[request.param]
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    variables = {name: value for name, value in shell_home.items() if name != "work"}
    opened = terminal(program=program, rows=40, columns=120, **variables)
    for line in (f"cd '{shell_home['work']}'", *setup, "echo rea''dy"):
        opened.send(line + "\r")
        time.sleep(0.1)
    opened.wait_for("\nready")
    opened.name = request.param
    yield opened
    opened.send("\x03")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("localchat compl\t", "localchat completion"),
        ("localchat run zeb\t", "localchat run zebra/Stripes-1B"),  # the other zebra is not offered
        ("localchat run x --system-f\t", "localchat run x --system-file"),
        ("localchat run x --color=of\t", "localchat run x --color=off"),
        ("localchat run x -f no\t", "localchat run x -f notes.txt"),
        ("localchat run ./no\t", "localchat run ./notes.txt"),
    ],
)
def test_in_a_real_shell(shell: Any, typed: str, completed: str) -> None:
    shell.send(typed)
    shell.wait_for(lambda text: completed in text)


def test_a_choice_is_listed(shell: Any) -> None:
    shell.send("localchat run qwen3.\t\t")
    shell.wait_for(lambda text: all(f"qwen3.{n}-27b" in text for n in (5, 6, 8)))
