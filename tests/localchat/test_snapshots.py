"""Which states are kept: how many, how far apart, and in whose memory."""

from dataclasses import replace

import pytest
import torch

from localchat import cache as cache_module
from localchat import ledger
from localchat.cache import KVCache
from localchat.config import ModelConfig
from localchat.ledger import default_snapshot_budget
from localchat.snapshots import KEPT_NEWEST, Snapshots

RAW = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}
CONFIG = replace(
    ModelConfig.from_dict(RAW),
    layer_types=("linear_attention",),
    linear_num_key_heads=1,
    linear_num_value_heads=1,
    linear_key_head_dim=2,
    linear_value_head_dim=2,
    linear_conv_kernel_dim=4,
)


class Turns:
    """A conversation whose turns are 10 tokens long, with a snapshot after each; `allocations` counts buffers taken."""

    def __init__(self, capacity: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = KVCache(CONFIG, 1 << 20, dtype=torch.float32, device=torch.device("cpu"))
        self.snapshots = Snapshots(self.cache, int(capacity * self.cache.snapshot_nbytes))
        self.allocations, self.available = 0, 1 << 20
        host_bytes = cache_module.host_bytes

        def counted(nbytes: int, device: torch.device) -> torch.Tensor:
            if self.allocations == self.available:
                raise MemoryError("no more")
            self.allocations += 1
            return host_bytes(nbytes, device)

        monkeypatch.setattr(cache_module, "host_bytes", counted)

    def run(self, count: int) -> "Turns":
        for _ in range(count):
            self.cache.begin()
            self.cache.recurrent[1].fill_(self.cache.length + 10)
            self.cache.append(10)
            self.snapshots.take()
        return self

    def ages(self) -> list[int]:
        """Of what is kept: how many turns ago, from the newest on."""
        return [(self.cache.length - length) // 10 for length in reversed(self.snapshots.lengths)]


def test_all_are_kept_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(12.9, monkeypatch).run(12)
    assert turns.ages() == list(range(12))
    assert turns.snapshots.nbytes == 12 * turns.cache.snapshot_nbytes


@pytest.mark.parametrize("capacity", [10, 16, 27])
@pytest.mark.parametrize("count", [30, 100, 1000])
def test_the_newest_stay_and_older_ones_are_spaced_exponentially(
    monkeypatch: pytest.MonkeyPatch, capacity: int, count: int
) -> None:
    turns = Turns(capacity, monkeypatch).run(count)
    ages = turns.ages()
    assert len(ages) == capacity
    assert ages[:KEPT_NEWEST] == list(range(KEPT_NEWEST))
    # A return to any turn that old reads again at most a share of the way, which falls with the room there is.
    older = [*ages[KEPT_NEWEST:], count]
    growth = max((b - a) / a for a, b in zip([KEPT_NEWEST - 1, *older[:-1]], older, strict=True))
    assert growth <= 2 * (count / KEPT_NEWEST) ** (1 / (capacity - KEPT_NEWEST))
    assert turns.allocations == capacity


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_a_small_budget_keeps_the_newest(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    turns = Turns(capacity, monkeypatch).run(40)
    assert turns.ages() == list(range(capacity))
    assert turns.allocations == capacity


def test_a_budget_below_one_snapshot_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(0.9, monkeypatch).run(3)
    assert turns.snapshots.newest(100) is None
    assert turns.allocations == turns.snapshots.nbytes == 0


def test_the_newest_one_within_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Turns(10, monkeypatch).run(4).snapshots
    found = {length: snapshots.newest(length) for length in (9, 10, 29, 30, 99)}
    assert {length: s and s.length for length, s in found.items()} == {9: None, 10: 10, 29: 20, 30: 30, 99: 40}


def test_what_a_return_leaves_behind_is_dropped_and_its_memory_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(10, monkeypatch).run(6)
    target = turns.snapshots.newest(20)
    if target is None:
        raise AssertionError("nothing was kept")
    turns.cache.restore(target)
    assert turns.snapshots.lengths == [10, 20]
    assert float(turns.cache.recurrent[1].max()) == 20
    turns.run(4)
    assert turns.snapshots.lengths == [10, 20, 30, 40, 50, 60]
    assert turns.allocations == 6
    for length in turns.snapshots.lengths:
        kept = turns.snapshots.newest(length)
        assert kept is not None and (kept.states[1] == length).all()


def test_taking_twice_at_the_same_place_takes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(10, monkeypatch).run(2)
    turns.snapshots.take()
    assert turns.snapshots.lengths == [10, 20]


@pytest.mark.parametrize("available", [0, 1, 4])
def test_a_machine_with_less_memory_than_the_budget(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    turns = Turns(10, monkeypatch)
    turns.available = available
    assert turns.run(20).ages() == list(range(available))


def test_attention_alone_needs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(10, monkeypatch)
    turns.cache = KVCache(ModelConfig.from_dict(RAW), 20, dtype=torch.float32, device=torch.device("cpu"))
    turns.snapshots = Snapshots(turns.cache, default_snapshot_budget())
    turns.cache.append(5)
    turns.snapshots.take()
    assert (turns.snapshots.nbytes, turns.allocations) == (0, 0)


def test_the_budget_is_at_most_an_eighth_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for total, budget in ((8 << 30, 1 << 30), (64 << 30, 4 << 30)):
        monkeypatch.setattr(ledger, "memory_used", lambda total=total: (0, total))
        assert default_snapshot_budget() == budget
