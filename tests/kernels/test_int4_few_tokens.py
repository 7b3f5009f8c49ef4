"""The kernel for up to 8 tokens: every way of launching it. What its inline PTX computes: test_fragments.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localchat.kernels.cards import Fragments, card_of
from localchat.kernels.early import UNWRITTEN, can_read_early
from localchat.kernels.int4_matmul import (
    few_tokens_options,
    int4_matmul,
    int4_matmul_norm,
    int4_matmul_reference,
    int4_matmul_swiglu,
)
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.kernels.rms_norm import rms_norm_reference
from localchat.kernels.scaled_half import UNIT, Squares
from localchat.kernels.swiglu import swiglu_reference

BOUND = 5e-4
Relative = Callable[[Tensor, Tensor], float]


def make(
    n: int, k: int, group: int, with_min: bool, device: torch.device, dtype: torch.dtype = torch.float16, by: float = 1
) -> tuple[Tensor, Tensor, Tensor | None]:
    """qweight, scales, mins; scales and mins times `by`."""
    codes = torch.randint(0, 16, (n, k), device=device)
    scales = (by * (0.005 + 0.01 * torch.rand(n, k // group, device=device))).to(dtype)
    mins = (by * -0.1 * torch.rand(n, k // group, device=device)).to(dtype) if with_min else None
    return pack(codes, group), pack_scales(scales), None if mins is None else pack_scales(mins)


LAUNCHES = [
    # N: 16 or fewer, a block more, odd. K: a multiple of all warps' tiles, of no tile, less than they take; of a loop's
    # body, less than one, and more with a rest; batches that divide a body or not, and bodies smaller than a batch.
    (Fragments(4, 2), 33, 1024, 128),
    (Fragments(1, 1), 33, 1408, 128),
    (Fragments(2, 5), 48, 2304, 128),
    (Fragments(4, 5), 48, 640, 128),
    (Fragments(8, 2), 7, 384, 64),
    (Fragments(2, 3), 40, 1216, 64),
    (Fragments(1, 2), 16, 1280, 32),
    (Fragments(4, 1), 17, 544, 32),
    (Fragments(2, 2, 2, True), 33, 1408, 128),
    (Fragments(1, 3, 3), 17, 1280, 128),
    (Fragments(2, 3, 1), 16, 896, 64),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize(("tokens", "with_min"), [*((tokens, False) for tokens in (1, 2, 3, 8)), (1, True), (3, True)])
def test_every_launch(
    device: torch.device, relative: Relative, launch: tuple[Fragments, int, int, int], tokens: int, with_min: bool
) -> None:
    """Bias, residual and row scales are in y, and nothing is written behind it."""
    settings, n, k, group = launch
    stored = make(n, k, group, with_min, device)
    x, row_scale = torch.randn(tokens, k, device=device).half(), 2.0 ** (torch.arange(tokens, device=device) % 8)
    bias, residual = torch.randn(n, device=device), torch.randn(tokens, n, device=device)
    wanted = int4_matmul_reference(x.float() * row_scale[:, None], *stored, bias, rows=n) + residual
    memory = torch.full((tokens * n + 64,), float("nan"), device=device)
    out = memory[: tokens * n].view(tokens, n)
    int4_matmul(x, row_scale, *stored, bias, residual, rows=n, out=out, settings=settings)
    assert relative(out, wanted) < BOUND
    assert bool(memory[tokens * n :].isnan().all())


@pytest.mark.parametrize(
    ("k", "body", "count", "rest"),
    [(4096, 8, 8, 0), (4096, 7, 4, 0), (3584, 7, 7, 0), (5120, 7, 5, 0), (5120, 3, 3, 1), (640, 1, 1, 0)],
)
def test_a_loop_s_body_is_no_longer_than_asked_for(k: int, body: int, count: int, rest: int) -> None:
    """Steps of 512 inputs, which the loop takes in bodies as even as they get."""
    options = few_tokens_options(1, k, 128, torch.float16, False, Fragments(4, 5, body))
    assert (options["COUNT"], options["REST"], options["BATCH"]) == (count, rest, min(5, count))


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("n", "k", "group"), [(40, 1024, 128), (2048, 5120, 128), (24, 544, 32)])
def test_the_ends_that_do_more(
    device: torch.device, relative: Relative, tokens: int, n: int, k: int, group: int
) -> None:
    """SwiGLU of rows in turn; and what the next norm needs: half and squares are y's, and make up its norm."""
    if device.type == "cpu" and n * k > 1 << 17:
        pytest.skip("too large for the interpreter, runs with -m gpu")
    stored, bias = make(n, k, group, False, device), torch.randn(n, device=device)
    # Not so much that gate times up is more than fp16 holds in units.
    x, row_scale = torch.randn(tokens, k, device=device).half(), 2.0 ** (torch.arange(tokens, device=device) % 4)
    wanted = int4_matmul_reference(x.float() * row_scale[:, None], *stored, bias, rows=n)
    swiglu = int4_matmul_swiglu(x, row_scale, *stored, bias, rows=n)
    assert relative(swiglu.float() * UNIT, swiglu_reference(wanted)) < BOUND
    residual, gain = torch.randn(tokens, n, device=device), 0.5 + torch.rand(n, device=device)
    y, half, squares = int4_matmul_norm(x, row_scale, *stored, bias, residual, gain, 1e-5)
    assert relative(y, wanted + residual) < BOUND
    normed = half.float() * squares.row_scale(n)[:, None]
    assert relative(normed, rms_norm_reference(wanted + residual, gain, 1e-5)) < BOUND


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_squares_in_place_of_row_scales(device: torch.device, relative: Relative, tokens: int) -> None:
    stored, parts = make(33, 640, 128, True, device), torch.rand(tokens, 40, device=device)
    x, squares = torch.randn(tokens, 640, device=device).half(), Squares(parts, 0.5)
    factors = UNIT / (parts.sum(1, keepdim=True) / 640 + 0.5).sqrt()
    out = int4_matmul(x, squares, *stored, rows=33)
    assert relative(out, int4_matmul_reference(x.float() * factors, *stored, rows=33)) < BOUND


