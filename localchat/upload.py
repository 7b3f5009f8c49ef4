"""From the files of a folder to a card: many threads read, each copies what it has read while it reads on.

A plain copy of a mapped file to a card goes through one thread and pages that nobody pinned, at a few GB/s. Here
pieces of the files are read into pinned memory by several threads, and go from there to one allocation on the card
that holds all tensors, so that nothing is lost to an allocator's rounding. Every tensor begins at a multiple of
256 bytes, which the kernels' 16-byte loads need and a file does not promise.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.pinned import host_bytes
from localchat.shards import Shards, Span

_ALIGNMENT = 256  # bytes
_PIECE = 16 << 20  # bytes of one read
_THREADS = 8


@dataclass(frozen=True)
class _Piece:
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
    pieces: list[_Piece] = []
    _lay_out(at_device, lambda size: torch.empty(size, dtype=torch.uint8, device=device), tensors, pieces)
    _lay_out(at_host, lambda size: host_bytes(size, device), tensors, pieces)
    _copy(pieces, device)
    return tensors


def _lay_out(
    spans: Mapping[str, Span], allocate: Callable[[int], Tensor], tensors: dict[str, Tensor], pieces: list[_Piece]
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
        parts = range(0, span.nbytes, _PIECE)
        pieces += (_Piece(span.path, span.start + at, raw[at : at + _PIECE]) for at in parts)


def _copy(pieces: list[_Piece], device: torch.device) -> None:
    """Fill the targets. The first error of a thread stops them all."""
    todo, lock, stop = iter(sorted(pieces, key=lambda p: (p.path, p.start))), threading.Lock(), threading.Event()

    def next_pieces() -> Iterator[_Piece]:
        while not stop.is_set():
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            yield piece

    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in {piece.path for piece in pieces}}
        with ThreadPoolExecutor(_THREADS) as pool:
            for done in [pool.submit(_work, next_pieces(), files, device, stop) for _ in range(_THREADS)]:
                done.result()


def _open(path: Path, stack: ExitStack) -> int:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read ({error.strerror}).") from error
    stack.callback(os.close, file)
    return file


def _work(pieces: Iterator[_Piece], files: Mapping[Path, int], device: torch.device, stop: threading.Event) -> None:
    """One thread."""
    try:
        if device.type == "cuda":
            _work_for_card(pieces, files, device)
        else:
            for piece in pieces:
                _read(files[piece.path], piece, piece.target)
    except BaseException:
        stop.set()
        raise


def _work_for_card(pieces: Iterator[_Piece], files: Mapping[Path, int], device: torch.device) -> None:
    """Two buffers in turn, so that one is read into while the other is copied from."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        buffers = torch.split(host_bytes(2 * _PIECE, device), _PIECE)
        free = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        turn = 0
        try:
            for piece in pieces:
                if piece.target.device.type == "cpu":
                    _read(files[piece.path], piece, piece.target)
                    continue
                free[turn].synchronize()
                buffer = buffers[turn][: piece.target.numel()]
                _read(files[piece.path], piece, buffer)
                piece.target.copy_(buffer, non_blocking=True)
                free[turn].record()
                turn = 1 - turn
        finally:
            stream.synchronize()  # the buffers go now


def _read(file: int, piece: _Piece, into: Tensor) -> None:
    view, done = memoryview(into.numpy().data), 0
    while done < len(view):
        try:
            got = os.preadv(file, [view[done:]], piece.start + done)
        except OSError as error:
            raise BadCheckpoint(f"{piece.path}: cannot be read ({error.strerror}).") from error
        if not got:
            raise BadCheckpoint(f"{piece.path}: ends in the middle of a tensor; download or quantize it again.")
        done += got
