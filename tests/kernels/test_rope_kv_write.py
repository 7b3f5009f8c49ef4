"""kernels/rope_kv_write.py: the kernel against its reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localchat.kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from localchat.kernels.rotary import rotary_table_reference

Relative = Callable[[Tensor, Tensor], float]
pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qkv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(3, 1, 64), (4, 2, 24), (2, 2, 128)])
def test_agrees(
    device: torch.device,
    relative: Relative,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    qkv_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    norm: bool,
) -> None:
    positions = torch.tensor([5, 6, 7], device=device)
    qkv = (torch.randn(3, (q_heads + 2 * kv_heads) * head_dim, device=device) * 5).to(qkv_dtype)
    norms = [torch.randn(head_dim, device=device).bfloat16() if norm else None for _ in range(2)]
    inv_freq = 1e4 ** (-torch.arange(head_dim // 2, device=device) * 2 / head_dim)
    cos, sin = rotary_table_reference(positions, inv_freq, 1.1)
    keys, values = (torch.full((kv_heads, 9, head_dim), 7.0, device=device, dtype=cache_dtype) for _ in range(2))
    wanted_keys, wanted_values = keys.float(), values.float()
    q = rope_kv_write(qkv, norms[0], norms[1], 1e-6, cos, sin, positions, keys, values)
    wanted_q = rope_kv_write_reference(
        qkv.float(), norms[0], norms[1], 1e-6, cos, sin, positions, wanted_keys, wanted_values
    )
    bound = 1e-6 if cache_dtype == torch.float32 else 2.5e-3
    assert q.dtype == cache_dtype
    assert relative(q, wanted_q) < bound
    for cache, wanted in ((keys, wanted_keys), (values, wanted_values)):
        assert relative(cache[:, 5:8], wanted[:, 5:8]) < bound
        assert bool((cache[:, :5] == 7).all() and (cache[:, 8] == 7).all())  # nothing else is touched


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), (24, 10)])
def test_partial_rotation_of_a_wider_product(
    device: torch.device, relative: Relative, head_dim: int, rotary_dim: int
) -> None:
    """Only the first dimensions turn; behind q, k and v lies a gate, which the kernel never sees."""
    positions, q_heads, kv_heads = torch.tensor([100_001, 100_002], device=device), 3, 1
    product = torch.randn(2, (2 * q_heads + 2 * kv_heads) * head_dim, device=device)
    qkv = product[:, : (q_heads + 2 * kv_heads) * head_dim]
    q_norm, k_norm = torch.randn(2, head_dim, device=device)
    inv_freq = 1e7 ** (-torch.arange(rotary_dim // 2, device=device) * 2 / rotary_dim)
    cos, sin = rotary_table_reference(positions, inv_freq, 1.0)
    positions = positions - 100_000
    keys, values, wanted_keys, wanted_values = torch.zeros(4, kv_heads, 4, head_dim, device=device)
    q = rope_kv_write(qkv, q_norm, k_norm, 1e-6, cos, sin, positions, keys, values)
    wanted_q = rope_kv_write_reference(qkv, q_norm, k_norm, 1e-6, cos, sin, positions, wanted_keys, wanted_values)
    for out, wanted in ((q, wanted_q), (keys, wanted_keys), (values, wanted_values)):
        assert relative(out, wanted) < 1e-6


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(3, 1, 64), (4, 2, 24), (2, 2, 128), (6, 1, 256)])
def test_int8_agrees(
    device: torch.device,
    relative: Relative,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    norm: bool,
    q_dtype: torch.dtype,
) -> None:
    """Rows of several sizes, one of zeros; a code may be the next one where a row's value is a tie but for rounding."""
    tokens, capacity = 40, 49
    positions = torch.arange(5, 5 + tokens, device=device)
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, device=device)
    qkv *= 10 ** (torch.rand(tokens, 1, device=device) * 6 - 3)
    qkv[7] = 0
    norms = torch.randn(2, head_dim, device=device) if norm else (None, None)
    inv_freq = 1e4 ** (-torch.arange(head_dim // 2, device=device) * 2 / head_dim)
    table = rotary_table_reference(positions, inv_freq, 1.0)
    caches = [torch.full((kv_heads, capacity, head_dim), 99, dtype=torch.int8, device=device) for _ in range(4)]
    scales = [torch.full((kv_heads, capacity), -1.0, device=device) for _ in range(4)]
    q = rope_kv_write(qkv, *norms, 1e-6, *table, positions, *caches[:2], scales=scales[:2], q_dtype=q_dtype)
    wanted_q = rope_kv_write_reference(qkv, *norms, 1e-6, *table, positions, *caches[2:], scales=scales[2:])
    assert q.dtype == q_dtype
    assert relative(q, wanted_q) < (1e-6 if q_dtype == torch.float32 else 2.5e-3)
    for codes, wanted in zip(caches[:2], caches[2:], strict=True):
        off = (codes.int() - wanted.int()).abs()
        assert int(off.max()) <= 1 and float(off.float().mean()) < 1e-3
        assert bool((codes[:, 12] == 0).all())  # the row of zeros
        assert bool((codes[:, :5] == 99).all() and (codes[:, 45:] == 99).all())  # nothing else is touched
    for scale, wanted in zip(scales[:2], scales[2:], strict=True):
        assert relative(scale[:, 5:45], wanted[:, 5:45]) < 1e-6
        assert bool((scale[:, :5] == -1).all() and (scale[:, 45:] == -1).all())


def test_queries_in_fp16_end_where_fp16_does(device: torch.device) -> None:
    qkv = torch.full((1, 3 * 16), 3e5, device=device) * torch.tensor([1.0, -1.0], device=device).repeat(24)
    still = torch.ones(1, 16, device=device), torch.zeros(1, 16, device=device)
    codes, scales = torch.zeros(2, 1, 4, 16, dtype=torch.int8, device=device), torch.zeros(2, 1, 4, device=device)
    into = (torch.tensor([2], device=device), *codes)
    q = rope_kv_write(qkv, None, None, 0.0, *still, *into, scales=tuple(scales), q_dtype=torch.float16)
    assert q.float().flatten().tolist() == [65504.0, -65504.0] * 8


@pytest.mark.gpu
def test_an_int8_cache_behind_two_to_the_31(card: torch.device) -> None:
    capacity = 140_000
    codes = torch.zeros(2, 128, capacity, 128, device=card, dtype=torch.int8)
    scales = torch.zeros(2, 128, capacity, device=card)
    positions = torch.tensor([capacity - 1], device=card)
    cos, sin = torch.ones(1, 128, device=card), torch.zeros(1, 128, device=card)
    qkv = torch.randn(1, 3 * 128 * 128, device=card)
    rope_kv_write(qkv, None, None, 0.0, cos, sin, positions, *codes, scales=tuple(scales))
    rows = (codes[:, :, -1] * scales[:, :, -1, None]).flatten()
    assert float((rows - qkv[0, 128 * 128 :]).abs().max()) < 0.03


@pytest.mark.gpu
def test_a_cache_behind_two_to_the_31(card: torch.device) -> None:
    capacity = 140_000
    keys, values = (torch.zeros(128, capacity, 128, device=card, dtype=torch.bfloat16) for _ in range(2))
    positions = torch.tensor([capacity - 1], device=card)
    cos, sin = torch.ones(1, 128, device=card), torch.zeros(1, 128, device=card)
    qkv = torch.randn(1, 3 * 128 * 128, device=card).bfloat16()
    q = rope_kv_write(qkv, None, None, 0.0, cos, sin, positions, keys, values)
    assert torch.equal(torch.cat((q[0], keys[:, -1], values[:, -1])).flatten(), qkv[0])


def test_refusals() -> None:
    keys = torch.zeros(2, 9, 16)
    table, positions, norm = torch.zeros(1, 16), torch.zeros(1, dtype=torch.int64), torch.ones(16)
    with pytest.raises(ValueError, match="got one of q_norm and k_norm"):
        rope_kv_write(torch.zeros(1, 96), norm, None, 0.0, table, table, positions, keys, keys)
    with pytest.raises(ValueError, match=r"rope_kv_write: qkv: got float32 \[1, 100\], wanted .* \[any, 96\]"):
        rope_kv_write(torch.zeros(1, 100), None, None, 0.0, table, table, positions, keys, keys)
    with pytest.raises(ValueError, match=r"rope_kv_write: got qkv \[1, 64\]"):
        rope_kv_write(torch.zeros(1, 64), None, None, 0.0, table, table, positions, keys, keys)
    with pytest.raises(ValueError, match="rope_kv_write: got cos of width 18, wanted an even number up to 16"):
        wide = torch.zeros(1, 18)
        rope_kv_write(torch.zeros(1, 96), None, None, 0.0, wide, wide, positions, keys, keys)
    with pytest.raises(ValueError, match="rope_kv_write: values: got bfloat16"):
        rope_kv_write(torch.zeros(1, 96), None, None, 0.0, table, table, positions, keys, keys.bfloat16())
    arguments = (torch.zeros(1, 96), None, None, 0.0, table, table, positions)
    codes, scales = keys.to(torch.int8), torch.zeros(2, 9)
    with pytest.raises(ValueError, match="rope_kv_write: keys: got int8"):
        rope_kv_write(*arguments, codes, codes)
    with pytest.raises(ValueError, match=r"rope_kv_write: keys: got float32 .* wanted contiguous int8"):
        rope_kv_write(*arguments, keys, keys, scales=(scales, scales))
    with pytest.raises(ValueError, match="rope_kv_write: got 1 tensors of scales, wanted none"):
        rope_kv_write(*arguments, codes, codes, scales=(scales,))
    with pytest.raises(ValueError, match=r"rope_kv_write: got q_dtype torch\.float64, wanted"):
        rope_kv_write(*arguments, codes, codes, scales=(scales, scales), q_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"rope_kv_write: scales: got float32 \[2, 8\], wanted .* \[2, 9\]"):
        rope_kv_write(*arguments, codes, codes, scales=(scales, torch.zeros(2, 8)))
