"""The benchmark's bookkeeping: what it counts, not how fast it is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from localchat import bench
from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.errors import UsageError


def test_bytes_per_token_are_the_packed_matrices(scripted: Callable[..., Path]) -> None:
    model = load_model(scripted("ok"))
    config = model.config
    rows = [(config.q_size + 2 * config.kv_size, config.hidden_size), (config.hidden_size, config.q_size)]
    rows += [(2 * config.intermediate_size, config.hidden_size), (config.hidden_size, config.intermediate_size)]
    codes = sum(n * k for n, k in rows) // 2 + config.vocab_size * config.hidden_size
    assert codes < bench.bytes_per_token(model) < 1.4 * codes  # scales come on top, the embedding is one row


def test_a_run_fills_the_record(scripted: Callable[..., Path]) -> None:
    result = bench.run(scripted("ok"), prompt_tokens=20, decode_tokens=5, repeats=1)
    assert min(result.prefill_rate, result.decode_rate, result.load_seconds, result.memory_bytes) > 0
    assert result.bandwidth == pytest.approx(result.bytes_per_token * result.decode_rate)
    assert {"prefill_rate", "decode_rate", "bandwidth", "memory_bytes"} <= result.to_dict().keys()


def test_more_tokens_than_the_model_was_made_for_are_refused(scripted: Callable[..., Path]) -> None:
    most = load_model(scripted("ok")).config.max_position_embeddings
    with pytest.raises(UsageError, match="are more than the"):
        bench.run(scripted("ok"), prompt_tokens=most, decode_tokens=1)


def test_every_repeat_starts_from_an_empty_cache(scripted: Callable[..., Path]) -> None:
    engine = Engine(load_model(scripted("ok")), 25)
    for _ in range(3):
        bench.measure(engine, 20, 5)
    assert engine.tokens_forwarded == 3 * (20 + 4)
