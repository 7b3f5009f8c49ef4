"""kernels/attention_slabs.py: dequantised slabs and attention over them against references; unwritten memory is NaN."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels import attention
from localchat.kernels.attention import attention_prefill, attention_reference
from localchat.kernels.attention_slabs import (
    SLAB,
    Slabs,
    dequantize_kv,
    dequantize_kv_reference,
    slabs_for,
)
from localchat.kernels.rope_kv_write import quantize_rows
from localchat.kernels.scaled_half import UNIT

Relative = Callable[[Tensor, Tensor], float]
pytestmark = pytest.mark.usefixtures("nan_filled")

# fp16: probabilities, keys and values are rounded to 2^-12 of themselves; the interpreter cuts bits off instead.
BOUNDS = {torch.float32: 2e-6, torch.float16: 1.5e-3}


def int8_cache(device: torch.device, kv_heads: int, length: int, head_dim: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Codes of keys and values [Hkv, length + 9, D] and their scales, NaN behind `length`; rows differ by up to 200."""
    keys, values = (torch.randn(kv_heads, length + 9, head_dim, device=device) for _ in range(2))
    values *= 10 ** (torch.rand(kv_heads, length + 9, 1, device=device) * 2.3 - 1.5)
    (keys, key_scales), (values, value_scales) = quantize_rows(keys), quantize_rows(values)
    key_scales[:, length:] = value_scales[:, length:] = float("nan")
    return keys, values, [key_scales, value_scales]


def queries(device: torch.device, tokens: int, q_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(tokens, q_heads, head_dim, device=device) * 2).to(dtype)


