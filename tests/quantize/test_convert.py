"""Conversions end to end: what is in the packed folder, and that a failure leaves nothing."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from localchat.config import TensorFormat, load_config
from localchat.errors import BadCheckpoint, UsageError, UserError
from localchat.kernels.int4_packing import dequantize, dequantize_rows, padded_rows, unpack_scales
from localchat.quantize.convert import Progress, Recipe, convert, default_recipe, open_source
from localchat.quantize.hf import open_hf
from localchat.shards import Shards, open_shards

Make = Callable[..., Any]
FINE = Recipe(group_size=32, symmetric=False)


def packed(source: Path, out: Path, recipe: Recipe = FINE, **options: Any) -> list[Progress]:
    return list(convert(source, out, recipe, **options))


def matrix(shards: Shards, name: str) -> Tensor:
    """A matrix of a packed folder as fp32."""
    if f"{name}.qweight" in shards.names:
        kinds = [kind for kind in ("scales", "mins") if f"{name}.{kind}" in shards.names]
        qweight = shards.get(f"{name}.qweight")
        by_row = [unpack_scales(shards.get(f"{name}.{kind}"), len(qweight)) for kind in kinds]
        return dequantize(qweight, *by_row, *[None] * (2 - len(kinds)))
    if f"{name}.scales" in shards.names:
        return dequantize_rows(shards.get(f"{name}.weight"), shards.get(f"{name}.scales"))
    return shards.get(f"{name}.weight").float()


def stacked(parts: list[Tensor], name: str) -> Tensor:
    """One part below the other; the rows of gate and up in turn."""
    return torch.stack(parts, 1).flatten(0, 1) if name.endswith("gate_up_proj") else torch.cat(parts)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tensor(make_hf: Make, weights_of: Make, config_of: Make, tmp_path: Path, arch: str, dtype: Any) -> None:
    """q, k, v fused in order, gate and up row by row; matrices close; the rest equal and of the source's dtype."""
    weights = weights_of(config_of(arch), dtype)
    packed(make_hf(arch, dtype), tmp_path / "out")
    with open_shards(tmp_path / "out") as shards:
        left = set(shards.names)
        for i in range(2):
            a, m = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            fused = {
                f"{a}.qkv_proj": [f"{a}.{x}_proj" for x in "qkv"],
                f"{a}.o_proj": [f"{a}.o_proj"],
                f"{m}.gate_up_proj": [f"{m}.gate_proj", f"{m}.up_proj"],
                f"{m}.down_proj": [f"{m}.down_proj"],
            }
            for name, parts in fused.items():
                wanted = stacked([weights[f"{p}.weight"] for p in parts], name)
                assert relative_error(matrix(shards, name), wanted) < 0.1
                left -= {f"{name}.{kind}" for kind in ("qweight", "scales", "mins")}
                if f"{parts[0]}.bias" in weights:
                    bias = stacked([weights[f"{p}.bias"] for p in parts], name)
                    assert torch.equal(shards.get(f"{name}.bias"), bias) and bias.dtype == dtype
                    left.remove(f"{name}.bias")
        for name in ("embed_tokens", "lm_head"):
            assert shards.dtype(f"{name}.weight") == "I8" and shards.dtype(f"{name}.scales") == "F32"
            assert relative_error(matrix(shards, name), weights[f"{name}.weight"]) < 0.01
            left -= {f"{name}.weight", f"{name}.scales"}
        for name in left:
            assert torch.equal(shards.get(name), weights[name]) and weights[name].dtype == dtype
        assert {n.rpartition(".")[0].rpartition(".")[2] for n in left} == {
            *("norm", "input_layernorm", "post_attention_layernorm"),
            *(("q_norm", "k_norm") if arch == "qwen3" else ()),
        }


def test_tied_model_has_no_lm_head(make_hf: Make, tmp_path: Path) -> None:
    packed(make_hf(tie_word_embeddings=True), tmp_path / "out")
    with open_shards(tmp_path / "out") as shards:
        assert not any("lm_head" in name for name in shards.names)
    assert load_config(tmp_path / "out").tie_word_embeddings


