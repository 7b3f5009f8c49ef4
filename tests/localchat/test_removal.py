"""`rm`: what goes, what stays, and who is asked."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat import registry, removal, store, wheels
from localchat.config import QuantizationConfig, TensorFormat
from localchat.errors import ModelNotFound, UsageError, UserError
from localchat.kernels.int4_packing import LAYOUT, VERSION

HUB = "Qwen/Qwen3-0.6B"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOCALCHAT_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fill(folder: Path, source_id: str = HUB, revision: str = "abc") -> Path:
    folder.mkdir(parents=True)
    source = {"id": source_id, "revision": revision}
    quantization = QuantizationConfig(LAYOUT, VERSION, TensorFormat(4, 32, False), source=source)
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"x" * 3_000_000)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization.to_dict()}))
    return folder


def download(hub: Path, commit: str = "a" * 40) -> Path:
    """What huggingface_hub leaves of a repository."""
    repo = hub / "models--Qwen--Qwen3-0.6B"
    blob, snapshot = repo / "blobs" / "1234", repo / "snapshots" / commit
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    blob.write_bytes(b"y" * 5_000_000)
    (snapshot / "model.safetensors").symlink_to(blob)
    return repo


def test_every_packing_of_a_model_goes_and_its_download_stays(cache: Path, hub_cache: Path, capsys: Capture) -> None:
    one, two = fill(cache / "packed" / "q-1"), fill(cache / "packed" / "q-2", revision="def")
    other = fill(cache / "packed" / "other", "Qwen/Qwen3-8B")
    repo = download(hub_cache)
    assert removal.remove("qwen3-0.6b", downloads=False, sure=True) == 0
    assert not one.exists()
    assert not two.exists()
    assert other.exists()
    assert repo.exists()
    assert not list((cache / "packed").glob("*.old"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[2] == "localchat: removed qwen3-0.6b: 6 MB are free"
    assert lines[3].startswith("localchat: its download in the hub's cache stays, 5 MB")


def test_downloads_go_where_asked(cache: Path, hub_cache: Path, capsys: Capture) -> None:
    fill(cache / "packed" / "q-1")
    repo = download(hub_cache)
    assert removal.remove(HUB, downloads=True, sure=True) == 0
    assert not repo.exists()
    assert "removed Qwen/Qwen3-0.6B: 8 MB are free" in capsys.readouterr().err


def test_one_revision(cache: Path) -> None:
    one, two = fill(cache / "packed" / "q-1"), fill(cache / "packed" / "q-2", revision="def")
    assert removal.remove("qwen3-0.6b@def", downloads=False, sure=True) == 0
    assert one.exists()
    assert not two.exists()


def test_a_model_out_of_a_package_goes_with_its_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel: Any = registry.MODELS["smollm2-135m"].wheel
    packed = fill(cache / "packed" / "s-1", wheel.requirement)
    place = wheels._place(wheel)
    place.parent.mkdir(parents=True)
    with place.open("wb") as file:
        file.truncate(wheel.member_size)
    assert removal.remove("smollm2-135m", downloads=False, sure=True) == 0
    assert not packed.exists()
    assert not place.exists()


def test_what_was_packed_from_a_folder_goes_and_the_folder_stays(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine"
    source.mkdir()
    packed = fill(cache / "packed" / "mine-1", str(source))
    assert removal.remove(str(source), downloads=False, sure=True) == 0
    assert source.exists()
    assert not packed.exists()


def test_a_folder_of_the_user_s_is_not_touched(tmp_path: Path, cache: Path) -> None:
    mine = fill(tmp_path / "mine")
    with pytest.raises(UsageError, match="a folder of your own"):
        removal.remove(str(mine), downloads=False, sure=True)
    assert mine.exists()
    kept = fill(cache / "packed" / "q-1")
    assert removal.remove(str(kept), downloads=False, sure=True) == 0  # but one of ours may be given by its path
    assert not kept.exists()


def test_what_is_not_here(cache: Path, hub_cache: Path) -> None:
    fill(cache / "packed" / "q-1")
    with pytest.raises(ModelNotFound, match=r"qwen3-0\.7b is not on this machine") as caught:
        removal.remove("qwen3-0.7b", downloads=False, sure=True)
    assert caught.value.hint == "did you mean qwen3-0.6b?"
    with pytest.raises(ModelNotFound) as caught:
        removal.remove("qwen3-8b", downloads=False, sure=True)
    assert "localchat list" in caught.value.hint


def test_only_a_download(hub_cache: Path) -> None:
    download(hub_cache)
    with pytest.raises(ModelNotFound, match=r"only a download of qwen3-0\.6b is on this machine, 5 MB") as caught:
        removal.remove("qwen3-0.6b", downloads=False, sure=True)
    assert "--downloads" in caught.value.hint


def test_one_that_is_being_written_stays(cache: Path) -> None:
    folder = fill(cache / "packed" / "q-1")
    with store.locked(folder), pytest.raises(UserError, match="another localchat is writing"):
        removal.remove("qwen3-0.6b", downloads=False, sure=True)
    assert folder.exists()


def test_nobody_to_ask(cache: Path, command: Callable[..., Any]) -> None:
    folder = fill(cache / "packed" / "q-1")
    done = command("rm", "qwen3-0.6b", LOCALCHAT_CACHE=str(cache), LOCALCHAT_YES="1")
    assert done.returncode == 2
    assert "nobody is there to be asked" in done.stderr.decode()
    assert folder.exists()


@pytest.mark.parametrize(("typed", "code", "left"), [(b"\n", 1, True), (b"n\n", 1, True), (b"y\n", 0, False)])
def test_a_person_is_asked(cache: Path, environment: dict[str, str], typed: bytes, code: int, left: bool) -> None:
    folder = fill(cache / "packed" / "q-1")
    person, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "localchat", "rm", "qwen3-0.6b"],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment | {"LOCALCHAT_CACHE": str(cache)},
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(person, 1000)
    assert b"remove qwen3-0.6b and free 3 MB?" in seen
    os.write(person, typed)
    assert process.wait(60) == code
    os.close(person)
    assert folder.exists() == left
