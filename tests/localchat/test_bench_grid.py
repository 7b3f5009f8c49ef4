"""The rows of a benchmark: what they count, and that a made context is one that a model can go on from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from localchat import bench, bench_grid
from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.errors import UsageError
from localchat.ops import ReferenceOps
from localchat.sampling import Sampling
from localchat.synthetic import deepen, made_up

GREEDY = Sampling(temperature=0.0)


def test_every_depth_has_its_prompts_and_a_decode_row(scripted: Callable[..., Path]) -> None:
    grid = bench_grid.run_grid(scripted("ok"), prompts=(3, 20), depths=(0, 600), decode_tokens=5, repeats=2)
    rows = [("prefill", 3), ("prefill", 20), ("decode", 5)]
    assert [(row.kind, row.tokens, row.depth) for row in grid.rows] == [
        (*row, depth) for depth in (0, 600) for row in rows
    ]
    for row in grid.rows:
        assert row.seconds > 0
        assert row.rate == pytest.approx(row.tokens / row.seconds)
        assert row.repeats == 2
    deep = grid.rows[-1]
    assert deep.bytes - grid.bytes_per_token == 602 * grid.kv_bytes_per_token
    assert grid.kv_bytes_per_token == 2 * 96 * 4  # one layer, one head of 96, fp32
    assert json.loads(json.dumps(grid.to_dict()))["rows"][0]["kind"] == "prefill"


def test_flops_are_two_for_each_weight_and_pair(scripted: Callable[..., Path]) -> None:
    model = load_model(scripted("ok"))
    config = model.config
    hidden, inter = config.hidden_size, config.intermediate_size
    block = hidden * (config.q_size + 2 * config.kv_size) + config.q_size * hidden + 3 * hidden * inter
    head = 2 * config.vocab_size * hidden
    pairs = 10 * 100 + 55  # ten queries see a hundred keys, and 1, 2, ... 10 of their own
    wanted = 2 * 10 * block + 4 * config.q_size * pairs
    assert bench_grid.prefill_flops(model, 10, 100) == wanted + head
    assert bench_grid.decode_flops(model, 10, 100) == wanted + 10 * head


def test_runs_start_at_their_depth(scripted: Callable[..., Path]) -> None:
    engine = Engine(load_model(scripted("ok")), 400)
    for _ in range(2):
        bench_grid.prefill_seconds(engine, 20, 300)
        assert engine.cache.length == 320
        bench_grid.decode_seconds(engine, 7, 300)
        assert engine.cache.length == 308
    assert engine.tokens_forwarded == 256 + 2 * (20 + 8)  # one chunk was read of the 300


@pytest.mark.parametrize("length", [20, 32, 75])
def test_a_made_context_is_finite_and_can_be_returned_to(hybrid: Any, length: int) -> None:
    """Rows without a value would be NaN."""
    engine = Engine(hybrid, 100)
    engine.cache.keys.fill_(float("nan"))
    engine.cache.values.fill_(float("nan"))
    deepen(engine, length)
    assert len(engine.ids) == engine.cache.length == length
    assert bool(engine.cache.keys[:, :, :length].isfinite().all())
    assert engine.tokens_forwarded == min(length, 32)
    replies = []
    for _ in range(2):
        assert engine.rewind(length) == length
        list(engine.prefill([7, 8]))
        with torch.inference_mode():
            assert bool(hybrid.logits(engine._hidden).isfinite().all())
        replies.append(list(engine.generate(GREEDY, (), 8)))
    assert replies[0] == replies[1]


def test_a_made_context_of_one_chunk_is_the_one_that_is_read(hybrid: Any) -> None:
    made, read = Engine(hybrid, 100), Engine(hybrid, 100)
    deepen(made, 30)
    list(read.prefill(made_up(read.vocab_size, 30)))
    assert made.ids == read.ids
    assert torch.equal(made.cache.keys[:, :, :30], read.cache.keys[:, :, :30])


def test_lengths_that_cannot_be_are_refused(scripted: Callable[..., Path]) -> None:
    most = load_model(scripted("ok"), ops=ReferenceOps()).config.max_position_embeddings
    with pytest.raises(UsageError, match="are more than the"):
        bench_grid.run_grid(scripted("ok"), depths=(0, most))
    with pytest.raises(UsageError, match="0 tokens cannot be read"):
        bench_grid.run_grid(scripted("ok"), prompts=(0, 5))


def test_rows_may_fill_the_whole_context(scripted: Callable[..., Path], tmp_path: Path) -> None:
    """A prompt of as many tokens as the model was made for, and drawing until the cache is full."""
    model = Path(shutil.copytree(scripted("ok"), tmp_path / "short"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300}))
    for prompts, depths, tokens in (((300,), (0,), 1), ((1,), (296,), 3)):
        grid = bench_grid.run_grid(model, prompts=prompts, depths=depths, decode_tokens=tokens, repeats=1)
        assert grid.context == 300
        assert [row.tokens for row in grid.rows] == [*prompts, tokens]
    with pytest.raises(UsageError, match="301 tokens, the longest row, are more than the 300 of"):
        bench_grid.run_grid(model, prompts=(1,), depths=(297,), decode_tokens=3)


def test_int8_keys_and_values_are_said(
    scripted: Callable[..., Path], command: Callable[..., CompletedProcess[bytes]]
) -> None:
    flags = ("bench", scripted("ok"), "--prompt", "9", "-n", "2", "--gpu", "cpu")
    assert b"keys and values           INT8\n" in command(*flags, "--kv-cache", "int8").stdout
    assert b"keys and values" not in command(*flags).stdout


def test_the_command(scripted: Callable[..., Path], command: Callable[..., CompletedProcess[bytes]]) -> None:
    model = scripted("ok")
    flags = ("bench", model, "--prompt", "30,9", "--depth", "40", "-n", "3", "--gpu", "cpu")
    done = command(*flags)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.decode().splitlines()[-3:]]
    assert [row[:3] for row in rows] == [["prefill", "9", "40"], ["prefill", "30", "40"], ["decode", "3", "40"]]
    document = json.loads(command(*flags, "--json").stdout)
    assert [row["tokens"] for row in document["rows"]] == [9, 30, 3]
    assert document["bytes_per_token"] == bench.bytes_per_token(load_model(model))
    refused = command("bench", model, "--prompt", "1k")
    assert refused.returncode == 2
    assert b"'1k' is no list of lengths such as 512,8192." in refused.stderr
