"""kernels/attention_decode.py against the references of rope_kv_write and attention, one after the other.

The cache's rows from the position on are NaN (or, of INT8, the largest codes with scales of NaN).
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels.attention import attention_reference
from localchat.kernels.attention_decode import attention_decode, decode_blocks, decode_splits, parts_at_once
from localchat.kernels.rope_kv_write import quantize_rows, rope_kv_write_reference
from localchat.kernels.rotary import rotary_table_reference
from localchat.kernels.scaled_half import UNIT

Relative = Callable[[Tensor, Tensor], float]
pytestmark = pytest.mark.usefixtures("nan_filled")

BEHIND = 9  # rows of the cache behind the position
# Of the result, where the weights p are rounded to bf16 before they are multiplied; and of the new rows.
BOUNDS = {torch.float32: (2e-6, 1e-6), torch.bfloat16: (2.5e-3, 2.5e-3), torch.int8: (2.5e-3, 2.5e-3)}
CACHES = pytest.mark.parametrize("dtype", BOUNDS)
WRITTEN_ON_A_CARD = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])


def step(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    position: int,
    *,
    rotary_dim: int | None = None,
    norm: bool = True,
    splits: int = 3,
) -> dict[str, Any]:
    """Random arguments by name. Of an INT8 cache rows differ in size by up to 200."""
    (q_heads, kv_heads), rotary_dim = heads, rotary_dim or head_dim
    rows = torch.randn(2, kv_heads, position + 1 + BEHIND, head_dim, device=device)
    scales: tuple[Tensor, ...] = ()
    if dtype == torch.int8:
        rows[1] *= 10 ** (torch.rand(kv_heads, position + 1 + BEHIND, 1, device=device) * 2.3 - 1.5)
        (keys, key_scales), (values, value_scales) = quantize_rows(rows[0]), quantize_rows(rows[1])
        scales = (key_scales, value_scales)
    else:
        keys, values = rows.to(dtype)
    for tensor in (keys, values, *scales):
        tensor[:, position:] = float("nan") if tensor.is_floating_point() else 127
    positions = torch.tensor([position], device=device)
    inv_freq = 1e4 ** (-torch.arange(rotary_dim // 2, device=device) * 2 / rotary_dim)
    cos, sin = rotary_table_reference(positions, inv_freq, 1.1)
    gains = torch.rand(2, head_dim, device=device) + 0.5 if norm else (None, None)
    return {
        "qkv": torch.randn(1, (q_heads + 2 * kv_heads) * head_dim, device=device) * 2,
        "q_norm": gains[0],
        "k_norm": gains[1],
        "eps": 1e-6,
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "keys": keys,
        "values": values,
        "scales": scales,
        "splits": splits,
        "arrivals": torch.zeros(kv_heads + 1, dtype=torch.int32, device=device),
    }


def copied(arguments: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The same with a cache of their own."""
    cache = {name: arguments[name].clone() for name in ("keys", "values")}
    return {**arguments, **cache, "scales": tuple(scale.clone() for scale in arguments["scales"]), **changed}


def reference(arguments: dict[str, Any]) -> Tensor:
    """Writes the row, and gives the result in fp32 of queries as they are rounded for the products."""
    rest = {name: a for name, a in arguments.items() if name not in ("splits", "arrivals", "gate", "units")}
    q = rope_kv_write_reference(**{**rest, "qkv": rest["qkv"].float()})
    if arguments["keys"].dtype != torch.float32:
        q = q.bfloat16().float()
    cache = [arguments[name] for name in ("keys", "values", "positions")]
    return attention_reference(q, *cache, scales=arguments["scales"], gate=arguments.get("gate"))


def check(relative: Relative, arguments: dict[str, Any]) -> Tensor:
    """One step against the reference: the result, the new row, everything else untouched, counters at zero."""
    wanted = copied(arguments)
    before = copied(arguments)
    out_bound, row_bound = BOUNDS[arguments["keys"].dtype]
    out = attention_decode(**arguments)
    wanted_out, at = reference(wanted), int(arguments["positions"])
    assert relative(out.float() * (UNIT if out.dtype == torch.float16 else 1), wanted_out) < out_bound
    for name in ("keys", "values"):
        ours, theirs = arguments[name][:, at].float(), wanted[name][:, at].float()
        assert relative(ours, theirs) < row_bound
        if arguments["keys"].dtype == torch.int8:  # a code may be the next one where rounding decides a tie
            assert float((ours - theirs).abs().max()) <= 1
    for ours, theirs in zip(arguments["scales"], wanted["scales"], strict=True):
        assert relative(ours[:, at], theirs[:, at]) < 1e-6
    for ours, theirs in zip(cache_of(arguments), cache_of(before), strict=True):
        for rows in (slice(0, at), slice(at + 1, None)):
            assert torch.equal(ours[:, rows].view(torch.uint8), theirs[:, rows].view(torch.uint8))  # NaN is NaN
    assert not bool(arguments["arrivals"].any())
    return out


