"""Writes safetensors shards one tensor at a time, so that memory holds a tensor and not a shard.

A safetensors file starts with the length of its header and the header, which names every tensor. The header's content
is known last, so room for it is reserved first and what is left over is filled with spaces, which the format permits.

Every tensor's checksum is taken on the way out. A full shard is brought to the disk and read back beside the work on
the next one; what reads back otherwise than it was written ends the conversion. A writer can also take up what another
one has left (`restore`): the same tensors after that give the same files.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType

import torch
from safetensors import safe_open
from torch import Tensor

from localchat.errors import UserError
from localchat.pinned import host_bytes
from localchat.shard_files import INDEX_NAME

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
# Bytes of one header entry beside the tensor's name: dtype, shape and two offsets, generously.
_ENTRY_BYTES = 160
_READS_OTHERWISE = "reads back other bytes than were written; is the disk failing?"
_BLOCK = 32 << 20  # bytes of one write, and of one read when a shard is read back


@dataclass(frozen=True)
class Entry:
    """One tensor as it was written: into which shard (from 1), where in its data, and the CRC-32 of its bytes."""

    name: str
    shard: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    crc: int


@dataclass
class _Shard:
    """One file being written, with what it holds so far."""

    path: Path
    file: FileIO
    entries: list[Entry] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of data so far."""
        return self.entries[-1].end if self.entries else 0


class ShardWriter:
    """Streams tensors into `folder`/model-0000i-of-0000N.safetensors and writes the index at the end.

    names: every tensor that may come, to reserve header room. max_shard_size: bytes of tensors in a file; a larger
    tensor gets a file of its own. Call `finish` when all are added; as a context manager it closes what is open.
    """

    def __init__(self, folder: Path, names: Iterable[str], max_shard_size: int) -> None:
        self._folder = folder
        self._max = max_shard_size
        room = 64 + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._header_size = -(-room // 64) * 64 - 8  # with its length field, data starts at a multiple of 64
        self._done: list[_Shard] = []
        self._open: _Shard | None = None
        self._blocks = _Blocks()
        self._reading_back = ThreadPoolExecutor(1)
        self._sealed: list[Future[None]] = []

    def add(self, name: str, tensor: Tensor, ready: "torch.cuda.Event | None" = None) -> Entry:
        """Append one tensor (any device; bf16, fp16, fp32, int32, int8 or uint8), and return what became of it.

        ready: of a tensor on a card, when its content is there; None is now.
        """
        for sealed in self._sealed:
            if sealed.done():
                sealed.result()  # a shard that reads back wrong ends it here
        data = tensor.detach()
        shard = self._shard_for(data.nbytes, data.element_size())
        start, crc = shard.size, 0
        for block in self._blocks.of(data, ready):
            _write(shard.file, block)
            crc = zlib.crc32(block, crc)
        number = len(self._done) + 1
        dtype, shape = _DTYPES[data.dtype], tuple(data.shape)
        shard.entries.append(Entry(name, number, dtype, shape, start, start + data.nbytes, crc))
        return shard.entries[-1]

    def intact(self, entries: Sequence[Entry]) -> int:
        """How many of these, from the first on, the folder holds as they were written by an earlier writer.

        That one had the same names and shard size, and added these in this order.
        """
        found = 0
        for number in sorted({entry.shard for entry in entries}):
            inside = [entry for entry in entries if entry.shard == number]
            for named in self._folder.glob(f"model-{number:05d}-of-*.safetensors"):
                named.replace(self._folder / _unfinished(number))  # it was complete, and waited for others
            good = _intact(self._folder / _unfinished(number), 8 + self._header_size, inside)
            found += good
            if good < len(inside):
                break
        return found

    def restore(self, entries: Sequence[Entry]) -> None:
        """Go on behind these entries of an earlier writer, which are `intact`; what follows them is forgotten.

        To be called before `add`.
        """
        for number in sorted({entry.shard for entry in entries}):
            self._complete()
            path = self._folder / _unfinished(number)
            inside = [entry for entry in entries if entry.shard == number]
            self._open = _Shard(path, FileIO(path, "r+"), inside)
            self._open.file.truncate(8 + self._header_size + self._open.size)
            self._open.file.seek(0, os.SEEK_END)
        kept = {shard.path for shard in (*self._done, *([self._open] if self._open else []))}
        for path in (*self._folder.glob("shard-*"), *self._folder.glob("model-*.safetensors")):
            if path not in kept:
                path.unlink()

    def read(self, entry: Entry) -> Tensor:
        """A tensor of one's own or `restore`d, on the CPU, before `finish`.

        Raises:
            UserError: its file ends before it does.
        """
        path = self._folder / _unfinished(entry.shard)
        raw = bytearray(entry.end - entry.start)
        with path.open("rb") as file:
            file.seek(8 + self._header_size + entry.start)
            if file.readinto(raw) != len(raw):
                raise UserError(f"{path}: ends in the middle of {entry.name}; is the disk failing?")
        return torch.frombuffer(raw, dtype=_BY_NAME[entry.dtype]).view(entry.shape)

    def finish(self) -> int:
        """Complete the last shard, give all their final names, write the index, verify. Returns the tensors' bytes."""
        self._complete()
        for sealed in self._sealed:
            sealed.result()
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(self._done, start=1):
            name = f"model-{i:05d}-of-{len(self._done):05d}.safetensors"
            shard.path = shard.path.rename(self._folder / name)
            _verify_header(shard)
            weight_map |= dict.fromkeys((entry.name for entry in shard.entries), name)
        total = sum(shard.size for shard in self._done)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(self._folder / INDEX_NAME, json.dumps(index, indent=1).encode())
        return total

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._reading_back.shutdown(cancel_futures=True)
        if self._open is not None:
            self._open.file.close()

    def _shard_for(self, nbytes: int, item: int) -> _Shard:
        """The open shard, or a new one when it is full or the tensor would lie across its own alignment."""
        full = self._open is not None and self._open.size > 0 and self._open.size + nbytes > self._max
        if full or (self._open is not None and self._open.size % item):
            self._complete()
        if self._open is None:
            path = self._folder / _unfinished(len(self._done) + 1)
            self._open = _Shard(path, FileIO(path, "w"))
            _write(self._open.file, memoryview(bytes(8 + self._header_size)))
        return self._open

    def _complete(self) -> None:
        """Put the header in front of the open shard's data, and have it read back meanwhile."""
        if self._open is None:
            return
        entries = {
            e.name: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.end]}
            for e in self._open.entries
        }
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        if len(header) > self._header_size:
            raise ValueError(f"header of {len(header)} bytes, {self._header_size} were reserved")
        file = self._open.file
        file.seek(0)
        _write(file, memoryview(self._header_size.to_bytes(8, "little") + header.ljust(self._header_size)))
        file.close()
        self._sealed.append(
            self._reading_back.submit(_seal, self._open.path, 8 + self._header_size, self._open.entries)
        )
        self._done.append(self._open)
        self._open = None


