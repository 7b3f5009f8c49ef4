"""The ledger's arithmetic against published figures, and its reading of real files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from localchat.cache import KVCache
from localchat.config import ModelConfig, QuantizationConfig, TensorFormat
from localchat.cuda_ops import CudaOps
from localchat.errors import BadCheckpoint
from localchat.forward_graphs import SIZES
from localchat.kernels.attention_slabs import SLAB
from localchat.ledger import (
    GRAPH_ROWS,
    KV_SLAB,
    PREFILL_CHUNK,
    Ledger,
    _matrices,
    default_formats,
    kv_bytes_per_token,
    ledger,
    ledger_of_folder,
    state_bytes,
)
from localchat.model import Linear
from localchat.ops import CpuOps
from localchat.quantize.convert import _SMALL, convert
from localchat.quantize.plan import Recipe, plan, upper_size
from localchat.quantize.source import expected_shapes, mtp_shapes
from localchat.registry import MODELS

BIG = MODELS["qwen3.5-27b"].config


def rows(table: Ledger) -> dict[str, int]:
    """Row name up to its first comma -> bytes."""
    return {row.name.partition(",")[0]: row.nbytes for row in table.rows}


def test_the_27b_in_gb() -> None:
    table = rows(ledger(BIG, 8192, device="cuda"))
    assert (table["INT4 weights"] + table["scales"]) / 1e9 == pytest.approx(12.55, abs=0.01)
    assert table["embedding"] == table["lm_head"] == 248320 * 5120 + 248320 * 4
    assert table["KV cache"] == 8192 * 65536
    assert table["INT8 weights"] == 48 * 2 * 48 * 5120  # steps and decays
    norms = 5120 + 64 * 2 * 5120 + 16 * 2 * 256
    assert table["norms and biases"] == 4 * norms + 48 * (4 * (2 * 48 + 128) + 2 * 10240 * 4)
    assert table["recurrent state"] / 1e6 == pytest.approx(154.9, abs=0.1)


def test_total_counts_the_card_only() -> None:
    card, host = ledger(BIG, 8192, device="cuda"), ledger(BIG, 8192, device="cpu")
    snapshots = next(row for row in card.rows if row.name.startswith("snapshots"))
    assert snapshots.on_host
    assert snapshots.nbytes <= 4 << 30
    embedding = next(row for row in card.rows if row.name == "embedding")
    assert embedding.on_host  # of which a token reads a row
    assert card.total == sum(row.nbytes for row in card.rows) - snapshots.nbytes - embedding.nbytes
    assert card.total < 16.8e9
    optional = sum(row.nbytes for row in host.rows if row.name.startswith("snapshots"))  # taken where there is room
    assert host.total == sum(row.nbytes for row in host.rows) - optional


def test_a_small_hybrid_fits_a_small_machine() -> None:
    table = ledger(MODELS["qwen3.5-0.8b"].config, 1, device="cpu")
    assert table.total < 2e9
    assert table.largest_context(4_000_000_000) > 10_000


@pytest.mark.parametrize(("alias", "kibibytes"), [("qwen3.5-0.8b", 12), ("qwen3.5-4b", 32), ("qwen3.5-27b", 64)])
def test_kv_bytes_per_token(alias: str, kibibytes: int) -> None:
    assert kv_bytes_per_token(MODELS[alias].config, "cuda") == kibibytes * 1024
    assert kv_bytes_per_token(MODELS[alias].config, "cpu") == 2 * kibibytes * 1024  # fp32 there


def test_int8_keys_and_values_have_a_scale_each() -> None:
    assert kv_bytes_per_token(BIG, "cuda", int8_kv=True) == kv_bytes_per_token(BIG, int8_kv=True) == 16 * 4 * 2 * 260
    wide, narrow = ledger(BIG, 8192, device="cuda"), ledger(BIG, 8192, device="cuda", int8_kv=True)
    assert wide.total - narrow.total == 8192 * (65536 - 33280)
    assert [row.name for row in narrow.rows if row.name.startswith("KV")] == ["KV cache, 8,192 tokens, INT8"]
    assert narrow.largest_context(narrow.total + 33280) == 8193


def test_kv_counts_every_layer_of_an_ordinary_model() -> None:
    assert kv_bytes_per_token(MODELS["qwen3-8b"].config, "cuda") == 2 * 36 * 8 * 128 * 2
    assert state_bytes(MODELS["qwen3-8b"].config, "cuda") == 0


@pytest.mark.parametrize(("alias", "mebibytes"), [("qwen3.5-0.8b", 18), ("qwen3.5-9b", 48), ("qwen3.5-27b", 144)])
def test_recurrent_state_without_its_convolution(alias: str, mebibytes: int) -> None:
    entry = MODELS[alias]
    convolution = entry.layer_types.count("linear_attention") * (4096 + entry.linear_num_value_heads * 128) * 4 * 2
    assert state_bytes(entry.config, "cuda") - convolution == mebibytes << 20
    assert state_bytes(entry.config, "cpu") - 2 * convolution == mebibytes << 20  # fp32 there


def test_small_model_gets_groups_of_32_with_min_and_no_second_head() -> None:
    table = rows(ledger(MODELS["smollm2-135m"].config, 1024))
    matrices = 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536)
    assert table["INT4 weights"] == matrices // 2
    assert table["scales"] == matrices // 32 * 4
    assert "lm_head" not in table
    assert "CUDA context" not in table
    assert table["norms and biases"] == (61 * 576) * 2


def test_qwen2_counts_biases_and_qwen3_its_head_norms() -> None:
    qwen2, qwen3 = MODELS["qwen2.5-7b"].config, MODELS["qwen3-8b"].config
    assert rows(ledger(qwen2, 1))["norms and biases"] == 2 * (57 * 3584 + 28 * (3584 + 2 * 512))
    assert rows(ledger(qwen3, 1))["norms and biases"] == 2 * (73 * 4096 + 36 * 2 * 128)


def test_recorded_formats_count() -> None:
    down = {f"layers.{i}.mlp.down_proj": TensorFormat(8) for i in range(36)}
    down["layers.0.self_attn.o_proj"] = TensorFormat(16)
    formats = QuantizationConfig("any", 1, TensorFormat(4, 64), down | {"embed_tokens": TensorFormat(8)})
    table = rows(ledger(replace(MODELS["qwen3-8b"].config, quantization=formats), 1))
    assert table["INT8 weights"] == 36 * 4096 * 12288
    assert table["unquantised weights"] == 4096 * 4096 * 2
    assert table["lm_head"] == 151936 * 4096 // 2 + 151936 * 4096 // 64 * 2


def test_codes_take_whole_tiles_of_rows() -> None:
    """As a Linear has them: gate_up has 2,008 rows, which 2,016 rows of codes and of scales hold."""
    entry = replace(MODELS["qwen3-8b"].config, num_hidden_layers=1, hidden_size=2048, intermediate_size=1004)
    formats = default_formats(entry)
    with torch.device("meta"):
        matrices = [each for each in _matrices(entry) if each[0] not in ("embed_tokens", "lm_head")]
        linears = [Linear(n, k, formats[name]) for name, n, k in matrices]
    stored = sum(linear.qweight.nbytes for linear in linears if linear.bits == 4)
    assert rows(ledger(entry, 1))["INT4 weights"] == stored
    scales = sum(linear.scales.nbytes for linear in linears)
    assert rows(ledger(entry, 1))["scales"] == scales


def test_largest_context() -> None:
    table = ledger(BIG, 8192, device="cuda")
    assert table.largest_context(table.total) == 8192
    assert table.largest_context(table.total + 65536 - 1) == 8192
    assert table.largest_context(table.total + 65536) == 8193
    assert table.largest_context(10**9) == 0
    assert table.largest_context(10**12) == 262144


def test_context_defaults_to_the_models_own() -> None:
    assert ledger(MODELS["qwen3-8b"].config).context == 40960


def packed_folder(folder: Path) -> Path:
    """A folder with the rows of a packed model, of no particular model's sizes."""
    config = MODELS["qwen2.5-7b"].config_dict()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"embed_tokens.weight": np.zeros((10, 4), np.int8), "embed_tokens.scales": np.zeros(10, np.float32)},
              folder / "model-00001-of-00002.safetensors")  # fmt: skip
    tensors = {
        "lm_head.weight": np.zeros((10, 4), np.float16),
        "norm.weight": np.zeros(4, np.float16),
        "layers.0.mlp.down_proj.qweight": np.zeros((8, 4), np.int32),
        "layers.0.mlp.down_proj.scales": np.zeros((8, 1), np.float16),
        "layers.0.mlp.down_proj.mins": np.zeros((8, 1), np.float16),
        "layers.0.self_attn.qkv_proj.weight": np.zeros((6, 5), np.int8),
        "layers.0.self_attn.qkv_proj.scales": np.zeros(6, np.float32),
        "layers.0.self_attn.qkv_proj.bias": np.zeros(6, np.float16),
        "layers.0.self_attn.o_proj.weight": np.zeros((3, 3), np.float32),
    }
    save_file(tensors, folder / "model-00002-of-00002.safetensors")
    return folder


