"""The references are the specification, so each is held against an independent formulation, mostly torch's own."""

import pytest
import torch
from torch.nn import functional as F

from localchat.kernels.attention import attention_reference
from localchat.kernels.int4_matmul import int4_matmul_reference
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.kernels.int8_embedding import int8_embedding_reference
from localchat.kernels.int8_matmul import int8_matmul_reference
from localchat.kernels.rms_norm import rms_norm_reference
from localchat.kernels.rope_kv_write import quantize_rows, rope_kv_write_reference
from localchat.kernels.swiglu import swiglu_reference


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 96) * 30, torch.randn(96)
    assert relative(rms_norm_reference(x, weight, 1e-5), F.rms_norm(x, (96,), weight, 1e-5)) < 1e-6
    rounded = rms_norm_reference(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert rounded.dtype == torch.bfloat16
    exact = F.rms_norm(x.bfloat16().double(), (96,), weight.bfloat16().double(), 1e-5)
    assert relative(rounded, exact) < 2.5e-3  # rounding to bf16 alone is 1.7e-3


def test_swiglu() -> None:
    gate, up = torch.randn(3, 40), torch.randn(3, 40)
    assert relative(swiglu_reference(torch.stack((gate, up), -1).flatten(1)), gate / (1 + torch.exp(-gate)) * up) < 1e-6


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_matmul(symmetric: bool) -> None:
    codes, scales = torch.randint(0, 16, (24, 128)), torch.rand(24, 4)
    mins = None if symmetric else torch.randn(24, 4)
    bias, x = torch.randn(24), torch.randn(3, 128)
    offset = 8 if symmetric else 0
    weight = (codes - offset).float() * scales.repeat_interleave(32, 1)
    if mins is not None:
        weight += mins.repeat_interleave(32, 1)
    stored = (pack(codes, 32), pack_scales(scales), None if mins is None else pack_scales(mins))
    assert relative(int4_matmul_reference(x, *stored, bias, rows=24), F.linear(x, weight, bias)) < 1e-6


def test_int8_matmul_and_embedding_agree_on_the_rows() -> None:
    weight, scales = torch.randint(-127, 128, (50, 32), dtype=torch.int8), torch.rand(50)
    rows, x, bias = weight.float() * scales[:, None], torch.randn(2, 32), torch.randn(50)
    assert relative(int8_matmul_reference(x, weight, scales, bias), F.linear(x, rows, bias)) < 1e-6
    ids = torch.tensor([49, 0, 7])
    assert torch.equal(int8_embedding_reference(ids, weight, scales, torch.float32), rows[ids])


@pytest.mark.parametrize(
    ("tokens", "start", "q_heads", "kv_heads"), [(1, 0, 4, 4), (1, 30, 6, 2), (7, 5, 6, 1), (37, 0, 9, 3)]
)
def test_attention_is_causal_over_prefix_and_chunk(tokens: int, start: int, q_heads: int, kv_heads: int) -> None:
    q, length = torch.randn(tokens, q_heads, 16), start + tokens
    keys, values = torch.full((2, kv_heads, length + 9, 16), float("nan"))
    keys[:, :length], values[:, :length] = torch.randn(2, kv_heads, length, 16)
    positions = torch.arange(start, length)
    mask = torch.arange(length) <= positions[:, None]
    wanted = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None, :, :length], values[None, :, :length], attn_mask=mask, enable_gqa=True
    )
    wanted = wanted[0].transpose(0, 1).reshape(tokens, -1)
    assert relative(attention_reference(q, keys, values, positions), wanted) < 1e-6


@pytest.mark.parametrize("tokens", [1, 12])
def test_attention_over_int8_is_that_over_the_rows_it_stands_for(tokens: int) -> None:
    q, gate, positions = torch.randn(tokens, 6, 16), torch.randn(tokens, 96), torch.arange(40 - tokens, 40)
    codes, scales = torch.randint(-127, 128, (2, 2, 45, 16)).to(torch.int8), torch.rand(2, 2, 45) / 50
    codes[:, :, 40:], scales[:, :, 40:] = 127, float("nan")
    rows = codes * scales[..., None]
    wanted = attention_reference(q, *rows, positions, gate=gate)
    assert relative(attention_reference(q, *codes, positions, gate=gate, scales=tuple(scales)), wanted) < 1e-6


