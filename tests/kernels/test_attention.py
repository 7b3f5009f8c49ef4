"""kernels/attention.py: the kernel against the reference; unwritten rows of the cache are NaN.

Of an INT8 cache the reference has the same codes and scales; what quantising them costs is a test of its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels.attention import attention_prefill, attention_reference
from localchat.kernels.rope_kv_write import quantize_rows
from localchat.kernels.scaled_half import UNIT

Relative = Callable[[Tensor, Tensor], float]
pytestmark = pytest.mark.usefixtures("nan_filled")

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3}  # bf16: the weights p are rounded before p v
CACHES = pytest.mark.parametrize("int8", [False, True], ids=["float", "int8"])


def cache_and_queries(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    length: int,
    int8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """q of the last `tokens` of `length` positions, keys, values (9 NaN rows behind the last), positions, scales.

    Of an INT8 cache the scales are NaN there and the codes the largest; rows differ in size by up to 200.
    """
    q_heads, kv_heads = heads
    q = (torch.randn(tokens, q_heads, head_dim, device=device) * 2).to(dtype)
    keys, values = (torch.randn(kv_heads, length + 9, head_dim, device=device) for _ in range(2))
    positions = torch.arange(length - tokens, length, device=device)
    if not int8:
        keys, values = keys.to(dtype), values.to(dtype)
        keys[:, length:] = values[:, length:] = float("nan")
        return q, keys, values, positions, ()
    values *= 10 ** (torch.rand(kv_heads, length + 9, 1, device=device) * 2.3 - 1.5)
    (keys, key_scales), (values, value_scales) = quantize_rows(keys), quantize_rows(values)
    keys[:, length:] = values[:, length:] = 127
    key_scales[:, length:] = value_scales[:, length:] = float("nan")
    return q, keys, values, positions, (key_scales, value_scales)


@CACHES
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "length", "tokens"),
    [
        ((9, 3), 64, 50, 50),  # no prefix
        ((14, 2), 64, 130, 40),  # a prefix, several tiles
        ((5, 1), 128, 197, 2),  # two tokens behind a prefix
        ((2, 2), 64, 300, 140),  # no group: a tile is 128 tokens
        ((3, 1), 64, 1, 1),
        ((32, 1), 128, 70, 5),
        ((4, 2), 256, 80, 33),
    ],
)
def test_prefill_agrees(
    device: torch.device,
    relative: Relative,
    heads: tuple[int, int],
    head_dim: int,
    length: int,
    tokens: int,
    dtype: torch.dtype,
    int8: bool,
) -> None:
    q, keys, values, positions, scales = cache_and_queries(device, dtype, tokens, heads, head_dim, length, int8)
    out = attention_prefill(q, keys, values, positions, scales=scales)
    wanted = attention_reference(q.float(), keys, values, positions, scales=scales)
    assert out.dtype == torch.float32
    assert relative(out, wanted) < BOUNDS[dtype]
    gate = torch.randn(tokens, 2 * q.shape[1] * head_dim, device=device)[:, q.shape[1] * head_dim :]
    for multiprocessors in (20, 90):  # the context in several parts, of which many see nothing
        cut = attention_prefill(q, keys, values, positions, scales=scales, gate=gate, multiprocessors=multiprocessors)
        assert relative(cut, wanted * gate.sigmoid()) < BOUNDS[dtype]
    rounded = attention_prefill(q, keys, values, positions, scales=scales, dtype=torch.bfloat16)
    assert torch.equal(rounded, out.bfloat16())
    for multiprocessors in (1, 20):
        options: dict[str, Any] = {"dtype": torch.float16, "multiprocessors": multiprocessors}
        in_units = attention_prefill(q, keys, values, positions, scales=scales, gate=gate, **options)
        # The interpreter cuts bits of fp16 off.
        assert relative(in_units.float() * UNIT, wanted * gate.sigmoid()) < BOUNDS[dtype] + 1e-3


@CACHES
@pytest.mark.gpu
@pytest.mark.parametrize(("length", "tokens"), [(2048, 2048), (5000, 1111), (32_768, 256)])
@pytest.mark.parametrize(("heads", "head_dim"), [((40, 8), 128), ((32, 8), 128), ((9, 3), 64)])
def test_prefill_agrees_at_real_sizes(
    card: torch.device, relative: Relative, heads: tuple[int, int], head_dim: int, length: int, tokens: int, int8: bool
) -> None:
    q, keys, values, positions, scales = cache_and_queries(card, torch.bfloat16, tokens, heads, head_dim, length, int8)
    out = attention_prefill(q, keys, values, positions, scales=scales)
    assert relative(out, attention_reference(q.float(), keys, values, positions, scales=scales)) < 2.5e-3
    assert torch.equal(out, attention_prefill(q, keys, values, positions, scales=scales))


@CACHES
@pytest.mark.parametrize("gate_dtype", BOUNDS)
@pytest.mark.parametrize(("heads", "head_dim", "length", "tokens"), [((6, 1), 256, 70, 33), ((4, 2), 64, 40, 1)])
def test_gate(
    device: torch.device,
    relative: Relative,
    heads: tuple[int, int],
    head_dim: int,
    length: int,
    tokens: int,
    gate_dtype: torch.dtype,
    int8: bool,
) -> None:
    """The gate is the last columns of a wider product; 1e5 and -1e5 are open and shut."""
    q, keys, values, positions, scales = cache_and_queries(device, torch.float32, tokens, heads, head_dim, length, int8)
    size = heads[0] * head_dim
    gate = (torch.randn(tokens, size + 24, device=device) * 3).to(gate_dtype)[:, 24:]
    gate[:, :2] = torch.tensor([1e5, -1e5])
    wanted = attention_reference(q, keys, values, positions, scales=scales) / (1 + torch.exp(-gate.float()))
    assert relative(attention_reference(q, keys, values, positions, scales=scales, gate=gate), wanted) < 1e-6
    assert relative(attention_prefill(q, keys, values, positions, scales=scales, gate=gate), wanted) < 1e-6


@CACHES
@pytest.mark.gpu
@pytest.mark.parametrize(("length", "tokens"), [(9000, 1), (8192, 8192), (5000, 1111)])
def test_gate_at_real_sizes(card: torch.device, relative: Relative, length: int, tokens: int, int8: bool) -> None:
    """Qwen3.5-27B: 24 query heads, 4 KV heads, head_dim 256."""
    q, keys, values, positions, scales = cache_and_queries(card, torch.bfloat16, tokens, (24, 4), 256, length, int8)
    gate = torch.randn(tokens, 2 * 24 * 256, device=card)[:, 24 * 256 :]
    wanted = attention_reference(q.float(), keys, values, positions, scales=scales, gate=gate)
    assert relative(attention_prefill(q, keys, values, positions, scales=scales, gate=gate), wanted) < 2.5e-3


@CACHES
def test_large_scores_do_not_overflow(device: torch.device, relative: Relative, int8: bool) -> None:
    """Keys of 1e5 make one token win everything."""
    q, keys, values, positions, scales = cache_and_queries(device, torch.bfloat16, 1, (4, 2), 64, 100, int8)
    if int8:
        scales[0].mul_(1e5)
    else:
        keys[:, :100] *= 1e5
    wanted = attention_reference(q.float(), keys, values, positions, scales=scales)
    assert relative(attention_prefill(q, keys, values, positions, scales=scales), wanted) < 2.5e-3


def test_refusals() -> None:
    q, keys, positions = torch.zeros(1, 4, 64), torch.zeros(2, 9, 64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="attention_prefill: keys: got bfloat16"):
        attention_prefill(q, keys.bfloat16(), keys, positions)
    with pytest.raises(ValueError, match=r"attention_prefill: gate: got float32 \[1, 64\], wanted .* \[1, 256\]"):
        attention_prefill(q, keys, keys, positions, gate=torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"attention_prefill: gate: .* \(not contiguous\)"):
        attention_prefill(q, keys, keys, positions, gate=torch.zeros(1, 512)[:, ::2])
    with pytest.raises(ValueError, match="got 3 query heads, 2 KV heads, head_dim 64"):
        attention_prefill(q[:, :3].contiguous(), keys, keys, positions)
    with pytest.raises(ValueError, match="got 4 query heads, 2 KV heads, head_dim 48"):
        attention_prefill(torch.zeros(1, 4, 48), torch.zeros(2, 9, 48), torch.zeros(2, 9, 48), positions)
    codes, scales = keys.to(torch.int8), torch.zeros(2, 9)
    with pytest.raises(ValueError, match="attention_prefill: keys: got int8"):
        attention_prefill(q, codes, codes, positions)
    with pytest.raises(ValueError, match=r"attention_prefill: keys: got float32 .* wanted contiguous int8"):
        attention_prefill(q, keys, keys, positions, scales=(scales, scales))
    with pytest.raises(ValueError, match="attention_prefill: got 1 tensors of scales"):
        attention_prefill(q, codes, codes, positions, scales=(scales,))
    with pytest.raises(ValueError, match=r"attention_prefill: scales: got float32 \[2, 8\], wanted .* \[2, 9\]"):
        attention_prefill(q, codes, codes, positions, scales=(scales, torch.zeros(2, 8)))
    with pytest.raises(ValueError, match=r"attention_prefill: got dtype torch\.float64"):
        attention_prefill(q, keys, keys, positions, dtype=torch.float64)
