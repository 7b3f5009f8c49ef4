"""The product of tens to hundreds of tokens: every tile, both formats, and how its steps are dealt out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localchat.kernels import many_tokens as module
from localchat.kernels.cards import DEFAULT, Card
from localchat.kernels.int4_matmul import int4_matmul, int4_matmul_reference, takes
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.kernels.int8_matmul import int8_matmul, int8_matmul_reference
from localchat.kernels.many_tokens import MANY_TOKENS, Tile, many_tokens, tile_for, tiles_for
from localchat.kernels.scaled_half import UNIT, Squares

BOUND = 5e-4
Relative = Callable[[Tensor, Tensor], float]
SMALL = Tile(64, 16, 4, 3, 1)


def int4(n: int, k: int, group: int, with_min: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = torch.randint(0, 16, (n, k), device=device)
    scales = (0.005 + 0.01 * torch.rand(n, k // group, device=device)).half()
    mins = (-0.1 * torch.rand(n, k // group, device=device)).half() if with_min else None
    return pack(codes, group), pack_scales(scales), None if mins is None else pack_scales(mins)


def int8(n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
    return codes, 0.001 * (1 + torch.rand(n, device=device))


def inputs(tokens: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, row scales, bias, residual."""
    x, row_scale = torch.randn(tokens, k, device=device).half(), 2.0 ** (torch.arange(tokens, device=device) % 8)
    return x, row_scale, torch.randn(n, device=device), torch.randn(tokens, n, device=device)


def programs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As on a card with so many multiprocessors."""
    monkeypatch.setattr(module, "card_of", lambda _: Card(count, DEFAULT))


@pytest.mark.parametrize("tokens", [9, 17, 64, 200])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
@pytest.mark.parametrize(("n", "k", "group"), [(7, 256, 128), (130, 640, 64), (49, 544, 32), (5120, 6144, 128)])
def test_int4(
    device: torch.device, relative: Relative, n: int, k: int, group: int, with_min: bool, tokens: int
) -> None:
    """Bias, residual and row scales are in y; nothing is written behind it, and the counters are zeros again."""
    if device.type == "cpu" and n * k > 1 << 17:
        pytest.skip("too large for the interpreter, runs with -m gpu")
    stored = int4(n, k, group, with_min, device)
    x, row_scale, bias, residual = inputs(tokens, n, k, device)
    wanted = int4_matmul_reference(x.float() * row_scale[:, None], *stored, bias, rows=n) + residual
    memory = torch.full((tokens * n + 64,), float("nan"), device=device)
    out, arrivals = memory[: tokens * n].view(tokens, n), torch.zeros(1000, dtype=torch.int32, device=device)
    int4_matmul(x, row_scale, *stored, bias, residual, rows=n, out=out, arrivals=arrivals)
    assert relative(out / row_scale[:, None], wanted / row_scale[:, None]) < BOUND
    assert bool(memory[tokens * n :].isnan().all())
    assert not bool(arrivals.any())


@pytest.mark.parametrize(
    ("n", "k", "tokens"),
    [*((n, k, t) for n, k in ((7, 64), (96, 640), (200, 1424), (5120, 6144)) for t in (9, 32, 40, 130)), (50, 90, 9)],
)
def test_int8(device: torch.device, relative: Relative, n: int, k: int, tokens: int) -> None:
    if device.type == "cpu" and n * k > 1 << 18:
        pytest.skip("too large for the interpreter, runs with -m gpu")
    stored = int8(n, k, device)
    x, row_scale, bias, residual = inputs(tokens, n, k, device)
    wanted = int8_matmul_reference(x.float() * row_scale[:, None], *stored, bias) + residual
    memory = torch.full((tokens * n + 64,), float("nan"), device=device)
    out = memory[: tokens * n].view(tokens, n)
    int8_matmul(x, row_scale, *stored, bias, residual, out=out)
    assert relative(out / row_scale[:, None], wanted / row_scale[:, None]) < BOUND
    assert bool(memory[tokens * n :].isnan().all())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, 14, 15, 100])
def test_however_steps_are_dealt_out(
    device: torch.device, relative: Relative, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Three tiles of rows by two of tokens, seven steps each: programs with parts of two tiles, with whole ones between
    them, several to a tile, and no more than there are steps. What comes is the same, bit for bit, when it comes again.
    """
    programs(monkeypatch, count)
    stored, (n, k, tokens) = int4(150, 896, 128, False, device), (150, 896, 20)
    x, row_scale, bias, residual = inputs(tokens, n, k, device)
    wanted = int4_matmul_reference(x.float() * row_scale[:, None], *stored, bias, rows=n) + residual
    outs = [torch.full((tokens, n), float("nan"), device=device) for _ in range(2)]
    arrivals = torch.zeros(6, dtype=torch.int32, device=device)
    for out in outs:
        many_tokens(x, row_scale, *stored, bias, residual, out, tile=SMALL, arrivals=arrivals)
    assert relative(outs[0], wanted) < BOUND
    assert torch.equal(*outs)
    assert not bool(arrivals.any())