def memory_of(keys: int, cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for `keys` keys and values, and a little more."""
    return torch.empty(2 * len(cache) * keys * cache.shape[2] + 30, dtype=dtype, device=cache.device)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "first", "count"), [(3, 64, 0, 50), (2, 128, 33, 1), (1, 256, 7, 45), (2, 16, 128, 300)]
)
def test_dequantised_rows_are_the_reference_s(
    device: torch.device, relative: Relative, kv_heads: int, head_dim: int, first: int, count: int, dtype: torch.dtype
) -> None:
    keys, values, scales = int8_cache(device, kv_heads, first + count, head_dim)
    out = torch.empty(2, kv_heads, count, head_dim, dtype=dtype, device=device)
    wanted = dequantize_kv_reference(keys, values, scales, first, torch.empty_like(out))
    dequantize_kv(keys, values, scales, first, out)
    assert torch.equal(out, wanted) or (device.type == "cpu" and relative(out, wanted) < 5e-4)
    rows = slice(first, first + count)
    exact = torch.stack(
        [codes[:, rows] * scale[:, rows, None] for codes, scale in zip((keys, values), scales, strict=True)]
    )
    assert relative(wanted, exact) < (1e-7 if dtype == torch.float32 else 3e-4)


def test_what_fp16_cannot_hold_ends_there(device: torch.device) -> None:
    """A row keeps its direction."""
    keys, values, scales = int8_cache(device, 1, 20, 32)
    scales[0][:, 3] = 1e6
    out = torch.empty(2, 1, 20, 32, dtype=torch.float16, device=device)
    dequantize_kv(keys, values, scales, 0, out)
    assert bool(out.isfinite().all())
    assert float((out[0, 0, 3].float() - keys[0, 3].float() * 511.75).abs().max()) <= 32
    assert torch.equal(dequantize_kv_reference(keys, values, scales, 0, out.clone())[0, 0, 3], out[0, 0, 3])


@pytest.mark.parametrize(
    ("length", "room", "wanted"),
    [
        (100, 100, [(0, 100)]),
        (1000, 5000, [(0, 1000)]),
        (1000, 999, [(0, 512), (512, 1000)]),
        (1000, 300, [(0, 256), (256, 512), (512, 768), (768, 1000)]),
        (300, 140, [(0, 128), (128, 256), (256, 300)]),
        (131_072, 87_040, [(0, 65_536), (65_536, 131_072)]),
    ],
)
def test_bounds(length: int, room: int, wanted: list[tuple[int, int]]) -> None:
    assert Slabs(length, torch.empty(2 * 3 * room * 16 + 5)).bounds(3, 16) == wanted


def test_bounds_cover_every_key_and_fit() -> None:
    for length in (1, 127, 128, 129, 1000, 4097):
        for room in (128, 129, 200, 256, 1000):
            bounds = Slabs(length, torch.empty(2 * room * 16)).bounds(1, 16)
            assert [first for first, _ in bounds] == [0, *(last for _, last in bounds[:-1])]
            assert bounds[-1][1] == length
            assert all(0 < last - first <= room and first % 128 == 0 for first, last in bounds)


def test_memory_for_no_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="Slabs: got memory for 127 keys, wanted at least 128"):
        Slabs(500, torch.empty(2 * 127 * 16)).bounds(1, 16)


def test_slabs_are_for_many_rows_and_keys_of_a_known_number() -> None:
    keys = torch.empty(2, 3000, 16, dtype=torch.int8)
    nothing, enough = (torch.empty(size, dtype=torch.bfloat16) for size in (0, 2 * 2 * 3000 * 16))
    assert slabs_for(512, keys, None, enough) is None
    assert slabs_for(511, keys, 2000, enough) is None
    assert slabs_for(512, keys, 1023, enough) is None
    shared, own = slabs_for(512, keys, 2000, enough), slabs_for(512, keys, 2000, nothing)
    assert shared is not None and shared.memory.data_ptr() == enough.data_ptr()
    assert own is not None and own.length == 2000 and own.bounds(2, 16) == [(0, 2000)]
    assert own.memory.dtype == shared.memory.dtype == torch.float16


def test_memory_of_its_own_is_one_slab() -> None:
    keys = torch.empty(1, 1, 16, dtype=torch.int8)
    slabs = slabs_for(512, keys, 3 * SLAB - 5, torch.empty(0, dtype=torch.bfloat16))
    assert slabs is not None
    assert slabs.memory.numel() == 2 * SLAB * 16
    assert len(slabs.bounds(1, 16)) == 3


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "length", "tokens", "room"),
    [
        ((4, 2), 64, 200, 20, 300),  # one slab
        ((4, 2), 64, 300, 61, 128),  # three; the diagonal is in the last two
        ((4, 1), 128, 257, 20, 200),  # the last slab is one key
        ((6, 1), 256, 389, 9, 130),  # four
        ((1, 1), 64, 260, 260, 128),  # no prefix: first tokens see nothing of the later slabs
        ((2, 1), 16, 150, 3, 128),
    ],
)
def test_attention_over_slabs(
    device: torch.device,
    relative: Relative,
    heads: tuple[int, int],
    head_dim: int,
    length: int,
    tokens: int,
    room: int,
    dtype: torch.dtype,
) -> None:
    """Gated and not, one program for all keys of a slab and several, and the dtypes that a product behind may take."""
    q_heads, kv_heads = heads
    keys, values, scales = int8_cache(device, kv_heads, length, head_dim)
    q = queries(device, tokens, q_heads, head_dim, dtype)
    positions = torch.arange(length - tokens, length, device=device)
    wanted = attention_reference(q.float(), keys, values, positions, scales=scales)
    gate = torch.randn(tokens, 2 * q_heads * head_dim, device=device)[:, q_heads * head_dim :]

    def prefill(**options: Any) -> Tensor:
        slabs = Slabs(length, memory_of(room, keys, dtype))
        return attention_prefill(q, keys, values, positions, scales=scales, slabs=slabs, **options)

    out = prefill()
    assert relative(out, wanted) < BOUNDS[dtype]
    cut = prefill(gate=gate, multiprocessors=20, dtype=torch.bfloat16)
    assert relative(cut, wanted * gate.sigmoid()) < 2.5e-3
    in_units = prefill(gate=gate, dtype=torch.float16)
    assert relative(in_units.float() * UNIT, wanted * gate.sigmoid()) < BOUNDS[dtype] + 1e-3


def test_one_slab_is_what_a_wide_cache_gives(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and nothing is put together."""
    keys, values, scales = int8_cache(device, 2, 200, 64)
    q = queries(device, 90, 6, 64, torch.float32)
    positions = torch.arange(110, 200, device=device)
    wide = torch.empty(2, 2, 200, 64, device=device)
    dequantize_kv(keys, values, scales, 0, wide)
    monkeypatch.setattr(attention, "attention_join", None)
    slabs = Slabs(200, memory_of(200, keys, torch.float32))
    out = attention_prefill(q, keys, values, positions, scales=scales, slabs=slabs)
    assert torch.equal(out, attention_prefill(q, wide[0], wide[1], positions))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "room"), [(2048, 87_040), (40_003, 32_768), (126_976 + 2048, 87_040)])
