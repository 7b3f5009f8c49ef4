"""How long work takes on a card, in a CUDA graph that goes through more memory than the card's cache holds.

`graph_seconds` times any calls. `Stopwatch` times a matrix product in one of the ways in which it could be done, for
localchat/tuning.py to choose from.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localchat.kernels.cards import Fragments
from localchat.kernels.int4_matmul import dequantize_int4, int4_matmul
from localchat.kernels.many_tokens import arrivals_for
from localchat.kernels.scaled_half import UNIT

_BATCH = 0.005  # seconds of replays between two looks at the clock
_BATCHES = 5
_CACHES = 4  # times the card's L2, that the calls go through
_LEAST_WALK = 256_000_000  # bytes
_MOST_CALLS = 64
_GROUP = 128


@dataclass(frozen=True)
class Trial:
    """The product of `tokens` inputs with an INT4 matrix [n, k].

    fragments: by the packed product, launched so; without them as the card says, or, dense, by dequantising and the
    library.
    """

    n: int
    k: int
    tokens: int
    fragments: Fragments | None = None
    dense: bool = False


def graph_seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one of `calls` in a CUDA graph of all of them."""
    for call in (*calls[:2], calls[-1]):  # compiles, and takes scratch memory
        call()
    torch.cuda.synchronize()
    start = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start.zero_()  # a plain launch, which waits for the walk before (kernels/pdl.py)
        for call in calls:
            call()
    graph.replay()
    replays = max(1, int(_BATCH / _replay_seconds(graph, 1)))
    return statistics.median(_replay_seconds(graph, replays) for _ in range(_BATCHES)) / len(calls)


def _replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / replays


class Stopwatch:
    """Called with a Trial: its seconds, or None where it cannot be done on this card.

    Holds four times the card's cache in random words, which all matrices are made of.

    Raises (also when it is made):
        torch.OutOfMemoryError: the card has no room for them.
    """

    def __init__(self, device: torch.device, walk: int | None = None, timer: Callable[..., float] = graph_seconds):
        if walk is None:
            walk = max(_LEAST_WALK, _CACHES * torch.cuda.get_device_properties(device).L2_cache_size)
        self._device, self._timer = device, timer
        self._words = torch.randint(-(2**31), 2**31, (walk // 4,), dtype=torch.int32, device=device)
        self._scales = torch.full((walk // 4 * 8 // _GROUP,), 0.01, dtype=torch.float16, device=device)

    def __call__(self, trial: Trial) -> float | None:
        from triton.errors import TritonError

        try:
            with torch.inference_mode():
                return self._timer(self.calls(trial))
        except (TritonError, torch.OutOfMemoryError):
            return None

    def calls(self, trial: Trial) -> list[Callable[[], Tensor]]:
        """The same product with as many different matrices as there are words for, 64 at the most."""
        n, k, tokens = trial.n, trial.k, trial.tokens
        count = min(_MOST_CALLS, self._words.numel() // (n * k // 8))
        if count < 2:
            raise ValueError(f"Stopwatch: got [{n}, {k}], wanted at least two of them in {self._words.nbytes} bytes")
        words = self._words[: count * n * k // 8].view(count, n, k // 8)
        scales = self._scales[: count * n * k // _GROUP].view(count, n // 16, k // _GROUP, 16)
        x = torch.randn(tokens, k, device=self._device)
        if trial.dense:
            half, scratch = x.bfloat16(), torch.empty(n, k, dtype=torch.bfloat16, device=self._device)

            def dense(i: int) -> Tensor:
                return torch.nn.functional.linear(half, dequantize_int4(words[i], scales[i], None, scratch))

            return [lambda i=i: dense(i) for i in range(count)]  # type: ignore[misc]
        units = torch.full((tokens,), UNIT, device=self._device)
        values, out = (x / UNIT).half(), torch.empty(tokens, n, device=self._device)
        arrivals, settings = arrivals_for(self._device), trial.fragments

        def packed(i: int) -> Tensor:
            return int4_matmul(values, units, words[i], scales[i], out=out, arrivals=arrivals, settings=settings)

        return [lambda i=i: packed(i) for i in range(count)]  # type: ignore[misc]