def test_what_does_not_fit_into_units_ends_at_their_largest(device: torch.device) -> None:
    """1e5 keeps its digits; 1e7 becomes 524,032, and never infinity or NaN."""
    k = 128
    stored = (pack(torch.full((16, k), 9, device=device), 128), torch.ones(1, 1, 16, device=device).half(), None)
    for magnitude, wanted in ((1e5, 1e5), (1e7, 65504.0 * UNIT)):
        x = torch.full((1, k), 1.0, device=device).half()
        row_scale = torch.full((1,), magnitude / k, device=device)
        y, half, _ = int4_matmul_norm(
            x, row_scale, *stored, None, torch.zeros(1, 16, device=device), torch.ones(16, device=device), 1e-6
        )
        assert torch.allclose(y, torch.full_like(y, magnitude))
        assert torch.allclose(half.float() * UNIT, torch.full_like(y, wanted), rtol=1e-3)


@pytest.mark.parametrize(("magnitude", "wanted"), [(100.0, 1e4), (316.2, 1e5), (1000.0, 65504.0 * UNIT)])
def test_what_swiglu_gives_in_units(device: torch.device, magnitude: float, wanted: float) -> None:
    """silu(g) g for large g is g^2: 1e5 in front of down_proj keeps its digits, 1e6 ends at the largest number."""
    stored = (pack(torch.full((16, 128), 9, device=device), 128), torch.ones(1, 1, 16, device=device).half(), None)
    x, row_scale = torch.ones(1, 128, device=device).half(), torch.full((1,), magnitude / 128, device=device)
    y = int4_matmul_swiglu(x, row_scale, *stored)
    assert torch.allclose(y.float() * UNIT, torch.full((1, 8), wanted, device=device), rtol=1e-3)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
