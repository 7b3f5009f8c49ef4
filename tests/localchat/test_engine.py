"""The engine over a tiny random model: what the cache holds, what the forward receives, and when a reply ends."""

from typing import Any

import pytest
import torch

from localchat.config import ModelConfig
from localchat.engine import Engine
from localchat.forward_graphs import ForwardGraphs
from localchat.model import Model
from localchat.ops import ReferenceOps
from localchat.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
        }
    )
    made = Model(config, ReferenceOps())
    for buffer in made.buffers():
        buffer.copy_(torch.randn_like(buffer) * 0.3)
    made.inv_freq = Model(config, ReferenceOps()).inv_freq
    return made


def prefill(engine: Engine, ids: list[int], snapshot_at: int | None = None) -> list[int]:
    """What a prefill says when a chunk is done; how often it looks up within one is a matter of time."""
    before = len(engine.ids)
    return [done for done in engine.prefill(ids, snapshot_at) if done == len(engine.ids) - before]


def test_prefill_reports_its_chunks_and_counts_what_it_forwarded(model: Model) -> None:
    engine = Engine(model, 1000)
    ids = [i % 100 for i in range(ReferenceOps.prefill_chunk * 2 + 5)]
    assert prefill(engine, ids) == [ReferenceOps.prefill_chunk, 2 * ReferenceOps.prefill_chunk, len(ids)]
    assert engine.ids == ids
    assert engine.cache.length == engine.tokens_forwarded == len(ids)


def test_a_closed_prefill_keeps_whole_chunks(model: Model) -> None:
    engine = Engine(model, 1000)
    ids = [i % 100 for i in range(700)]
    steps = engine.prefill(ids)
    while next(steps) < ReferenceOps.prefill_chunk:
        continue
    steps.close()
    assert engine.ids == ids[: ReferenceOps.prefill_chunk]
    assert engine.cache.length == ReferenceOps.prefill_chunk
    prefill(engine, ids[ReferenceOps.prefill_chunk :])
    fresh = Engine(model, 1000)
    prefill(fresh, ids)
    assert list(engine.generate(GREEDY, (), 5)) == list(fresh.generate(GREEDY, (), 5))


def test_a_prefill_looks_up_between_layers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a layer takes, the caller gets a word after each, and nothing of the chunk counts before its end."""
    monkeypatch.setattr("localchat.engine.LOOK_UP", 0.0)
    engine = Engine(model, 1000)
    said = [(done, len(engine.ids)) for done in engine.prefill([i % 100 for i in range(300)])]
    assert said == [(128, 0), (256, 256), (278, 256), (300, 300)]


def test_a_forward_of_many_tokens_knows_how_long_the_conversation_is(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what may become a graph it does not: the same kernels have to serve there."""
    said, layer_by_layer = [], model.layer_by_layer

    def spied(ids: torch.Tensor, positions: torch.Tensor, *arguments: Any) -> Any:
        said.append((int(positions[-1]) + 1, arguments[-1]))
        return layer_by_layer(ids, positions, *arguments)

    monkeypatch.setattr(model, "layer_by_layer", spied)
    engine = Engine(model, 1000)
    engine._graphs = ForwardGraphs(model, engine.cache, 16)
    for tokens in (300, 33, 17, 16, 1):
        prefill(engine, [5] * tokens)
    assert said == [(256, 256), (300, 300), (333, 333), (350, 350), (366, None), (367, 367)]
    assert engine._graphs._ran == {16}


