"""config.json of the hybrid family: every spelling leads to the same record."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat.config import ModelConfig
from localchat.errors import BadCheckpoint
from localchat.ledger import ledger
from localchat.registry import MODELS

Change = Callable[[dict[str, Any]], object]
ConfigError = Callable[[dict[str, Any]], str]


def flat() -> dict[str, Any]:
    """A text model's config as transformers saves it."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 40,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    }


def wrapped(**top: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5", "text_config": flat(), "vision_config": {"hidden_size": 7}, **top}


def test_the_fields() -> None:
    config = ModelConfig.from_dict(flat())
    assert config.model_type == "qwen3_5"
    assert config.layer_types == (*["linear_attention"] * 3, "full_attention") * 2
    assert (config.head_dim, config.rotary_dim, config.rope.rope_theta) == (32, 8, 1e7)
    assert (config.linear_value_size, config.conv_channels) == (48, 2 * 32 + 48)
    assert config.attn_output_gate and config.qk_norm and not config.qkv_bias


def test_the_wrapper_says_the_same() -> None:
    assert ModelConfig.from_dict(wrapped()) == ModelConfig.from_dict(flat())


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("layer_types"),  # four is the default interval
        lambda c: (c.pop("layer_types"), c.update(full_attention_interval=4)),
        lambda c: c["rope_parameters"].pop("partial_rotary_factor"),  # 0.25 as well
        lambda c: c.update(partial_rotary_factor=c["rope_parameters"].pop("partial_rotary_factor")),
        lambda c: c.update(partial_rotary_factor=0.25),
        lambda c: c.update(rope_theta=c.pop("rope_parameters")["rope_theta"]),
        lambda c: c.update(output_gate_type="swish", mamba_ssm_dtype="float32", mtp_num_hidden_layers=1),
        lambda c: c.update(rms_norm_eps=None, attn_output_gate=None, mlp_only_layers=[]),
    ],
)
def test_spellings_of_the_same(change: Change) -> None:
    raw = flat()
    change(raw)
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(flat())


def test_another_interval_and_another_share() -> None:
    raw = flat()
    del raw["layer_types"]
    raw["full_attention_interval"] = 3
    raw["rope_parameters"]["partial_rotary_factor"] = 0.5
    config = ModelConfig.from_dict(raw)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [2, 5]
    assert config.rotary_dim == 16


def test_yarn_on_a_part_of_the_head() -> None:
    raw = flat()
    raw["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = ModelConfig.from_dict(raw)
    assert (config.rope.rope_type, config.rope.factor, config.rotary_dim) == ("yarn", 4.0, 8)


@pytest.mark.parametrize(("top", "nested", "tied"), [(None, True, True), (True, False, True), (False, None, False)])
def test_what_the_wrapper_says_of_the_embedding_counts(top: bool | None, nested: bool | None, tied: bool) -> None:
    raw = wrapped(tie_word_embeddings=top)
    raw["text_config"]["tie_word_embeddings"] = nested
    assert ModelConfig.from_dict(raw).tie_word_embeddings == tied


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_output_gate", False),
        ("attention_bias", True),
        ("output_gate_type", "sigmoid"),
        ("linear_conv_kernel_dim", 3),
        ("linear_num_value_heads", 5),
        ("linear_num_key_heads", None),
        ("layer_types", ["linear_attention"] * 7),
        ("layer_types", ["linear_attention"] * 7 + ["sliding_attention"]),
        ("partial_rotary_factor", 0.1),
        ("num_experts", 8),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(key: str, value: object, config_error: ConfigError) -> None:
    raw = flat()
    if key == "partial_rotary_factor":
        del raw["rope_parameters"][key]
    assert key in config_error(raw | {key: value})


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_next", "qwen4_exp", "qwen3_moe"])
def test_mixtures_of_experts_are_refused_by_name(model_type: str, config_error: ConfigError) -> None:
    for raw in (flat() | {"model_type": model_type}, wrapped(model_type=model_type)):
        sentence = config_error(raw)
        assert model_type in sentence
        assert "mixture-of-experts" in sentence
    nested = wrapped()
    nested["text_config"]["model_type"] = "qwen3_5_moe_text"
    assert "mixture-of-experts" in config_error(nested)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("deepseek_v3", "n_routed_experts"), ("gpt_oss", "num_local_experts"), ("ernie4_5", "moe_num_experts")],
)
def test_experts_are_seen_in_families_that_nobody_has_heard_of(
    model_type: str, key: str, config_error: ConfigError
) -> None:
    assert "mixture-of-experts" in config_error(flat() | {"model_type": model_type, key: 8})
    assert "known architectures are" in config_error(flat() | {"model_type": model_type, key: 0})


def test_a_known_family_with_experts_is_told_of_a_dense_one(config_error: ConfigError) -> None:
    assert config_error(flat() | {"num_experts": 8}) == (
        "config.json: num_experts = 8 cannot be run: mixture-of-experts models are not supported, "
        "use a dense one such as qwen3.5-27b."
    )


def test_dense_families_have_layer_types_too() -> None:
    config = ModelConfig.from_dict(MODELS["qwen3-8b"].config_dict())
    assert config.layer_types == ("full_attention",) * 36
    assert (config.rotary_dim, config.attn_output_gate, config.conv_channels) == (128, False, 0)


def test_the_real_config_is_the_registrys(qwen_folder: Path) -> None:
    real = ModelConfig.from_dict(json.loads((qwen_folder / "config.json").read_text()))
    assert real == ModelConfig.from_dict(MODELS["qwen3.5-27b"].config_dict())
    assert (real.rotary_dim, real.conv_channels, real.linear_value_size) == (64, 10240, 6144)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": "x"}, "text_config is 'x', wanted an object"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e+09, wanted a whole number up to"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_messages_name_what_is_wrong(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadCheckpoint, match=re.escape(words)):
        ModelConfig.from_dict(flat() | change)


def test_the_ledger_of_a_hybrid_without_attention() -> None:
    config = ModelConfig.from_dict(flat() | {"layer_types": ["linear_attention"] * 8})
    table = ledger(config, 100)
    assert table.largest_context(table.total) == config.max_position_embeddings
    assert table.largest_context(table.total - 1) == 0
