"""Tiny checkpoints for the conversion's tests, as a Hugging Face folder and as a .gguf file.

`gguf` is imported where it is used: a machine with a card need not have it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from localchat.config import ModelConfig
from localchat.foreign import Foreign
from localchat.kernels.int4_packing import dequantize, pack
from localchat.quantize.codes import Codes
from localchat.quantize.parts import Parts
from localchat.quantize.source import expected_shapes, mtp_shapes
from localchat.shards import open_shards

if TYPE_CHECKING:
    import gguf

# Helper functions reach the tests through fixtures: test files are not a package and cannot import each other.
MakeHF = Callable[..., Path]
MakeGGUF = Callable[..., Path]


# Three value heads read one key head; six matrices of a layer are no wider than a group of 32.
DELTA_NET = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


def tiny_config(arch: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json's content: two layers, hidden 64, intermediate 96."""
    config = {
        "model_type": arch,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
    }
    return {**config, **(DELTA_NET if arch == "qwen3_5" else {}), **overrides}


def tiny_weights(config: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under canonical names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(ModelConfig.from_dict(config))
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def mtp_weights(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights of Qwen3.5's head for the token after the next, under canonical names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = mtp_shapes(ModelConfig.from_dict(config))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def hf_form(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Canonical weights of a Qwen3.5 as transformers has them: gates among the queries, norms around zero."""
    stored = {}
    for name, weight in weights.items():
        if ".q_proj." in name:
            both = (weights[name], weights[name.replace("q_proj", "gate_proj")])
            heads = [w.view(config["num_attention_heads"], config["head_dim"], -1) for w in both]
            stored[name] = torch.cat(heads, dim=1).flatten(0, 1)
        elif ".conv1d." in name:
            stored[name] = weight.unsqueeze(1)
        elif "norm" in name and "linear_attn" not in name:
            stored[name] = weight - 1
        elif ".gate_proj." not in name or ".mlp." in name:
            stored[name] = weight
    return stored


@pytest.fixture
def config_of() -> Callable[..., dict[str, Any]]:
    """`tiny_config`."""
    return tiny_config


@pytest.fixture
def weights_of() -> Callable[..., dict[str, Tensor]]:
    """`tiny_weights`."""
    return tiny_weights


@pytest.fixture
def mtp_of() -> Callable[..., dict[str, Tensor]]:
    """`mtp_weights`."""
    return mtp_weights


@pytest.fixture
def make_hf(tmp_path: Path) -> MakeHF:
    """A function that writes a model folder: make_hf(arch, dtype=, shards=, prefix=, change=, name=, **config).

    mtp: with that head. wrapper: the keys around a nested text_config. stem: of the names of several shards. in_order:
    a shard holds neighbours, as on the hub, instead of every so-many-th tensor.
    """

    def make(
        arch: str = "llama",
        dtype: torch.dtype = torch.float32,
        shards: int = 1,
        prefix: str = "model.",
        change: Callable[[dict[str, Tensor]], None] | None = None,
        name: str = "source",
        mtp: bool = False,
        wrapper: dict[str, Any] | None = None,
        stem: str = "model-",
        in_order: bool = False,
        **overrides: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = tiny_config(arch, **overrides)
        weights = {**tiny_weights(config, dtype), **(mtp_weights(config) if mtp else {})}
        if arch == "qwen3_5":
            weights = hf_form(config, weights)
        weights = {n if n.startswith(("lm_head", "mtp.")) else prefix + n: w for n, w in weights.items()}
        if change:
            change(weights)
        written = config if wrapper is None else {"model_type": arch, **wrapper, "text_config": config}
        (folder / "config.json").write_text(json.dumps(written))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "generation_config.json").write_text('{"eos_token_id": [2]}')
        names = sorted(weights)
        if shards == 1:
            save_file(weights, folder / "model.safetensors")
            return folder
        index = {}
        for i in range(shards):
            file = f"{stem}{i + 1:05d}-of-{shards:05d}.safetensors"
            part = names[i * len(names) // shards : (i + 1) * len(names) // shards] if in_order else names[i::shards]
            save_file({n: weights[n] for n in part}, folder / file)
            index.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return folder

    return make


@pytest.fixture
def bytes_tokenizer() -> Callable[[Path], None]:
    """bytes_tokenizer(folder): writes a tokenizer of one token per byte, ids 0..255."""

    def write(folder: Path) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.save(str(folder / "tokenizer.json"))

    return write


@pytest.fixture
def noise() -> Callable[..., Path]:
    """noise(path, seed=0): a text of 4,000 random characters."""

    def write(path: Path, seed: int) -> Path:
        characters = torch.randint(33, 127, (4000,), generator=torch.Generator().manual_seed(seed))
        path.write_text("".join(map(chr, characters)))
        return path

    return write


@pytest.fixture
def talker(
    make_hf: MakeHF, bytes_tokenizer: Callable[[Path], None], noise: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Path, Path]]:
    """talker("qwen3"): a source of small weights with a tokenizer, and a text of its own to calibrate with."""

    def make(arch: str, **options: Any) -> tuple[Path, Path]:
        def calmed(weights: dict[str, Tensor]) -> None:
            for name, weight in weights.items():
                weights[name] = weight * 0.15 if weight.dim() == 2 and "conv1d" not in name else weight

        folder = make_hf(arch, vocab_size=256, change=calmed, **options)
        bytes_tokenizer(folder)
        return folder, noise(tmp_path / "text.txt", seed=0)

    return make


@pytest.fixture
def parts_of(tmp_path: Path) -> Callable[..., Parts]:
    """parts_of(foreign, qweight=..., scales=...): these tensors of a matrix "x" as they are found in a file."""

    def make(foreign: Foreign, **tensors: Tensor) -> Parts:
        path = tmp_path / f"x{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        save_file({f"x.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}, path / "x.safetensors")
        return Parts("x", {kind: f"x.{kind}" for kind in tensors}, open_shards(path), foreign)

    return make


