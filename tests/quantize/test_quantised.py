"""Checkpoints that another tool has quantised, from the folder to the logits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localchat.cache import KVCache
from localchat.checkpoint import load_model
from localchat.config import TensorFormat, load_config
from localchat.errors import BadCheckpoint
from localchat.kernels.int4_packing import dequantize, dequantize_rows, unpack_scales
from localchat.ops import ReferenceOps
from localchat.quantize.convert import Recipe, convert, default_recipe, open_source, what_is_lost
from localchat.quantize.source import check
from localchat.shards import open_shards

Make = Callable[..., Any]
Tensors = dict[str, Tensor]
MATRICES = r"layers\.\d+\.(self_attn|mlp|linear_attn\.(in_proj_qkvz|out_proj))"
KINDS = ("qweight", "scales", "mins")
GROUP = 32
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 80], "activation_scheme": "dynamic"}


def compressed(symmetric: bool, group_size: int = GROUP, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": {**weights, **others}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


class Maker:
    """Quantised matrices of random codes, and the weights that these stand for, in fp32."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = torch.Generator().manual_seed(seed)

    def grid(self, n: int, k: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """codes [N, K], zeros and scales [N, S], W [N, K]."""
        codes = torch.randint(0, 16, (n, k), generator=self.chance)
        zeros = torch.randint(3, 13, (n, k // GROUP), generator=self.chance)
        zeros = torch.full_like(zeros, 8) if symmetric else zeros
        scales = ((torch.rand(n, k // GROUP, generator=self.chance) + 0.5) / (8 * k**0.5)).half()
        full = [t.repeat_interleave(GROUP, 1) for t in (zeros, scales)]
        return codes, zeros, scales, full[1].float() * (codes - full[0])

    @staticmethod
    def words(nibbles: Tensor) -> Tensor:
        """[R, 8 C] -> int32 [R, C], the first in the lowest bits."""
        shifted = nibbles.view(len(nibbles), -1, 8) << 4 * torch.arange(8)
        return shifted.sum(-1).to(torch.int32)

    def gptq(self, offset: int = 1, symmetric: bool = False) -> Callable[[int, int], tuple[Tensors, Tensor]]:
        def make(n: int, k: int) -> tuple[Tensors, Tensor]:
            codes, zeros, scales, w = self.grid(n, k, symmetric)
            return {
                "qweight": self.words(codes).t(),
                "qzeros": self.words((zeros.t() - offset) & 15),
                "scales": scales.t(),
                "g_idx": (torch.arange(k) // GROUP).to(torch.int32),
            }, w

        return make

    def act_order(self, n: int, k: int) -> tuple[Tensors, Tensor]:
        tensors, w = self.gptq()(n, k)
        order = torch.randperm(k, generator=self.chance)
        in_words = tensors["qweight"].t().contiguous()
        codes = torch.stack([in_words >> 4 * i & 15 for i in range(8)], -1).view(n, k)
        shuffled = {"qweight": self.words(codes[:, order].long()).t(), "g_idx": tensors["g_idx"][order]}
        return {**tensors, **shuffled}, w[:, order]

    def awq(self, n: int, k: int) -> tuple[Tensors, Tensor]:
        codes, zeros, scales, w = self.grid(n, k)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        packed = [self.words(t.t().reshape(-1, n // 8, 8)[:, :, order].flatten(1)) for t in (codes, zeros)]
        return {"qweight": packed[0], "qzeros": packed[1], "scales": scales.t()}, w

    def compressed(self, symmetric: bool) -> Callable[[int, int], tuple[Tensors, Tensor]]:
        def make(n: int, k: int) -> tuple[Tensors, Tensor]:
            codes, zeros, scales, w = self.grid(n, k, symmetric)
            tensors = {"weight_packed": self.words(codes), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
            return tensors if symmetric else {**tensors, "weight_zero_point": self.words(zeros.t()).t()}, w

        return make

    def fp8(self, n: int, k: int) -> tuple[Tensors, Tensor]:
        weight = torch.randn(n, k, generator=self.chance).to(torch.float8_e4m3fn)
        scales = (torch.rand(-(-n // 48), -(-k // 80), generator=self.chance) + 0.5) / k**0.5
        full = scales.repeat_interleave(48, 0)[:n].repeat_interleave(80, 1)[:, :k]
        return {"weight": weight, "weight_scale_inv": scales}, weight.float() * full

    def fp8_rows(self, n: int, k: int) -> tuple[Tensors, Tensor]:
        weight = torch.randn(n, k, generator=self.chance).to(torch.float8_e4m3fn)
        scales = ((torch.rand(n, 1, generator=self.chance) + 0.5) / k**0.5).bfloat16()
        return {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(1)}, weight.float() * scales.float()


# Tools whose levels are kept: the matrices, config.json's words, symmetric.
KEPT: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "gptq": (Maker().gptq(), GPTQ, False),
    "gptq symmetric": (Maker().gptq(symmetric=True), GPTQ | {"sym": True}, True),
    "gptq v2": (Maker().gptq(offset=0), GPTQ | {"checkpoint_format": "gptq_v2"}, False),
    "auto-round": (Maker().gptq(), GPTQ | {"quant_method": "auto-round"}, False),
    "awq": (Maker().awq, AWQ, False),
    "compressed": (Maker().compressed(symmetric=False), compressed(False), False),
    "compressed symmetric": (Maker().compressed(symmetric=True), compressed(True), True),
}
FLOATING = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
ROUNDED = {
    "fp8": (Maker().fp8, FP8, "to FP8, so it is"),
    "fp8 rows": (Maker().fp8_rows, compressed(True, **FLOATING) | {"format": "float-quantized"}, "to FP8"),
    "act-order": (Maker().act_order, GPTQ | {"desc_act": True}, "with act-order; its groups do not fit ours"),
}


def packed(source: Path, recipe: Recipe) -> Path:
    out = source.with_name(f"{source.name}-packed")
    for _ in convert(source, out, recipe):
        continue
    return out


def logits(folder: Path) -> Tensor:
    """Of twelve positions."""
    model = load_model(folder, ops=ReferenceOps())
    cache = KVCache(model.config, 12, dtype=model.ops.cache_dtype, device=model.device)
    with torch.inference_mode():
        return model.logits(model(torch.arange(12), torch.arange(12), cache))


def matrices(folder: Path) -> Tensors:
    """Every INT4 matrix of a packed folder, decoded."""
    with open_shards(folder) as shards:
        stems = [name.removesuffix(".qweight") for name in shards.names if name.endswith(".qweight")]
        stored = {s: [shards.get(f"{s}.{k}") if f"{s}.{k}" in shards.names else None for k in KINDS] for s in stems}
    return {
        stem: dequantize(words, *(None if s is None else unpack_scales(s, len(words)) for s in scales))
        for stem, (words, *scales) in stored.items()
    }


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("case", KEPT)
def test_levels_are_kept_to_the_last_bit(make_quantised: Make, case: str, arch: str) -> None:
    """Fused matrices equal the stacked, decoded ones; so do the logits of both checkpoints."""
    matrix, words, symmetric = KEPT[case]
    quantised, plain = make_quantised(matrix, words, arch)
    recipe = default_recipe(quantised)
    assert (recipe.group_size, recipe.symmetric) == (GROUP, symmetric)
    assert what_is_lost(quantised, recipe).startswith("its 4-bit codes")
    assert what_is_lost(plain, recipe) == ""
    ours, theirs = packed(quantised, recipe), packed(plain, Recipe(keep=((MATRICES, 16),)))
    with open_shards(theirs) as shards:
        for name, weight in matrices(ours).items():
            assert torch.equal(weight, shards.get(f"{name}.weight")), name
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
@pytest.mark.parametrize("case", ROUNDED)
def test_what_does_not_fit_is_decoded_and_rounded(make_quantised: Make, case: str, arch: str) -> None:
    """As the decoded checkpoint is, and it is said."""
    matrix, words, lost = ROUNDED[case]
    quantised, plain = make_quantised(matrix, words, arch)
    recipe = default_recipe(quantised)
    assert recipe == default_recipe(plain)
    assert lost in what_is_lost(quantised, recipe) and what_is_lost(quantised, recipe).endswith("a second time")
    name = "model-00001-of-00001.safetensors"
    first, second = ((packed(folder, recipe) / name).read_bytes() for folder in (quantised, plain))
    assert first == second


def test_only_some_are_quantised(make_quantised: Make) -> None:
    """As in Qwen3.5's GPTQ, whose attention is bf16: the others are rounded once, into the same groups."""
    quantised, plain = make_quantised(Maker().gptq(symmetric=True), GPTQ | {"sym": True}, only=".mlp.")
    recipe = default_recipe(quantised)
    assert recipe == Recipe(GROUP, True) and what_is_lost(quantised, recipe).startswith("its 4-bit codes")
    ours, theirs = matrices(packed(quantised, recipe)), matrices(packed(plain, recipe))
    for name, weight in ours.items():
        if ".mlp." not in name:
            assert torch.equal(weight, theirs[name])
    decoded = packed(plain.rename(plain.with_name("again")), Recipe(keep=((".", 16),)))
    with open_shards(decoded) as shards:
        assert torch.equal(ours["layers.1.mlp.down_proj"], shards.get("layers.1.mlp.down_proj.weight"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_size": 64}, "in other groups than groups of 64, so 12 of its 14 quantised matrices are rounded"),
        ({"symmetric": True}, "in other groups than groups of 32, symmetric, so it is rounded a second time"),
    ],
)
def test_another_recipe_says_what_it_loses(make_quantised: Make, change: dict[str, Any], words: str) -> None:
    """K = 96 has groups of 32 in any recipe, so down_proj keeps its levels."""
    quantised, plain = make_quantised(Maker().awq, AWQ)
    recipe = replace(default_recipe(quantised), **change)
    assert words in what_is_lost(quantised, recipe)
    rounded, wanted = (matrices(packed(folder, recipe))["layers.0.self_attn.o_proj"] for folder in (quantised, plain))
    assert torch.equal(rounded, wanted)


def test_zero_points_that_are_not_in_the_middle(make_quantised: Make) -> None:
    """Whatever config.json says: symmetric groups could not hold the levels, which the notice says are kept."""
    quantised, plain = make_quantised(Maker().gptq(), GPTQ | {"sym": True})
    recipe = default_recipe(quantised)
    assert recipe == Recipe(GROUP, symmetric=False)
    assert "nothing is rounded again" in what_is_lost(quantised, recipe)
    assert "rounded a second time" in what_is_lost(quantised, replace(recipe, symmetric=True))
    kept = matrices(packed(quantised, recipe))
    with open_source(plain) as source:
        assert torch.equal(kept["layers.0.mlp.down_proj"], source.read("layers.0.mlp.down_proj.weight"))


def test_narrow_scales(make_quantised: Make) -> None:
    quantised, _ = make_quantised(Maker().awq, AWQ)
    exact = matrices(packed(quantised, default_recipe(quantised)))
    quantised = quantised.rename(quantised.with_name("narrow"))
    narrow = packed(quantised, replace(default_recipe(quantised), exact=False))
    name = "layers.0.self_attn.qkv_proj"
    with open_shards(narrow) as shards:
        assert shards.dtype(f"{name}.scales") == shards.dtype(f"{name}.mins") == "F16"
        scales = shards.get(f"{name}.scales")
        steps = unpack_scales(scales, 16 * len(scales)).float().repeat_interleave(GROUP, 1)
    off = (matrices(narrow)[name] - exact[name]).abs() / steps
    assert 0 < float(off.max()) <= 1 / 128


def test_the_folder_describes_itself(make_quantised: Make) -> None:
    quantised, _ = make_quantised(Maker().compressed(True), compressed(True), "qwen3_5", torch_dtype="bfloat16")
    config = load_config(packed(quantised, default_recipe(quantised)))
    assert config.foreign_quantization is None and config.quantization is not None
    assert config.quantization.format_of("layers.0.mlp.down_proj") == TensorFormat(4, GROUP, True)


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("matrix", "words", "kind"),
    [
        (Maker().gptq(), GPTQ, "scales"),
        (Maker().awq, AWQ, "scales"),
        (Maker().compressed(True), compressed(True), "weight_scale"),
        (Maker().fp8, FP8, "weight_scale_inv"),
    ],
)
def test_not_a_number_is_named(make_quantised: Make, matrix: Any, words: Any, kind: str, bad: float) -> None:
    quantised, _ = make_quantised(matrix, words)

    def change(tensors: Tensors) -> None:
        tensors[f"model.layers.1.mlp.up_proj.{kind}"][0, 0] = bad

    edit(quantised, change)
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinite"):
        packed(quantised, default_recipe(quantised))
    assert not (quantised.parent / "quantised-packed.partial").exists()


def test_biases_of_zeros_are_left_out(make_quantised: Make) -> None:
    """GPTQ's tools write one beside every matrix; one that is not zero would be computed wrongly."""
    quantised, _ = make_quantised(Maker().gptq(), GPTQ)
    edit(quantised, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(96)}))
    with open_source(quantised) as source:
        check(source)
    edit(quantised, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96)}))
    with open_source(quantised) as source, pytest.raises(BadCheckpoint, match=r"up_proj\.bias is unexpected"):
        check(source)


def test_what_is_said_of_activations_is_left_out(make_quantised: Make) -> None:
    quantised, _ = make_quantised(Maker().fp8, FP8)
    for name in ("self_attn.k_scale", "self_attn.v_proj.v_scale", "mlp.up_proj.input_scale"):
        edit(quantised, lambda tensors, name=name: tensors.update({f"model.layers.0.{name}": torch.ones(1)}))  # type: ignore[misc]
    with open_source(quantised) as source:
        check(source)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("model.layers.0.mlp.up_proj.scales"),
            r"quantised: layers\.0\.mlp.*\.scales is missing",
        ),
        (lambda t: [t.pop(n) for n in list(t) if ".0.mlp.up_proj." in n], r"up_proj\.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 95, dtype=torch.int32)}),
            r"up_proj\.weight has the shape \[95, 64\], wanted \[96, 64\]",
        ),
        (lambda t: t.update({"model.layers.0.x.weight_packed": torch.zeros(8, 8)}), r"layers\.0\.x"),
    ],
)
def test_damaged(make_quantised: Make, change: Callable[[Tensors], Any], words: str) -> None:
    quantised, _ = make_quantised(Maker().gptq(), GPTQ)
    edit(quantised, change)
    with pytest.raises(BadCheckpoint, match=words), open_source(quantised) as source:
        check(source)


def test_float8_without_its_scale(make_quantised: Make) -> None:
    """It is what is missing that is named, and not the dtype, which is right."""
    quantised, _ = make_quantised(Maker().fp8, FP8)
    edit(quantised, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale_inv"))
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.up_proj\.weight is FP8 and has no scale beside it"):
        open_source(quantised)


def test_progress_ends_at_the_bytes_of_the_files(make_quantised: Make) -> None:
    for matrix, words in ((Maker().gptq(), GPTQ), (Maker().fp8, FP8)):
        folder, plain = make_quantised(matrix, words, "qwen3_5")
        steps = list(convert(folder, folder.with_name("out"), default_recipe(folder)))
        stored = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
        assert steps[-1].done_bytes == steps[-1].total_bytes == stored
        for used in (folder, plain, folder.with_name("out")):
            used.rename(used.with_name(f"{used.name}-{words['quant_method']}"))


def test_a_head_of_4_bits_becomes_rows_of_8(make_quantised: Make) -> None:
    """As GPTQ's `lm_head: true` makes it: the packed format keeps heads in INT8."""
    quantised, _ = make_quantised(Maker().gptq(), GPTQ)
    tensors, wanted = Maker(1).gptq()(40, 64)

    def change(stored: Tensors) -> None:
        del stored["lm_head.weight"]
        stored |= {f"lm_head.{kind}": tensor for kind, tensor in tensors.items()}

    edit(quantised, change)
    with open_shards(packed(quantised, default_recipe(quantised))) as shards:
        got = dequantize_rows(shards.get("lm_head.weight"), shards.get("lm_head.scales"))
    assert float((got - wanted).abs().max()) <= float(wanted.abs().max()) / 127


def test_a_config_at_the_top_of_a_wrapper(make_quantised: Make, make_hf: Make) -> None:
    """A multimodal checkpoint names its quantisation outside text_config."""
    quantised, _ = make_quantised(Maker().gptq(), GPTQ, "qwen3_5")
    config = json.loads((quantised / "config.json").read_text())
    words = config.pop("quantization_config")
    wrapped = {"model_type": "qwen3_5", "text_config": config, "quantization_config": words}
    (quantised / "config.json").write_text(json.dumps(wrapped))
    with open_source(quantised) as source:
        check(source)
        assert source.kept_format == TensorFormat(4, GROUP, False)