@pytest.mark.parametrize("tokens", [200, 1111, 2048])
@pytest.mark.parametrize(("heads", "head_dim"), [((24, 4), 256), ((32, 8), 128), ((9, 3), 64)])
def test_attention_over_slabs_at_real_sizes(
    card: torch.device, relative: Relative, heads: tuple[int, int], head_dim: int, tokens: int, length: int, room: int
) -> None:
    """Near the reference, and the same twice."""
    q_heads, kv_heads = heads
    keys, values, scales = int8_cache(card, kv_heads, length, head_dim)
    q = queries(card, tokens, q_heads, head_dim, torch.float16)
    positions = torch.arange(length - tokens, length, device=card)
    gate = torch.randn(tokens, q_heads * head_dim, device=card).bfloat16()
    slabs = Slabs(length, memory_of(room, keys, torch.float16))
    options: dict[str, Any] = {"gate": gate, "scales": scales, "multiprocessors": 132, "slabs": slabs}
    out = attention_prefill(q, keys, values, positions, **options)
    wanted = attention_reference(q.float(), keys, values, positions, gate=gate, scales=scales)
    assert relative(out, wanted) < 1e-3
    assert torch.equal(out, attention_prefill(q, keys, values, positions, **options))


def test_refusals() -> None:
    codes, scales = torch.zeros(2, 200, 64, dtype=torch.int8), [torch.zeros(2, 200)] * 2
    out = torch.zeros(2, 2, 50, 64)
    with pytest.raises(ValueError, match="dequantize_kv: got rows 151 to 201, wanted some of 200"):
        dequantize_kv(codes, codes, scales, 151, out)
    with pytest.raises(ValueError, match="dequantize_kv: out: got bfloat16"):
        dequantize_kv(codes, codes, scales, 0, out.bfloat16())
    with pytest.raises(ValueError, match="dequantize_kv: keys: got float32"):
        dequantize_kv(codes.float(), codes, scales, 0, out)
    q, positions, slabs = torch.zeros(5, 4, 64), torch.arange(5), Slabs(200, torch.zeros(2 * 2 * 200 * 64))
    with pytest.raises(ValueError, match=r"attention_prefill: q: got bfloat16 .* wanted contiguous float32"):
        attention_prefill(q.bfloat16(), codes, codes, positions, scales=scales, slabs=slabs)
    with pytest.raises(ValueError, match="got slabs of 200 keys and 0 tensors of scales, wanted 5 to 200 keys and 2"):
        attention_prefill(q, codes.float(), codes.float(), positions, slabs=slabs)
    for length in (4, 201):
        wrong = slabs._replace(length=length)
        with pytest.raises(ValueError, match=f"got slabs of {length} keys and 2 tensors of scales"):
            attention_prefill(q, codes, codes, positions, scales=scales, slabs=wrong)
