"""The workers of a conversion, and torch's own threads."""

from collections.abc import Iterator

import pytest
import torch

from localchat.quantize.threads import worker_pool


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_operations_run_on_one_thread_inside_and_the_setting_returns() -> None:
    with worker_pool() as pool:
        assert torch.get_num_threads() == 1
        assert list(pool.map(lambda _: torch.get_num_threads(), range(4))) == [1] * 4
    assert torch.get_num_threads() == 3


def test_setting_returns_after_an_error() -> None:
    with pytest.raises(RuntimeError), worker_pool():
        raise RuntimeError
    assert torch.get_num_threads() == 3
