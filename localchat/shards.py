"""The safetensors files of a model folder, opened safely: which tensor lies where, and one tensor at a time.

A folder comes from the network, so nothing in it is trusted: a shard is named by a plain file name (an index cannot
point outside the folder), pickle files are never opened, and every header is checked by the safetensors library before
a tensor is read. Tensors are mapped, not copied: memory is touched only where it is used.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.shard_files import find_index, read_index, shard_files

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_POINTER = b"version https://git-lfs"  # the beginning of what stands in the place of a file; source: its specification


@dataclass(frozen=True)
class Span:
    """Where a tensor lies: `nbytes` bytes at `start` of the file `path`."""

    path: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Shards:
    """The open safetensors files of one folder. Use `open_shards`; close it, or use it as a context manager.

    `names` maps every tensor's name to the file that holds it. arriving: reading waits for files that are on their way.
    """

    arriving = False

    def __init__(self, names: Mapping[str, Path], files: Mapping[Path, Any], stack: ExitStack) -> None:
        self.names = dict(names)
        self._files = files
        self._stack = stack
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def get(self, name: str) -> Tensor:
        """The tensor `name` as stored, on the CPU, backed by the mapped file.

        Raises:
            BadCheckpoint: no shard holds it, or its bytes cannot be read.
        """
        path = self._path(name)
        with translated(path):
            tensor: Tensor = self._files[path].get_tensor(name)
        return tensor

    def read(self, name: str) -> Tensor:
        """The tensor `name` in memory of its own. (Pages of a mapped file count as the process's once they are read.)

        Raises:
            BadCheckpoint: see `span`, or its bytes cannot be read.
        """
        span = self.span(name)
        tensor = torch.empty(span.shape, dtype=span.dtype)
        with translated(span.path), span.path.open("rb") as file:
            file.seek(span.start)
            if file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data) != span.nbytes:
                raise OSError(f"it ends in the middle of {name}")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of `name`, read from the header alone."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of `name` as safetensors spells it ("BF16", "F32", "I32", "F8_E4M3", ...)."""
        return str(self._slice(name).get_dtype())

    def span(self, name: str) -> Span:
        """Where `name` lies in its file.

        Raises:
            BadCheckpoint: no shard holds it, or it is of a dtype that is not known here.
        """
        path = self._path(name)
        if path not in self._headers:
            self._headers[path] = read_header(path)
        begin, header = self._headers[path]
        return span_of(path, name, begin, header[name])

    def close(self) -> None:
        """Release the files. Tensors already returned stay valid."""
        self._stack.close()
        self._files = {}

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _path(self, name: str) -> Path:
        try:
            return self.names[name]
        except KeyError:
            raise BadCheckpoint(f"The model folder holds no tensor named {name}: it is incomplete.") from None

    def _slice(self, name: str) -> Any:
        path = self._path(name)
        with translated(path):
            return self._files[path].get_slice(name)


def open_shards(folder: Path) -> Shards:
    """Open every safetensors file of `folder` and map tensor names to files, through the index where there is one.

    Raises:
        BadCheckpoint: a file is missing, damaged, outside the folder, or the folder holds pickle files only.
    """
    index = find_index(folder)
    wanted = read_index(index) if index else None
    paths = shard_files(folder)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        held: dict[Path, set[str]] = {}
        for path in paths:
            with translated(path):
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            held[path] = set(files[path].keys())
        names = indexed(folder, wanted, held) if wanted is not None else merged(held)
        return Shards(names, files, stack.pop_all())


def span_of(path: Path, name: str, begin: int, entry: Mapping[str, Any]) -> Span:
    """The span of a tensor by its header's entry, in a file whose tensors begin at `begin`.

    Raises:
        BadCheckpoint: it is of a dtype that is not known here.
    """
    if entry["dtype"] not in _DTYPES:
        raise BadCheckpoint(f"{path}: {name} has the dtype {entry['dtype']}, which is not known here.")
    start, end = entry["data_offsets"]
    return Span(path, begin + start, end - start, _DTYPES[entry["dtype"]], tuple(entry["shape"]))


def check_file(path: Path) -> None:
    """Have the library check a file's header against its size.

    Raises:
        BadCheckpoint: the file is damaged.
    """
    with translated(path), safe_open(path, framework="pt"):
        return


def indexed(folder: Path, wanted: Mapping[str, str], held: Mapping[Path, set[str]]) -> dict[str, Path]:
    names = {name: folder / file for name, file in wanted.items()}
    for name, path in names.items():
        if name not in held[path]:
            raise BadCheckpoint(f"{path}: does not hold {name}, which the index says it does; download it again.")
    return names


def merged(held: Mapping[Path, set[str]]) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for path, tensors in held.items():
        for name in tensors:
            if name in names:
                raise BadCheckpoint(
                    f"{path.parent}: the tensor {name} is in both {names[name].name} and {path.name}, and no index "
                    "says which one counts."
                )
            names[name] = path
    return names


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a file's tensors begin, and its header, which the library has checked on opening.

    Source: safetensors' README: 8 bytes with the length of the header, little-endian, then the header in JSON.
    """
    with translated(path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """The safetensors library's errors, and the system's, as one sentence that names the file."""
    try:
        yield
    except (SafetensorError, OSError, AttributeError) as error:
        if _is_pointer(path):
            raise BadCheckpoint(
                f"{path}: is only git's pointer to the file; `git lfs pull` in its folder fetches the file."
            ) from error
        again = "; download it again" if isinstance(error, SafetensorError) else ""
        raise BadCheckpoint(f"{path}: is damaged or not a safetensors file ({error}){again}.") from error


def _is_pointer(path: Path) -> bool:
    """Whether a repository was cloned without git-lfs, which leaves a few lines in the place of a large file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False
