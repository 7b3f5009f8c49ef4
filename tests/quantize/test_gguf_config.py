"""GGUF metadata as config.json: every key that changes the result, and refusals by key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localchat.errors import BadCheckpoint
from localchat.quantize.gguf import open_gguf
from localchat.quantize.gguf_config import generation_config_from

Make = Callable[..., Any]
Change = Callable[[gguf.GGUFWriter], Any]


@pytest.fixture
def config_after(make_gguf: Make, config_of: Make, weights_of: Make) -> Make:
    """A function: the source of a file with more metadata."""

    def after(change: Change | None = None, arch: str = "llama", extra: Any = None, **overrides: Any) -> Any:
        config = config_of(arch, **overrides)
        path: Path = make_gguf(config, weights_of(config), metadata=change, extra=extra)
        return open_gguf(path)

    return after


def test_plain_config(config_after: Make) -> None:
    source = config_after(arch="qwen3", rope_theta=1e6)
    config = source.model_config
    assert (config.model_type, config.hidden_size, config.intermediate_size) == ("qwen3", 64, 96)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (16, 40, 512)
    assert config.rms_norm_eps == 1e-5  # not 9.99999974e-06, as fp32 has it
    assert (config.rope.rope_type, config.rope.rope_theta) == ("default", 1e6)
    assert source.config["eos_token_id"] == 258
    assert source.config["architectures"] == ["Qwen3ForCausalLM"]


def test_head_size_that_is_not_hidden_by_heads(config_after: Make) -> None:
    assert config_after(head_dim=32).model_config.head_dim == 32


def test_linear_scaling(config_after: Make) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rope = config_after(change).model_config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


def test_scaling_type_none_is_none(config_after: Make) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(4.0)

    assert config_after(change).model_config.rope.rope_type == "default"


def test_factor_beside_divisors_is_refused(config_after: Make) -> None:
    with pytest.raises(BadCheckpoint, match=r"both rope_freqs\.weight and linear"):
        config_after(lambda w: w.add_rope_scaling_factor(4.0), extra={"rope_freqs.weight": np.ones(8, np.float32)})


def test_yarn_without_its_ramp_is_refused(config_after: Make) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_float32("llama.rope.scaling.yarn_ext_factor", 0.0)

    with pytest.raises(BadCheckpoint, match="yarn_ext_factor"):
        config_after(change)


def test_yarn(config_after: Make) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    rope = config_after(change, arch="qwen2").model_config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert (rope.beta_fast, rope.beta_slow) == (32, 1)


def llama3_divisors(theta: float, head_dim: int, factor: float, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    divisors = []
    for j in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (j / head_dim)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling(config_after: Make, factor: float) -> None:
    divisors = llama3_divisors(500000.0, 64, factor)
    assert 1 < len(set(divisors.tolist()) - {1.0, factor}) < 20  # the interpolated part is there
    source = config_after(extra={"rope_freqs.weight": divisors}, head_dim=64, rope_theta=500000.0)
    rope = source.model_config.rope
    assert (rope.rope_type, rope.factor, rope.rope_theta) == ("llama3", factor, 500000.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings) == (1, 4, 8192)
    assert "rope_freqs.weight" not in source.shapes


@pytest.mark.parametrize(
    "divisors",
    [
        llama3_divisors(500000.0, 64, 8.0, high=8.0),
        llama3_divisors(10000.0, 64, 8.0)[::-1].copy(),
        np.full(32, np.nan, np.float32),
        np.ones(31, np.float32),
    ],
)
def test_other_divisors_are_refused(config_after: Make, divisors: np.ndarray) -> None:
    with pytest.raises(BadCheckpoint, match=r"rope_freqs\.weight"):
        config_after(extra={"rope_freqs.weight": divisors}, head_dim=64, rope_theta=500000.0)


def test_divisors_of_one_change_nothing(config_after: Make) -> None:
    source = config_after(extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert source.model_config.rope.rope_type == "default"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "llama.expert_count = 8"),
        (lambda w: w.add_uint32("llama.attention.sliding_window", 4096), "sliding_window"),
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count is not the head size"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope' is not implemented"),
    ],
)
def test_refused_by_key(config_after: Make, change: Change, words: str) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        config_after(change)


def test_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadCheckpoint, match="architecture 'mamba' is not supported"):
        open_gguf(tmp_path / "x.gguf")


def test_generation_config(config_after: Make) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(257)
        writer.add_bos_token_id(1)
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)

    got = generation_config_from(config_after(change)._metadata)
    assert got == {"bos_token_id": 1, "eos_token_id": [258, 257], "temperature": 0.7, "top_k": 20}