def test_folder_takes_the_tensors_that_are_there(tmp_path: Path) -> None:
    table = rows(ledger_of_folder(packed_folder(tmp_path), 100))
    assert table["embedding"] == 40 + 40
    assert table["lm_head"] == 80
    assert table["norms and biases"] == 8 + 12
    assert table["INT4 weights"] == 128
    assert table["scales"] == 16 + 16 + 24
    assert table["INT8 weights"] == 30
    assert table["unquantised weights"] == 36
    assert table["KV cache"] == 100 * 2 * 28 * 4 * 128 * 4


def test_a_packed_hybrid_takes_what_its_config_says(tmp_path: Path) -> None:
    """The head for the token after the next is in the folder and not in memory."""
    config = {
        **MODELS["qwen3.5-27b"].config_dict(),
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "layer_types": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    shapes = ModelConfig.from_dict(config)
    weights = {name: torch.randn(shape) for name, shape in {**expected_shapes(shapes), **mtp_shapes(shapes)}.items()}
    wide = ("A_log", "linear_attn.norm.weight")
    half = {name: weight if name.endswith(wide) else weight.bfloat16() for name, weight in weights.items()}
    for name in [n for n in half if ".self_attn.gate_proj." in n]:
        half[name.replace("gate", "q")] = torch.cat((half[name], half.pop(name)))
    source, packed = tmp_path / "source", tmp_path / "packed"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_torch(half, source / "model.safetensors")
    for _ in convert(source, packed, Recipe(group_size=32, symmetric=False)):
        continue
    for device in ("cpu", "cuda"):
        assert rows(ledger_of_folder(packed, 100, device)) == rows(ledger(shapes, 100, device=device))


def test_folder_with_a_damaged_header_is_refused_by_name(tmp_path: Path) -> None:
    packed_folder(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadCheckpoint, match="model-00002-of-00002"):
        ledger_of_folder(tmp_path)


def test_what_runs_at_once_is_the_engines() -> None:
    assert {"cpu": CpuOps.prefill_chunk, "cuda": CudaOps.prefill_chunk} == PREFILL_CHUNK
    assert SIZES[-1] == GRAPH_ROWS


def test_slabs_of_an_int8_cache_take_the_matrices_memory_where_they_fit() -> None:
    """gate_up of the 27B is 356 MB, a slab of smollm2 (8,192 tokens, 3 heads of 64) larger than any of its matrices.

    8 slabs give more than gate, up and their product: 0.6B with 32 heads, whose longest context is 262,144.
    """
    wide = replace(MODELS["qwen3-0.6b"], max_position_embeddings=262_144, num_attention_heads=32)
    more = {}
    for name, entry in {"27b": MODELS["qwen3.5-27b"], "small": MODELS["smollm2-135m"], "wide": wide}.items():
        spaces = [rows(ledger(entry.config, 4096, "cuda", int8_kv=int8))["workspace"] for int8 in (False, True)]
        more[name] = spaces[1] - spaces[0]
    parts = 2048 * 2 * (2 * 8 * 32 * 128 - 3 * 3072)
    assert more == {"27b": 0, "small": 2 * 2 * 8192 * 3 * 64, "wide": 2 * 2 * 32_768 * 8 * 128 + parts}
    assert KV_SLAB == SLAB
    assert SIZES[-1] == GRAPH_ROWS


@pytest.mark.parametrize("int8", [False, True])
def test_the_cache_is_as_large_as_the_ledger_says(int8: bool) -> None:
    entry = MODELS["smollm2-135m"]
    config = entry.config
    cache = KVCache(config, 100, dtype=CpuOps.cache_dtype, device=torch.device("cpu"), int8=int8)
    assert cache.nbytes == 100 * kv_bytes_per_token(entry.config, "cpu", int8_kv=int8)
    entry = MODELS["qwen3.5-0.8b"]
    config = entry.config
    for device, dtype in (("cpu", CpuOps.cache_dtype), ("cuda", CudaOps.cache_dtype)):
        cache = KVCache(config, 100, dtype=dtype, device=torch.device("cpu"), int8=int8)
        tokens = 100 * kv_bytes_per_token(entry.config, device, int8_kv=int8)
        assert cache.nbytes == tokens + state_bytes(entry.config, device)
        assert cache.kv_nbytes == tokens


@pytest.mark.parametrize(
    "alias", ["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b", "qwen3.5-2b", "qwen3.5-27b"]
)
def test_the_ledger_assumes_the_formats_that_a_conversion_chooses(alias: str) -> None:
    """Two rooms know how wide groups are; nothing but this test holds them together."""
    config = MODELS[alias].config
    recipe = Recipe(group_size=32, symmetric=False) if config.hidden_size < _SMALL else Recipe()
    planned = sum(upper_size(matrix) for matrix in plan(config, recipe))
    assert ledger(MODELS[alias].config).weights - rows(ledger(MODELS[alias].config))["norms and biases"] == planned
