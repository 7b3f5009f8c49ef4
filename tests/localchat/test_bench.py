"""The benchmark's bookkeeping: what it counts, not how fast it is."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat import bench, cli, synthetic
from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.errors import DoesNotFit, UsageError
from localchat.ledger import ledger_of_folder
from localchat.memory_table import Memory


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


@pytest.mark.parametrize("lengths", [[], ["--prompt", "8,512", "--depth", "120"]])
def test_what_does_not_fit_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lengths: list[str]
) -> None:
    monkeypatch.setattr(bench, "memory_on", lambda *_: Memory("cpu", "this machine", 25_000_000_000))
    monkeypatch.setattr(synthetic, "fill_linear", lambda *_: pytest.fail("it is being made"))
    words = ["--synthetic", "--gpu", "cpu", *lengths]
    assert cli.main(["bench", "qwen2.5-72b", *words]) == 4
    sentence, hint = capsys.readouterr().err.splitlines()[-2:]
    wanted = "632" if lengths else "640"
    assert sentence.endswith(f"the model and a context of {wanted} tokens do not fit into 25.0 GB of memory.")
    assert re.fullmatch(r"`localchat bench [\w.-]+` fits\.", hint)


def test_a_bench_that_could_be_shorter_says_by_how_much(scripted: Callable[..., Path], tight: Memory) -> None:
    """What it may take is the ledger's, with the flags that it has."""
    with pytest.raises(DoesNotFit, match="a context of 61 tokens") as caught:
        bench.run(scripted("ok"), prompt_tokens=50, decode_tokens=11)
    assert "--kv-cache int8 fits; 60 tokens in all fit (-p, -n, --prompt, --depth)" in caught.value.hint
    assert "--ctx" not in caught.value.hint
    bench.run(scripted("ok"), prompt_tokens=50, decode_tokens=10, repeats=1)
    bench.run(scripted("ok"), prompt_tokens=50, decode_tokens=11, repeats=1, int8_kv=True)


@pytest.fixture
def tight(scripted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A processor's memory with room for 60 tokens of the scripted model."""
    memory = Memory("cpu", "this machine", ledger_of_folder(scripted("ok"), 60).total)
    monkeypatch.setattr(bench, "memory_on", lambda *_: memory)
    return memory


def test_every_repeat_starts_from_an_empty_cache(scripted: Callable[..., Path]) -> None:
    engine = Engine(load_model(scripted("ok")), 25)
    for _ in range(3):
        bench.measure(engine, 20, 5)
    assert engine.tokens_forwarded == 3 * (20 + 4)
