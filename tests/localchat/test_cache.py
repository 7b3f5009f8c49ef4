"""The cache's four verbs, and what they refuse: over keys and values, and over states that cannot be cut."""

from dataclasses import replace

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


@pytest.fixture
def cache() -> KVCache:
    return KVCache(CONFIG, 20, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_memory_is_what_the_shapes_say(cache: KVCache) -> None:
    assert cache.nbytes == 2 * 3 * 2 * 20 * 8 * 2
    assert cache.layer(2)[0].shape == (2, 20, 8)


def test_int8_rows_have_a_scale_for_each_token_and_head() -> None:
    cache = KVCache(CONFIG, 20, dtype=torch.bfloat16, device=torch.device("cpu"), int8=True)
    assert cache.nbytes == cache.kv_nbytes == 2 * 3 * 2 * 20 * (8 + 4)
    assert [(part.shape, part.dtype) for part in cache.layer(2)] == [
        ((2, 20, 8), torch.int8),
        ((2, 20, 8), torch.int8),
        ((2, 20), torch.float32),
        ((2, 20), torch.float32),
    ]
    for i in range(3):
        for j, part in enumerate(cache.layer(i)):
            part.fill_(10 * i + j)
    assert all(
        int(part.min()) == int(part.max()) == 10 * i + j for i in range(3) for j, part in enumerate(cache.layer(i))
    )


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


HYBRID = replace(
    CONFIG,
    num_hidden_layers=4,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    linear_num_key_heads=1,
    linear_num_value_heads=3,
    linear_key_head_dim=5,
    linear_value_head_dim=3,
    linear_conv_kernel_dim=4,
)
CHANNELS = 2 * 5 + 3 * 3


@pytest.fixture
def hybrid_cache() -> KVCache:
    return KVCache(HYBRID, 20, dtype=torch.bfloat16, device=torch.device("cpu"))


def forward(cache: KVCache, tokens: int) -> None:
    """What a forward does to a cache: it changes all states in place and writes rows."""
    cache.begin()
    for _ in range(tokens):
        for i, kind in enumerate(HYBRID.layer_types):
            if kind == "linear_attention":
                for state in cache.layer(i):
                    state.mul_(0.5).add_(i + 1)
    cache.append(tokens)


def states(cache: KVCache) -> list[torch.Tensor]:
    return [state.clone() for state in cache.recurrent]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_only_attention_has_rows_and_only_linear_layers_have_states(hybrid_cache: KVCache) -> None:
    for i in range(3):
        convolution, state = hybrid_cache.layer(i)
        assert (convolution.shape, convolution.dtype) == ((4, CHANNELS), torch.bfloat16)
        assert (state.shape, state.dtype) == ((3, 3, 5), torch.float32)
        assert not convolution.any() and not state.any()
    assert [t.shape for t in hybrid_cache.layer(3)] == [(2, 20, 8)] * 2
    per_snapshot = 3 * (CHANNELS * 4 * 2 + 3 * 5 * 3 * 4)
    assert hybrid_cache.snapshot_nbytes == per_snapshot
    assert hybrid_cache.nbytes == 2 * 1 * 2 * 20 * 8 * 2 + per_snapshot


def test_layers_do_not_share_their_memory(hybrid_cache: KVCache) -> None:
    for i in range(4):
        for tensor in hybrid_cache.layer(i):
            tensor.fill_(i)
    for i in range(4):
        assert all((tensor == i).all() for tensor in hybrid_cache.layer(i))


def test_states_come_back_bit_for_bit_at_the_same_addresses(hybrid_cache: KVCache) -> None:
    addresses = [state.data_ptr() for state in hybrid_cache.recurrent]
    forward(hybrid_cache, 5)
    then, snapshot = states(hybrid_cache), hybrid_cache.snapshot()
    forward(hybrid_cache, 3)
    later = states(hybrid_cache)
    assert not equal(then, later)
    for _ in range(2):  # a snapshot serves any number of times
        hybrid_cache.restore(snapshot)
        assert equal(states(hybrid_cache), then)
        assert hybrid_cache.is_at(5)
        forward(hybrid_cache, 3)
        assert equal(states(hybrid_cache), later)
    assert [state.data_ptr() for state in hybrid_cache.recurrent] == addresses


def test_a_recurrent_state_is_not_cut(hybrid_cache: KVCache) -> None:
    forward(hybrid_cache, 5)
    hybrid_cache.truncate(5)
    with pytest.raises(ValueError, match="got length 3, wanted 0 or a restore: the states are at 5"):
        hybrid_cache.truncate(3)
    assert hybrid_cache.is_at(5)
    hybrid_cache.truncate(0)
    assert hybrid_cache.is_at(0)
    assert not any(state.any() for state in hybrid_cache.recurrent)


def test_a_step_that_was_broken_off_leaves_no_state(hybrid_cache: KVCache) -> None:
    forward(hybrid_cache, 5)
    then, snapshot = states(hybrid_cache), hybrid_cache.snapshot()
    hybrid_cache.begin()
    hybrid_cache.layer(1)[1].add_(1)
    assert not hybrid_cache.is_at(5)
    with pytest.raises(ValueError, match="broken off"):
        hybrid_cache.truncate(5)
    with pytest.raises(ValueError, match="broken off"):
        hybrid_cache.snapshot()
    hybrid_cache.restore(snapshot)
    assert equal(states(hybrid_cache), then)
    hybrid_cache.begin()
    hybrid_cache.layer(1)[1].add_(1)
    hybrid_cache.truncate(0)
    assert not any(state.any() for state in hybrid_cache.recurrent)


def test_a_snapshot_behind_a_return_is_no_longer_valid(hybrid_cache: KVCache) -> None:
    forward(hybrid_cache, 5)
    early = hybrid_cache.snapshot()
    forward(hybrid_cache, 5)
    late = hybrid_cache.snapshot()
    hybrid_cache.restore(early)
    forward(hybrid_cache, 9)
    with pytest.raises(ValueError, match="cut below"):
        hybrid_cache.restore(late)


def test_a_snapshot_takes_over_the_memory_of_another(hybrid_cache: KVCache) -> None:
    forward(hybrid_cache, 5)
    first = hybrid_cache.snapshot()
    memory = [copy.data_ptr() for copy in first.states]
    forward(hybrid_cache, 2)
    then, second = states(hybrid_cache), hybrid_cache.snapshot(reuse=first)
    assert [copy.data_ptr() for copy in second.states] == memory
    assert equal(list(second.states), then)
    assert not first.valid
    with pytest.raises(ValueError, match="restore"):
        hybrid_cache.restore(first)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_what_runs_in_preserved_leaves_no_trace(hybrid_cache: KVCache, error: type[BaseException] | None) -> None:
    forward(hybrid_cache, 5)
    then = states(hybrid_cache)
    try:
        with hybrid_cache.preserved():
            hybrid_cache.layer(0)[0].fill_(9)
            hybrid_cache.layer(2)[1].fill_(9)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert equal(states(hybrid_cache), then)
    assert hybrid_cache.is_at(5)
