"""What a conversion meets at the edges: memory that is bounded, disks that are full, read-only, or lie."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.config import ModelConfig
from localchat.errors import UserError
from localchat.quantize import writer
from localchat.quantize.convert import Recipe, convert
from localchat.quantize.gguf import open_gguf
from localchat.quantize.hf import HFSource, open_hf
from localchat.quantize.source import Source, expected_shapes

Make = Callable[..., Any]
FINE = Recipe(group_size=32, symmetric=False)
ROOT = Path(__file__).parents[2]

# Prints the most memory that a conversion needed beyond what the process had before. VmHWM is what ru_maxrss is too,
# except that it begins anew with the program: ru_maxrss of a child begins with its parent's.
_MEASURED = """
import re, sys
from pathlib import Path
import torch
from localchat.quantize.convert import Recipe, convert

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
for _ in convert(Path(sys.argv[1]), Path(sys.argv[2]), Recipe(search=False, keep=((".*", 8),))):
    continue
print(peak() - before)
"""


def test_memory_is_that_of_two_matrices_and_not_of_the_model(tmp_path: Path) -> None:
    """A checkpoint of 300 MB, whose largest step has 25 MB."""
    source, shapes = tmp_path / "source", {"hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 6}
    source.mkdir()
    config = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        **shapes,
    }
    (source / "config.json").write_text(json.dumps(config))
    expected = expected_shapes(ModelConfig.from_dict(config))
    with writer.ShardWriter(source, expected, 1 << 30) as out:
        for name, shape in expected.items():
            out.add(f"model.{name}", torch.full(shape, 0.5, dtype=torch.bfloat16))
        out.finish()
    with open_hf(source) as opened:
        total = sum(map(opened.nbytes, opened.shapes))
    largest = 2 * 2 * 6144 * 1024  # gate and up
    assert total > 250e6
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    words = [sys.executable, "-c", _MEASURED, str(source), str(tmp_path / "packed")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    # Two steps as read, their codes of half the size (parts, and parts above each other), threads, writing.
    assert 0 < int(done.stdout) < 2 * largest + 2 * largest + 60e6 < total


def test_tensors_of_two_steps_are_in_memory_at_most(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    formed = HFSource.formed

    def counting(self: HFSource, name: str, stored: torch.Tensor) -> torch.Tensor:
        nonlocal most
        tensor = formed(self, name, stored).clone()
        alive.add(tensor)
        most = max(most, sum(t.nbytes for t in alive))
        return tensor

    monkeypatch.setattr(HFSource, "formed", counting)
    source = make_hf(num_hidden_layers=4)
    list(convert(source, tmp_path / "out", FINE))
    with open_hf(source) as opened:
        steps = [2 * opened.nbytes("layers.0.mlp.gate_proj.weight"), opened.nbytes("layers.0.mlp.down_proj.weight")]
        assert steps[0] < most <= sum(steps) + 4 * 64 * 4  # the largest two neighbours, and norms
        assert most < sum(map(opened.nbytes, opened.shapes)) / 4


def test_a_gguf_file_does_not_stay_in_memory(make_gguf: Make, config_of: Make, weights_of: Make) -> None:
    """It is mapped: pages that were read count until they are given back."""

    def mapped() -> int:
        found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    config = config_of(hidden_size=512, head_dim=128, intermediate_size=2048, num_hidden_layers=4)
    path = make_gguf(config, weights_of(config))
    assert path.stat().st_size > 60e6
    with open_gguf(path) as opened:
        before = mapped()
        for name in opened.shapes:
            opened.read(name)
            opened.grid(name)
        assert mapped() - before < 10e6


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """small_disk("size=1m"): a file system of its own in memory, mounted with these options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this user may not mount: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def any_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free space is not looked at, as if somebody else filled the disk afterwards."""
    monkeypatch.setattr("localchat.quantize.convert.check_disk_space", lambda *_: None)


@pytest.mark.parametrize("resume", [False, True])
def test_a_disk_that_fills_up(
    make_hf: Make, tmp_path: Path, small_disk: Callable[[str], Path], any_room: None, resume: bool
) -> None:
    source, disk = make_hf(num_hidden_layers=6), small_disk("size=120k")
    recipe = Recipe(group_size=32, symmetric=False, max_shard_size=20_000)
    list(convert(source, tmp_path / "wanted", recipe))
    with pytest.raises(UserError, match=r"out: cannot be written \(No space left on device\)"):
        list(convert(source, disk / "out", recipe, resume=resume))
    assert {path.name for path in disk.iterdir()} == ({"out.partial"} if resume else set())
    if resume:  # and once there is room
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        list(convert(source, disk / "out", recipe, resume=True))
        wanted = {path.name: path.read_bytes() for path in (tmp_path / "wanted").iterdir()}
        assert {path.name: path.read_bytes() for path in (disk / "out").iterdir()} == wanted


def test_a_full_disk_is_seen_before_anything_is_written(make_hf: Make, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=1m")
    with pytest.raises(UserError, match=r"GB free, but .* are needed"):
        list(convert(make_hf(), disk / "out", FINE))
    assert list(disk.iterdir()) == []


def test_a_file_that_may_not_grow(make_hf: Make, tmp_path: Path, any_room: None) -> None:
    """A quota, as the system itself says it: for users who may not mount."""
    source = make_hf()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"out: cannot be written \(File too large\)"):
            list(convert(source, tmp_path / "out", FINE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_read_only_disk(make_hf: Make, small_disk: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"out: cannot be written \(Read-only file system\)"):
        list(convert(make_hf(), small_disk("ro") / "out", FINE))


def test_a_folder_that_may_not_be_written(make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    source = make_hf()
    monkeypatch.setattr(Path, "mkdir", refused)  # the tests may run as a user who may write everywhere
    with pytest.raises(UserError, match=r"out: cannot be written \(Permission denied\)"):
        list(convert(source, tmp_path / "out", FINE))


@pytest.mark.parametrize("which", [2, 9])
def test_a_disk_that_keeps_other_bytes(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """One bit of one block turns on its way to the disk: it is read back and seen, and nothing is put in place."""
    write, calls = writer._write, []

    def turning(file: FileIO, block: memoryview) -> None:
        calls.append(len(block))
        content = bytearray(block)
        if len(calls) == which:
            content[len(content) // 2] ^= 1
        write(file, memoryview(content))

    monkeypatch.setattr(writer, "_write", turning)
    source = make_hf()
    with pytest.raises(UserError, match="reads back other bytes than were written"):
        list(convert(source, tmp_path / "out", FINE))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "tokenizer.json", "config.json"])
def test_a_disk_that_keeps_other_bytes_of_a_small_file(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It would be found out by a `run` that cannot read it, when the source may be gone."""
    sync = os.fsync

    def turning(handle: int) -> None:
        sync(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.name == name:
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])

    monkeypatch.setattr(writer.os, "fsync", turning)
    source = make_hf()
    with pytest.raises(UserError, match=f"{name}: reads back other bytes than were written"):
        list(convert(source, tmp_path / "out", FINE))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_the_source_is_only_read(
    make_hf: Make, make_gguf: Make, config_of: Make, weights_of: Make, tmp_path: Path
) -> None:
    """Contents and dates are the same afterwards."""
    folder, file = make_hf(shards=3), make_gguf(config_of(), weights_of(config_of()))
    paths = [*folder.iterdir(), file]
    before = [(path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode) for path in paths]
    list(convert(folder, tmp_path / "a", FINE))
    list(convert(file, tmp_path / "b", FINE))
    assert [(path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode) for path in paths] == before
    assert [*folder.iterdir(), file] == paths


def test_a_source_without_spans_is_read_by_itself(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow way gives the same bytes as the threads."""
    source = make_hf("qwen3_5")
    list(convert(source, tmp_path / "threads", FINE))
    monkeypatch.setattr(HFSource, "span", Source.span)
    list(convert(source, tmp_path / "itself", FINE))
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / x).iterdir()} for x in ("threads", "itself"))
    assert one == other