def test_rows_are_quantised_to_within_half_a_step() -> None:
    """Of every size; halves to even; a row of zeros stays so; and what attention makes of random rows."""
    x = torch.randn(1000, 64) * 10 ** (torch.rand(1000, 1) * 12 - 6)
    codes, scales = quantize_rows(x)
    assert codes.dtype == torch.int8 and int(codes.abs().amax(-1).min()) == int(codes.abs().max()) == 127
    assert float(((codes * scales[:, None] - x).abs() / scales[:, None]).max()) < 0.5001
    assert quantize_rows(torch.tensor([[0.5, -1.5, 2.5, 127.0]]))[0].tolist() == [[0, -2, 2, 127]]
    assert [part.tolist() for part in quantize_rows(torch.zeros(1, 3))] == [[[0, 0, 0]], [0.0]]
    q, keys, values, positions = torch.randn(9, 6, 64), *torch.randn(2, 2, 300, 64), torch.arange(291, 300)
    (key_codes, key_scales), (value_codes, value_scales) = quantize_rows(keys), quantize_rows(values)
    out = attention_reference(q, key_codes, value_codes, positions, scales=(key_scales, value_scales))
    error = relative(out, attention_reference(q, keys, values, positions))
    # A step is 2.5 / 127 of a row's standard deviation at D = 64, its error 0.29 of that; keys' and values' add up.
    assert 0.004 < error < 0.012


def test_attention_in_query_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values = torch.randn(37, 6, 16), torch.randn(2, 40, 16), torch.randn(2, 40, 16)
    whole = attention_reference(q, keys, values, torch.arange(3, 40))
    monkeypatch.setattr("localchat.kernels.attention._MAX_SCORES", 6 * 40 * 5)
    assert relative(attention_reference(q, keys, values, torch.arange(3, 40)), whole) < 1e-6


@pytest.mark.parametrize("turning", [8, 4])  # dimensions that are rotated
@pytest.mark.parametrize("normed", [True, False])
def test_rope_rotates_pairs_and_writes_only_its_rows(normed: bool, turning: int) -> None:
    tokens, q_heads, kv_heads, dim = 3, 4, 2, 8
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim)
    positions = torch.tensor([4, 5, 6])
    angles = torch.rand(tokens, turning // 2)
    q_norm, k_norm = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    keys, values = torch.full((2, kv_heads, 10, dim), float("nan"))
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()
    q = rope_kv_write_reference(qkv, q_norm, k_norm, 1e-6, cos, sin, positions, keys, values)

    heads = qkv.view(tokens, -1, dim)

    def rotated(part: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        part = part if norm is None else F.rms_norm(part, (dim,), norm, 1e-6)
        low, high, still = part.split((turning // 2, turning // 2, dim - turning), -1)
        turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)[:, None]  # complex: a rotation
        return torch.cat((turned.real, turned.imag, still), -1)

    assert relative(q, rotated(heads[:, :q_heads], q_norm)) < 1e-6
    assert relative(keys[:, 4:7].transpose(0, 1), rotated(heads[:, q_heads:-kv_heads], k_norm)) < 1e-6
    assert torch.equal(values[:, 4:7].transpose(0, 1), heads[:, -kv_heads:])
    untouched = [0, 1, 2, 3, 7, 8, 9]
    assert bool(keys[:, untouched].isnan().all())
    assert bool(values[:, untouched].isnan().all())

    codes, scales = (
        torch.full((2, kv_heads, 10, dim), 99, dtype=torch.int8),
        torch.full((2, kv_heads, 10), float("nan")),
    )
    same_q = rope_kv_write_reference(qkv, q_norm, k_norm, 1e-6, cos, sin, positions, *codes, scales=tuple(scales))
    assert torch.equal(same_q, q)
    for row, code, scale in zip((keys, values), codes, scales, strict=True):
        wanted_code, wanted_scale = quantize_rows(row[:, 4:7])
        assert torch.equal(code[:, 4:7], wanted_code) and torch.equal(scale[:, 4:7], wanted_scale)
        assert bool((code[:, untouched] == 99).all() and scale[:, untouched].isnan().all())
