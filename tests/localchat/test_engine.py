"""The engine over a tiny random model: what the cache holds, what the forward receives, and when a reply ends."""

import pytest
import torch

from localchat.config import ModelConfig
from localchat.engine import Engine
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


def prefill(engine: Engine, ids: list[int]) -> list[int]:
    return list(engine.prefill(ids))


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
    next(steps)
    steps.close()
    assert engine.ids == ids[: ReferenceOps.prefill_chunk]
    assert engine.cache.length == ReferenceOps.prefill_chunk
    prefill(engine, ids[ReferenceOps.prefill_chunk :])
    fresh = Engine(model, 1000)
    prefill(fresh, ids)
    assert list(engine.generate(GREEDY, (), 5)) == list(fresh.generate(GREEDY, (), 5))


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


def test_rewinding_and_going_on_is_as_if_nothing_had_happened(model: Model) -> None:
    engine = Engine(model, 100)
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
