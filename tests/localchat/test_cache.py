"""The cache's four verbs, and what they refuse."""

import pytest
import torch

from localchat.cache import KVCache
from localchat.config import ModelConfig

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
)


HYBRID = ModelConfig.from_dict(
    {
        "model_type": "qwen3_5",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 5,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
)


@pytest.fixture
def cache() -> KVCache:
    return KVCache(CONFIG, 20, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_memory_is_what_the_shapes_say(cache: KVCache) -> None:
    assert cache.nbytes == 2 * 3 * 2 * 20 * 8 * 2
    assert cache.layer(2)[0].shape == (2, 20, 8)


def test_length_moves_by_append_and_truncate(cache: KVCache) -> None:
    cache.append(20)
    cache.truncate(7)
    assert cache.length == 7
    with pytest.raises(ValueError, match="at most 20"):
        cache.append(14)
    for wrong in (-1, 8):
        with pytest.raises(ValueError, match=r"wanted 0\.\.7"):
            cache.truncate(wrong)


def test_restore_returns_to_a_snapshot_unless_it_was_overwritten(cache: KVCache) -> None:
    cache.append(5)
    early = cache.snapshot()
    cache.append(5)
    late = cache.snapshot()
    cache.append(3)
    cache.restore(late)
    assert cache.length == 10
    cache.truncate(6)
    cache.append(9)  # other tokens where `late` was taken
    with pytest.raises(ValueError, match="cut below"):
        cache.restore(late)
    cache.restore(early)
    assert cache.length == 5


def test_a_hybrid_keeps_keys_for_attention_and_states_for_the_others() -> None:
    cache = KVCache(HYBRID, 20, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert cache.nbytes == 2 * 2 * 2 * 20 * 8 * 2 + 3 * (32 * 3 * 2 + 4 * 3 * 5 * 4)
    for index in (0, 2, 4):
        convolution, state = cache.layer(index)
        assert convolution.shape == (2 * 6 + 20, 3) and convolution.dtype == torch.bfloat16
        assert state.shape == (4, 3, 5) and state.dtype == torch.float32
        assert not convolution.any() and not state.any()
        convolution += index + 1
        state += index + 1
    assert cache.layer(3)[0].data_ptr() != cache.layer(1)[0].data_ptr()
    assert float(cache.layer(2)[1][0, 0, 0]) == 3
    cache.append(10)
    with pytest.raises(ValueError, match="cannot be cut"):
        cache.truncate(5)
    cache.truncate(10)
    assert cache.layer(4)[1].all()
    cache.truncate(0)
    assert not any(state.any() for index in (0, 2, 4) for state in cache.layer(index))
