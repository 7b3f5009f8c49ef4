"""Float8 weights against a decoder that reads the bits of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign
from localchat.quantize import fp8

Make = Callable[..., Any]


def random_weight(n: int, k: int) -> Tensor:
    """Any byte but the two that are not numbers."""
    byte = torch.randint(0, 256, (n, k), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return torch.where(byte & 127 == 127, byte - 1, byte).view(torch.float8_e4m3fn)


def e4m3(byte: int) -> float:
    """One sign, four bits of exponent (bias 7; 0: subnormal), three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def decoded(weight: Tensor, scale_of: Callable[[int, int], float]) -> Tensor:
    """W fp32, one weight at a time. A product of 4 and at most 20 bits: no rounding but the last."""
    codes = weight.view(torch.uint8).tolist()
    rows = [[e4m3(code) * scale_of(n, k) for k, code in enumerate(row)] for n, row in enumerate(codes)]
    return torch.tensor(rows, dtype=torch.float64).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(128, 256), (40, 576), (130, 192), (1, 64), (300, 200)])
def test_blocks(parts_of: Make, n: int, k: int, dtype: torch.dtype) -> None:
    """Also where the last block of rows or inputs is not whole."""
    weight = random_weight(n, k)
    scales = torch.rand(-(-n // 128), -(-k // 128), generator=torch.Generator().manual_seed(1)).to(dtype)
    stored = scales.tolist()
    foreign = Foreign("fp8", 8, block=(128, 128))
    parts = parts_of(foreign, weight=weight, weight_scale_inv=scales)
    assert fp8.shape(parts) == (n, k)
    assert torch.equal(fp8.decode(parts), decoded(weight, lambda r, c: stored[r // 128][c // 128]))


@pytest.mark.parametrize("shape", [(24, 1), (24,), (1,), (1, 1), ()])
def test_rows_and_the_whole_matrix(parts_of: Make, shape: tuple[int, ...]) -> None:
    weight, scales = random_weight(24, 64), torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
    flat = scales.flatten().tolist()
    got = fp8.decode(parts_of(Foreign("compressed-tensors", 8), weight=weight, weight_scale=scales))
    assert torch.equal(got, decoded(weight, lambda row, _: flat[row % len(flat)]))


def test_huge_and_tiny_scales(parts_of: Make) -> None:
    weight = random_weight(256, 128)
    scales = torch.tensor([[1e-30], [1e30]])
    got = fp8.decode(parts_of(Foreign("fp8", 8, block=(128, 128)), weight=weight, weight_scale_inv=scales))
    assert torch.equal(got, decoded(weight, lambda row, _: float(scales[row // 128])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_scale_inv": torch.ones(2, 2)}, r"x\.weight_scale_inv is F32 \[2, 2\], wanted .* \[1, 2\]"),
        ({"weight_scale_inv": torch.ones(1, 2, dtype=torch.int32)}, r"x\.weight_scale_inv is I32"),
        ({"weight": torch.ones(24, 256)}, r"x\.weight is F32 \[24, 256\], wanted F8_E4M3"),
        ({"weight": torch.zeros(24, 256).to(torch.float8_e5m2)}, r"x\.weight is F8_E5M2"),
    ],
)
def test_damaged(parts_of: Make, change: dict[str, Tensor], words: str) -> None:
    tensors = {"weight": random_weight(24, 256), "weight_scale_inv": torch.ones(1, 2), **change}
    with pytest.raises(BadCheckpoint, match=words):
        fp8.decode(parts_of(Foreign("fp8", 8, block=(128, 128)), **tensors))
