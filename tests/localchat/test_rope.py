"""RoPE frequencies against transformers' own, old and new spelling of the config."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from localchat.config import ModelConfig
from localchat.rope import inverse_frequencies, rotary

SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 32768,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "attention_factor": 1.5},
        {**YARN, "truncate": False},
        LLAMA3,
    ],
    ids=lambda p: "-".join(map(str, p.values())),
)
def test_cos_and_sin_equal_transformers(parameters: dict[str, Any], theta: float) -> None:
    config = ModelConfig.from_dict({**SHAPE, "rope_parameters": {**parameters, "rope_theta": theta}})
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{**SHAPE, "rope_parameters": {**parameters, "rope_theta": theta}}))
    positions = torch.tensor([0, 1, 100, 8191, 32767])
    ours = rotary(positions, inverse_frequencies(config.rope, config.head_dim), config.rope.attention_factor)
    cos, sin = theirs(torch.zeros(1), positions[None])
    # At position 32,767 one rounding of the frequency is 2e-3 of a turn: compare what is left of the angle.
    sign = torch.ones(128).index_fill_(0, torch.arange(64), -1.0)
    assert float((ours.cos - cos[0]).abs().max()) < 5e-3
    assert float((ours.sin - sin[0] * sign).abs().max()) < 5e-3
    assert float((ours.cos - cos[0])[:3].abs().max()) < 2e-5


def test_old_and_new_spelling_are_the_same_record() -> None:
    new = ModelConfig.from_dict({**SHAPE, "rope_parameters": {**YARN, "rope_theta": 5e5}})
    for type_key in ("type", "rope_type"):
        scaling = {**YARN, type_key: "yarn"}
        if type_key == "type":
            del scaling["rope_type"]
        old = ModelConfig.from_dict({**SHAPE, "rope_theta": 5e5, "rope_scaling": scaling})
        assert old.rope == new.rope
