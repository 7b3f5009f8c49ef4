"""cuda_ops.py: the table takes a product apart and chooses kernels as the references do. Runs in the interpreter."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.cuda_ops import CudaOps
from localchat.kernels.gated_delta_net import gated_delta_net_reference
from localchat.kernels.rope_kv_write import quantize_rows
from localchat.ops import ReferenceOps
from localchat.rope import Rotary, rotary


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the card in this process (-m gpu)")
    card = SimpleNamespace(multi_processor_count=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    torch.manual_seed(0)
    return CudaOps(torch.device("cpu"))


def relative(out: Tensor, wanted: Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("int8", [False, True])
def test_attention(ops: CudaOps, tokens: int, gated: bool, int8: bool) -> None:
    """qkv is queries, keys, values and, if the layer is gated, as many columns again as there are queries."""
    q_heads, kv_heads, head_dim, length = 4, 2, 32, 9
    norm: Any = SimpleNamespace(weight=torch.randn(head_dim), eps=1e-6)
    qkv = torch.randn(tokens, ((1 + gated) * q_heads + 2 * kv_heads) * head_dim)
    rows = torch.randn(2, kv_heads, 12, head_dim)
    caches = tuple(rows)
    if int8:  # under bf16 queries
        (keys, key_scales), (values, value_scales) = map(quantize_rows, rows)
        caches = (keys, values, key_scales, value_scales)
    rope: Rotary = rotary(torch.arange(length - tokens, length), torch.rand(4), 1.0)  # 8 of 32 dimensions turn
    wanted_caches = [cache.clone() for cache in caches]
    wanted = ReferenceOps().attention(qkv, norm, norm, rope, tuple(wanted_caches), gated=gated)
    out = ops.attention(qkv, norm, norm, rope, caches, gated=gated)
    assert relative(out, wanted) < (1e-2 if int8 else 1e-6)  # the interpreter cuts bits off
    for cache, wanted_cache in zip(caches, wanted_caches, strict=True):
        assert relative(cache, wanted_cache) < 1e-6


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (2, torch.float32), (40, torch.bfloat16)])
def test_gated_delta_net(ops: CudaOps, tokens: int, dtype: torch.dtype) -> None:
    """One token, a few, and so many that the product behind takes bf16; twice, so that nothing is left over between."""
    key_heads, value_heads, dim = 2, 4, 16
    channels, values = (2 * key_heads + value_heads) * dim, value_heads * dim
    mixer: Any = SimpleNamespace(
        conv1d=SimpleNamespace(weight=torch.randn(channels, 4)),
        A_log=torch.randn(value_heads),
        dt_bias=torch.randn(value_heads),
        norm=SimpleNamespace(weight=torch.randn(dim), eps=1e-6),
    )
    cache = torch.randn(channels, 3), torch.randn(value_heads, dim, dim)
    wanted_cache = cache[0].clone(), cache[1].clone()
    for _ in range(2):
        qkvz, ba = torch.randn(tokens, channels + values), torch.randn(tokens, 2 * value_heads)
        out = ops.gated_delta_net(qkvz, ba, mixer, cache)
        weights = (mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight)
        wanted = gated_delta_net_reference(qkvz, ba, *weights, 1e-6, *wanted_cache)
        assert out.dtype == dtype
        assert relative(out, wanted) < (1e-3 if dtype == torch.float32 else 5e-3)  # the interpreter cuts bits off
        assert relative(cache[1], wanted_cache[1]) < 1e-3
        assert torch.equal(cache[0], wanted_cache[0])