def test_sharded_source_gives_the_same_bytes(make_hf: Make, tmp_path: Path) -> None:
    packed(make_hf(name="one"), tmp_path / "a")
    packed(make_hf(name="three", shards=3), tmp_path / "b")
    first, second = ((tmp_path / x / "model-00001-of-00001.safetensors").read_bytes() for x in "ab")
    assert first == second


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize(("kind", "symmetric"), [(Type.Q4_1, False), (Type.Q4_0, True), (Type.Q4_0, False)])
def test_grids_of_a_gguf_file_come_back_exactly(
    make_gguf: Make, config_of: Make, weights_of: Make, tmp_path: Path, arch: str, kind: Type, symmetric: bool
) -> None:
    config = config_of(arch)
    weights = weights_of(config)
    packed(make_gguf(config, weights, kind), tmp_path / "out", Recipe(32, symmetric))
    with open_shards(tmp_path / "out") as shards:
        for part in ("q", "k", "v"):
            stored = gguf.quants.quantize(weights[f"layers.1.self_attn.{part}_proj.weight"].numpy(), kind)
            rows = {"q": slice(0, 64), "k": slice(64, 96), "v": slice(96, 128)}[part]
            want = torch.from_numpy(gguf.quants.dequantize(stored, kind))
            assert torch.equal(matrix(shards, "layers.1.self_attn.qkv_proj")[rows], want)
        stored = gguf.quants.quantize(weights["layers.0.mlp.down_proj.weight"].numpy(), kind)
        want = torch.from_numpy(gguf.quants.dequantize(stored, kind))
        assert torch.equal(matrix(shards, "layers.0.mlp.down_proj"), want)