def test_more_tiles_than_shared_counters(device: torch.device, relative: Relative) -> None:
    """Many tokens in narrow tiles, as groups of 32 have on older cards: the launch has counters of its own."""
    stored, (x, row_scale, *_) = int4(16, 256, 128, False, device), inputs(40, 16, 256, device)
    y, few = torch.full((40, 16), float("nan"), device=device), torch.zeros(2, dtype=torch.int32, device=device)
    many_tokens(x, row_scale, *stored, None, None, y, arrivals=few, tile=SMALL)
    assert relative(y, int4_matmul_reference(x.float() * row_scale[:, None], *stored)) < BOUND
    assert not bool(few.any())


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tile", [*module._HOPPER, *module._OTHERS], ids=str)
def test_every_tile(card: torch.device, relative: Relative, tile: Tile, bits: int) -> None:
    """Also those of other cards; and it is the same from run to run, though programs arrive as they like."""
    n, k, tokens = 5120, 6144, tile.tokens + 3
    stored = int4(n, k, 128, False, card) if bits == 4 else (*int8(n, k, card), None)
    x, row_scale, bias, residual = inputs(tokens, n, k, card)
    reference = int4_matmul_reference if bits == 4 else int8_matmul_reference
    wanted = reference(x.float() * row_scale[:, None], *stored[: 3 if bits == 4 else 2], bias=bias) + residual
    outs = [torch.full((tokens, n), float("nan"), device=card) for _ in range(20)]
    for out in outs:
        many_tokens(x, row_scale, *stored, bias, residual, out, tile=tile)
    assert relative(outs[0], wanted) < BOUND
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
def test_the_inline_ptx_and_its_twin_agree(card: torch.device, relative: Relative, group: int, with_min: bool) -> None:
    stored = int4(512, 1536, group, with_min, card)
    x, one = torch.randn(40, 1536, device=card).half(), torch.ones(40, device=card)
    ptx, twin = (int4_matmul(x, one, *stored, use_ptx=use) for use in (True, False))
    assert relative(ptx, twin) < 1e-5


@pytest.mark.parametrize("code", range(16))
def test_every_code_at_every_place(device: torch.device, code: int) -> None:
    """One weight that is not zero: its input is found, its value exact."""
    n, k = 16, 128
    codes, row = torch.full((n, k), 8, device=device), (5 * code) % n
    x = torch.diag(torch.full((k,), 2.0, device=device)).half()
    codes[row] = code
    stored = (pack(codes, 128), pack_scales(torch.full((n, 1), 0.375, device=device).half()), None)
    y = int4_matmul(x, torch.ones(k, device=device), *stored)
    wanted = torch.zeros(k, n, device=device)
    wanted[:, row] = (code - 8) * 0.75
    assert torch.equal(y, wanted)


def test_squares_in_place_of_row_scales(device: torch.device, relative: Relative) -> None:
    stored, parts = int4(33, 640, 128, True, device), torch.rand(11, 40, device=device)
    x, squares = torch.randn(11, 640, device=device).half(), Squares(parts, 0.5)
    factors = UNIT / (parts.sum(1, keepdim=True) / 640 + 0.5).sqrt()
    out = int4_matmul(x, squares, *stored, rows=33)
    assert relative(out, int4_matmul_reference(x.float() * factors, *stored, rows=33)) < BOUND


def test_the_tile_follows_from_the_tokens() -> None:
    x = torch.empty(0)
    for tokens, width in ((9, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 128), (129, 128), (512, 128)):
        assert tile_for(tokens, x).tokens == width
    assert [tile.tokens for tile in tiles_for(x)] == sorted(tile.tokens for tile in tiles_for(x))


def test_what_it_does_not_take_is_refused(device: torch.device) -> None:
    qweight, scales, _ = int4(16, 128, 128, False, device)
    one = torch.ones(MANY_TOKENS + 1, device=device)
    x = torch.zeros(MANY_TOKENS + 1, 128, dtype=torch.float16, device=device)
    assert takes(MANY_TOKENS, scales)
    assert takes(8, scales.float())
    assert not takes(9, scales.float())
    for tokens, kept in ((MANY_TOKENS + 1, scales), (9, scales.float())):
        with pytest.raises(ValueError, match=f"got {tokens} tokens, scales"):
            int4_matmul(x[:tokens], one[:tokens], qweight, kept)
    with pytest.raises(ValueError, match="got 513 tokens"):
        int8_matmul(x, one, *int8(16, 128, device))
