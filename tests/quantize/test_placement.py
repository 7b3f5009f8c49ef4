"""Exceptions of an architecture: in the plan, below what a person keeps, and in the packed folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from localchat.checkpoint import load_model
from localchat.config import ModelConfig, TensorFormat
from localchat.quantize.convert import Recipe, convert, with_placement
from localchat.quantize.placement import EXCEPTIONS, exceptions_for
from localchat.quantize.plan import plan
from localchat.registry import MODELS

Make = Callable[..., Any]


def formats(config: ModelConfig, recipe: Recipe) -> dict[str, TensorFormat]:
    return {m.name: m.format for m in plan(config, recipe)}


def test_every_entry_matches_a_matrix_of_its_architecture() -> None:
    for model_type, entries in EXCEPTIONS.items():
        config = next(e.config for e in MODELS.values() if e.model_type == model_type)
        plain = formats(config, Recipe())
        placed = formats(config, Recipe(placement=exceptions_for(config, True)))
        assert placed != plain
        for pattern, _ in entries:
            assert formats(config, Recipe(placement=((pattern, TensorFormat(8)),))) != plain, pattern


def test_order_widths_and_what_is_kept(config_of: Make) -> None:
    config = ModelConfig.from_dict(config_of("llama", intermediate_size=192))
    placement = ((r"\.0\.mlp\.down", TensorFormat(8)), (r"down|o_proj|embed", TensorFormat(4, 128, False)))
    found = formats(config, Recipe(32, True, keep=((r"\.1\.self_attn\.o_proj", 16),), placement=placement))
    assert found["layers.0.mlp.down_proj"].bits == 8
    assert found["layers.1.mlp.down_proj"] == TensorFormat(4, 64, False)  # 192 has no groups of 128
    assert found["layers.0.self_attn.o_proj"] == TensorFormat(4, 64, False)
    assert found["layers.1.self_attn.o_proj"].bits == 16
    assert found["layers.1.mlp.gate_up_proj"] == TensorFormat(4, 32, True)
    assert found["embed_tokens"].bits == 8


def test_a_folder_with_exceptions_runs(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf("qwen3_5", linear_value_head_dim=64)
    recipe = with_placement(source, Recipe(128, False))
    config = ModelConfig.from_dict({**read(source)})
    assert recipe.placement == exceptions_for(config, False)
    assert with_placement(config, Recipe(128, False)) == recipe
    for _ in convert(source, tmp_path / "out", recipe):
        continue
    model = load_model(tmp_path / "out")
    sizes = {n: (m.bits, m.group_size) for n, m in model.named_modules() if n.endswith("_proj")}
    assert sizes["layers.0.linear_attn.out_proj"] == (4, 32) and sizes["layers.0.mlp.gate_up_proj"] == (4, 32)
    assert sizes["layers.1.self_attn.qkv_proj"] == sizes["layers.1.mlp.gate_up_proj"] == (4, 64)


def read(folder: Path) -> dict[str, Any]:
    from localchat.config import read_json

    return read_json(folder / "config.json")