@pytest.mark.parametrize("by", [1e-6, 1e7])
@pytest.mark.parametrize("tokens", [3, 8])
def test_scales_that_fp16_does_not_hold(
    device: torch.device, relative: Relative, group: int, with_min: bool, by: float, tokens: int
) -> None:
    stored = make(20, 640, group, with_min, device, torch.float32, by)
    x = torch.randn(tokens, 640, device=device).half()
    out = int4_matmul(x, torch.ones(tokens, device=device), *stored, rows=20, settings=Fragments(2, 2))
    assert relative(out, int4_matmul_reference(x.float(), *stored, rows=20)) < BOUND


def test_too_many_tokens_are_refused(device: torch.device) -> None:
    stored = make(16, 64, 32, False, device)
    x, one = torch.zeros(9, 64, dtype=torch.float16, device=device), torch.ones(9, device=device)
    with pytest.raises(ValueError, match="got 9 tokens, wanted up to 8"):
        int4_matmul_swiglu(x, one, *stored)


def test_what_does_not_belong_together_is_refused(device: torch.device) -> None:
    qweight, scales, mins = make(33, 64, 32, True, device)
    x, one = torch.zeros(1, 64, dtype=torch.float16, device=device), torch.ones(1, device=device)
    if mins is None:
        raise AssertionError("made without minima")
    with pytest.raises(ValueError, match="mins: got float32"):
        int4_matmul(x, one, qweight, scales, mins.float(), rows=33)
    with pytest.raises(ValueError, match="bias"):
        int4_matmul(x, one, qweight, scales, mins, torch.zeros(48, device=device), rows=33)
    with pytest.raises(ValueError, match="residual"):
        int4_matmul(x, one, qweight, scales, mins, None, torch.zeros(2, 33, device=device), rows=33)
    with pytest.raises(ValueError, match="got 33 rows"):
        int4_matmul_swiglu(x, one, qweight, scales, mins, rows=33)


@pytest.mark.parametrize(
    ("k", "group", "with_min", "parts", "early", "rest"),
    [
        (17408, 128, False, 4, True, 6),
        (12288, 128, False, 4, True, 8),  # three bodies, of which the last comes behind the wait
        (17408, 128, True, 4, True, 6),
        (12288, 128, False, 8, False, 0),  # no registers left
        (2048, 128, False, 4, False, 0),  # one body
        (17536, 128, False, 4, False, 0),  # a rest of one tile
        (17408, 64, False, 4, False, 6),
    ],
)
def test_what_is_read_early(k: int, group: int, with_min: bool, parts: int, early: bool, rest: int) -> None:
    options = few_tokens_options(1, k, group, torch.float16, with_min, Fragments(parts, 2), early=True)
    assert (options["EARLY"], options["REST"]) == (early, rest)


@pytest.mark.parametrize("words", [4, 1024, 5000])
def test_filled_for_somebody_who_reads_early(device: torch.device, words: int) -> None:
    """So many words by few programs, no more, and the product is there as well."""
    stored, x = make(33, 128, 128, False, device), torch.randn(1, 128, device=device).half()
    memory = torch.zeros(words + 8, dtype=torch.int32, device=device)
    one, halves = torch.ones(1, device=device), memory.view(torch.float16)[None]
    y = int4_matmul(x, one, *stored, rows=33, unwritten=halves[:, : 2 * words])
    assert torch.equal(memory[:words], torch.full_like(memory[:words], UNWRITTEN))
    assert not memory[words:].any()
    assert torch.equal(y, int4_matmul(x, one, *stored, rows=33))
    with pytest.raises(ValueError, match="9 tokens and a tensor to fill"):
        int4_matmul(x.expand(9, -1).contiguous(), one.expand(9), *stored, rows=33, unwritten=halves)
    two = (x.expand(2, -1).contiguous(), one.expand(2).contiguous())
    with pytest.raises(ValueError, match=r"unwritten: got .*not contiguous"):
        int4_matmul(*two, *stored, rows=33, unwritten=halves.view(2, -1)[:, :4])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("missing", ["all", "odd halves", "last"])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
