"""The comparison layer by layer and chunk by chunk gives what whole models give at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.checkpoint import load_model
from localchat.kernels.int4_packing import dequantize, unpack_scales
from localchat.ops import ReferenceOps
from localchat.perplexity import perplexity
from localchat.quantize import report
from localchat.quantize.convert import Recipe, convert, open_source
from localchat.quantize.layerwise import SourceWeights
from localchat.quantize.report import compare, compare_folder, reference
from localchat.shards import open_shards

Make = Callable[..., Any]
WINDOWS = [[(11 * i * i + w) % 40 for i in range(30)] for w in range(3)] + [[1, 2, 3]]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders of chunks inside 40 ids and 93 positions."""
    monkeypatch.setattr(report, "_VOCABULARY", 16)
    monkeypatch.setattr(report, "_POSITIONS", 20)


def packed(source: Path, out: Path, recipe: Recipe) -> Path:
    for _ in convert(source, out, recipe):
        continue
    return out


def log_probabilities(folder: Path) -> Tensor:
    model = load_model(folder, ops=ReferenceOps())
    rows = []
    for window in WINDOWS:
        cache = KVCache(model.config, len(window), dtype=torch.float32, device=model.device)
        rows.append(model.logits(model(torch.tensor(window), torch.arange(len(window)), cache)))
    return torch.cat(rows).double().log_softmax(-1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_5"])
def test_figures_are_those_of_whole_models(make_hf: Make, tmp_path: Path, arch: str, tied: bool) -> None:
    source = make_hf(arch, tie_word_embeddings=tied)
    whole = packed(source, tmp_path / "whole", Recipe(keep=((".", 16),)))
    folder = packed(source, tmp_path / "packed", Recipe(32, True))
    p, q = log_probabilities(whole), log_probabilities(folder)
    divergence = (p.exp() * (p - q)).sum(-1)
    with open_source(source) as opened:
        got = compare_folder(opened, folder, WINDOWS, "cpu")
    assert got.tokens == 93
    assert got.kl == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert got.kl_99 == pytest.approx(float(divergence.sort().values[91]), rel=1e-3)
    assert got.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    ends = torch.tensor([i for window in WINDOWS for i in (*window[1:], -1)])
    for value, table in ((got.source_perplexity, p), (got.perplexity, q)):
        loss = -table[ends >= 0].gather(1, ends[ends >= 0][:, None]).mean()
        assert value == pytest.approx(float(loss.exp()), rel=1e-3)


def test_perplexity_is_that_of_the_other_room(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf("qwen3")
    folder = packed(source, tmp_path / "packed", Recipe(32, False))
    ids = [i for window in WINDOWS[:3] for i in window]
    with open_source(source) as opened:
        got = compare_folder(opened, folder, WINDOWS[:3], "cpu")
    assert got.perplexity == pytest.approx(perplexity(load_model(folder, ops=ReferenceOps()), ids, 30), rel=1e-4)


def test_errors_are_named_and_relative(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf("qwen3_5")
    folder = packed(source, tmp_path / "packed", Recipe(32, True))
    with open_source(source) as opened, open_shards(folder) as shards:
        errors = compare_folder(opened, folder, WINDOWS, "cpu").errors
        name = "layers.1.mlp.down_proj"
        w = opened.read(f"{name}.weight")
        scales = unpack_scales(shards.get(f"{name}.scales"), len(w))
        stored = dequantize(shards.get(f"{name}.qweight"), scales, None)
        assert errors[name] == pytest.approx(float((w - stored).norm() / w.norm()), rel=1e-4)
        head = opened.read("lm_head.weight")
        rows = shards.get("lm_head.weight").float() * shards.get("lm_head.scales")[:, None]
        assert errors["lm_head"] == pytest.approx(float((head - rows).norm() / head.norm()), rel=1e-3)
    wanted = {"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"}
    wanted |= {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    assert {n.split(".", 2)[2] for n in errors if n.startswith("layers.")} == wanted


def test_a_model_against_itself(make_hf: Make) -> None:
    with open_source(make_hf("qwen3_5")) as opened:
        plain = SourceWeights(opened)
        got = compare(plain, plain, reference(plain, WINDOWS, "cpu"), "cpu")
    assert abs(got.kl) < 1e-6 and got.agreement == 1.0
    assert got.perplexity == got.source_perplexity
    assert not any(got.errors.values())


def test_a_reference_saves_the_sources_forward(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf("llama")
    folder = packed(source, tmp_path / "packed", Recipe(32, True))
    with open_source(source) as opened:
        known = reference(SourceWeights(opened), WINDOWS, "cpu")
        assert compare_folder(opened, folder, known, "cpu") == compare_folder(opened, folder, WINDOWS, "cpu")


def test_logits_of_no_use_make_an_infinite_perplexity(make_hf: Make) -> None:
    """And no overflow, behind all the work."""

    def change(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] *= 1e6

    with open_source(make_hf(change=change)) as opened:
        got = compare(SourceWeights(opened), SourceWeights(opened), WINDOWS, "cpu")
    assert got.perplexity == got.source_perplexity == float("inf")