@pytest.fixture
def packed_again() -> Callable[..., Tensor | None]:
    """packed_again(codes, group_size, symmetric): what the packed format decodes to, or None where it is not kept."""

    def make(codes: Codes, group_size: int, symmetric: bool, exact: bool = True) -> Tensor | None:
        kept = codes.repacked(group_size, symmetric, exact)
        return kept and dequantize(pack(kept["codes"], group_size), kept["scales"], kept.get("mins"))

    return make


@pytest.fixture
def make_quantised(make_hf: MakeHF) -> Callable[..., tuple[Path, Path]]:
    """A function that writes a checkpoint twice, as a tool has quantised it and as plain numbers.

    make_quantised(matrix, quantization_config, arch, only=, **config): `matrix(n, k)` gives the tensors of a quantised
    matrix by their kinds, and its decoded W; `only`: of which matrices, part of their names.
    """

    def make(
        matrix: Callable[[int, int], tuple[dict[str, Tensor], Tensor]],
        quantization: dict[str, Any],
        arch: str = "llama",
        only: str = "",
        **config: Any,
    ) -> tuple[Path, Path]:
        made: dict[str, tuple[dict[str, Tensor], Tensor]] = {}

        def is_quantised(name: str, weight: Tensor) -> bool:
            linear = weight.dim() == 2 and ".layers." in name and only in name
            return linear and not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))

        def quantised(weights: dict[str, Tensor]) -> None:
            for name, weight in list(weights.items()):
                if is_quantised(name, weight):
                    made[name] = matrix(*weight.shape)
                    del weights[name]
                    stem = name.removesuffix(".weight")
                    weights |= {f"{stem}.{kind}": tensor.contiguous() for kind, tensor in made[name][0].items()}

        def plain(weights: dict[str, Tensor]) -> None:
            weights |= {name: w for name, (_, w) in made.items()}

        folder = make_hf(arch, change=quantised, name="quantised", **config)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "quantization_config": quantization}))
        return folder, make_hf(arch, change=plain, name="plain", **config)

    return make