@pytest.mark.parametrize("nan", [False, True], ids=["finite", "nan"])
def test_what_is_unwritten_is_waited_for(
    card: torch.device, tokens: int, missing: str, with_min: bool, nan: bool
) -> None:
    """Ten milliseconds after the launch another stream writes it; a NaN of arithmetic is a value like others.

    What is read behind the wait is there from the start: the wait is for a kernel in front, not for another stream.
    """
    k, n = 17408, 256
    stored = make(n, k, 128, with_min, card)
    options = few_tokens_options(
        tokens, k, 128, torch.float16, with_min, card_of(card).fragments(n, k), early=can_read_early(stored[0])
    )
    assert options["EARLY"] == can_read_early(stored[0])
    early = k - options["REST"] * options["PARTS"] * 128
    x, ones = torch.randn(tokens, k, device=card).half(), torch.ones(tokens, device=card)
    if nan:
        x[0, 7] = float("nan")
    residual, gain = torch.randn(tokens, n, device=card), torch.ones(n, device=card)

    def bits(x: Tensor, early: bool) -> Tensor:
        y, half, squares = int4_matmul_norm(x, ones, *stored, None, residual, gain, 1e-5, early=early)
        return torch.cat([part.view(torch.int16).flatten() for part in (y, half, squares.parts)])

    wanted = bits(x, False)
    assert torch.equal(bits(x, True), wanted)  # and it is compiled
    incomplete = x.clone()
    if missing == "all":
        incomplete.view(torch.int16)[:, :early] = -1
    elif missing == "odd halves":
        incomplete.view(torch.int16)[:, 1:early:2] = -1
    else:
        incomplete.view(torch.int32)[-1, early // 2 - 1] = UNWRITTEN
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        incomplete.copy_(x)
    y, half, squares = int4_matmul_norm(incomplete, ones, *stored, None, residual, gain, 1e-5, early=True)
    assert not other.query(), "it was written before the product was launched"
    assert torch.equal(torch.cat([part.view(torch.int16).flatten() for part in (y, half, squares.parts)]), wanted)
    assert bool(y[int(nan) :].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_chain_that_reads_early_gives_the_same_bits(card: torch.device, tokens: int) -> None:
    """First product, SwiGLU of many programs, the product behind it: as in a layer, 200 of them in a graph."""
    hidden, inner = 2048, 17408
    chosen = card_of(card).fragments(hidden, inner)
    assert few_tokens_options(tokens, inner, 128, torch.float16, False, chosen, early=True)["EARLY"]
    first, gate_up = make(hidden, hidden, 128, False, card), make(2 * inner, hidden, 128, False, card, by=0.1)
    down, gain = make(hidden, inner, 128, False, card, by=0.1), torch.ones(hidden, device=card)
    start, ones = torch.randn(tokens, hidden, device=card), torch.ones(tokens, device=card)
    memory = torch.empty(tokens, inner, dtype=torch.float16, device=card)

    def layers(early: bool) -> Tensor:
        stream = int4_matmul_norm(start.half(), ones, *first, None, start, gain, 1e-5)
        for _ in range(200):
            x, half, squares = stream
            mixed = int4_matmul(half, squares, *first, unwritten=memory if early else None)
            x, half, squares = int4_matmul_norm(mixed.half(), ones, *first, None, x, gain, 1e-5)
            inside = int4_matmul_swiglu(half, squares, *gate_up, out=memory if early else None)
            stream = int4_matmul_norm(inside, ones, *down, None, x, gain, 1e-5, early=early)
        return stream[0]

    wanted = layers(False)
    assert bool(wanted.isfinite().all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(True)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [Fragments(4, 5), Fragments(8, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
def test_the_inline_ptx_and_its_twin_agree(
    card: torch.device, relative: Relative, settings: Fragments, tokens: int, group: int, with_min: bool
) -> None:
    """Over few steps: of a loop the twin takes half a minute to compile. With eight warps some have no last tile."""
    stored = make(512, 1536, group, with_min, card)
    x, one = torch.randn(tokens, 1536, device=card).half(), torch.ones(tokens, device=card)
    ptx, twin = (int4_matmul(x, one, *stored, settings=settings, use_ptx=use) for use in (True, False))
    assert relative(ptx, twin) < BOUND
