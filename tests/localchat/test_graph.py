"""The captured decode step on a card: what runs in it, and that it gives what separate launches give."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from localchat.cache import KVCache
from localchat.engine import Engine
from localchat.failures import failure_of
from localchat.forward_graphs import ForwardGraphs
from localchat.kernels.pdl import pdl_options, without_pdl
from localchat.model import Model
from localchat.ops import ReferenceOps
from localchat.registry import MODELS, Entry
from localchat.sampling import Sampling
from localchat.synthetic import synthetic_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")]
GREEDY = Sampling(temperature=0.0)
PROMPT = list(range(5, 90))
INT8_OR_NOT = pytest.mark.parametrize("int8_kv", [False, True], ids=["bf16", "int8"])


@pytest.fixture(scope="module")
def model() -> Model:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    return synthetic_model(MODELS["smollm2-135m"], "cuda")


def reply(engine: Engine, prompt: list[int], sampling: Sampling, tokens: int = 40) -> list[int]:
    engine.rewind(0)
    for _ in engine.prefill(prompt):
        continue
    return list(engine.generate(sampling, (), tokens))


@INT8_OR_NOT
@pytest.mark.parametrize(("name", "layers"), [("smollm2-135m", 30), ("qwen3.5-27b", 5)])
def test_only_triton_kernels_run_in_a_step(name: str, layers: int, int8_kv: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    model = synthetic_model(replace(MODELS[name], num_hidden_layers=layers), "cuda")
    names = launches(Engine(model, 200, int8_kv=int8_kv))
    others = {name for name in names if not name.isidentifier() or not name.endswith("_kernel")}  # theirs are C++ names
    assert not others - {"Activity Buffer Request"}  # the profiler's own
    assert names.count("int4_few_tokens_kernel") == 4 * layers
    assert layers * 5 + 14 < len(names) < layers * 5 + 19  # five launches a layer, and the step's own


def launches(engine: Engine) -> list[str]:
    """What runs on the card in one step, in order."""
    reply(engine, PROMPT, GREEDY)
    if engine._graph is None or engine._graph._graph is None:
        raise AssertionError("no graph was captured")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine._graph._graph.replay()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


def test_a_layer_is_five_launches() -> None:
    """Both kinds; but the first, in front of which no product's end has made the norm."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    model = synthetic_model(replace(MODELS["qwen3.5-27b"], num_hidden_layers=5), "cuda")
    names = [name for name in launches(Engine(model, 200)) if name.endswith("_kernel")]
    product, delta_net, attention = "int4_few_tokens_kernel", "_decode_kernel", "_attention_decode_kernel"
    first = names.index(delta_net)
    assert names[first - 3 : first] == ["_rms_norm_kernel", product, "_rms_norm_kernel"]
    layers = names[first + 1 : len(names) - names[::-1].index(product)]
    mixers = [delta_net, delta_net, attention, delta_net]
    assert layers == [product] * 3 + [name for mixer in mixers for name in (product, mixer, *[product] * 3)]
    assert names.count("int8_few_tokens_kernel") == 1  # the head


@INT8_OR_NOT
def test_the_graph_gives_what_separate_launches_give(model: Model, int8_kv: bool) -> None:
    engine, plain = (Engine(model, 200, int8_kv=int8_kv) for _ in range(2))
    captured = reply(engine, PROMPT, GREEDY)
    for _ in plain.prefill(PROMPT):
        continue
    ids = [plain._sample(GREEDY)]
    while len(ids) < len(captured):
        plain._forward([ids[-1]])
        ids.append(plain._sample(GREEDY))
    assert captured == ids


@INT8_OR_NOT
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3.5-27b"])
def test_few_tokens_are_a_graph_from_the_second_time_on(name: str, int8_kv: bool) -> None:
    """Bit for bit what single launches of as many rows give, wherever the tokens stand and whatever ran between.

    Nothing is kept of the rows that fill up: the next token is what it is without them.
    """
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    entry = MODELS[name] if name == "smollm2-135m" else replace(MODELS[name], num_hidden_layers=4)
    engine, single, exact = (Engine(synthetic_model(entry, "cuda"), 400, int8_kv=int8_kv) for _ in range(3))
    single._graphs.ready = lambda _size: False  # type: ignore[method-assign]
    exact._graphs = ForwardGraphs(exact.model, exact.cache, 0)
    cases = ((0, 16), (3, 16), (200, 13), (9, 2), (100, 2), (11, 15), (7, 23), (70, 32), (50, 33), (5, 130), (9, 200))
    for start, tokens in cases:
        hidden = []
        for each in (engine, single, exact):
            each.rewind(0)
            for part in (PROMPT * 3)[:start], list(range(20, 20 + tokens)):
                for _ in each.prefill(part):
                    continue
            hidden.append(each._hidden)
        assert torch.equal(*hidden[:2])
        assert float((hidden[0] - hidden[2]).norm() / hidden[2].norm()) < 2e-2
        assert reply(engine, PROMPT, GREEDY, 5) == reply(single, PROMPT, GREEDY, 5)
    assert set(engine._graphs._captured) == {2, 8, 16, 32, 64, 128, 256}
    assert not single._graphs._captured


