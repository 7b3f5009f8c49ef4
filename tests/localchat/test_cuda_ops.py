"""cuda_ops.py: the table takes a product apart and chooses kernels as the references do. Runs in the interpreter."""

import copy
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat import cuda_ops
from localchat.cache import KVCache
from localchat.config import TensorFormat
from localchat.cuda_ops import CudaOps, Early, Summed
from localchat.kernels import attention_slabs
from localchat.kernels.cards import DEFAULT, Card
from localchat.kernels.early import UNWRITTEN
from localchat.kernels.gated_delta_net_prefill import gated_delta_net_prefill
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.kernels.padding import padded
from localchat.kernels.rope_kv_write import quantize_rows
from localchat.kernels.scaled_half import UNIT
from localchat.model import Linear, RMSNorm
from localchat.ops import ReferenceOps
from localchat.registry import MODELS
from localchat.rope import Rotary, rotary
from localchat.synthetic import synthetic_model

FORMAT = TensorFormat(4, 32, symmetric=False)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the card in this process (-m gpu)")
    card = SimpleNamespace(multi_processor_count=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    monkeypatch.setattr(cuda_ops, "card_of", lambda _device: Card(6, replace(DEFAULT, crossover=32)))
    torch.manual_seed(0)
    return CudaOps(torch.device("cpu"))


def unscaled(out: Tensor) -> Tensor:
    """Of few tokens, kernels give fp16 in units, as the product behind takes it."""
    return out.float() * UNIT if out.dtype == torch.float16 else out


def halved(heads: Tensor) -> Tensor:
    """As a mixer gives few tokens to the product behind it."""
    return (heads / UNIT).half()


def linear(n: int, k: int, fmt: TensorFormat) -> Linear:
    matrix = Linear(n, k, fmt, bias=True)
    if fmt.bits == 4:
        matrix.qweight = pack(torch.randint(0, 16, (n, k)), fmt.group_size)
        scales = 0.02 + 0.02 * torch.rand(n, k // fmt.group_size)
        matrix.scales, matrix.mins = pack_scales(scales).half(), pack_scales(-7.5 * scales).half()
    else:
        matrix.weight, matrix.scales = torch.randint(-127, 128, (n, k), dtype=torch.int8), 0.01 * torch.rand(n)
    matrix.bias = torch.randn(n)
    return matrix


def norm(size: int) -> RMSNorm:
    gain = RMSNorm(size, 1e-5)
    gain.weight = torch.rand(size) + 0.5
    return gain


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-2, 1.0, 1e4])
def test_two_blocks_of_products(ops: CudaOps, tokens: int, bits: int, size: float) -> None:
    """Sum, norm, gate and up, SwiGLU, down, sum, norm, and the two products behind it, one of them INT8."""
    hidden, inner = 160, 96
    fmt = TensorFormat(bits, 32, symmetric=False)
    first, gate_up, down = linear(hidden, 64, fmt), linear(2 * inner, hidden, fmt), linear(hidden, inner, fmt)
    qkv, ba = linear(80, hidden, fmt), linear(24, hidden, TensorFormat(8))
    before, behind = norm(hidden), norm(hidden)
    heads, x = torch.randn(tokens, 64), size * torch.randn(tokens, hidden)

    def blocks(table: ReferenceOps, heads: Tensor) -> list[Tensor]:
        stream = table.linear_add(heads, first, x, before)
        stream = table.linear_add(table.norm_swiglu(stream, before, gate_up), down, stream, behind)
        last = table.linear_add(heads, first, stream, None)
        return [*(table.norm_linear(stream, behind, matrix) for matrix in (qkv, ba)), last]

    fused = bits == 4 and tokens <= 8
    stream = ops.linear_add(halved(heads), first, x, before)
    inside, factors = ops.norm_swiglu(stream, before, gate_up)
    assert isinstance(stream, Summed) == fused
    assert isinstance(factors, Tensor) and bool((factors == UNIT).all()) == (fused or float(inside.abs().max()) > 511)
    for out, wanted in zip(blocks(ops, halved(heads)), blocks(ReferenceOps(), heads), strict=True):
        assert out.dtype == torch.float32
        assert relative(out, wanted) < 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_swiglu_that_is_read_early_lies_where_the_layer_s_first_product_has_filled(
    ops: CudaOps, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """From the second layer on. An INT8 product fills nothing, so behind one it lies elsewhere, as for many."""
    monkeypatch.setattr(cuda_ops, "can_read_early", lambda _: True)
    hidden, inner, tokens = 64, 224, 3  # 28 programs, where there is room for 24
    qkv = linear(32, hidden, TensorFormat(bits, 32, symmetric=False))
    gate_up, down = linear(2 * inner, hidden, FORMAT), linear(hidden, inner, FORMAT)
    before, behind = norm(hidden), norm(hidden)

    def layer(x: Tensor) -> tuple[Tensor, Any, Tensor]:
        first = ops.norm_linear(x, before, qkv)
        filled = ops._unwritten is not None and bool((ops._unwritten.view(torch.int16) == UNWRITTEN).all())
        inside = ops.norm_swiglu(x, behind, gate_up)
        stream = ops.linear_add(inside, down, x, before)
        assert isinstance(stream, Summed if len(x) <= 8 else Tensor)
        assert filled == isinstance(inside, Early)
        return first, inside, stream.x if isinstance(stream, Summed) else stream

    x = torch.randn(tokens, hidden)
    plain, again = layer(x), layer(x)
    assert not isinstance(plain[1], Early)
    assert isinstance(again[1], Early) == (bits == 4)
    assert torch.equal(plain[0], again[0]) and torch.equal(plain[1][0], again[1][0]) and torch.equal(plain[2], again[2])
    assert ops._unwritten is None  # taken: the next layer's first product fills it anew
    assert not isinstance(layer(torch.randn(9, hidden))[1], Early)
    assert not isinstance(ops.norm_swiglu(x, behind, gate_up), Early)


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
    out = unscaled(ops.attention(qkv, norm, norm, rope, caches, gated=gated))
    assert relative(out, wanted) < (1e-2 if int8 else 5e-4)  # the interpreter cuts bits off
    for cache, wanted_cache in zip(caches, wanted_caches, strict=True):
        assert relative(cache, wanted_cache) < 1e-6


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("room", [0, 60])
def test_many_queries_of_an_int8_cache_go_over_slabs(
    ops: CudaOps, monkeypatch: pytest.MonkeyPatch, gated: bool, room: int
) -> None:
    """In the matrices' scratch, or beside it where that is too small; only where the length is known."""
    (q_heads, kv_heads, head_dim), tokens, length = (4, 2, 32), 40, 60
    monkeypatch.setattr(attention_slabs, "_LEAST_ROWS", 80)
    monkeypatch.setattr(attention_slabs, "_LEAST_KEYS", 60)
    used, prefill = [], cuda_ops.attention_prefill
    monkeypatch.setattr(
        cuda_ops, "attention_prefill", lambda *a, slabs, **k: (used.append(slabs), prefill(*a, slabs=slabs, **k))[1]
    )
    ops._scratch = torch.zeros(2 * kv_heads * room * head_dim, dtype=torch.bfloat16)
    qkv = torch.randn(tokens, ((1 + gated) * q_heads + 2 * kv_heads) * head_dim)
    (keys, key_scales), (values, value_scales) = map(quantize_rows, torch.randn(2, kv_heads, 70, head_dim))
    caches = (keys, values, key_scales, value_scales)
    rope = rotary(torch.arange(length - tokens, length), torch.rand(4), 1.0)
    wanted = ReferenceOps().attention(qkv, None, None, rope, tuple(cache.clone() for cache in caches), gated=gated)
    for known in (length, None):
        out = ops.attention(qkv, None, None, replace(rope, length=known), caches, gated=gated)
        assert relative(out, wanted) < 1e-2  # the interpreter cuts bits off
    slabs, nothing = used
    assert nothing is None
    assert slabs is not None and slabs.length == length
    assert (slabs.memory.data_ptr() == ops._scratch.data_ptr()) == (room == 60)


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("summed", [False, True])
def test_gated_delta_net(ops: CudaOps, monkeypatch: pytest.MonkeyPatch, tokens: int, bits: int, summed: bool) -> None:
    """One token, a few, some, and so many that the product behind takes bf16; twice: nothing is left over between.

    Behind a sum and behind the embedding. Steps and decays in every format; as INT8, of one token, without a launch.
    """
    key_heads, value_heads, dim, hidden = 2, 4, 16, 64
    channels, values = (2 * key_heads + value_heads) * dim, value_heads * dim
    in_proj, before, gain = steps_and_decays(2 * value_heads, hidden, bits), linear(hidden, 32, FORMAT), norm(hidden)
    mixer: Any = SimpleNamespace(
        in_proj_ba=in_proj,
        conv1d=SimpleNamespace(weight=torch.randn(channels, 4)),
        A_log=torch.randn(value_heads),
        dt_bias=torch.randn(value_heads),
        norm=SimpleNamespace(weight=torch.randn(dim), eps=1e-6),
    )
    exact = SimpleNamespace(**vars(mixer))
    if bits == 16:
        exact.in_proj_ba = copy.copy(in_proj)
        exact.in_proj_ba._buffers = {"weight": in_proj.weight.float(), "bias": None}
    cache = torch.randn(4, channels), torch.randn(value_heads, dim, dim)
    wanted_cache = cache[0].clone(), cache[1].clone()
    products: list[Linear] = []
    product = CudaOps._product

    def counted(self: CudaOps, activation: Any, matrix: Linear, residual: Tensor | None = None) -> Tensor:
        products.append(matrix)
        return product(self, activation, matrix, residual)

    def chunked(*args: Any, **options: Any) -> Tensor:
        assert tokens > 16
        return gated_delta_net_prefill(*args, **options)

    monkeypatch.setattr(CudaOps, "_product", counted)
    monkeypatch.setattr(cuda_ops, "gated_delta_net_prefill", chunked)
    dtype = torch.float16 if tokens <= 32 else torch.bfloat16
    for start in (9, 9 + tokens):
        x, heads = torch.randn(tokens, hidden), torch.randn(tokens, 32)
        qkvz, positions = torch.randn(tokens, channels + values), torch.arange(start, start + tokens)
        given = halved(heads) if tokens <= 32 else heads
        stream = ops.linear_add(given, before, x, gain) if summed else x
        assert isinstance(stream, Summed) == (summed and tokens <= 8)
        products.clear()
        out = ops.gated_delta_net(stream, gain, qkvz, mixer, positions, cache)
        assert products == ([] if bits == 8 and tokens == 1 else [in_proj])
        x = ReferenceOps().linear_add(heads, before, x, gain) if summed else x
        wanted = ReferenceOps().gated_delta_net(x, gain, qkvz, exact, positions, wanted_cache)
        assert out.dtype == dtype
        assert not ops._arrivals.any()
        # 16 bits and many tokens: products of bf16, whose error the decays carry on
        bound = 1e-3 if dtype == torch.float16 and bits != 16 else 5e-3
        assert relative(unscaled(out), wanted) < bound
        assert relative(cache[1], wanted_cache[1]) < bound
        assert torch.equal(cache[0], wanted_cache[0])


def steps_and_decays(rows: int, columns: int, bits: int) -> Linear:
    """in_proj_ba, which has no bias; b and a of the size of one."""
    if bits == 16:
        matrix = Linear(rows, columns, TensorFormat(16))
        matrix.weight = (torch.randn(rows, columns) / columns**0.5).bfloat16()
        return matrix
    matrix = linear(rows, columns, TensorFormat(bits, 32, symmetric=False))
    matrix.scales = matrix.scales / columns**0.5
    if bits == 4 and matrix.mins is not None:
        matrix.mins = matrix.mins / columns**0.5
    matrix.bias = None
    return matrix


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("by", [1e-6, 1e7])
def test_scales_that_fp16_does_not_hold(ops: CudaOps, tokens: int, by: float) -> None:
    """More than 8 tokens take the dense product, in bf16: nothing is NaN, nothing lost."""
    matrix = linear(48, 96, TensorFormat(4, 32, symmetric=False))
    if matrix.mins is None:
        raise AssertionError("made without minima")
    matrix.scales, matrix.mins = matrix.scales.float() * by, matrix.mins.float() * by
    x, stream = torch.randn(tokens, 96), torch.zeros(tokens, 48)
    wanted = ReferenceOps().linear_add(x, matrix, stream, None)
    out = ops.linear_add(halved(x), matrix, stream, None)
    assert isinstance(out, Tensor)
    assert relative(out, wanted) < (1e-3 if tokens <= 8 else 1e-2)


@pytest.mark.parametrize(("tokens", "size", "int8"), [(5, 8, True), (17, 32, False)])
def test_a_model_keeps_nothing_of_rows_that_fill_up(
    ops: CudaOps, monkeypatch: pytest.MonkeyPatch, tokens: int, size: int, int8: bool
) -> None:
    """A layer of each kind behind ten tokens: what the tokens give, and what cache and states hold then."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 200, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2}
    shape |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    model = synthetic_model(replace(MODELS["qwen3.5-27b"], **shape, full_attention_interval=2), "cpu", ops=ops)
    # What rows that fill up give nobody has written; the interpreter takes NaN, which may lie there, for a fault.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, **named: empty(*given, **named).zero_())
    ids, results = torch.randint(0, 200, (tokens,)).tolist(), []
    for rows in (tokens, size):
        cache = KVCache(model.config, 10 + tokens, dtype=ops.cache_dtype, device=model.device, int8=int8)
        torch.manual_seed(1)
        for kept in (*cache.rows, *cache.recurrent):
            kept.copy_(torch.rand(kept.shape) * (100 if kept.dtype == torch.int8 else 1))
        hidden = model(*padded(ids, 10, rows, model.device), cache)
        results.append([hidden[:tokens], *cache.rows, *cache.recurrent])
    for ours, wanted in zip(*results, strict=True):
        assert relative(ours, wanted) < 1e-2
