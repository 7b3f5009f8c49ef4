"""localchat/forward_graphs.py: which forwards become a graph, and when. What one gives: test_graph.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localchat.forward_graphs import SIZES, ForwardGraphs


class Recorded(ForwardGraphs):
    """Takes down what would be captured; a capture of `failing` rows finds no memory."""

    def __init__(self, most: int = 512) -> None:
        super().__init__(SimpleNamespace(), SimpleNamespace(), most)  # type: ignore[arg-type]
        self.captures: list[int] = []
        self.failing: set[int] = set()

    def _capture(self, size: int) -> Any:
        self.captures.append(size)
        if size in self.failing:
            raise torch.OutOfMemoryError
        return size


def test_a_size_is_captured_once_a_forward_of_it_has_run_to_its_end() -> None:
    graphs = Recorded()
    assert not graphs.ready(16)  # begun, and broken off: nobody says that it ran
    assert not graphs.ready(16)
    assert not graphs.captures
    graphs.ran(16)
    assert graphs.ready(16)
    assert graphs.ready(16)
    assert graphs.captures == [16]
    assert not graphs.ready(32)


def test_forwards_are_filled_up_to_few_sizes() -> None:
    graphs = Recorded()
    sizes = {graphs.size(tokens, 1000) for tokens in range(2, 257)}
    assert sizes == set(SIZES)
    for tokens, size in ((2, 2), (3, 4), (9, 16), (17, 32), (200, 256), (256, 256)):
        assert graphs.size(tokens, 1000) == size


@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (257, 0), (200, 131_072), (2, 2**24 - 1)])
def test_what_is_none_for_a_graph(tokens: int, start: int) -> None:
    """One token has its own; the work of many, or of many behind a long context, hides the launches."""
    assert Recorded().size(tokens, start) is None
    assert Recorded().size(2, 2**24 - 2) == 2


def test_no_more_tokens_than_packed_products_take() -> None:
    assert Recorded(32).size(33, 0) is None
    assert Recorded(32).size(32, 0) == 32
    assert Recorded(40).size(33, 0) is None
    assert Recorded(0).size(2, 0) is None


def test_without_memory_for_a_graph_they_are_launched_one_by_one() -> None:
    graphs = Recorded()
    graphs.failing.add(8)
    graphs.ran(8)
    assert not graphs.ready(8)
    assert not graphs.ready(8)
    assert graphs.captures == [8]  # not at every message
    graphs.failing.clear()
    graphs.ran(8)
    assert graphs.ready(8)
