"""Far positions, long contexts and many tokens: RoPE against fp64, attention that finds one key, offsets above 2^31."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.config import ModelConfig
from localchat.kernels.attention import attention_prefill, attention_reference
from localchat.kernels.attention_decode import attention_decode
from localchat.kernels.attention_slabs import Slabs
from localchat.kernels.gated_delta_net import gated_delta_net_reference
from localchat.kernels.gated_delta_net_prefill import gated_delta_net_prefill
from localchat.kernels.int8_embedding import int8_embedding
from localchat.kernels.rms_norm import rms_norm
from localchat.kernels.rope_kv_write import quantize_rows, rope_kv_write
from localchat.kernels.rotary import rotary_table
from localchat.kernels.swiglu import swiglu
from localchat.rope import inverse_frequencies, rotary

Relative = Callable[[Tensor, Tensor], float]
DeltaNet = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("nan_filled")

POSITIONS = [0, 32_767, 131_071, 262_143]
SHAPE: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 10}
SHAPE |= {"max_position_embeddings": 262_144}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": ({}, {"rope_theta": 1e6}),
    "qwen3, YaRN": ({}, {"rope_theta": 1e6, **YARN}),
    "qwen3.5, 64 of 256": (
        {"model_type": "qwen3_5", "head_dim": 256, "layer_types": ["full_attention"]},
        {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    "qwen3.5, 64 of 256, YaRN": (
        {"model_type": "qwen3_5", "head_dim": 256, "layer_types": ["full_attention"]},
        {"rope_theta": 1e7, "partial_rotary_factor": 0.25, **YARN, "original_max_position_embeddings": 262_144},
    ),
}


def exact_angles(rotary_dim: int, parameters: dict[str, Any]) -> tuple[Tensor, float]:
    """fp64 angles [positions, R / 2] and the attention factor, by the formulas of arXiv 2104.09864 and 2309.00071."""
    theta, factor, angles = parameters["rope_theta"], 1.0, []
    yarn = parameters.get("rope_type") == "yarn"
    if yarn:
        length, stretch = parameters["original_max_position_embeddings"], parameters["factor"]
        factor = 0.1 * math.log(stretch) + 1.0
        low, high = (rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), rotary_dim - 1)
    for j in range(rotary_dim // 2):
        frequency = theta ** (-2 * j / rotary_dim)
        if yarn:
            slow = min(max((j - low) / (high - low), 0.0), 1.0)
            frequency = frequency * (1 - slow) + frequency / stretch * slow
        angles.append([position * frequency for position in POSITIONS])
    return torch.tensor(angles, dtype=torch.float64).T, factor


@pytest.fixture(params=ROPES)
def rope(request: pytest.FixtureRequest) -> tuple[ModelConfig, Tensor, float]:
    """A config, the exact angles of its positions, and its attention factor."""
    shape, parameters = ROPES[request.param]
    delta_net = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_conv_kernel_dim": 4}
    delta_net |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = ModelConfig.from_dict({**SHAPE, **delta_net, **shape, "rope_parameters": parameters})
    return config, *exact_angles(config.rotary_dim, parameters)


def bound_of(angles: Tensor, factor: float) -> Tensor:
    """What fp32 may cost: frequency and angle are rounded (2^-24 of the angle each), then sine and cosine."""
    return (angles * 2.0**-23 + 3e-7) * factor


def test_far_positions_turn_as_in_fp64(device: torch.device, rope: tuple[ModelConfig, Tensor, float]) -> None:
    config, angles, factor = rope
    assert config.rotary_dim == 2 * angles.shape[1]
    assert config.rope.attention_factor == pytest.approx(factor)
    inv_freq = inverse_frequencies(config.rope, config.rotary_dim).to(device)
    positions, bound = torch.tensor(POSITIONS, device=device), bound_of(angles, factor)
    half = angles.shape[1]
    model = rotary(positions, inv_freq, config.rope.attention_factor)
    for cos, sin in ((model.cos, model.sin), rotary_table(positions, inv_freq, config.rope.attention_factor)):
        cos, sin = cos.cpu().double(), sin.cpu().double()
        assert bool(((cos[:, :half] - angles.cos() * factor).abs() <= bound).all())
        assert bool(((sin[:, half:] - angles.sin() * factor).abs() <= bound).all())
        assert torch.equal(cos[:, :half], cos[:, half:])
        assert torch.equal(sin[:, :half], -sin[:, half:])
    assert float(bound.max()) < 0.05 * factor  # and that is little: the last position's fastest angle is 262,143


def test_queries_and_keys_at_far_positions(device: torch.device, rope: tuple[ModelConfig, Tensor, float]) -> None:
    """Their products depend on the distance alone, here and in fp64; dimensions behind the rotated ones stay."""
    config, angles, factor = rope
    head_dim, rotary_dim, kv_heads = config.head_dim, config.rotary_dim, config.num_key_value_heads
    inv_freq = inverse_frequencies(config.rope, rotary_dim).to(device)
    positions = torch.tensor(POSITIONS, device=device)
    cos, sin = rotary_table(positions, inv_freq, config.rope.attention_factor)
    qkv = torch.randn(len(POSITIONS), config.q_size + 2 * config.kv_size, device=device)
    cache = [torch.empty(kv_heads, POSITIONS[-1] + 1, head_dim, device=device) for _ in range(2)]
    rows = [slice(n, n + 1) for n in range(len(POSITIONS))]  # one a call: positions of a call are consecutive
    q = torch.cat([rope_kv_write(qkv[n], None, None, 0.0, cos[n], sin[n], positions[n], *cache) for n in rows])
    heads = qkv.view(len(POSITIONS), -1, head_dim)[:, : config.num_attention_heads + kv_heads].cpu().double()
    low, high = heads[..., : rotary_dim // 2], heads[..., rotary_dim // 2 : rotary_dim]
    c, s, bound = angles.cos()[:, None] * factor, angles.sin()[:, None] * factor, bound_of(angles, factor)[:, None]
    wanted = torch.cat((low * c - high * s, high * c + low * s, heads[..., rotary_dim:]), -1)
    may_err = torch.cat(
        ((low.abs() + high.abs()) * bound + 1e-6,) * 2 + (torch.zeros_like(heads[..., rotary_dim:]),), -1
    )
    got = torch.cat((q, cache[0][:, positions].transpose(0, 1)), 1).cpu().double()
    assert bool(((got - wanted).abs() <= may_err).all())


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_lengths_around_every_block(device: torch.device, delta_net: DeltaNet, relative: Relative, tokens: int) -> None:
    """A whole prompt, and as many tokens behind prefixes that end at a block of keys, or one before."""
    for length in (tokens, tokens + 6, tokens + 7):
        q, cache = torch.randn(tokens, 4, 16, device=device), torch.randn(2, 2, length + 5, 16, device=device)
        cache[:, :, length:] = float("nan")
        positions = torch.arange(length - tokens, length, device=device)
        wanted = attention_reference(q, *cache, positions)
        assert relative(attention_prefill(q, *cache, positions), wanted) < 1e-6
    inputs = delta_net(device, tokens, (1, 2), (16, 16))
    states = [{name: inputs[name].clone() for name in ("conv_state", "state")} for _ in range(2)]
    out = gated_delta_net_prefill(**{**inputs, **states[0]})
    bound = 1.6e-3  # twice that of test_gated_delta_net_prefill.py: of so few numbers some are unlucky
    assert relative(out, gated_delta_net_reference(**{**inputs, **states[1]})) < bound
    assert relative(states[0]["state"], states[1]["state"]) < bound
    assert torch.equal(states[0]["conv_state"], states[1]["conv_state"])


def planted(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: tuple[int, int], head_dim: int, length: int, at: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of the last `tokens` of `length`; the key at `at` is the one that all of them look for."""
    q_heads, kv_heads = heads
    wanted = torch.nn.functional.normalize(torch.randn(kv_heads, head_dim, device=device), dim=-1)
    q = torch.randn(tokens, q_heads, head_dim, device=device)
    q += 20 * wanted.repeat_interleave(q_heads // kv_heads, 0)
    keys, values = (torch.randn(kv_heads, length + 9, head_dim, device=device) for _ in range(2))
    keys[:, at] = 2 * head_dim**0.5 * wanted  # a score near 40; of the others hardly one is above 6
    values[:, at] = 10.0
    keys[:, length:] = values[:, length:] = float("nan")
    return q.to(dtype), keys.to(dtype), values.to(dtype), torch.arange(length - tokens, length, device=device)


def decoded(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, splits: int) -> Tensor:
    """The last token by the kernel for one: nothing is normalised or turned, its row of the cache is written again."""
    at, head_dim = int(positions[-1]), q.shape[-1]
    qkv = torch.cat((q[-1], keys[:, at], values[:, at])).view(1, -1)
    keys[:, at] = values[:, at] = float("nan")
    still = torch.ones(1, head_dim, device=q.device), torch.zeros(1, head_dim, device=q.device)
    arrivals = torch.zeros(len(keys), dtype=torch.int32, device=q.device)
    heads = (qkv, None, None, 0.0, *still, positions[-1:])
    return attention_decode(*heads, keys, values, splits=splits, arrivals=arrivals)


def check_planted(
    relative: Relative, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, rows: list[int], splits: int
) -> None:
    """Some rows of a prefill, and the last token decoded: all see what was planted, as the fp32 reference does."""
    wanted = attention_reference(q[rows].float(), keys, values, positions[rows])
    out = attention_prefill(q, keys, values, positions)[rows]
    last = decoded(q, keys, values, positions, splits)
    assert relative(out, wanted) < 2.5e-3
    assert relative(last, attention_reference(q[-1:].float(), keys, values, positions[-1:])) < 2.5e-3
    assert float((wanted - 10).abs().max()) < 0.5
    assert float((out - 10).abs().max()) < 0.5
    assert float((last - 10).abs().max()) < 0.5


@pytest.mark.parametrize("at", [0, 3, 997])
def test_one_key_far_back_is_found(device: torch.device, relative: Relative, at: int) -> None:
    q, keys, values, positions = planted(device, torch.bfloat16, 20, (4, 2), 64, 1100, at)
    check_planted(relative, q, keys, values, positions, [0, 7, 19], splits=7)


def check_planted_int8(relative: Relative, q: Tensor, rows: tuple[Tensor, ...], positions: Tensor, room: int) -> None:
    """The same over an INT8 cache, whose blocks are read as they are and by slabs of at most `room` keys."""
    (keys, key_scales), (values, value_scales) = (quantize_rows(r.float().nan_to_num(0.0)) for r in rows)
    length, scales = int(positions[-1]) + 1, (key_scales, value_scales)
    for scale in scales:
        scale[:, length:] = float("nan")
    sampled = [0, len(q) // 2, len(q) - 1]
    wanted = attention_reference(q[sampled].float(), keys, values, positions[sampled], scales=scales)
    memory = torch.empty(2 * len(keys) * q.shape[-1] * room, dtype=torch.float16, device=q.device)
    for heads, slabs in ((q, None), (q.half(), Slabs(length, memory))):
        out = attention_prefill(heads, keys, values, positions, scales=scales, slabs=slabs)[sampled]
        assert relative(out, wanted) < 2.5e-3
        assert float((out - 10).abs().max()) < 0.5


@pytest.mark.parametrize("at", [0, 3, 997])
def test_one_key_far_back_is_found_in_int8(device: torch.device, relative: Relative, at: int) -> None:
    q, keys, values, positions = planted(device, torch.bfloat16, 20, (4, 2), 64, 1100, at)
    check_planted_int8(relative, q, (keys, values), positions, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("at", [0, 65_536, 99_000])
@pytest.mark.parametrize(("heads", "head_dim"), [((24, 4), 256), ((40, 8), 128), ((9, 3), 64)])
def test_one_key_of_100k_is_found_in_int8(
    card: torch.device, relative: Relative, heads: tuple[int, int], head_dim: int, at: int
) -> None:
    q, keys, values, positions = planted(card, torch.bfloat16, 200, heads, head_dim, 100_003, at)
    check_planted_int8(relative, q, (keys, values), positions, 32_768)


@pytest.mark.gpu
@pytest.mark.parametrize("at", [0, 37, 65_536, 99_000])
@pytest.mark.parametrize(("heads", "head_dim"), [((24, 4), 256), ((40, 8), 128), ((9, 3), 64)])
def test_one_key_of_100k_is_found(
    card: torch.device, relative: Relative, heads: tuple[int, int], head_dim: int, at: int
) -> None:
    q, keys, values, positions = planted(card, torch.bfloat16, 200, heads, head_dim, 100_003, at)
    check_planted(relative, q, keys, values, positions, [0, 1, 63, 64, 127, 128, 199], splits=33)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim"), [((24, 4), 256), ((40, 8), 128)])
def test_attention_of_a_whole_prompt_of_100k(
    card: torch.device, relative: Relative, heads: tuple[int, int], head_dim: int
) -> None:
    """Sampled rows against fp32; for these one key is planted right at the start."""
    length = 100_003
    q, keys, values, positions = planted(card, torch.bfloat16, length, heads, head_dim, length, 1)
    rows = [1, 2, 63, 64, 2047, 2048, 32_767, 65_535, 65_536, 99_999, length - 1]
    check_planted(relative, q, keys, values, positions, rows, splits=33)


def far_rows(rows: Tensor) -> Tensor:
    """bf16 [T, N]: the same values with rows so far apart that the last 16 begin 2^31 elements behind the first.

    As many lie before the first, where an offset of 32 bits would end up. Nothing of all that is touched, so nothing is
    taken.
    """
    stride = -(-(2**31) // (len(rows) - 16))
    memory = torch.empty_strided((2**31 + len(rows) * stride,), (1,), dtype=rows.dtype, device=rows.device)
    return memory.as_strided(rows.shape, (stride, 1), 2**31).copy_(rows)


def test_rows_beyond_32_bits(device: torch.device, delta_net: DeltaNet) -> None:
    """Columns of products that are as wide as it takes: far rows give what near ones do."""
    heads, head_dim, tokens = 2, 16, 140  # several tiles: within one 32 bits suffice
    positions = torch.arange(tokens, device=device)
    cos, sin = rotary_table(positions, torch.rand(8, device=device), 1.0)
    qkv = torch.randn(tokens, (heads + 2) * head_dim, device=device).bfloat16()
    gate = torch.randn(tokens, heads * head_dim, device=device).bfloat16()
    near_cache, far_cache = ([torch.zeros(1, tokens, head_dim, device=device) for _ in range(2)] for _ in range(2))
    near = rope_kv_write(qkv, None, None, 0.0, cos, sin, positions, *near_cache)
    far = rope_kv_write(far_rows(qkv), None, None, 0.0, cos, sin, positions, *far_cache)
    assert torch.equal(near, far)
    assert torch.equal(near_cache[0], far_cache[0])
    wanted = attention_prefill(near, *near_cache, positions, gate=gate)
    assert torch.equal(attention_prefill(near, *near_cache, positions, gate=far_rows(gate)), wanted)
    inputs = delta_net(device, tokens, (1, 1), (16, 16), torch.bfloat16)
    outs = []
    for spread in (torch.clone, far_rows):
        states = {name: inputs[name].clone() for name in ("conv_state", "state")}
        changed = {name: spread(inputs[name]) for name in ("qkvz", "ba")}
        outs.append(gated_delta_net_prefill(**{**inputs, **states, **changed}))
    assert torch.equal(*outs)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(card: torch.device) -> None:
    """Rows behind 2^31 elements come out as the same rows alone do."""
    tokens, tail = 131_100, slice(131_090, 131_100)
    x = torch.randn(tokens, 16_384, device=card)  # 2.15e9 elements
    weight = torch.ones(16_384, device=card)
    for half in (True, False):
        whole, alone = rms_norm(x, weight, 1e-6, half=half), rms_norm(x[tail].clone(), weight, 1e-6, half=half)
        assert torch.equal(whole[0][tail], alone[0])
        del whole
    for half in (True, False):
        assert torch.equal(swiglu(x, half=half)[0][tail], swiglu(x[tail].clone(), half=half)[0])
    del x
    table, scales = (
        torch.randint(-127, 128, (140_000, 16_384), dtype=torch.int8, device=card),
        torch.rand(140_000, device=card),
    )
    ids = torch.tensor([139_999, 0], device=card)
    assert torch.equal(int8_embedding(ids, table, scales), table[ids].float() * scales[ids, None])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2047, 2048, 2049, 140_001])
def test_a_delta_net_over_many_tokens_is_that_of_its_chunks(
    card: torch.device, delta_net: DeltaNet, tokens: int
) -> None:
    """Bit for bit, where the parts are whole chunks; 140,001 tokens of the 27B's width are more than 2^31 elements."""
    inputs = delta_net(card, tokens, (16, 48), (128, 128), torch.bfloat16)
    states = [{name: inputs[name].clone() for name in ("conv_state", "state")} for _ in range(2)]
    whole = gated_delta_net_prefill(**{**inputs, **states[0]}, dtype=torch.bfloat16)
    for start in range(0, tokens, 1024):
        rows = {name: inputs[name][start : start + 1024] for name in ("qkvz", "ba", "positions")}
        part = gated_delta_net_prefill(**{**inputs, **states[1], **rows}, dtype=torch.bfloat16)
        assert torch.equal(part, whole[start : start + 1024])
    assert torch.equal(states[0]["state"], states[1]["state"])
    assert torch.equal(states[0]["conv_state"], states[1]["conv_state"])