def test_a_prefill_closed_between_layers_never_began_its_chunk(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat.engine.LOOK_UP", 0.0)
    wanted, engine = Engine(model, 1000), Engine(model, 1000)
    prefill(wanted, [5, 6, 7, 8])
    prefill(engine, [5, 6])
    steps = engine.prefill([i % 100 for i in range(300)])
    assert next(steps) == 128
    steps.close()
    assert engine.ids == [5, 6]
    assert engine.cache.is_at(2)
    prefill(engine, [7, 8])
    assert list(engine.generate(GREEDY, (), 5)) == list(wanted.generate(GREEDY, (), 5))


def test_generate_caches_all_but_the_last_token(model: Model) -> None:
    engine = Engine(model, 100)
    prefill(engine, [1, 2, 3])
    out = list(engine.generate(GREEDY, (), 10))
    assert len(out) == 10
    assert engine.ids == [1, 2, 3, *out[:-1]]
    assert engine.tokens_forwarded == 3 + 9


def test_a_stop_id_is_the_last_one_yielded_and_never_cached(model: Model) -> None:
    engine = Engine(model, 100)
    prefill(engine, [1, 2, 3])
    out = list(engine.generate(GREEDY, (), 10))
    engine.rewind(0)
    prefill(engine, [1, 2, 3])
    first = out.index(out[4])
    assert list(engine.generate(GREEDY, {out[4]}, 10)) == out[: first + 1]
    assert engine.ids == [1, 2, 3, *out[:first]]


def test_generation_ends_when_the_cache_is_full(model: Model) -> None:
    engine = Engine(model, 10)
    prefill(engine, [1] * 7)
    assert len(list(engine.generate(GREEDY, (), 99))) == 4  # three fit, the fourth needs no room
    assert len(engine.ids) == 10


@pytest.mark.parametrize("int8_kv", [False, True])
def test_rewinding_and_going_on_is_as_if_nothing_had_happened(model: Model, int8_kv: bool) -> None:
    engine = Engine(model, 100, int8_kv=int8_kv)
    prefill(engine, [5, 6, 7, 8])
    wanted = list(engine.generate(GREEDY, (), 8))
    assert engine.rewind(2) == 2
    prefill(engine, [50, 51])
    list(engine.generate(GREEDY, (), 8))
    assert engine.rewind(2) == 2
    prefill(engine, [7, 8])
    assert list(engine.generate(GREEDY, (), 8)) == wanted


def test_an_interruption_at_any_point_leaves_a_cache_that_heals(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may arrive between two statements: here right after the cache has grown, before `ids` has."""
    wanted = Engine(model, 100)
    prefill(wanted, [5, 6, 7, 8])
    engine = Engine(model, 100)
    prefill(engine, [5, 6])
    append = engine.cache.append

    def interrupted(tokens: int) -> None:
        append(tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.cache, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prefill(engine, [50, 51])
    monkeypatch.setattr(engine.cache, "append", append)
    assert engine.ids == [5, 6]
    prefill(engine, [7, 8])
    assert engine.cache.length == 4
    assert list(engine.generate(GREEDY, (), 5)) == list(wanted.generate(GREEDY, (), 5))


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_rewind_heals_too(model: Model, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Ctrl-C on either side of the moment when the cache is cut."""
    wanted, engine = Engine(model, 100), Engine(model, 100)
    prefill(wanted, [5, 6, 7, 8])
    prefill(engine, [5, 6, 50, 51, 52])
    truncate = engine.cache.truncate

    def interrupted(length: int) -> None:
        if after:
            truncate(length)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.cache, "truncate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.rewind(2)
    monkeypatch.setattr(engine.cache, "truncate", truncate)
    assert engine.rewind(len(engine.ids)) <= engine.cache.length
    assert engine.rewind(2) == 2
    prefill(engine, [7, 8])
    assert list(engine.generate(GREEDY, (), 5)) == list(wanted.generate(GREEDY, (), 5))


def test_rewind_beyond_the_end_changes_nothing(model: Model) -> None:
    engine = Engine(model, 100)
    prefill(engine, [1, 2])
    assert engine.rewind(50) == 2
    assert len(list(engine.generate(GREEDY, (), 1))) == 1


def test_generating_from_nothing_is_refused(model: Model) -> None:
    engine = Engine(model, 100)
    with pytest.raises(ValueError, match="prefill first"):
        next(engine.generate(GREEDY, (), 1))
    prefill(engine, [1, 2])
    engine.rewind(1)
    with pytest.raises(ValueError, match="prefill first"):
        next(engine.generate(GREEDY, (), 1))


@pytest.mark.parametrize("ids", [[0] * 11, [100], [-1]])
def test_ids_that_cannot_be_forwarded_are_refused_before_anything_changes(model: Model, ids: list[int]) -> None:
    engine = Engine(model, 10)
    with pytest.raises(ValueError, match="wanted"):
        prefill(engine, ids)
    assert engine.ids == []


def test_padding_rows_of_the_vocabulary_are_never_drawn(model: Model) -> None:
    engine = Engine(model, 300, vocab_size=7)
    prefill(engine, [99, 1])
    assert max(engine.generate(Sampling(temperature=5.0, top_p=1.0), (), 200)) < 7


def test_a_seed_makes_a_reply_reproducible(model: Model) -> None:
    replies = []
    for seed in (3, 3, 4):
        engine = Engine(model, 100)
        prefill(engine, [1, 2, 3])
        replies.append(list(engine.generate(Sampling(temperature=1.5, top_p=1.0, seed=seed), (), 30)))
    assert replies[0] == replies[1] != replies[2]


def test_presence_penalty_counts_the_reply_only(model: Model) -> None:
    engine = Engine(model, 200)
    prefill(engine, list(range(50)))
    out = list(engine.generate(Sampling(temperature=0.0, presence_penalty=100.0), (), 60))
    assert len(set(out)) == 60  # never twice in a reply
    assert set(out) & set(range(50))  # but the prompt's ids are free


def test_what_was_seen_follows_every_turn_of_the_conversation(model: Model) -> None:
    """A reply that is taken back is not seen any more, nor is what a closed prefill had begun."""
    engine = Engine(model, 200, vocab_size=90)
    sampling = Sampling(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5)
    prefill(engine, [1, 2, 3, 95])  # an id behind the tokenizer's
    list(engine.generate(sampling, (), 9))
    engine.rewind(2)
    prefill(engine, [7, 8, 99])
    list(engine.generate(sampling, (), 4))
    replied = 2
    engine.rewind(5)
    prefill(engine, [4])
    fresh = Engine(model, 200, vocab_size=90)
    prefill(fresh, [1, 2, 7, 8, 99, 4])
    outs = [list(e.generate(sampling, (), 30, replied=replied)) for e in (engine, fresh)]
    assert outs[0] == outs[1]
    assert torch.equal(engine._seen, fresh._seen)
    assert {i for i in range(90) if fresh._seen[i]} == {i for i in fresh.ids if i < 90}


class Recurrent:
    """An engine over a model with recurrent layers, with a look at all that its forward leaves behind."""

    def __init__(self, hybrid: Any, **options: Any) -> None:
        self.engine = Engine(hybrid, 500, **options)
        self.ids = [(7 * i + i * i // 3) % 260 for i in range(300)]

    def prefill(self, start: int, end: int, snapshot_at: int | None = None) -> list[int]:
        return prefill(self.engine, self.ids[start:end], snapshot_at)

    def state(self) -> list[torch.Tensor]:
        cache = self.engine.cache
        rows = [rows[:, :, : cache.length] for rows in cache.rows]
        return [tensor.clone() for tensor in (*cache.recurrent, *rows)]


@pytest.fixture
def recurrent(hybrid: Any) -> Recurrent:
    return Recurrent(hybrid)


def identical(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("int8_kv", [False, True])
def test_prefill_stops_at_a_boundary_and_rewind_returns_there(hybrid: Any, int8_kv: bool) -> None:
    recurrent = Recurrent(hybrid, int8_kv=int8_kv)
    engine = recurrent.engine
    assert engine.cache.int8 == int8_kv
    assert recurrent.prefill(0, 100, snapshot_at=50) == [32, 50, 82, 100]
    assert engine.snapshots.lengths == [50]
    state, wanted = recurrent.state(), list(engine.generate(GREEDY, (), 30))
    for _ in range(2):  # snapshot -> continue -> restore -> continue, bit for bit
        assert engine.rewind(99) == 50
        assert (engine.ids, engine.cache.length) == (recurrent.ids[:50], 50)
        recurrent.prefill(50, 100)
        assert identical(recurrent.state(), state)
        assert list(engine.generate(GREEDY, (), 30)) == wanted


def test_a_restored_state_is_that_of_the_tokens_before_it(recurrent: Recurrent, hybrid: Any) -> None:
    recurrent.prefill(0, 200, snapshot_at=70)
    recurrent.engine.rewind(80)
    fresh = Recurrent(hybrid)
    fresh.prefill(0, 70)
    for restored, computed in zip(recurrent.state(), fresh.state(), strict=True):
        torch.testing.assert_close(restored, computed)


def test_a_snapshot_at_the_end_and_at_the_start_of_a_prefill(recurrent: Recurrent) -> None:
    recurrent.prefill(0, 40, snapshot_at=40)
    recurrent.prefill(40, 60, snapshot_at=40)
    recurrent.prefill(60, 80, snapshot_at=60)
    recurrent.prefill(80, 90, snapshot_at=70)  # too late
    assert recurrent.engine.snapshots.lengths == [40, 60]
    assert recurrent.engine.rewind(89) == 60


def test_going_on_from_the_end_needs_no_snapshot(recurrent: Recurrent) -> None:
    recurrent.prefill(0, 40)
    assert recurrent.engine.rewind(40) == recurrent.engine.rewind(99) == 40
    assert len(list(recurrent.engine.generate(GREEDY, (), 1))) == 1


def test_without_a_snapshot_a_recurrent_model_starts_again(recurrent: Recurrent, hybrid: Any) -> None:
    recurrent.prefill(0, 100, snapshot_at=50)
    assert recurrent.engine.rewind(49) == 0
    assert recurrent.engine.ids == []
    recurrent.prefill(0, 64)
    fresh = Recurrent(hybrid)
    fresh.prefill(0, 64)
    assert identical(recurrent.state(), fresh.state())


def test_a_model_that_can_be_cut_takes_no_snapshots(model: Model) -> None:
    engine = Engine(model, 1000)
    ids = [i % 100 for i in range(300)]
    assert prefill(engine, ids, snapshot_at=50) == [256, 300]
    assert not engine.recurrent
    assert engine.snapshots.nbytes == 0
    assert engine.rewind(77) == 77


@pytest.mark.parametrize("boundary", [None, 50])
@pytest.mark.parametrize("moment", ["forward", "append"])
def test_a_step_broken_off_falls_back_to_a_snapshot(
    recurrent: Recurrent, hybrid: Any, monkeypatch: pytest.MonkeyPatch, boundary: int | None, moment: str
) -> None:
    engine, back = recurrent.engine, boundary or 0
    recurrent.prefill(0, 100, boundary)
    name = "append" if moment == "append" else "layer"
    original = getattr(engine.cache, name)

    def interrupted(argument: int) -> Any:  # at the last layer, when the ones before have changed their states
        result = original(argument)
        if name == "append" or argument == len(hybrid.config.layer_types) - 1:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            recurrent.prefill(100, 120)
    assert engine.ids == recurrent.ids[:back]
    assert engine.cache.is_at(back)
    recurrent.prefill(back, 120)
    undisturbed = Recurrent(hybrid)
    undisturbed.prefill(0, back)
    undisturbed.prefill(back, 120)
    assert identical(recurrent.state(), undisturbed.state())


@pytest.mark.parametrize("boundary", [None, 50])
def test_a_recurrent_prefill_closed_between_layers_is_back_at_the_boundary(
    recurrent: Recurrent, monkeypatch: pytest.MonkeyPatch, boundary: int | None
) -> None:
    monkeypatch.setattr("localchat.engine.LOOK_UP", 0.0)
    engine, back = recurrent.engine, boundary or 0
    recurrent.prefill(0, 60, boundary)
    recurrent.prefill(60, 100)
    state = recurrent.state()
    steps = engine.prefill(recurrent.ids[100:200])
    while next(steps) <= 40:  # within the second chunk
        continue
    steps.close()
    assert engine.ids == recurrent.ids[:back]
    assert engine.cache.is_at(back)
    recurrent.prefill(back, 60)
    recurrent.prefill(60, 100)
    for healed, before in zip(recurrent.state(), state, strict=True):
        torch.testing.assert_close(healed, before)


def test_a_fall_back_that_is_interrupted_too_is_made_up_for(
    recurrent: Recurrent, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = recurrent.engine
    recurrent.prefill(0, 100, 50)
    state = recurrent.state()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "append", interrupted)
        patch.setattr(engine.cache, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recurrent.prefill(100, 120)
    with pytest.raises(ValueError, match="broken off"):  # never a reply from a state that is of no use
        recurrent.prefill(100, 120)
    assert engine.rewind(100) == 50
    recurrent.prefill(50, 100)
    assert identical(recurrent.state(), state)


def test_an_interrupted_reply_can_be_returned_from(recurrent: Recurrent) -> None:
    engine = recurrent.engine
    recurrent.prefill(0, 100, snapshot_at=98)
    replies = engine.generate(GREEDY, (), 50)
    said = [next(replies) for _ in range(10)]
    replies.close()
    assert engine.ids == recurrent.ids[:100] + said[:-1]
    assert engine.rewind(99) == 98
    recurrent.prefill(98, 100)
    assert list(engine.generate(GREEDY, (), 10)) == said