class _Blocks:
    """A tensor's bytes in blocks, by way of one pinned buffer where it lies on a card."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def of(self, tensor: Tensor, ready: "torch.cuda.Event | None") -> Iterator[memoryview]:
        """The blocks; each is valid until the next one is asked for."""
        if tensor.device.type != "cuda":
            raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, raw.numel(), _BLOCK):
                yield memoryview(raw[start : start + _BLOCK].numpy().data)
            return
        if self._pinned is None or self._stream is None:
            self._pinned = host_bytes(_BLOCK, tensor.device)
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(ready or torch.cuda.current_stream(tensor.device).record_event())
        with torch.cuda.stream(self._stream):
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, raw.numel(), _BLOCK):
                part = raw[start : start + _BLOCK]
                block = self._pinned[: part.numel()]
                block.copy_(part, non_blocking=True)
                self._stream.synchronize()
                yield memoryview(block.numpy().data)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, make sure that it is on the disk, and that it reads back from there as it was written.

    Raises:
        UserError: it does not.
    """
    with path.open("wb") as file:
        file.write(content)
    with path.open("rb", buffering=0) as file:
        _bring_to_disk(file)
        if file.read() != content:
            raise UserError(f"{path}: {_READS_OTHERWISE}")


def _unfinished(number: int) -> str:
    """What shard `number` is called until all are complete."""
    return f"shard-{number:05d}"


def _write(file: FileIO, block: memoryview) -> None:
    """All of `block`: the system may take less at once."""
    while len(block):
        block = block[file.write(block) :]


def _seal(path: Path, begin: int, entries: Sequence[Entry]) -> None:
    """Make sure that a shard is on the disk, and that it reads back from there as it was written."""
    with path.open("rb", buffering=0) as file:
        _bring_to_disk(file)
    if _intact(path, begin, entries) < len(entries):
        raise UserError(f"{path}: {_READS_OTHERWISE}")


def _bring_to_disk(file: FileIO) -> None:
    """What is read of the file after this comes from there, and not from memory."""
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _intact(path: Path, begin: int, entries: Sequence[Entry]) -> int:
    """How many tensors of a shard, from the first on, have the bytes that were written; its data starts at `begin`."""
    if not path.is_file():
        return 0
    buffer = memoryview(bytearray(min(_BLOCK, max((e.end - e.start for e in entries), default=0))))
    with path.open("rb", buffering=0) as file:
        for i, entry in enumerate(entries):
            file.seek(begin + entry.start)
            left, crc = entry.end - entry.start, 0
            while left:
                got = file.readinto(buffer[:left]) or 0
                if not got:
                    return i
                crc, left = zlib.crc32(buffer[:got], crc), left - got
            if crc != entry.crc:
                return i
    return len(entries)


def _verify_header(shard: _Shard) -> None:
    with safe_open(shard.path, framework="pt") as file:
        if set(file.keys()) != {entry.name for entry in shard.entries}:
            raise UserError(f"{shard.path}: reads back other tensors than were written; is the disk failing?")
