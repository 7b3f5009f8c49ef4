"""localchat/forward_graphs.py: which numbers of tokens become a graph, and when. What one gives: test_graph.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localchat.forward_graphs import KEPT, ForwardGraphs


class Recorded(ForwardGraphs):
    """Takes down what would be captured; a capture of `failing` tokens finds no memory."""

    def __init__(self, most: int = 32) -> None:
        super().__init__(SimpleNamespace(), SimpleNamespace(), most)  # type: ignore[arg-type]
        self.captures: list[int] = []
        self.failing: set[int] = set()

    def _capture(self, tokens: int) -> Any:
        self.captures.append(tokens)
        if tokens in self.failing:
            raise torch.OutOfMemoryError
        return tokens


def test_a_number_is_captured_once_a_forward_of_it_has_run_to_its_end() -> None:
    graphs = Recorded()
    assert not graphs.ready(16)  # begun, and broken off: nobody says that it ran
    assert not graphs.ready(16) and not graphs.captures
    graphs.ran(16)
    assert graphs.ready(16) and graphs.ready(16)
    assert graphs.captures == [16]
    assert not graphs.ready(17)


@pytest.mark.parametrize(("most", "yes", "no"), [(32, [2, 32], [1, 33]), (8, [2, 8], [1, 9, 32]), (64, [32], [33])])
def test_only_few_tokens_are(most: int, yes: list[int], no: list[int]) -> None:
    graphs = Recorded(most)
    for tokens in yes + no:
        graphs.ran(tokens)
    assert [tokens for tokens in yes + no if graphs.ready(tokens)] == yes
    assert [tokens for tokens in yes + no if graphs.takes(tokens)] == yes


def test_the_last_few_are_kept() -> None:
    graphs = Recorded()
    lengths = list(range(2, 2 + KEPT + 1))
    for tokens in lengths:
        graphs.ran(tokens)
        assert graphs.ready(tokens)
    assert list(graphs._captured) == lengths[1:]
    assert graphs.ready(lengths[0]) and graphs.captures == [*lengths, lengths[0]]  # it has run: captured at once


def test_without_memory_for_a_graph_they_are_launched_one_by_one() -> None:
    graphs = Recorded()
    graphs.failing.add(5)
    graphs.ran(5)
    assert not graphs.ready(5) and not graphs.ready(5)
    assert graphs.captures == [5]  # not at every message
    graphs.failing.clear()
    graphs.ran(5)
    assert graphs.ready(5)
