"""scripts/quantize_speed: what it makes is a checkpoint that converts, and what it prints is what it measured."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import torch

from localchat import registry
from localchat.quantize.calibration_text import WINDOW, calibration_windows
from localchat.quantize.convert import Recipe, convert, open_source
from localchat.quantize.source import check

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("quantize_speed", str(ROOT / "scripts" / "quantize_speed"))
    spec = importlib.util.spec_from_loader("quantize_speed", loader)
    if spec is None:
        raise ImportError("scripts/quantize_speed")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of model, with few weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 320, "vocab_size": 512}
    entries = {name: replace(registry.MODELS[name], **sizes) for name in ("qwen3.5-27b", "qwen3-8b")}
    monkeypatch.setattr(registry, "MODELS", entries)


@pytest.mark.parametrize(("model", "layers"), [("qwen3.5-27b", 4), ("qwen3-8b", 2)])
def test_the_checkpoint_is_whole(script: ModuleType, small: None, tmp_path: Path, model: str, layers: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    script.make(source, model, layers, "cpu")
    with open_source(source) as opened:
        check(opened)
        assert opened.model_config.num_hidden_layers == layers
        weight = opened.read("layers.0.mlp.down_proj.weight")
        assert weight.dtype == torch.bfloat16
        assert 0.015 < float(weight.float().std()) < 0.025
    assert script.nbytes(source) > 2e6
    assert [step.tensor for step in convert(source, tmp_path / "out", Recipe())][-1] == "lm_head"


def test_the_lines(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "seconds": 20.0,
        "written": {
            "embed_tokens": 2.0,
            "layers.0.mlp.down_proj": 6.0,
            "layers.1.mlp.down_proj": 10.0,
            "lm_head": 12.0,
        },
        "busy": {"read": 5.0, "arithmetic": 15.0, "write": 6.0},
        "ram": 3_000_000_000,
        "ram before": 1_000_000_000,
        "vram": 9_000_000_000,
        "device": "a card",
        "torch": "2",
    }
    script.report(found, 40_000_000_000, 10_000_000_000, layers=2, all_layers=64)
    text = capsys.readouterr().out
    assert "20.0 s on a card" in text
    assert "read 40.0 GB at 2.00 GB/s, wrote and read back 10.0 GB at 0.50 GB/s" in text
    assert "busy: read 5.0 s, arithmetic 15.0 s, write 6.0 s" in text
    assert "peak RAM 3.00 GB (1.00 GB before), peak VRAM 9.00 GB" in text
    assert "4.000 s a layer; 64 layers extrapolated from 2: 268 s" in text


@pytest.mark.parametrize("kind", ["plain", "gptq"])
def test_a_measurement_in_its_own_process(script: ModuleType, small: None, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    script.make(source, "qwen3-8b", 1, "cpu")
    words = [
        str(ROOT / "scripts" / "quantize_speed"),
        "--device",
        "cpu",
        "--calib-tokens",
        "1024",
        "--measure",
        source,
        tmp_path / "out",
        kind,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["busy"]["arithmetic"] <= found["seconds"]
    assert found["ram"] >= found["ram before"] > 50e6
    assert next(iter(found["written"])) == "embed_tokens"
    assert (tmp_path / "out" / "config.json").is_file()


def test_its_tokenizer_makes_enough_of_the_shipped_text(script: ModuleType) -> None:
    files = {"tokenizer.json": script.bytes_tokenizer().to_str().encode()}
    windows = calibration_windows(files, tokens=script.CALIBRATION_TOKENS)
    assert script.CALIBRATION_TOKENS - WINDOW < sum(map(len, windows)) <= script.CALIBRATION_TOKENS