@pytest.mark.parametrize(("kind", "size", "bound"), [(Type.Q4_1, 20, 0.0), (Type.Q4_K, 144, 1e-3)])
def test_grids_that_do_not_use_all_levels(
    make_gguf: Make, config_of: Make, weights_of: Make, tmp_path: Path, kind: Type, size: int, bound: float
) -> None:
    """Files made with an importance matrix have groups without the codes 0 and 15: min and max do not show the grid."""
    config = config_of("qwen3", hidden_size=256, num_hidden_layers=1)
    weights = weights_of(config)
    del weights["layers.0.mlp.up_proj.weight"]
    chance = np.random.default_rng(0)
    blocks = chance.integers(0, 256, (96, 256 // (32 if kind == Type.Q4_1 else 256), size), dtype=np.uint8)
    header = 4 if kind == Type.Q4_1 else 16
    blocks[..., header:] = 0x33 + chance.integers(0, 8, blocks[..., header:].shape) * 0x11  # codes 3..10
    blocks[..., 0:4] = chance.uniform(0.01, 0.1, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(96, -1)
    path = make_gguf(config, weights, metadata=lambda w: w.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=kind))
    packed(path, tmp_path / "out")
    with open_shards(tmp_path / "out") as shards:
        got = matrix(shards, "layers.0.mlp.gate_up_proj")[1::2]
    assert relative_error(got, torch.from_numpy(gguf.quants.dequantize(rows, kind))) <= bound


def test_gguf_folder_is_complete(make_gguf: Make, config_of: Make, weights_of: Make, tmp_path: Path) -> None:
    packed(make_gguf(config_of(), weights_of(config_of()), Type.Q8_0), tmp_path / "out", source_id="x/y", revision="r")
    config = load_config(tmp_path / "out")
    assert config.quantization is not None
    assert config.quantization.source["id"] == "x/y" and config.quantization.source["format"] == "gguf"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    }
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [258]


def test_config_is_flat_and_describes_the_formats(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf(torch_dtype="float32", auto_map={"x": "y.py"})
    packed(source, tmp_path / "out", Recipe(128, True), source_id="some/model", revision="abc")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["dtype"] == "float32" and "torch_dtype" not in raw and "auto_map" not in raw
    assert raw["initializer_range"] == 0.02  # harmless keys stay
    quantization = load_config(tmp_path / "out").quantization
    assert quantization is not None
    assert quantization.default == TensorFormat(4, 128, True)
    assert quantization.format_of("layers.0.self_attn.qkv_proj") == TensorFormat(4, 64, True)  # K = 64
    assert quantization.format_of("layers.0.mlp.down_proj") == TensorFormat(4, 32, True)  # K = 96
    assert quantization.format_of("embed_tokens") == quantization.format_of("lm_head") == TensorFormat(8)
    assert (quantization.source["id"], quantization.source["revision"]) == ("some/model", "abc")
    assert len(quantization.source["sha256"]) == 64


@pytest.mark.parametrize("k", [576, 896, 192, 40, 24])
@pytest.mark.parametrize("rows", [40, 44])
def test_odd_sizes(make_hf: Make, weights_of: Make, config_of: Make, tmp_path: Path, k: int, rows: int) -> None:
    """K that no group divides becomes INT8 rows; N that is no multiple of 16."""
    sizes = {"hidden_size": k, "head_dim": k // 4, "intermediate_size": rows, "num_hidden_layers": 1}
    packed(make_hf(**sizes), tmp_path / "out", Recipe(128, True))
    weights = weights_of(config_of(**sizes))
    quantization = load_config(tmp_path / "out").quantization
    assert quantization is not None
    want = {576: 64, 896: 128, 192: 64}.get(k)
    name = "layers.0.self_attn.o_proj"
    assert quantization.format_of(name) == (TensorFormat(4, want, True) if want else TensorFormat(8))
    assert quantization.format_of("layers.0.mlp.down_proj") == TensorFormat(8)
    with open_shards(tmp_path / "out") as shards:
        assert relative_error(matrix(shards, name), weights[f"{name}.weight"]) < (0.12 if want else 0.01)
        stacked = "layers.0.mlp.gate_up_proj"  # of parts that end inside a tile
        wanted = torch.stack([weights[f"layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")], 1).flatten(0, 1)
        assert relative_error(matrix(shards, stacked)[: 2 * rows], wanted) < (0.12 if want else 0.01)
        if want:
            assert shards.shape(f"{stacked}.qweight")[0] == padded_rows(2 * rows)


def test_kept_matrices(make_hf: Make, weights_of: Make, config_of: Make, tmp_path: Path) -> None:
    recipe = replace(FINE, keep=((r"layers\.0\.mlp\.down_proj$", 16), ("qkv_proj", 8), ("^embed_tokens$", 16)))
    packed(make_hf(dtype=torch.bfloat16), tmp_path / "out", recipe)
    weights = weights_of(config_of(), torch.bfloat16)
    quantization = load_config(tmp_path / "out").quantization
    assert quantization is not None
    assert quantization.format_of("layers.0.mlp.down_proj").bits == 16
    assert quantization.format_of("layers.1.mlp.down_proj").bits == 4
    assert quantization.format_of("layers.1.self_attn.qkv_proj").bits == 8
    with open_shards(tmp_path / "out") as shards:
        for name in ("layers.0.mlp.down_proj.weight", "embed_tokens.weight"):
            assert torch.equal(shards.get(name), weights[name])
            assert shards.get(name).dtype == torch.bfloat16


def test_first_matching_pattern_counts(make_hf: Make, tmp_path: Path) -> None:
    packed(make_hf(), tmp_path / "out", replace(FINE, keep=(("layers.0.mlp.down_proj", 16), ("down_proj", 8))))
    quantization = load_config(tmp_path / "out").quantization
    assert quantization is not None
    bits = [quantization.format_of(f"layers.{i}.mlp.down_proj").bits for i in range(2)]
    assert bits == [16, 8]


def test_search_can_be_left_out(make_hf: Make, weights_of: Make, config_of: Make, tmp_path: Path) -> None:
    source, want = make_hf(), weights_of(config_of())["layers.0.mlp.down_proj.weight"]
    errors = []
    for search in (False, True):
        out = tmp_path / f"out{search}"
        packed(source, out, Recipe(32, True, search=search))
        with open_shards(out) as shards:
            errors.append(relative_error(matrix(shards, "layers.0.mlp.down_proj"), want))
    assert errors[1] < 0.9 * errors[0]


def test_norm_gains_are_used_as_energy(make_hf: Make, config_of: Make, weights_of: Make, tmp_path: Path) -> None:
    """With a gain of zero for half of the inputs, the other half is all that counts."""
    quiet = torch.ones(64)
    quiet[1::2] = 1e-3

    def change(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.input_layernorm.weight"] = quiet.clone()

    want = torch.cat([weights_of(config_of())[f"layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    errors = []
    for i, options in enumerate([{}, {"change": change}]):
        packed(make_hf(name=f"m{i}", **options), tmp_path / f"out{i}", Recipe(64, True))
        with open_shards(tmp_path / f"out{i}") as shards:
            errors.append((matrix(shards, "layers.0.self_attn.qkv_proj") - want)[:, 0::2].norm())
    assert errors[1] < 0.95 * errors[0]


def test_max_shard_size(make_hf: Make, tmp_path: Path) -> None:
    packed(make_hf(), tmp_path / "one")
    packed(make_hf(name="again"), tmp_path / "many", replace(FINE, max_shard_size=20_000))
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    with open_shards(tmp_path / "one") as one, open_shards(tmp_path / "many") as many:
        assert set(one.names) == set(many.names)
        assert all(torch.equal(one.get(name), many.get(name)) for name in one.names)


def test_progress(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf()
    steps = packed(source, tmp_path / "out")
    with open_hf(source) as opened:
        total = sum(opened.nbytes(name) for name in opened.shapes)
    assert [s.done_bytes for s in steps] == sorted({s.done_bytes for s in steps})
    assert steps[-1].done_bytes == steps[-1].total_bytes == total
    assert steps[0].tensor == "embed_tokens" and steps[-1].tensor == "lm_head"


def leaves_nothing(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} == {"source"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight"])
def test_not_a_number_is_named_and_leaves_nothing(make_hf: Make, tmp_path: Path, name: str, value: float) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights[f"model.{name}"].view(-1)[-1] = value

    source = make_hf(dtype=torch.bfloat16, change=change)
    with pytest.raises(BadCheckpoint, match=f"{name} holds NaN or infinite"):
        packed(source, tmp_path / "out")
    assert leaves_nothing(tmp_path)


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_what_no_scale_could_hold_is_named(make_hf: Make, tmp_path: Path, value: float) -> None:
    """From one end of fp32 to the other is infinitely far."""

    def change(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"].view(-1)[-1] = value

    source = make_hf(dtype=torch.bfloat16, change=change)
    with pytest.raises(BadCheckpoint, match=rf"up_proj\.weight holds a value of {value:.1e}".replace("+", r"\+")):
        packed(source, tmp_path / "out")
    assert leaves_nothing(tmp_path)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("recipe", [Recipe(32, True), FINE], ids=["sym", "min"])
def test_matrices_of_one_row(talker: Make, tmp_path: Path, recipe: Recipe, method: str) -> None:
    """One feature in the MLP: gate and up of a row each, and down of a column, which no group fits."""
    source, text = talker("llama", intermediate_size=1)
    packed(source, tmp_path / "out", replace(recipe, method=method, calibration=text))
    with open_source(source) as opened, open_shards(tmp_path / "out") as shards:
        wanted = stacked([opened.read(f"layers.0.mlp.{x}_proj.weight") for x in ("gate", "up")], "gate_up_proj")
        assert relative_error(matrix(shards, "layers.0.mlp.gate_up_proj")[:2], wanted) < 0.15
        down = opened.read("layers.0.mlp.down_proj.weight")
        assert relative_error(matrix(shards, "layers.0.mlp.down_proj"), down) < 0.01


def test_closed_generator_leaves_nothing(make_hf: Make, tmp_path: Path) -> None:
    steps = convert(make_hf(), tmp_path / "out", FINE)
    next(steps)
    assert (tmp_path / "out.partial").is_dir() and not (tmp_path / "out").exists()
    steps.close()  # type: ignore[attr-defined]
    assert leaves_nothing(tmp_path)


def test_incomplete_source_is_refused_before_anything_is_written(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf(change=lambda weights: weights.pop("model.norm.weight"))
    (tmp_path / "out.partial").touch()  # would be in the way if it came to that
    with pytest.raises(BadCheckpoint, match=r"norm\.weight is missing"):
        packed(source, tmp_path / "out")


def test_write_error_is_one_sentence(make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localchat.quantize.writer.os.fsync", full)
    with pytest.raises(UserError, match=r"out: cannot be written \(No space left on device\)"):
        packed(make_hf(), tmp_path / "out")
    assert leaves_nothing(tmp_path)


def test_threads_of_torch_are_given_back(make_hf: Make, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    steps = convert(make_hf(), tmp_path / "out", FINE)
    next(steps)
    assert torch.get_num_threads() == before
    list(steps)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(group_size=48), "group size 48"),
        (Recipe(keep=(("x", 5),)), "5 bits"),
        (Recipe(keep=(("(", 8),)), "not a regular expression"),
        (Recipe(keep=(("no_such_proj", 8),)), "matches no matrix"),
        (Recipe(max_shard_size=0), "shard size"),
    ],
)
def test_recipes_without_meaning(make_hf: Make, tmp_path: Path, recipe: Recipe, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        packed(make_hf(), tmp_path / "out", recipe)
    assert leaves_nothing(tmp_path)


def test_a_file_of_a_folder_and_a_folder_of_files(
    make_hf: Make, make_gguf: Make, config_of: Make, weights_of: Make
) -> None:
    file = make_gguf(config_of(), weights_of(config_of()))
    with pytest.raises(UserError, match=rf"give the path of one, such as {file}"):
        open_source(file.parent)
    with pytest.raises(UserError, match="give the folder that it is in"):
        open_source(make_hf() / "model.safetensors")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such model folder"):
        packed(tmp_path / "nothing", tmp_path / "out")


def test_default_recipe(make_hf: Make, make_gguf: Make, config_of: Make, weights_of: Make) -> None:
    with open_source(make_hf()) as source:
        assert default_recipe(source) == Recipe(32, False)
        source.model_config = large = replace(source.model_config, hidden_size=2048)
        assert default_recipe(source) == Recipe(128, True)
    with open_source(make_gguf(config_of(), weights_of(config_of()), Type.Q4_0)) as source:
        source.model_config = large
        assert default_recipe(source) == Recipe(32, False)


def test_rounding_needs_no_kernels() -> None:
    """They are slow to import, and Triton decides then whether it interprets them: tests/conftest.py comes before."""
    code = "import sys, localchat.quantize.convert; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0