def cache_of(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    return arguments["keys"], arguments["values"], *arguments["scales"]


@CACHES
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "position", "splits"),
    [
        ((9, 3), 64, 64, 0, 4),  # smollm2; all splits but one are empty, and that has one row
        ((2, 2), 64, 64, 1, 1),
        ((14, 2), 64, 64, 129, 3),  # qwen2.5-0.5b
        ((5, 1), 128, 128, 333, 5),  # a KV head of qwen2.5-32b
        ((4, 4), 128, 128, 300, 33),  # no group; most splits are empty
        ((32, 1), 64, 64, 200, 2),  # a group beyond one tile of 16
        ((6, 1), 256, 64, 257, 33),  # qwen3.5-27b
        ((3, 1), 16, 10, 40, 2),  # halves of an odd number of dimensions
    ],
)
def test_agrees(
    device: torch.device,
    relative: Relative,
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int,
    position: int,
    splits: int,
    norm: bool,
    dtype: torch.dtype,
) -> None:
    arguments = step(device, dtype, heads, head_dim, position, rotary_dim=rotary_dim, norm=norm, splits=splits)
    assert check(relative, arguments).dtype == torch.float32


@CACHES
@pytest.mark.parametrize("position", [15, 16, 17, 62, 63, 64, 65, 126, 127, 128, 129, 191, 192, 193])
@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_around_every_block(
    device: torch.device, relative: Relative, position: int, splits: int, dtype: torch.dtype
) -> None:
    check(relative, step(device, dtype, (4, 2), 64, position, splits=splits))


@CACHES
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
def test_gate_and_units(
    device: torch.device, relative: Relative, gate_dtype: torch.dtype, splits: int, dtype: torch.dtype
) -> None:
    """qkv and gate are columns of one product; 1e5 and -1e5 are open and shut. fp16 in units comes from the same."""
    heads, head_dim = (6, 2), 64
    arguments = step(device, dtype, heads, head_dim, 150, rotary_dim=32, splits=splits)
    product = torch.cat((arguments["qkv"], torch.randn(1, heads[0] * head_dim, device=device) * 3), 1).to(gate_dtype)
    product[:, -2:] = torch.tensor([1e5, -1e5])
    columns = product.split((arguments["qkv"].shape[1], heads[0] * head_dim), 1)
    arguments |= {"qkv": columns[0], "gate": columns[1]}
    out = check(relative, arguments)
    half = attention_decode(**arguments, units=True)
    assert half.dtype == torch.float16
    assert torch.equal(half, (out / UNIT).half())


@pytest.mark.parametrize("splits", [1, 2])
@CACHES
def test_steps_that_follow_each_other(
    device: torch.device, relative: Relative, splits: int, dtype: torch.dtype
) -> None:
    """Five of them over a border between blocks: what one writes the next one reads."""
    ours = step(device, dtype, (6, 2), 64, 61, splits=splits)
    theirs = copied(ours)
    for position in range(61, 66):
        positions = torch.tensor([position], device=device)
        cos, sin = rotary_table_reference(positions, torch.rand(32, device=device), 1.0)
        turn = {"positions": positions, "cos": cos, "sin": sin, "qkv": torch.randn_like(ours["qkv"])}
        out, wanted = attention_decode(**{**ours, **turn}), reference({**theirs, **turn})
        assert relative(out, wanted) < BOUNDS[dtype][0]


@CACHES
def test_the_newest_row_is_the_one_that_the_cache_holds(
    device: torch.device, relative: Relative, dtype: torch.dtype
) -> None:
    """An older key that is the new one as it was rounded weighs as much, to the last bits of scores near 100."""
    arguments = step(device, dtype, (4, 2), 64, 1, splits=1)
    arguments["qkv"][:, : 4 * 64] = arguments["qkv"][:, 4 * 64 : 6 * 64].view(2, 64).repeat_interleave(2, 0).view(1, -1)
    arguments["q_norm"] = arguments["k_norm"] * 10
    first = copied(arguments)
    attention_decode(**first)
    for cache, written in zip(cache_of(arguments)[0::2], cache_of(first)[0::2], strict=True):
        cache[:, 0] = written[:, 1]
    out = attention_decode(**arguments).view(2, 2, 64)
    rows = arguments["values"][:, :2].float()
    if dtype == torch.int8:
        rows = rows * arguments["scales"][1][:, :2, None]
    assert relative(out, rows.mean(1, keepdim=True).expand_as(out)) < (2e-3 if dtype == torch.int8 else 2e-4)


@CACHES
def test_large_scores_do_not_overflow(device: torch.device, relative: Relative, dtype: torch.dtype) -> None:
    """Keys of 1e5 make one token win everything; then the newest one's, which the norm does not hold down."""
    arguments = step(device, dtype, (4, 2), 64, 100, splits=2, norm=False)
    if dtype == torch.int8:
        arguments["scales"][0].mul_(1e5)
    else:
        arguments["keys"].mul_(1e5)
    newest = copied(arguments, qkv=arguments["qkv"].clone())
    newest["qkv"][:, 4 * 64 : 6 * 64] *= 1e7
    for each in (arguments, newest):
        wanted = copied(each)
        out = attention_decode(**each)
        assert bool(out.isfinite().all())
        assert relative(out, reference(wanted)) < 2.5e-3


