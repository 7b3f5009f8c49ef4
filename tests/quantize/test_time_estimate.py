"""The estimated time: what it is made of, by a clock that advances a second at each look."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.config import ModelConfig
from localchat.quantize import calibration_time, time_estimate
from localchat.quantize.calibrate import calibration_of
from localchat.quantize.calibration_time import calibration_seconds, calibration_tokens
from localchat.quantize.convert import Recipe, open_source
from localchat.quantize.plan import plan
from localchat.quantize.time_estimate import time_line

Make = Callable[..., Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample takes one second."""
    seconds = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def test_the_time_grows_with_the_model(make_hf: Make, clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(time_estimate._SAMPLE, "cpu", 64 * 10)
    seconds = []
    for layers in (1, 3):
        with open_source(make_hf(name=f"m{layers}", num_hidden_layers=layers)) as source:
            line = time_line(plan(source.model_config, Recipe(32, False)), Recipe(32, False), source)
        found = re.match(r"about (\d+) s on \w+: (\d+) s of arithmetic, beside it (\d+) s of reading", line)
        assert found is not None
        assert int(found[1]) == max(int(found[2]), int(found[3]))
        seconds.append(int(found[2]))
    # 10 rows of 64 a second: qkv 128, o 64, gate and up 192; down 64 rows of 96, of which 6 are a sample.
    assert seconds[1] - seconds[0] == pytest.approx(2 * (12.8 + 6.4 + 19.2 + 64 / 6), abs=1.1)


def test_the_calibrations_parts(config_of: Make, clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in no time: the columns. Then also products, which grow with the text. Nothing of 8 bits counts."""
    config = ModelConfig.from_dict(config_of(num_hidden_layers=1, intermediate_size=1024))
    kept = Recipe(32, True, keep=(("o_proj", 8),))
    matrices = plan(config, kept)
    monkeypatch.setattr(calibration_time, "_flop_seconds", lambda *_: 0.0)
    # A second for 256 columns of up to 512 rows: qkv 64, gate and up 64 in four blocks, down 1024.
    assert calibration_seconds(matrices, 100, "cpu") == pytest.approx((64 + 4 * 64 + 1024) / 256)
    monkeypatch.setattr(calibration_time, "_flop_seconds", lambda *_: 1.0)
    texts = [calibration_seconds(matrices, tokens, "cpu") for tokens in (100, 200)]
    flops = sum(2 * k**2 + 4 * n * k for n, k in ((128, 64), (2048, 64), (64, 1024)))
    assert texts[1] - texts[0] == pytest.approx(100 * flops)


def test_the_tokens_are_those_of_the_conversion(talker: Make, tmp_path: Path) -> None:
    source, text = talker("qwen3")
    recipe = Recipe(32, True, method="gptq", calibration=text, calibration_tokens=2048)
    with open_source(source) as opened:
        wanted = sum(map(len, calibration_of(opened, recipe, "cpu")._windows))
        assert calibration_tokens(recipe, opened) == wanted == 2048
        assert "calibration with 2,048 tokens" in time_line(plan(opened.model_config, recipe), recipe, opened)
    assert calibration_tokens(recipe, None) == text.stat().st_size // 4
