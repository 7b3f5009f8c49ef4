"""The packed products on a GPU (or in the interpreter) against their references."""

import pytest
import torch

from localchat.kernels.int4_matmul import (
    DEQUANTIZED,
    Dequantized,
    dequantize_int4,
    int4_matmul,
    int4_matmul_reference,
)
from localchat.kernels.int4_packing import dequantize, dequantize_rows, pack, pack_scales, unpack_scales
from localchat.kernels.int8_matmul import dequantize_int8, int8_matmul, int8_matmul_reference

# The last two shapes are real ones; they only run on a card.
SHAPES = [(7, 64, 32), (48, 576, 64), (20, 896, 128), (33, 1664, 128), (3584, 18944, 128), (10240, 5120, 128)]
BOUND = 5e-4


def relative(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.float() - wanted.float()).norm() / wanted.float().norm())


def skip_large(n: int, k: int, device: torch.device) -> None:
    if device.type == "cpu" and n * k > 1 << 17:
        pytest.skip("too large for the interpreter, runs with -m gpu")


def scaled_half(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels/scaled_half.py defines it, in torch."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1) / 512)).clamp_min(0))
    return (x / scale[:, None]).half(), scale


def make_int4(n: int, k: int, group: int, with_min: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
    codes = torch.randint(0, 16, (n, k), device=device)
    scales = (0.005 + 0.01 * torch.rand(n, k // group, device=device)).half()
    mins = (-0.1 * torch.rand(n, k // group, device=device)).half() if with_min else None
    return pack(codes, group), pack_scales(scales), None if mins is None else pack_scales(mins)  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 17, 32])
@pytest.mark.parametrize("with_min", [False, True], ids=["sym", "min"])
@pytest.mark.parametrize("magnitude", [1.0, 1e5])
def test_int4(device: torch.device, shape: tuple[int, int, int], tokens: int, with_min: bool, magnitude: float) -> None:
    torch.manual_seed(0)
    n, k, group = shape
    skip_large(n, k, device)
    qweight, scales, mins = make_int4(n, k, group, with_min, device)
    x, row_scale = scaled_half(magnitude * torch.randn(tokens, k, device=device))
    bias = torch.randn(n, device=device) if with_min else None
    residual = magnitude * torch.randn(tokens, n, device=device) if with_min else None
    wanted = int4_matmul_reference(x.float() * row_scale[:, None], qweight, scales, mins, bias, rows=n)
    wanted = wanted if residual is None else wanted + residual
    out = torch.full((tokens, n), float("nan"), device=device)
    int4_matmul(x, row_scale, qweight, scales, mins, bias, residual, rows=n, out=out)
    assert relative(out, wanted) < BOUND


@pytest.mark.parametrize("shape", [*(s[:2] for s in SHAPES), (300, 96)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_int8(device: torch.device, shape: tuple[int, int], tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    n, k = shape
    skip_large(n, k, device)
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    scales = 0.001 * (1 + torch.rand(n, device=device))
    x, row_scale = scaled_half(1e4 * torch.randn(tokens, k, device=device))
    added = torch.randn(n, device=device) if bias else None
    residual = 1e4 * torch.randn(tokens, n, device=device) if bias else None
    wanted = int8_matmul_reference(x.float() * row_scale[:, None], weight, scales, added)
    wanted = wanted if residual is None else wanted + residual
    out = torch.full((tokens, n), float("nan"), device=device)
    int8_matmul(x, row_scale, weight, scales, added, residual, out=out)
    assert relative(out, wanted) < BOUND


@pytest.mark.parametrize("shape", [(7, 64), (48, 576), (20, 896), (33, 1664), (16, 1024)], ids=str)
def test_dequantised_int8_is_the_matrix(device: torch.device, shape: tuple[int, int]) -> None:
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    scales = torch.rand(shape[0], device=device)
    out = torch.full(shape, float("nan"), dtype=torch.float16, device=device)
    assert relative(dequantize_int8(weight, scales, out), dequantize_rows(weight, scales)) < BOUND


@pytest.mark.parametrize("settings", [DEQUANTIZED, (2, 4, 4), (1, 16, 2)], ids=str)
@pytest.mark.parametrize("shape", [(7, 64), (33, 576), (20, 1664), (32, 1024)], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["sym", "min", "fp32 min"])
def test_dequantised_int4_is_the_matrix(
    device: torch.device, settings: tuple[int, int, int], shape: tuple[int, int], group: int, kind: str
) -> None:
    """To the last bit, in both types, and nothing behind its last row. Narrow tiles, few rows, and whole programs."""
    n, k = shape
    if k % group:
        pytest.skip("K is no multiple of the group")
    qweight, scales, mins = make_int4(n, k, group, kind != "sym", device)
    if kind == "fp32 min":  # of fp16's few bits, so that their products with codes are exact
        scales, mins = scales.float() * 2**10, mins.float() * 2**10
    by_row = (unpack_scales(scales, n), None if mins is None else unpack_scales(mins, n))
    for dtype in (torch.bfloat16, torch.float16):
        memory = torch.full((n + 16, k), float("nan"), dtype=dtype, device=device)
        out = dequantize_int4(qweight, scales, mins, memory[:n], settings=Dequantized(*settings))
        assert torch.equal(out, dequantize(qweight, *by_row, dtype))
        assert memory[n:].isnan().all()


def test_shapes_that_do_not_belong_together_are_refused(device: torch.device) -> None:
    qweight, scales, _ = make_int4(8, 64, 32, False, device)
    x, row_scale = scaled_half(torch.randn(1, 96, device=device))
    with pytest.raises(ValueError, match="wanted fp16"):
        int4_matmul(x, row_scale, qweight, scales)
    with pytest.raises(ValueError, match="wanted fp16"):
        int8_matmul(x.float(), row_scale, torch.zeros(8, 96, dtype=torch.int8, device=device), torch.ones(8))
