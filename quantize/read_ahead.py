"""Reads the tensors of the next step while the arithmetic is at work on this one.

At any moment the tensors of two steps are in memory at most. Weights that lie in a file as they are go through several
threads straight to the device (localchat/upload.py): on a card, host memory then holds the threads' buffers and not
the tensor. Everything else is read by its source: of one that has 4 or 8 bits its codes. NaN or infinity stop the
conversion here.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.quantize.codes import Codes
from localchat.quantize.source import Grid, Source
from localchat.quantize.steps import Step, weights_of
from localchat.shards import Span
from localchat.upload import Copier, pieces_of

_LARGEST = 2.0**120  # twice 16 times as much is still far from fp32's infinity


@dataclass
class Loaded:
    """What one step needs by canonical name, a matrix's weights on the device.

    tensors, and the grids that they lie on; codes: of weights that are whole numbers, which are not among the tensors.
    """

    step: Step
    tensors: dict[str, Tensor]
    grids: dict[str, Grid | None]
    codes: dict[str, Codes] = field(default_factory=dict)

    def all_tensors(self) -> list[Tensor]:
        """Those that the codes consist of as well."""
        parts = ((codes.codes, codes.scales, codes.zeros, codes.group_of) for codes in self.codes.values())
        return [*self.tensors.values(), *(tensor for four in parts for tensor in four)]


class ReadAhead:
    """An iterator over what the steps need, one step ahead of who asks. Close it, or use it as a context manager."""

    def __init__(self, source: Source, steps: Sequence[Step], device: torch.device) -> None:
        self._source = source
        self._steps = steps
        self._device = device
        self._on_card = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_card else None  # type: ignore[no-untyped-call]
        self._copier = Copier(device)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read ahead")

    def __iter__(self) -> Iterator["Future[Loaded]"]:
        """A future for each step; that of the next one runs while this one is used."""
        following: Future[Loaded] | None = None
        for i, step in enumerate(self._steps):
            current = following or self._reader.submit(self._load, step)
            last = i + 1 == len(self._steps)
            following = None if last else self._reader.submit(self._load, self._steps[i + 1])
            yield current
            del current

    def close(self) -> None:
        """End the reading."""
        if self._source.arrival:
            self._source.arrival.stop()
        self._reader.shutdown(cancel_futures=True)
        self._copier.close()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _load(self, step: Step) -> Loaded:
        weights = weights_of(step.matrix) if step.matrix else ()
        with self._on_own_stream():
            codes = self._codes(weights)
            tensors = self._to_device([name for name in weights if name not in codes])
            for name in step.reads:
                if name not in tensors and name not in codes:
                    tensors[name] = self._source.read(name)
            for name, tensor in tensors.items():
                check_finite(self._source, name, tensor)
        if self._stream is not None:
            self._stream.synchronize()
        return Loaded(step, tensors, {name: self._source.grid(name) for name in weights if name not in codes}, codes)

    def _codes(self, names: Sequence[str]) -> dict[str, Codes]:
        """The codes of those tensors that have some, on the device."""
        found = {}
        for name in names:
            codes = self._source.codes(name)
            if codes is not None:
                check_finite(self._source, name, codes.scales.float() * 2**codes.bits)  # what no weight is beyond
                found[name] = codes.to(self._device)
        return found

    def _to_device(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The tensors `names` on the device, each span once (two names may stand for halves of one)."""
        spans = {name: self._source.span(name) for name in names}
        stored: dict[Span, Tensor] = {}
        for span in spans.values():
            if span is not None and span not in stored:
                stored[span] = torch.empty(span.nbytes, dtype=torch.uint8, device=self._device)
        self._copier.copy([piece for span, raw in stored.items() for piece in pieces_of(span, raw)])
        tensors = {}
        for name, span in spans.items():
            if span is None:
                tensors[name] = self._source.read(name).to(self._device)
            else:
                tensors[name] = self._source.formed(name, stored[span].view(span.dtype).view(span.shape))
        return tensors

    def _on_own_stream(self) -> AbstractContextManager[object]:
        """Work on the card that does not wait for the arithmetic; memory comes from a pool of this stream's own."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def check_finite(source: Source, name: str, tensor: Tensor) -> None:
    """Refuse a tensor of which no scale would have a meaning.

    Raises:
        BadCheckpoint: it holds NaN, infinity, or what is so large that a range or a product would be infinite.
    """
    low, high = (float(extreme) for extreme in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise BadCheckpoint(f"{source.name}: {name} holds NaN or infinite values, so the checkpoint is damaged.")
    if max(high, -low) > _LARGEST:
        raise BadCheckpoint(
            f"{source.name}: {name} holds a value of {max(high, low, key=abs):.1e}, so the checkpoint is damaged."
        )