_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, number, stem = stem.split(".", 2)
        return f"blk.{number}.{_GGUF_NAMES[stem]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def permuted(weight: Tensor, heads: int) -> Tensor:
    """What llama.cpp's converter does to query and key rows."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


_QWEN35_NAMES = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def qwen35_form(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Canonical weights of a Qwen3.5 as llama.cpp's converter writes them, by the file's names."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    repeats = value_heads // key_heads
    order = [k * repeats + j for j in range(repeats) for k in range(key_heads)]  # of the file's heads

    def tiled(weight: Tensor, axis: int = 0) -> Tensor:
        return torch.cat([weight.chunk(value_heads, axis)[head] for head in order], axis)

    stored: dict[str, Tensor] = {}
    plain = hf_form(config, weights)
    for name, weight in plain.items():
        values = value_heads * config["linear_value_head_dim"]
        if "norm" in name:
            weight = weights[name]  # 1 is added already
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            weight = weight.squeeze()
            weight = torch.cat((weight[:-values], tiled(weight[-values:])))
        elif name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")):
            weight = tiled(weight)
        elif name.endswith("A_log"):
            weight = -tiled(weight).exp()
        elif name.endswith("out_proj.weight"):
            weight = tiled(weight, axis=1)
        block = f"layers.{config['num_hidden_layers']}."
        placed = name.replace("mtp.layers.0.", block)
        _, _, kind = placed.split(".", 2) if placed.startswith("layers.") else ("", "", placed)
        if kind in _QWEN35_NAMES:
            number = placed.split(".")[1] if placed.startswith("layers.") else block.split(".")[1]
            stored[f"blk.{number}.{_QWEN35_NAMES[kind]}"] = weight
        else:
            stored[gguf_name(placed)] = weight
    return stored


def _qwen35_metadata(writer: "gguf.GGUFWriter", config: dict[str, Any], mtp: bool) -> None:
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_rope_dimension_count(config["head_dim"] // 4)
    writer.add_rope_dimension_sections([1, 1, 0, 0])
    if mtp:
        writer.add_nextn_predict_layers(1)


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGGUF:
    """A function that writes a .gguf file from canonical weights: make_gguf(config, weights, type, metadata=...).

    The type is F32 where none is given. metadata: called with the writer for more keys. extra: more tensors (name ->
    numpy array).
    """

    def make(
        config: dict[str, Any],
        weights: dict[str, Tensor],
        kind: "gguf.GGMLQuantizationType | None" = None,
        metadata: "Callable[[gguf.GGUFWriter], None] | None" = None,
        extra: dict[str, np.ndarray] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        import gguf

        plain = gguf.GGMLQuantizationType.F32
        path, arch = tmp_path / name, config["model_type"]
        mtp = "mtp.fc.weight" in weights
        writer = gguf.GGUFWriter(path, "qwen35" if arch == "qwen3_5" else arch)
        writer.add_block_count(config["num_hidden_layers"] + mtp)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*BYTES, "ab", "<|im_start|>", "<|im_end|>", "<think>"])
        writer.add_token_types([1] * 257 + [3, 3, 4])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(258)
        if metadata:
            metadata(writer)
        if arch == "qwen3_5":
            _qwen35_metadata(writer, config, mtp)
        named = qwen35_form(config, weights) if arch == "qwen3_5" else {gguf_name(n): w for n, w in weights.items()}
        for key, weight in named.items():
            if arch == "llama" and (".attn_q." in key or ".attn_k." in key):
                heads = config["num_attention_heads" if ".attn_q." in key else "num_key_value_heads"]
                weight = permuted(weight, heads)
            data = weight.float().numpy()
            stored = kind if kind is not None and data.ndim == 2 and data.shape[1] % 32 == 0 else plain
            writer.add_tensor(key, gguf.quants.quantize(data, stored), raw_dtype=stored)
        for key, array in (extra or {}).items():
            writer.add_tensor(key, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make
