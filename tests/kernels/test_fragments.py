"""What the pieces of inline PTX compute: interpreted here line by line, without a card."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from localchat.kernels import int4_fragments, int8_fragments

Relative = Callable[[Tensor, Tensor], float]
Registers = NDArray[np.uint32]  # of a warp: one for each of 32 lanes


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
    if name == "xor.b32":
        return values[0] ^ values[1]
    if name == "prmt.b32":  # each of four digits chooses one of eight bytes
        both = np.stack(values[:2], 1).astype("<u4").view(np.uint8)
        chosen = [int(values[2][0]) >> (4 * i) & 15 for i in range(4)]
        return np.ascontiguousarray(both[:, chosen]).view(np.uint32)[:, 0]
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


def test_the_product_of_codes(relative: Relative) -> None:
    """INT8, all 256 of them: words are bytes as they lie, and each meets the input of its place."""
    torch.manual_seed(0)
    codes = (torch.randperm(1024) % 256 - 128).to(torch.int8).view(16, 64)
    x = torch.randn(8, 64).half() * 100
    pairs = x.view(torch.int32).view(8, 4, 2, 4)  # token, lane, first or second, pair
    words = codes.view(torch.int32)
    inputs = [r for each in (words[:8], words[8:]) for r in lanes(each)]
    inputs += [r for half in range(2) for r in lanes(pairs[:, :, half].reshape(8, 16))]
    inputs += [np.full(32, 0x64646464, np.uint32)] * 4
    sums = execute(int8_fragments._CODES.value, int8_fragments._OPERANDS.value, inputs)
    assert relative(of_fragment(sums[:4]) + of_fragment(sums[4:]), codes.float() @ x.float().T) < 1e-6
