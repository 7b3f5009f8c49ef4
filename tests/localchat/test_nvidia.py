"""nvidia-smi's answers, good and bad, from programs of that name."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat import nvidia

GPUS = "0, GPU-ab12, NVIDIA GeForce RTX 4090, 570.86, 24564, 1250"
APPS = "GPU-ab12, 4711, /usr/bin/python3, 900"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """smi("echo ..."): the only nvidia-smi there is; a shell script."""

    def install(body: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return install


def answering(gpus: str, apps: str) -> str:
    return f"case $1 in --query-gpu*) printf '%s\\n' '{gpus}';; *) printf '%s\\n' '{apps}';; esac"


def test_cards_and_processes(smi: Callable[[str], None]) -> None:
    smi(answering(GPUS, APPS))
    card = nvidia.Card(0, "GPU-ab12", "NVIDIA GeForce RTX 4090", "570.86", 24564 << 20, 1250 << 20)
    process = nvidia.Process("GPU-ab12", 4711, "/usr/bin/python3", 900 << 20)
    assert nvidia.ask() == nvidia.Report((card,), (process,))


def test_fields_that_it_does_not_know(smi: Callable[[str], None]) -> None:
    smi(answering("0, GPU-ab12, GB10, 580.1, [N/A], [N/A]", "GPU-ab12, 12, [Not Found], [N/A]"))
    report = nvidia.ask()
    assert (report.cards[0].total, report.processes[0].used) == (None, None)


@pytest.mark.parametrize("text", ["", "No devices were found", "a, b", "x, GPU-ab12, y, z, 1, 2", "\x00\x1b[2J,,,,,"])
def test_nonsense_is_no_card(smi: Callable[[str], None], text: str) -> None:
    smi(f"cat '{text_file(text)}'" if text else "true")
    assert nvidia.ask() == nvidia.Report()


def text_file(text: str) -> str:
    path = Path("~").expanduser() / "answer"
    path.write_text(text)
    return str(path)


def test_why_there_is_no_answer(smi: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvidia.ask().problem == "there is no nvidia-smi"
    smi("echo Driver/library version mismatch; exit 18")
    assert nvidia.ask().problem == "nvidia-smi failed: Driver/library version mismatch"
    smi("exit 9")
    assert nvidia.ask().problem == "nvidia-smi failed: exit code 9"
    (tmp_path / "nvidia-smi").write_bytes(b"\x00")
    assert "cannot be run" in nvidia.ask().problem

    def late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(subprocess, "run", late)
    assert nvidia.ask().problem == "nvidia-smi has not answered within 10 s"
