"""Writes safetensors shards one tensor at a time, so that memory holds a tensor and not a shard.

A safetensors file starts with the length of its header and the header, which names every tensor. The header's content
is known last, so room for it is reserved first and what is left over is filled with spaces, which the format permits.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from localchat.errors import UserError
from localchat.shards import INDEX_NAME

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
# Bytes of one header entry beside the tensor's name: dtype, shape and two offsets, generously.
_ENTRY_BYTES = 160


@dataclass
class _Shard:
    """One file being written: `entries` are the header's, `size` the bytes of data so far."""

    path: Path
    file: BinaryIO
    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    size: int = 0


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

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor (any device; bf16, fp16, fp32, int32, int8 or uint8)."""
        data = tensor.detach().cpu().contiguous()
        shard = self._shard_for(data.nbytes, data.element_size())
        shard.entries[name] = {
            "dtype": _DTYPES[data.dtype],
            "shape": list(data.shape),
            "data_offsets": [shard.size, shard.size + data.nbytes],
        }
        shard.file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        shard.size += data.nbytes

    def finish(self) -> int:
        """Complete the last shard, give all their final names, write the index, verify. Returns the tensors' bytes."""
        self._complete()
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(self._done, start=1):
            name = f"model-{i:05d}-of-{len(self._done):05d}.safetensors"
            shard.path = shard.path.rename(self._folder / name)
            _verify(shard)
            weight_map.update(dict.fromkeys(shard.entries, name))
        total = sum(shard.size for shard in self._done)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(self._folder / INDEX_NAME, json.dumps(index, indent=1).encode())
        return total

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._open is not None:
            self._open.file.close()

    def _shard_for(self, nbytes: int, item: int) -> _Shard:
        """The open shard, or a new one when it is full or the tensor would lie across its own alignment."""
        full = self._open is not None and self._open.size > 0 and self._open.size + nbytes > self._max
        if full or (self._open is not None and self._open.size % item):
            self._complete()
        if self._open is None:
            path = self._folder / f"shard-{len(self._done) + 1:05d}"
            self._open = _Shard(path, path.open("wb"))
            self._open.file.write(bytes(8 + self._header_size))
        return self._open

    def _complete(self) -> None:
        """Put the header in front of the open shard's data and make sure that it is on the disk."""
        if self._open is None:
            return
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._open.entries}).encode()
        if len(header) > self._header_size:
            raise ValueError(f"header of {len(header)} bytes, {self._header_size} were reserved")
        file = self._open.file
        file.seek(0)
        file.write(self._header_size.to_bytes(8, "little") + header.ljust(self._header_size))
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._done.append(self._open)
        self._open = None


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and make sure that it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _verify(shard: _Shard) -> None:
    with safe_open(shard.path, framework="pt") as file:
        if set(file.keys()) != set(shard.entries):
            raise UserError(f"{shard.path}: reads back other tensors than were written; is the disk failing?")