@INT8_OR_NOT
def test_one_graph_serves_every_prompt_length_and_setting(model: Model, int8_kv: bool) -> None:
    engine = Engine(model, 200, int8_kv=int8_kv)
    reply(engine, PROMPT, GREEDY)
    graph = engine._graph and engine._graph._graph
    cases = ((PROMPT[:3], GREEDY), (PROMPT, Sampling(seed=3, top_k=20)), (PROMPT[:50], Sampling(seed=4)))
    for prompt, sampling in cases:
        first = reply(engine, prompt, sampling)
        assert first == reply(engine, prompt, sampling)  # bit-identical, whatever ran before
        assert first == reply(Engine(model, 200, int8_kv=int8_kv), prompt, sampling)
    assert engine._graph and engine._graph._graph is graph


@pytest.mark.parametrize("entry", [MODELS["smollm2-135m"], replace(MODELS["qwen3.5-27b"], num_hidden_layers=4)])
@pytest.mark.parametrize("length", [85, 3000])  # one part of the context, and as many as there are splits
@INT8_OR_NOT
def test_programmatic_dependent_launch_changes_nothing(entry: Entry, length: int, int8_kv: bool) -> None:
    """Dense and tied; and a hybrid whose embedding lies in the host's memory."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    model = synthetic_model(entry, "cuda")
    prompt = [5 + i % 90 for i in range(length)]
    engine = Engine(model, length + 100, int8_kv=int8_kv)
    if not pdl_options(engine._seen)["PDL"]:
        pytest.skip("this card launches plainly")
    overlapped = reply(engine, prompt, GREEDY, 100)
    with without_pdl():
        plain_engine = Engine(model, length + 100, int8_kv=int8_kv)
        plain = reply(plain_engine, prompt, GREEDY, 100)
    assert overlapped == plain
    written = length + 99
    for ours, theirs in zip(engine.cache.rows, plain_engine.cache.rows, strict=True):
        assert torch.equal(ours[:, :, :written], theirs[:, :, :written])  # every hidden state went into these
    assert all(torch.equal(a, b) for a, b in zip(engine.cache.recurrent, plain_engine.cache.recurrent, strict=True))


def test_running_out_of_memory_ends_the_turn_only(model: Model) -> None:
    engine = Engine(model, 4000)
    wanted = reply(engine, PROMPT, GREEDY, 10)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (8 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            reply(engine, [5] * 3000, GREEDY, 1)
        assert "GB more were asked for" in str(failure_of(caught.value))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.ids == []
    assert reply(engine, PROMPT, GREEDY, 10) == wanted


@INT8_OR_NOT
def test_a_recurrent_state_survives_the_capture_and_comes_back_from_host_memory(int8_kv: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    hybrid = synthetic_model(MODELS["qwen3.5-0.8b"], "cuda")
    engine, plain = (Engine(hybrid, 200, int8_kv=int8_kv) for _ in range(2))
    for each in (engine, plain):
        for _ in each.prefill(PROMPT, snapshot_at=80):
            continue
    captured = list(engine.generate(GREEDY, (), 40))  # the second token is behind the capture
    ids = [plain._sample(GREEDY)]
    while len(ids) < len(captured):
        plain._forward([ids[-1]])
        ids.append(plain._sample(GREEDY))
    assert captured == ids
    states = [state.clone() for state in engine.cache.recurrent]
    for _ in range(2):
        assert engine.rewind(84) == 80
        for _ in engine.prefill(PROMPT[80:]):
            continue
        assert list(engine.generate(GREEDY, (), 40)) == captured
        assert all(torch.equal(a, b) for a, b in zip(engine.cache.recurrent, states, strict=True))


@INT8_OR_NOT
def test_four_layers_of_the_27b_s_shapes_give_the_reference_s_logits(int8_kv: bool) -> None:
    """Three gated delta nets and one gated attention of real size: prefill in odd chunks, then steps."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    entry = replace(MODELS["qwen3.5-27b"], num_hidden_layers=4)
    ours, reference = synthetic_model(entry, "cuda"), synthetic_model(entry, "cuda", ops=ReferenceOps())
    ids = torch.randint(0, entry.vocab_size, (170,), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.inference_mode():
        borders = [101, 120, *range(141, 170)]
        got, wanted = (run_in_chunks(model, ids, borders, int8_kv) for model in (ours, reference))
    error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error[:101].max()) < 3e-2  # bf16 products
    assert float(error[101:].max()) < 3e-2  # over what they left in the cache and the states


def run_in_chunks(model: Model, ids: torch.Tensor, borders: list[int], int8_kv: bool) -> torch.Tensor:
    cache = KVCache(model.config, 256, dtype=model.ops.cache_dtype, device=model.device, int8=int8_kv)
    parts = []
    for start, end in pairwise([0, *borders, len(ids)]):
        hidden = model(ids[start:end], torch.arange(start, end, device=ids.device), cache)
        cache.append(end - start)
        parts.append(model.logits(hidden))
    return torch.cat(parts)
