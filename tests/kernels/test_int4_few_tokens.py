"""The kernel for up to 32 tokens: every way of launching them, and their inline PTX, interpreted here line by line."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from localchat.kernels import int4_fragments
from localchat.kernels.cards import Fragments
from localchat.kernels.int4_matmul import int4_matmul, int4_matmul_norm, int4_matmul_reference, int4_matmul_swiglu
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.kernels.rms_norm import rms_norm_reference
from localchat.kernels.scaled_half import UNIT, Squares
from localchat.kernels.swiglu import swiglu_reference

BOUND = 5e-4
Relative = Callable[[Tensor, Tensor], float]
Registers = NDArray[np.uint32]  # of a warp: one for each of 32 lanes


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
    # body, less than one, and more with a rest; batches that divide a body or not.
    (Fragments(4, 2), 33, 1024, 128),
    (Fragments(1, 1), 33, 1408, 128),
    (Fragments(2, 5), 48, 2304, 128),
    (Fragments(4, 5), 48, 640, 128),
    (Fragments(8, 2), 7, 384, 64),
    (Fragments(2, 3), 40, 1216, 64),
    (Fragments(1, 2), 16, 1280, 32),
    (Fragments(4, 1), 17, 544, 32),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 27])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
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


@pytest.mark.parametrize("tokens", [1, 3, 8, 17])
@pytest.mark.parametrize(("n", "k", "group"), [(40, 1024, 128), (2048, 5120, 128), (24, 544, 32)])
def test_the_ends_that_do_more(
    device: torch.device, relative: Relative, tokens: int, n: int, k: int, group: int
) -> None:
    """SwiGLU of rows in turn; and what the next norm needs: half and squares are y's, and make up its norm."""
    if device.type == "cpu" and n * k > 1 << 17:
        pytest.skip("too large for the interpreter, runs with -m gpu")
    stored, bias = make(n, k, group, False, device), torch.randn(n, device=device)
    x, row_scale = torch.randn(tokens, k, device=device).half(), 2.0 ** (torch.arange(tokens, device=device) % 8)
    wanted = int4_matmul_reference(x.float() * row_scale[:, None], *stored, bias, rows=n)
    swiglu = int4_matmul_swiglu(x, row_scale, *stored, bias, rows=n)
    assert relative(swiglu.float() * UNIT, swiglu_reference(wanted)) < BOUND
    residual, gain = torch.randn(tokens, n, device=device), 0.5 + torch.rand(n, device=device)
    y, half, squares = int4_matmul_norm(x, row_scale, *stored, bias, residual, gain, 1e-5)
    assert relative(y, wanted + residual) < BOUND
    normed = half.float() * squares.row_scale(n)[:, None]
    assert relative(normed, rms_norm_reference(wanted + residual, gain, 1e-5)) < BOUND


@pytest.mark.parametrize("tokens", [1, 3, 8, 11])
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


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
@pytest.mark.parametrize("by", [1e-6, 1e7])
@pytest.mark.parametrize("tokens", [3, 12])
def test_scales_that_fp16_does_not_hold(
    device: torch.device, relative: Relative, group: int, with_min: bool, by: float, tokens: int
) -> None:
    stored = make(20, 640, group, with_min, device, torch.float32, by)
    x = torch.randn(tokens, 640, device=device).half()
    out = int4_matmul(x, torch.ones(tokens, device=device), *stored, rows=20, settings=Fragments(2, 2))
    assert relative(out, int4_matmul_reference(x.float(), *stored, rows=20)) < BOUND


