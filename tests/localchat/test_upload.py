"""What arrives through the threads is what the files hold. Without a card the same code copies to the CPU."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localchat import upload as module
from localchat.errors import BadCheckpoint
from localchat.shards import Shards, open_shards
from localchat.upload import upload

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of tensors of every dtype and awkward sizes, read in small pieces."""
    monkeypatch.setattr(module, "_PIECE", 1000)
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.int32)
    tensors = {
        f"{i}.{dtype}": torch.randint(-99, 99, (7 + 40 * i, 13), generator=generator).to(dtype)
        for i in range(4)
        for dtype in dtypes
    }
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:9]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, tmp_path / "b.safetensors")
    return tmp_path


def check(shards: Shards, device: torch.device, on_host: set[str]) -> None:
    got = upload(shards, list(shards.names), device, on_host)
    assert set(got) == set(shards.names)
    for name, tensor in got.items():
        wanted = shards.get(name)
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor.cpu(), wanted), name
        assert tensor.device.type == ("cpu" if name in on_host else device.type)
    on_device = [tensor for name, tensor in got.items() if name not in on_host]
    assert all(tensor.data_ptr() % 256 == on_device[0].data_ptr() % 256 for tensor in on_device)


def test_every_tensor_arrives(folder: Path) -> None:
    with open_shards(folder) as shards:
        check(shards, CPU, set())


@pytest.mark.gpu
def test_every_tensor_arrives_on_a_card(folder: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    with open_shards(folder) as shards:
        check(shards, torch.device("cuda"), {"1.torch.int8", "3.torch.float32"})


def test_a_file_that_is_cut_short_is_named(folder: Path) -> None:
    threads = threading.active_count()
    with open_shards(folder) as shards:
        path = folder / "b.safetensors"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(BadCheckpoint, match=r"b\.safetensors: ends in the middle"):
            upload(shards, list(shards.names), CPU)
    assert threading.active_count() == threads


@pytest.mark.parametrize("threads", [1, 8])
def test_an_error_stops_all_threads(folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    reads, read = [], module._read

    def failing(file: int, piece: module.Piece, into: torch.Tensor) -> None:
        reads.append(piece)
        if len(reads) >= 3:
            raise KeyboardInterrupt
        read(file, piece, into)

    monkeypatch.setattr(module, "_read", failing)
    monkeypatch.setattr(module, "_THREADS", threads)
    with open_shards(folder) as shards, pytest.raises(KeyboardInterrupt):
        upload(shards, list(shards.names), CPU)
    assert len(reads) < 3 + threads


def test_who_interrupts_does_not_wait_for_the_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], module._read

    def slow(file: int, piece: module.Piece, into: torch.Tensor) -> None:
        reads.append(piece)
        if len(reads) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # which the main thread gets, and that one waits
        time.sleep(0.02)
        read(file, piece, into)

    monkeypatch.setattr(module, "_read", slow)
    monkeypatch.setattr(module, "_THREADS", 2)
    with open_shards(folder) as shards:
        pieces = sum(-(-shards.span(name).nbytes // 1000) for name in shards.names)
        with pytest.raises(KeyboardInterrupt):
            upload(shards, list(shards.names), CPU, {"1.torch.int8"})
    assert len(reads) < pieces / 2


def test_memory_of_the_host_that_cannot_be_had_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int, device: torch.device) -> torch.Tensor:
        raise MemoryError("no memory to pin")

    monkeypatch.setattr(module, "host_bytes", full)
    threads = threading.active_count()
    with open_shards(folder) as shards, pytest.raises(MemoryError, match="no memory to pin"):
        upload(shards, list(shards.names), CPU, {"1.torch.int8"})
    assert threading.active_count() == threads


def test_every_piece_is_read_once_and_host_tensors_arrive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], module._read
    monkeypatch.setattr(module, "_read", lambda file, piece, into: (reads.append(piece), read(file, piece, into)))
    with open_shards(folder) as shards:
        check(shards, CPU, {"1.torch.int8", "3.torch.float32"})
        sizes = [shards.span(name).nbytes for name in shards.names]
    assert sum(piece.target.numel() for piece in reads) == sum(sizes)


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    with open_shards(folder) as shards:
        check(shards, CPU, set())
        (folder / "b.safetensors").unlink()
        with pytest.raises(BadCheckpoint, match=r"b\.safetensors: cannot be read"):
            upload(shards, list(shards.names), CPU)


@pytest.mark.gpu
def test_a_card_still_works_after_a_file_that_is_cut_short(folder: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    with open_shards(folder) as shards:
        path = folder / "b.safetensors"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(BadCheckpoint, match="ends in the middle"):
            upload(shards, list(shards.names), torch.device("cuda"))
    assert int(torch.ones(5, device="cuda").sum()) == 5
