"""A hybrid is trained on the spot, and what packing it costs stands in a table; llama.cpp's formats by its own tool."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(("function", "kind"), [("q4_0", "Q4_0"), ("q4_1", "Q4_1")])
def test_llama_cpps_formats(function: str, kind: str) -> None:
    w = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    w[3, :32] = 0
    quantised = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[kind])
    want = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind])
    got = runpy.run_path(str(SCRIPTS / "quantize_table"))[function](w)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-6)


def run(script: str, *words: str | Path) -> str:
    command = [sys.executable, str(SCRIPTS / script), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hybrid_is_trained_and_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root, out = tmp_path / "root", tmp_path / "hybrid"
    root.mkdir()
    for i in range(120):
        (root / f"{i}.py").write_text("\n".join(f"def f{j}(x):\n    return x + {i * j}\n" for j in range(30)))
    small = ("--tiny", "--steps", 3, "--batch", 2, "--length", 64, "--vocab", 300, "--device", "cpu")
    assert "wrote" in run("train_hybrid.py", "--out", out, "--root", root, *map(str, small))
    assert len((out / "heldout.txt").read_text()) > 500
    lines = tmp_path / "lines.json"
    table = ("--text", out / "heldout.txt", "--tokens", "1024", "--calib-tokens", "1024", "--device", "cpu")
    printed = run("quantize_table", out, *table, "--groups", "64", "--placement", "--json", lines)
    rows = {row["name"]: row for row in json.loads(lines.read_text())["lines"]}
    assert abs(rows["unquantised"]["kl"]) < 1e-5
    assert all(row["kl"] > 0 for name, row in rows.items() if name != "unquantised")
    assert rows["g64 sym gptq"]["bits"] == pytest.approx(4.25, abs=0.05)  # in_proj_ba is INT8
    assert rows["placement: out_proj INT8"]["bytes"] > rows["placement: g128 sym"]["bytes"]
    assert "mKL/MB" in printed and "llama.cpp Q4_1" in printed


def test_its_training_form_is_the_recurrence() -> None:
    """Output of the chunks against kernels' token by token; and a gradient that is not nothing."""
    code = f"""
import sys; sys.path.insert(0, {str(SCRIPTS)!r})
import torch
from train_hybrid import chunk_gated_delta_rule
g = torch.Generator().manual_seed(0)
q, k = (torch.randn(2, 128, 2, 16, generator=g) for _ in range(2))
v = torch.randn(2, 128, 4, 8, generator=g, requires_grad=True)
decay, beta = -torch.rand(2, 128, 4, generator=g) * 0.2, torch.rand(2, 128, 4, generator=g)
out, _ = chunk_gated_delta_rule(q, k, v, decay, beta)
qn, kn = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
for b in range(2):
    for h in range(4):
        state = torch.zeros(16, 8)
        for t in range(128):
            key = kn[b, t, h // 2]
            state = state * decay[b, t, h].exp()
            state = state + torch.outer(key, beta[b, t, h] * (v[b, t, h] - state.t() @ key))
            want = state.t() @ qn[b, t, h // 2] / 4
            assert (out[b, t, h] - want).abs().max() < 1e-4, (b, h, t)
out.sum().backward()
assert v.grad.abs().min() > 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
