"""kernels/padding.py: rows that fill a call up change nothing that is kept, and nothing that others give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels.attention import attention_prefill
from localchat.kernels.gated_delta_net_few_tokens import gated_delta_net_few_tokens
from localchat.kernels.gated_delta_net_prefill import gated_delta_net_prefill
from localchat.kernels.padding import padded
from localchat.kernels.rope_kv_write import quantize_rows, rope_kv_write

DeltaNet = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("nan_filled")


def test_ids_and_positions(device: torch.device) -> None:
    ids, positions = padded([7, 8, 9], 100, 5, device)
    assert ids.tolist() == [7, 8, 9, 0, 0]
    assert positions.tolist() == [100, 101, 102, 102, 102]
    ids, positions = padded([7, 8], 0, 2, device)
    assert (ids.tolist(), positions.tolist()) == ([7, 8], [0, 1])


def fill(rows: Tensor, size: int, value: float = float("nan")) -> Tensor:
    """Rows of `value` behind the others."""
    return torch.cat((rows, torch.full_like(rows[:1], value).expand(size - len(rows), *rows.shape[1:])))


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize(("tokens", "size"), [(3, 4), (1, 8), (9, 16)])
def test_keys_and_values(device: torch.device, tokens: int, size: int, int8: bool) -> None:
    """Also at the cache's end: positions behind it are none."""
    start, kv_heads, head_dim = 5, 2, 32
    shape, dtype = (kv_heads, start + tokens, head_dim), torch.int8 if int8 else torch.bfloat16
    qkv, angles = torch.randn(tokens, 6 * head_dim, device=device), torch.rand(size, head_dim, device=device)
    given, results = [(qkv, tokens), (fill(qkv, size), size)], []
    for rows, count in given:
        cache = [torch.full(shape, 3, dtype=dtype, device=device) for _ in range(2)]
        scales = [torch.full(shape[:2], 0.5, device=device) for _ in range(2)] if int8 else []
        positions = padded([1] * tokens, start, count, device)[1]
        cos_sin = (angles[:count], angles[:count])
        q = rope_kv_write(rows, None, None, 1e-6, *cos_sin, positions, *cache, scales=scales)
        results.append([q[:tokens], *cache, *scales])
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*results, strict=True))
    assert not bool(results[0][1].isnan().any())


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize(("start", "tokens", "size"), [(0, 3, 4), (90, 40, 64), (200, 9, 64), (65, 33, 128)])
@pytest.mark.parametrize("multiprocessors", [1, 30])
def test_attention(device: torch.device, start: int, tokens: int, size: int, int8: bool, multiprocessors: int) -> None:
    """The cache ends with the last token: what lies behind it in memory is not read, by rows that fill up neither."""
    head_dim, length = 64, start + tokens
    q = torch.randn(tokens, 3, head_dim, device=device).bfloat16()
    memory = list(torch.randn(2, 1, length + size, head_dim, device=device))  # of one head, so a part is contiguous
    scales: list[Tensor] = []
    if int8:
        memory, scales = map(list, zip(*map(quantize_rows, memory), strict=True))
    cache = [rows.to(torch.int8 if int8 else torch.bfloat16) for rows in memory]
    for rows in scales or cache:
        rows[:, length:] = float("nan")
    keys, values, *scales = (rows[:, :length] for rows in (*cache, *scales))
    outs = []
    for count in (tokens, size):
        positions = padded([1] * tokens, start, count, device)[1]
        options: dict[str, Any] = {"scales": scales, "multiprocessors": multiprocessors}
        outs.append(attention_prefill(fill(q, count, 1.0), keys, values, positions, **options))
    assert all(bool(out.isfinite().all()) for out in outs)
    assert float((outs[1][:tokens] - outs[0]).norm() / outs[0].norm()) < 2.5e-3  # in other tiles and parts


@pytest.mark.parametrize(("tokens", "size"), [(1, 2), (3, 8), (9, 16), (33, 64), (64, 128), (65, 128), (100, 128)])
def test_a_delta_net(device: torch.device, delta_net: DeltaNet, tokens: int, size: int) -> None:
    """Both states and all outputs, bit for bit; then what follows, from any place of the ring."""
    inputs = delta_net(device, tokens, (1, 2), (16, 32), torch.float32)
    start = int(inputs["positions"][0])
    filled = {name: fill(inputs[name], size) for name in ("qkvz", "ba")}
    filled["positions"] = padded([1] * tokens, start, size, device)[1]
    forms: list[Callable[..., Tensor]] = [gated_delta_net_prefill]
    if size <= 16:
        arrivals = torch.zeros(16, dtype=torch.int32, device=device)
        forms.append(lambda **given: gated_delta_net_few_tokens(**given, arrivals=arrivals))
    for form in forms:
        results = []
        for changed in ({}, filled):
            states = {name: inputs[name].clone() for name in ("conv_state", "state")}
            out = form(**{**inputs, **changed, **states})[:tokens]
            results.append([out, *states.values()])
        assert all(torch.equal(ours, wanted) for ours, wanted in zip(*results, strict=True))
        assert not any(bool(result.isnan().any()) for result in results[0])
