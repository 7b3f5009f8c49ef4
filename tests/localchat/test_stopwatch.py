"""stopwatch.py: the ways that are timed against each other compute the same. Interpreted here."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels.cards import Fragments
from localchat.kernels.int4_matmul import int4_matmul_reference
from localchat.stopwatch import Stopwatch, Trial, graph_seconds

N, K = 32, 256


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the card in this process (-m gpu)")


def watch(timer: Callable[..., float]) -> Stopwatch:
    torch.manual_seed(0)
    return Stopwatch(torch.device("cpu"), walk=3 * N * K // 2 + 100, timer=timer)


@pytest.mark.parametrize(
    "trial", [Trial(N, K, 1, Fragments(2, 1)), Trial(N, K, 16), Trial(N, K, 16, dense=True)], ids=str
)
def test_every_way_gives_the_product(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each matrix, one after the other: no call finds what another has read."""
    x = torch.randn(trial.tokens, K)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: x)
    results: list[Tensor] = []

    def timer(calls: Sequence[Callable[[], Tensor]]) -> float:
        results.extend(call().float().clone() for call in calls)
        return 0.5

    stopwatch = watch(timer)
    assert stopwatch(trial) == 0.5
    assert len(results) == 3
    words = stopwatch._words[: 3 * N * K // 8].view(3, N, K // 8)
    scales = torch.full((N // 16, K // 128, 16), 0.01, dtype=torch.float16)
    for out, matrix in zip(results, words, strict=True):
        wanted = int4_matmul_reference(x, matrix, scales)
        assert float((out - wanted).norm() / wanted.norm()) < (1e-2 if trial.dense else 1e-3)


def test_a_launch_that_the_card_cannot_do_has_no_time() -> None:
    from triton.runtime.errors import OutOfResources

    def refuses(_calls: Any) -> float:
        raise OutOfResources(200_000, 101_376, "shared memory")

    assert watch(refuses)(Trial(N, K, 1, Fragments(8, 2))) is None


def test_another_fault_is_not_hidden() -> None:
    def fails(_calls: Any) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        watch(fails)(Trial(N, K, 1, Fragments(4, 2)))
    with pytest.raises(ValueError, match="at least two"):
        watch(fails)(Trial(N * 4, K, 1, Fragments(4, 2)))


@pytest.mark.gpu
def test_on_a_card() -> None:
    """A product takes at least what its bytes take, and not a thousand times that."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    stopwatch = Stopwatch(torch.device("cuda"), timer=graph_seconds)
    for trial in (Trial(16384, 5120, 1, Fragments(4, 5)), Trial(16384, 5120, 16), Trial(16384, 5120, 16, dense=True)):
        seconds = stopwatch(trial)
        assert seconds is not None
        assert 16384 * 5120 / 2 / 1e13 < seconds < 1000 * 16384 * 5120 / 2 / 1e12