def test_too_many_tokens_are_refused(device: torch.device) -> None:
    stored = make(16, 64, 32, False, device)
    x, one = torch.zeros(65, 64, dtype=torch.float16, device=device), torch.ones(65, device=device)
    with pytest.raises(ValueError, match="got 65 tokens, wanted up to 64"):
        int4_matmul(x, one, *stored)
    with pytest.raises(ValueError, match="got 65 tokens"):
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


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [Fragments(4, 5), Fragments(8, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 20])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
def test_the_inline_ptx_and_its_twin_agree(
    card: torch.device, relative: Relative, settings: Fragments, tokens: int, group: int, with_min: bool
) -> None:
    stored = make(512, 5120, group, with_min, card)
    x, one = torch.randn(tokens, 5120, device=card).half(), torch.ones(tokens, device=card)
    ptx, twin = (int4_matmul(x, one, *stored, settings=settings, use_ptx=use) for use in (True, False))
    assert relative(ptx, twin) < BOUND


# What the pieces of inline PTX compute, without a card.


@pytest.fixture
def tile() -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Words of 16 rows [16, 16], pairs of x for 8 tokens (four [8, 16]), and by nibble position their codes
    [4, 16, 32] and inputs fp32 [4, 8, 32].
    """
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (16, 16), dtype=torch.int32)
    x = torch.randn(4, 8, 32).half() * 100
    codes = torch.stack([torch.stack(((words >> 4 * p) & 15, (words >> 16 + 4 * p) & 15), -1) for p in range(4)])
    return words, list(x.view(torch.int32)), codes.view(4, 16, 32).float(), x.float()


def lanes(tensor: Tensor) -> list[Registers]:
    """[8, 16] -> what Triton hands to the instructions: lane 4g + t has columns 4t..4t+3 of row g; fp16 in pairs."""
    return list(tensor.contiguous().view(torch.int32).reshape(32, -1).numpy().view(np.uint32).T)


def of_fragment(registers: list[Registers]) -> Tensor:
    """Four sums of each lane -> [16 rows, 8 tokens]."""
    out, values = torch.empty(16, 8), [torch.from_numpy(r.view(np.float32).copy()) for r in registers]
    for lane in range(32):
        for r in range(4):
            out[lane // 4 + 8 * (r >= 2), lane % 4 * 2 + r % 2] = values[r][lane]
    return out


def to_fragment(y: Tensor) -> list[Registers]:
    """The other way round, of [16, 8]."""
    values = [torch.stack([y[lane // 4 + 8 * (r >= 2), lane % 4 * 2 + r % 2] for lane in range(32)]) for r in range(4)]
    return [v.numpy().view(np.uint32) for v in values]


def execute(text: str, operands: str, inputs: list[Registers]) -> list[Registers]:
    """Run inline PTX for one warp; -> its eight outputs."""
    assert len(operands.split(",")) == 8 + len(inputs)  # as many as Triton will pass
    named = {f"${8 + i}": value for i, value in enumerate(inputs)}
    for line in text.replace("{ .reg", ".reg").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name.startswith("mma"):
            into, *sources = ([part.strip() for part in four.split(",")] for four in re.findall(r"{(.*?)}", rest))
            a, b, c = ([named[register] for register in source] for source in sources)
            named.update(zip(into, mma(a, b, c), strict=True))
        elif name and name[0] not in ".}":
            into, *sources = (part.strip() for part in rest.split(","))
            named[into] = scalar(name, [value_of(source, named) for source in sources])
    return [named[f"${i}"] for i in range(8)]


def value_of(source: str, named: dict[str, Registers]) -> Registers:
    if source.startswith("0f"):
        return np.full(32, int(source[2:], 16), np.uint32)
    return np.full(32, int(source, 0), np.uint32) if source[0].isdigit() else named[source]


def scalar(name: str, values: list[Registers]) -> Registers:
    """One instruction that is no mma."""
    if name.startswith("mov"):
        return values[0]
    if name == "shr.u32":
        return values[0] >> values[1]
    if name == "lop3.b32":
        assert int(values[3][0]) == 0xEA  # (a & b) | c
        return (values[0] & values[1]) | values[2]
    a, b, *c = (v.view(np.float16).astype(np.float64) for v in map(np.ascontiguousarray, values))
    results = {"sub.f16x2": a - b, "mul.f16x2": a * b, "fma.rn.f16x2": a * b + (c[0] if c else 0)}
    return results[name].astype(np.float16).view(np.uint32)


def mma(a: list[Registers], b: list[Registers], c: list[Registers]) -> list[Registers]:
    """m16n8k16 by the PTX ISA's tables of which lane holds what."""
    left, right = torch.zeros(16, 16), torch.zeros(16, 8)
    for lane in range(32):
        g, k = lane // 4, lane % 4 * 2
        for i in range(4):
            left[g + 8 * (i % 2), k + 8 * (i // 2) :][:2] = pair(a[i][lane])
        for i in range(2):
            right[k + 8 * i : k + 8 * i + 2, g] = pair(b[i][lane])
    return to_fragment((left.double() @ right.double()).float() + of_fragment(c))


def pair(register: np.uint32) -> Tensor:
    return torch.from_numpy(np.array([register]).view(np.float16).astype(np.float32))


def test_the_sums_of_x(tile: tuple[Tensor, list[Tensor], Tensor, Tensor], relative: Relative) -> None:
    _, pairs, _, x = tile
    inputs = [register for each in pairs for register in lanes(each)]
    for text, even_factor, odd_factor in (
        (int4_fragments._ONES, 1, 1),
        (int4_fragments._MINUS, -1032, -1152),
    ):
        sums = execute(text.value, int4_fragments._SUMS_OPERANDS.value, inputs)
        even, odd = (torch.stack([x[p] for p in ps]).sum((0, 2)).expand(16, 8) for ps in ((0, 2), (1, 3)))
        assert relative(of_fragment(sums[:4]), even_factor * even) < 1e-5
        assert relative(of_fragment(sums[4:]), odd_factor * odd) < 1e-5


def test_the_raw_product(tile: tuple[Tensor, list[Tensor], Tensor, Tensor], relative: Relative) -> None:
    words, pairs, codes, x = tile
    start = torch.randn(2, 16, 8)
    inputs = [r for each in (words[:8], words[8:], *pairs) for r in lanes(each)]
    inputs += [r for each in start for r in to_fragment(each)]
    sums = execute(int4_fragments._RAW.value, int4_fragments._RAW_OPERANDS.value, inputs)
    products = torch.einsum("prk,ptk->prt", codes, x)
    even, odd = (x[ps].sum((0, 2)) for ps in ([0, 2], [1, 3]))
    assert relative(of_fragment(sums[:4]), start[0] + products[0] + products[2] + 1024 * even) < 1e-5
    assert relative(of_fragment(sums[4:]), start[1] + 16 * (products[1] + products[3]) + 1024 * odd) < 1e-5


@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
def test_the_scaled_product(
    tile: tuple[Tensor, list[Tensor], Tensor, Tensor], relative: Relative, with_min: bool
) -> None:
    """A scale for each row and four words, as in groups of 32; rounding of the weights to fp16 is its only error."""
    words, pairs, codes, x = tile
    scales, mins = torch.rand(2, 16, 4).half() / 100
    wide = [each.repeat_interleave(4, 1) for each in (scales, mins)]
    inputs = [r for each in (words[:8], words[8:], *pairs) for r in lanes(each)]
    inputs += [r for each in wide[: 1 + with_min] for half in (each[:8], each[8:]) for r in lanes(half)]
    piece, operands = ("_SCALED_MIN", "_SCALED_MIN_OPERANDS") if with_min else ("_SCALED", "_SCALED_OPERANDS")
    sums = execute(getattr(int4_fragments, piece).value, getattr(int4_fragments, operands).value, inputs)
    s, m = (each.float().repeat_interleave(2, 1) for each in wide)  # by input
    weights = codes * s + m if with_min else (codes - 8) * s
    wanted = torch.einsum("prk,ptk->rt", weights.half().float(), x)
    assert relative(of_fragment(sums[:4]) + of_fragment(sums[4:]), wanted) < 1e-5
