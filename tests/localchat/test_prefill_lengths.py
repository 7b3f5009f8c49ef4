"""A prompt read whole, in chunks and token by token is the same prompt, at lengths around every block of a kernel."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.config import ModelConfig
from localchat.engine import Engine
from localchat.kernels.gated_delta_net import gated_delta_net_chunked
from localchat.model import Linear, Model
from localchat.ops import CpuOps, ReferenceOps
from localchat.registry import MODELS, Entry
from localchat.synthetic import made_up, synthetic_model

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
# fp32 throughout; and products whose inputs are rounded to bf16, where a last bit more or less counts 2^-9 of a value.
BOUNDS: dict[type[ReferenceOps], float] = {ReferenceOps: 2e-5, CpuOps: 1e-2}


def shape(kind: str) -> ModelConfig:
    raw = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 200}
    raw |= {"max_position_embeddings": 4096, "tie_word_embeddings": True}
    if kind == "hybrid":
        raw |= {"model_type": "qwen3_5", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        raw |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    return ModelConfig.from_dict(raw)


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def weights(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = shape(request.param)
    torch.manual_seed(0)
    made = Model(config, ReferenceOps())
    state = {name: torch.randn(tensor.shape) * 0.25 for name, tensor in made.state_dict().items()}
    for name in state:
        if name.endswith("A_log"):
            state[name] -= 5.0  # a state that remembers the chunk before
    return config, state


@pytest.fixture(params=BOUNDS)
def model(request: pytest.FixtureRequest, weights: tuple[ModelConfig, dict[str, Tensor]]) -> Model:
    config, state = weights
    made = Model(config, request.param())
    frequencies = made.inv_freq
    made.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    made.inv_freq = frequencies
    for module in made.modules():
        if isinstance(module, Linear):
            made.ops.prepare(module)
    return made


def hidden_in_parts(model: Model, ids: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Hidden states of all ids, read in parts of these sizes (the last one for the rest), and what the cache keeps."""
    cache = KVCache(model.config, len(ids), dtype=model.ops.cache_dtype, device=model.device)
    rows, start = [], 0
    with torch.inference_mode():
        while start < len(ids):
            count = min(sizes[min(len(rows), len(sizes) - 1)], len(ids) - start)
            rows.append(model(ids[start : start + count], torch.arange(start, start + count, device=ids.device), cache))
            cache.append(count)
            start += count
    return torch.cat(rows), [cache.keys, cache.values, *cache.recurrent]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_is_chunked_is_token_by_token(model: Model, length: int) -> None:
    ids = torch.randint(0, 200, (length,), generator=torch.Generator().manual_seed(length))
    bound = BOUNDS[type(model.ops)]
    wanted, kept = hidden_in_parts(model, ids, [1])
    for sizes in ([length], [64], [16, 1, 31], [max(1, length - 1), 1]):
        got, left = hidden_in_parts(model, ids, sizes)
        assert relative(got, wanted) < bound, sizes
        for ours, theirs in zip(left, kept, strict=True):
            assert relative(ours, theirs) < bound, sizes


def test_the_engine_s_chunks_are_the_whole_prompt(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 ids in chunks of 64, a snapshot at 100, against one forward."""
    monkeypatch.setattr(model.ops, "prefill_chunk", 64)
    ids = torch.randint(0, 200, (300,), generator=torch.Generator().manual_seed(1))
    engine = Engine(model, 301)
    for _ in engine.prefill(ids.tolist(), snapshot_at=100):
        continue
    wanted, _ = hidden_in_parts(model, ids, [300])
    assert engine._hidden is not None
    assert relative(engine._hidden, wanted[-1:]) < BOUNDS[type(model.ops)]


class FastReference(ReferenceOps):
    """The references, with the delta rule in chunks, which is what can be waited for."""

    prefill_chunk = 2048

    def delta_rule(self, tokens: int) -> Callable[..., Tensor]:
        return gated_delta_net_chunked


REAL = {
    "dense": replace(MODELS["qwen2.5-7b"], num_hidden_layers=2, max_position_embeddings=131_072),
    "hybrid": replace(MODELS["qwen3.5-27b"], num_hidden_layers=4),
}


@pytest.fixture(scope="module", params=REAL)
def pair(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """A few layers of real width on a card, and the same weights under the references."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    entry: Entry = REAL[request.param]
    return synthetic_model(entry, "cuda"), synthetic_model(entry, "cuda", ops=FastReference())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("length", "int8_kv"), [*((n, False) for n in (*LENGTHS, 2047, 2048, 2049, 100_003)), (2049, True), (100_003, True)]
)
def test_prompts_on_a_card_are_the_reference_s(pair: tuple[Model, Model], length: int, int8_kv: bool) -> None:
    """In the engine's chunks; what is compared is the last hidden state, which depends on all before it."""
    ids = torch.randint(0, 100_000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    last = []
    for model in pair:
        engine = Engine(model, length + 1, int8_kv=int8_kv)
        for _ in engine.prefill(ids):
            continue
        assert engine._hidden is not None
        last.append(engine._hidden)
    assert relative(*last) < 3e-2  # bf16 products and a bf16 cache


@pytest.mark.gpu
@pytest.mark.parametrize("length", [129, 2049])
def test_on_a_card_whole_is_chunked_is_token_by_token(pair: tuple[Model, Model], length: int) -> None:
    model = pair[0]
    ids = torch.randint(0, 100_000, (length,), generator=torch.Generator().manual_seed(length)).cuda()
    wanted, _ = hidden_in_parts(model, ids, [length])
    for sizes in ([64], [1000, 1, 16, 17], [length - 40, 1]):
        got, _ = hidden_in_parts(model, ids, sizes)
        assert relative(got[-30:], wanted[-30:]) < 3e-2


@pytest.mark.gpu
def test_a_card_is_never_far_behind_what_a_prefill_says() -> None:
    """Ctrl-C closes the prefill, and then waits for what is queued: that is 100 ms at the most."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    engine = Engine(synthetic_model(replace(MODELS["qwen3.5-27b"], num_hidden_layers=16), "cuda"), 40_000)
    ids = made_up(engine.vocab_size, 32_768)
    for _ in engine.prefill(ids[:4096]):  # compiles
        continue
    for seconds in (0.03, 0.1, 0.25, 0.4):
        engine.rewind(0)
        torch.cuda.synchronize()
        start = looked = time.perf_counter()
        steps, longest = engine.prefill(ids), 0.0
        while time.perf_counter() - start < seconds:
            next(steps)
            longest, looked = max(longest, time.perf_counter() - looked), time.perf_counter()
        stopped = time.perf_counter()
        steps.close()
        torch.cuda.synchronize()
        assert time.perf_counter() - stopped < 0.1
        assert longest < 0.1  # and between two moments in which it can be stopped
        # Whole chunks are kept; one broken off inside leaves nothing, and no snapshot to go back to: the start.
        assert len(engine.ids) == engine.cache.length
        assert len(engine.ids) % engine.model.ops.prefill_chunk == 0
