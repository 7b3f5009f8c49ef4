"""From the files of a folder to a card: many threads read, each copies what it has read while it reads on.

A plain copy of a mapped file to a card goes through one thread and pages that nobody pinned, at a few GB/s. Here
pieces of the files are read into pinned memory by several threads, and go from there to one allocation on the card
that holds all tensors, so that nothing is lost to an allocator's rounding. Every tensor begins at a multiple of
256 bytes, which the kernels' 16-byte loads need and a file does not promise.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.pinned import host_bytes
from localchat.shards import Shards, Span

_ALIGNMENT = 256  # bytes
_PIECE = 16 << 20  # bytes of one read
_THREADS = 8


@dataclass(frozen=True)
class Piece:
    """Bytes of a file, and where they go."""

    path: Path
    start: int
    target: Tensor  # uint8


def upload(
    shards: Shards, names: Sequence[str], device: torch.device, on_host: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors `names` on `device`, those in `on_host` in pinned memory of the host instead.

    Raises:
        BadCheckpoint: a file is shorter than its header says, or cannot be read.
    """
    spans = {name: shards.span(name) for name in names}
    at_device = {name: span for name, span in spans.items() if name not in on_host}
    at_host = {name: span for name, span in spans.items() if name in on_host}
    tensors: dict[str, Tensor] = {}
    pieces: list[Piece] = []
    kept: dict[str, Tensor] = {}
    later: list[Piece] = []
    _lay_out(at_device, lambda size: torch.empty(size, dtype=torch.uint8, device=device), tensors, pieces)
    with Copier(device) as copier, ThreadPoolExecutor(1) as beside:
        pinning = beside.submit(_lay_out, at_host, lambda size: host_bytes(size, device), kept, later)
        copier.copy(pieces)  # meanwhile: pinning takes the driver a while
        pinning.result()
        copier.copy(later)
    return tensors | kept


def _lay_out(
    spans: Mapping[str, Span], allocate: Callable[[int], Tensor], tensors: dict[str, Tensor], pieces: list[Piece]
) -> None:
    """One allocation for all of these; adds the tensors in it, and the pieces that fill it."""
    if not spans:
        return
    starts, total = {}, 0
    for name, span in spans.items():
        starts[name] = total
        total += -(-span.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = allocate(total)
    for name, span in spans.items():
        raw = memory[starts[name] : starts[name] + span.nbytes]
        tensors[name] = raw.view(span.dtype).view(span.shape)
        pieces += pieces_of(span, raw)


def pieces_of(span: Span, target: Tensor) -> Iterator[Piece]:
    """The reads that bring the bytes of `span` into `target`, uint8 [nbytes]."""
    parts = range(0, span.nbytes, _PIECE)
    return (Piece(span.path, span.start + at, target[at : at + _PIECE]) for at in parts)


class Copier:
    """Threads that copy pieces of files to `device`, with the pinned buffers they take. One `copy` at a time.

    Close it, or use it as a context manager. Copies run on streams of its own: the targets may not be in use by work
    that is queued on another one, and are there when `copy` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = _THREADS
        self._pool = ThreadPoolExecutor(self._threads)
        self._own = threading.local()  # a thread's buffers

    def copy(self, pieces: Collection[Piece]) -> None:
        """Fill the targets. The first error of a thread stops them all.

        Raises:
            BadCheckpoint: a file is shorter than its header says, or cannot be read.
        """
        todo, lock, stop = iter(sorted(pieces, key=lambda p: (p.path, p.start))), threading.Lock(), threading.Event()

        def next_pieces() -> Iterator[Piece]:
            while not stop.is_set():
                with lock:
                    piece = next(todo, None)
                if piece is None:
                    return
                yield piece

        with ExitStack() as stack:
            files = {path: _open(path, stack) for path in {piece.path for piece in pieces}}
            workers = min(self._threads, len(pieces))
            running = [self._pool.submit(self._work, next_pieces(), files, stop) for _ in range(workers)]
            wait(running)  # the files stay open as long as somebody reads
            for done in running:
                done.result()

    def close(self) -> None:
        """End the threads and give their buffers back."""
        self._pool.shutdown()
        self._own = threading.local()

    def __enter__(self) -> "Copier":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _work(self, pieces: Iterator[Piece], files: Mapping[Path, int], stop: threading.Event) -> None:
        """One thread."""
        try:
            if self._device.type == "cuda":
                if not hasattr(self._own, "buffers"):
                    self._own.buffers = _Buffers(self._device)
                self._own.buffers.work(pieces, files)
            else:
                for piece in pieces:
                    _read(files[piece.path], piece, piece.target)
        except BaseException:
            stop.set()
            raise


class _Buffers:
    """Two buffers of one thread in turn, so that one is read into while the other is copied from."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._buffers = torch.split(host_bytes(2 * _PIECE, device), _PIECE)
            self._free = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]

    def work(self, pieces: Iterator[Piece], files: Mapping[Path, int]) -> None:
        with torch.cuda.stream(self._stream):
            turn = 0
            try:
                for piece in pieces:
                    if piece.target.device.type == "cpu":
                        _read(files[piece.path], piece, piece.target)
                        continue
                    self._free[turn].synchronize()
                    buffer = self._buffers[turn][: piece.target.numel()]
                    _read(files[piece.path], piece, buffer)
                    piece.target.copy_(buffer, non_blocking=True)
                    self._free[turn].record()
                    turn = 1 - turn
            finally:
                self._stream.synchronize()  # the targets are handed over, or the buffers go


def _open(path: Path, stack: ExitStack) -> int:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read ({error.strerror}).") from error
    stack.callback(os.close, file)
    return file


def _read(file: int, piece: Piece, into: Tensor) -> None:
    view, done = memoryview(into.numpy().data), 0
    while done < len(view):
        try:
            got = os.preadv(file, [view[done:]], piece.start + done)
        except OSError as error:
            raise BadCheckpoint(f"{piece.path}: cannot be read ({error.strerror}).") from error
        if not got:
            raise BadCheckpoint(f"{piece.path}: ends in the middle of a tensor; download or quantize it again.")
        done += got
