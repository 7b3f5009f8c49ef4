"""What the captured step reads is what the host thinks it has written, also after Ctrl-C between two writes."""

import pytest
import torch

from localchat.graph import DecodeGraph
from localchat.sampling import Sampling


@pytest.fixture
def graph() -> DecodeGraph:
    """Only the step's inputs, on a CPU."""
    made = DecodeGraph.__new__(DecodeGraph)
    made._token, made._position, made._draw_position = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    made._settings_f, made._settings_i = torch.zeros(8), torch.zeros(4, dtype=torch.int64)
    made._now = (-1, -1, None)
    return made


def inputs(graph: DecodeGraph) -> list[list[float]]:
    tensors = (graph._token, graph._position, graph._draw_position, graph._settings_f, graph._settings_i)
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("broken", ["_position", "_draw_position", "_settings_f", "_settings_i"])
def test_an_interrupted_write_is_made_up_for(graph: DecodeGraph, broken: str) -> None:
    first, second = Sampling(temperature=0.7, top_k=20), Sampling(temperature=0.0)
    graph._set(5, 19, first)
    wanted = inputs(graph)

    class Interrupted:
        def fill_(self, value: int) -> None:
            raise KeyboardInterrupt

        copy_ = fill_

    real = getattr(graph, broken)
    setattr(graph, broken, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        graph._set(6, 20, second)
    setattr(graph, broken, real)
    graph._set(5, 19, first)
    assert inputs(graph) == wanted


def test_what_is_there_is_not_written_again(graph: DecodeGraph) -> None:
    sampling = Sampling(temperature=0.7)
    graph._set(5, 19, sampling)
    graph._token.fill_(7)
    graph._settings_f.fill_(0)
    graph._set(5, 19, sampling)
    assert (int(graph._token), float(graph._settings_f.sum())) == (7, 0.0)