def test_settings_fit_what_they_are_for() -> None:
    for head_dim in (16, 64, 128, 256):
        for kv_heads, size, major in itertools.product((1, 8), (1, 2, 4), (8, 9, 12)):
            keys, _, stages, programs = decode_blocks(kv_heads, head_dim, size, major)
            assert 16 <= keys <= 128
            most = 227_000 if major == 9 else 99_000
            assert 2 * keys * head_dim * size * (stages - 1) * programs < most
    for dtype, splits in ((torch.bfloat16, 33), (torch.int8, 66)):
        assert decode_splits(torch.empty(4, 8, 256, dtype=dtype), 132) == splits
        assert decode_splits(torch.empty(400, 8, 256, dtype=dtype), 132) == 1
    assert parts_at_once(33, 8, 256) == 8
    assert parts_at_once(1, 8, 256) == parts_at_once(16, 256, 256) == 1


@WRITTEN_ON_A_CARD
@pytest.mark.gpu
@pytest.mark.parametrize("position", [0, 1023, 2047, 32_768])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "splits"),
    [
        ((24, 4), 256, 64, 33),
        ((40, 8), 128, 128, 16),
        ((32, 8), 128, 128, 16),
        ((9, 3), 64, 64, 44),
        ((9, 3), 64, 64, 1),
    ],
)
def test_real_sizes_are_the_same_each_time(
    card: torch.device,
    relative: Relative,
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int,
    position: int,
    splits: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty launches over one cache, each as soon as the one before lets it; whoever arrives last, no bit changes."""
    arguments = step(card, dtype, heads, head_dim, position, rotary_dim=rotary_dim, splits=splits)
    arguments |= {"gate": torch.randn(1, heads[0] * head_dim, device=card), "units": True}
    out = check(relative, arguments)
    cache = [tensor[:, position].clone() for tensor in cache_of(arguments)]
    monkeypatch.undo()  # tensors filled with NaN: launches in between, behind which nothing overlaps
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments["arrivals"].zero_()  # a plain launch
        outs = [attention_decode(**arguments) for _ in range(20)]
    graph.replay()
    assert all(torch.equal(again, out) for again in outs)
    assert all(torch.equal(tensor[:, position], row) for tensor, row in zip(cache_of(arguments), cache, strict=True))
    assert not bool(arguments["arrivals"].any())


@WRITTEN_ON_A_CARD
@pytest.mark.gpu
def test_a_cache_behind_two_to_the_31(card: torch.device, dtype: torch.dtype) -> None:
    """The last KV heads of 128 lie behind as many elements."""
    arguments = step(card, dtype, (128, 128), 128, 140_000 - 1 - BEHIND, norm=False, splits=1)
    count = 6  # four or fewer are read in blocks of another size
    out = attention_decode(**arguments).view(128, 128)[-count:]
    alone = {name: arguments[name][-count:].contiguous() for name in ("keys", "values")}
    alone["scales"] = tuple(scale[-count:].contiguous() for scale in arguments["scales"])
    alone["qkv"] = arguments["qkv"].view(3, 128, 128)[:, -count:].reshape(1, -1).contiguous()
    wanted = attention_decode(**{**arguments, **alone}).view(count, 128)
    assert torch.equal(out, wanted)


def test_refusals() -> None:
    arguments = step(torch.device("cpu"), torch.float32, (4, 2), 64, 5)

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=match):
            attention_decode(**{**arguments, **changed})

    refused("attention_decode: values: got bfloat16", values=arguments["values"].bfloat16())
    refused("attention_decode: got 1 tokens, 0 splits", splits=0)
    two = {"qkv": torch.zeros(2, 512), "positions": torch.zeros(2, dtype=torch.int64)}
    refused("got 2 tokens, 3 splits, wanted 1 token", **two, cos=torch.zeros(2, 64), sin=torch.zeros(2, 64))
    refused(r"attention_decode: gate: got float32 \[1, 64\], wanted .* \[1, 256\]", gate=torch.zeros(1, 64))
    refused(r"gate: .* \(not contiguous\)", gate=torch.zeros(1, 512)[:, ::2])
    refused("got 3 query heads, 2 KV heads, head_dim 64", qkv=torch.zeros(1, 7 * 64))
    refused("attention_decode: keys: got int8", keys=arguments["keys"].to(torch.int8))
    codes = {name: arguments[name].nan_to_num().to(torch.int8) for name in ("keys", "values")}
    refused("attention_decode: got 1 tensors of scales", **codes, scales=(torch.zeros(2, 15),))
    refused("got one of q_norm and k_norm", k_norm=None)
    refused("attention_decode: arrivals: got int64", arrivals=torch.zeros(2, dtype=torch.int64))
    refused("got 1 arrivals, wanted one per KV head", arrivals=torch.zeros(1, dtype=torch.int32))
    wide = step(torch.device("cpu"), torch.float32, (2, 1), 48, 5)
    with pytest.raises(ValueError, match="got 2 query heads, 1 KV heads, head_dim 48"):
        attention_decode(**wide)
