"""Qwen3.5's own layouts: whatever the checkpoint's spelling, the packed folder holds the same tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.checkpoint import load_model
from localchat.config import ModelConfig, TensorFormat, load_config, read_json
from localchat.errors import BadCheckpoint
from localchat.ops import ReferenceOps
from localchat.quantize.convert import Recipe, convert, open_source
from localchat.quantize.plan import plan
from localchat.quantize.source import expected_shapes, mtp_shapes
from localchat.registry import MODELS
from localchat.shards import open_shards

Make = Callable[..., Any]
PLAIN = Recipe(keep=((".", 16),))
WRAPPER = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {"depth": 1}}
SIZES = [alias for alias, entry in MODELS.items() if entry.model_type == "qwen3_5"]


def stored(folder: Path) -> dict[str, Tensor]:
    with open_shards(folder) as shards:
        return {name: shards.get(name) for name in shards.names}


def read_back(path: Path) -> dict[str, Tensor]:
    """What the conversion reads, by canonical name."""
    with open_source(path) as source:
        return {name: source.read(name) for name in source.shapes}


def test_the_sources_tensors_come_back(make_hf: Make, config_of: Make, weights_of: Make, mtp_of: Make) -> None:
    config = config_of("qwen3_5")
    want, got = {**weights_of(config), **mtp_of(config)}, read_back(make_hf("qwen3_5", mtp=True))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        folded = "norm" in name and "linear_attn" not in name  # (w - 1) + 1 in fp32
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-6 if folded else 0)


@pytest.mark.parametrize(
    ("outside", "inside", "wanted"), [(None, 248044, [248044]), ([5, 6], 6, [5, 6]), (7, None, [7]), (None, None, None)]
)
def test_the_ends_of_a_turn_are_the_union(
    make_hf: Make, tmp_path: Path, outside: object, inside: object, wanted: object
) -> None:
    source = make_hf("qwen3_5", wrapper={**WRAPPER, "eos_token_id": outside}, eos_token_id=inside)
    for _ in convert(source, tmp_path / "out", Recipe(32)):
        continue
    assert read_json(tmp_path / "out" / "config.json").get("eos_token_id") == wanted


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "language_model.model.", ""])
@pytest.mark.parametrize("tied", [False, True])
def test_every_prefix_and_the_wrapper_give_the_same_folder(
    make_hf: Make, tmp_path: Path, prefix: str, tied: bool
) -> None:
    for _ in convert(make_hf("qwen3_5", name="flat", tie_word_embeddings=tied), tmp_path / "a", Recipe(32)):
        continue

    def with_vision(weights: dict[str, Tensor]) -> None:
        if prefix == "language_model.model.":
            weights["language_model.lm_head.weight"] = weights.pop("lm_head.weight", torch.ones(40, 64))
        weights["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(3, 5)
        weights["model.visual.pos_embed.weight"] = torch.ones(2, 2, dtype=torch.float64)

    wrapper = {**WRAPPER, "tie_word_embeddings": tied}
    source = make_hf("qwen3_5", prefix=prefix, change=with_vision, wrapper=wrapper, tie_word_embeddings=tied)
    for _ in convert(source, tmp_path / "b", Recipe(32)):
        continue
    a, b = stored(tmp_path / "a"), stored(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    config = load_config(tmp_path / "b")
    assert config.model_type == "qwen3_5" and config.tie_word_embeddings == tied
    assert config.layer_types == ("linear_attention", "full_attention")
    assert "text_config" not in read_json(tmp_path / "b" / "config.json")


def test_shards_with_the_odd_stem(make_hf: Make, tmp_path: Path) -> None:
    """Qwen3.5's files are called model.safetensors-00001-of-00011.safetensors."""
    sources = [make_hf("qwen3_5", name="one"), make_hf("qwen3_5", name="odd", shards=3, stem="model.safetensors-")]
    assert (sources[1] / "model.safetensors-00003-of-00003.safetensors").exists()
    for i, source in enumerate(sources):
        for _ in convert(source, tmp_path / str(i), Recipe(32)):
            continue
    a, b = stored(tmp_path / "0"), stored(tmp_path / "1")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decays_in_either_dtype_become_fp32(make_hf: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    """Qwen3.5's files have A_log and the delta net's norm in fp32 among bf16, those of 3.6 and 3.8 all in bf16."""
    kept: dict[str, Tensor] = {}

    def change(weights: dict[str, Tensor]) -> None:
        for name in weights:
            if name.endswith(("A_log", "linear_attn.norm.weight")):
                weights[name] = weights[name].to(dtype)
            kept[name.removeprefix("model.")] = weights[name]

    for _ in convert(make_hf("qwen3_5", torch.bfloat16, change=change), tmp_path / "out", Recipe(32)):
        continue
    got = stored(tmp_path / "out")
    for name in ("A_log", "dt_bias"):
        assert got[f"layers.0.linear_attn.{name}"].dtype == torch.float32
        assert torch.equal(got[f"layers.0.linear_attn.{name}"], kept[f"layers.0.linear_attn.{name}"].float())
    assert torch.equal(got["layers.0.linear_attn.norm.weight"], kept["layers.0.linear_attn.norm.weight"])
    for name in ("norm.weight", "layers.0.input_layernorm.weight", "layers.1.self_attn.q_norm.weight"):
        assert got[name].dtype == torch.float32  # 1 + w would be rounded in bf16
        assert torch.equal(got[name], 1 + kept[name].float())


def test_the_mtp_head_is_stored_and_not_loaded(make_hf: Make, mtp_of: Make, config_of: Make, tmp_path: Path) -> None:
    for _ in convert(make_hf("qwen3_5", mtp=True), tmp_path / "out", PLAIN):
        continue
    got, want = stored(tmp_path / "out"), mtp_of(config_of("qwen3_5"))
    parts = [want[f"mtp.layers.0.self_attn.{x}_proj.weight"] for x in ("q", "k", "v", "gate")]
    assert torch.equal(got["mtp.layers.0.self_attn.qkv_proj.weight"], torch.cat(parts))
    assert torch.equal(got["mtp.fc.weight"], want["mtp.fc.weight"])
    assert sum(name.startswith("mtp.") for name in got) == 12  # 15 in the file, q, k, v and gate, up are fused
    for name in ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.k_norm.weight"):
        torch.testing.assert_close(got[name], want[name])
    model = load_model(tmp_path / "out", ops=ReferenceOps())
    assert not any("mtp" in name for name in model.state_dict())


def test_the_mtp_head_is_packed_in_the_same_formats(make_hf: Make, tmp_path: Path) -> None:
    for _ in convert(make_hf("qwen3_5", mtp=True), tmp_path / "out", Recipe(32)):
        continue
    kinds = {name for name in stored(tmp_path / "out") if name.startswith("mtp.") and name.endswith(".qweight")}
    assert kinds == {
        *("mtp.fc.qweight", "mtp.layers.0.self_attn.qkv_proj.qweight", "mtp.layers.0.self_attn.o_proj.qweight"),
        *("mtp.layers.0.mlp.gate_up_proj.qweight", "mtp.layers.0.mlp.down_proj.qweight"),
    }


@pytest.mark.parametrize("change", ["missing", "more", "shape"])
def test_an_unknown_mtp_head_is_left_out(make_hf: Make, tmp_path: Path, change: str) -> None:
    def damage(weights: dict[str, Tensor]) -> None:
        if change == "missing":
            del weights["mtp.norm.weight"]
        else:
            name = "mtp.embed_tokens.weight" if change == "more" else "mtp.fc.weight"
            weights[name] = torch.ones(3, 3)

    for _ in convert(make_hf("qwen3_5", mtp=True, change=damage), tmp_path / "out", Recipe(32)):
        continue
    assert not any(name.startswith("mtp.") for name in stored(tmp_path / "out"))


@pytest.mark.parametrize(("name", "problem"), [("A_log", "is missing"), ("in_proj_z.bias", "is unexpected")])
def test_a_missing_or_unknown_tensor_is_named(make_hf: Make, tmp_path: Path, name: str, problem: str) -> None:
    def damage(weights: dict[str, Tensor]) -> None:
        if weights.pop(f"model.layers.0.linear_attn.{name}", None) is None:
            weights[f"model.layers.0.linear_attn.{name}"] = torch.ones(4)

    with pytest.raises(BadCheckpoint, match=f"{name} {problem}"):
        list(convert(make_hf("qwen3_5", change=damage), tmp_path / "out", Recipe(32)))


@pytest.mark.parametrize("alias", SIZES)
def test_every_size_has_a_plan(alias: str) -> None:
    """Shapes as published: the widths tile into groups of 128, decays and steps stay INT8."""
    config = ModelConfig.from_dict(MODELS[alias].config_dict())
    formats = {m.name: m.format for m in plan(config, Recipe(), mtp=True)}
    assert formats["layers.0.linear_attn.in_proj_ba"] == TensorFormat(8)
    eight = {name.rpartition(".")[2] for name, form in formats.items() if form.bits == 8}
    assert eight == {"embed_tokens", "in_proj_ba", *(() if config.tie_word_embeddings else ("lm_head",))}
    assert {form.group_size for form in formats.values() if form.bits == 4} == {128}


def test_the_27b_has_as_many_tensors_and_weights_as_published() -> None:
    config = ModelConfig.from_dict(MODELS["qwen3.5-27b"].config_dict())
    text, mtp = expected_shapes(config), mtp_shapes(config)
    gates = [name for name in {**text, **mtp} if ".self_attn.gate_proj." in name]
    assert len(text) + len(mtp) - len(gates) == 851 + 15
    count = sum(torch.Size(shape).numel() for shape in text.values())
    assert count / 1e9 == pytest.approx(26.896, abs=5e-4)
    assert sum(torch.Size(shape).numel() for shape in mtp.values()) / 1e9 == pytest.approx(0.425, abs=5e-4)
