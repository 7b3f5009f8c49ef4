"""The CPU's own matrix products against the references they stand in for."""

import copy

import pytest
import torch

from localchat.config import TensorFormat
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.model import Linear, RMSNorm
from localchat.ops import CpuOps, ReferenceOps, ops_for


def make_linear(n: int, k: int, fmt: TensorFormat, bias: bool = False) -> Linear:
    """Random weights of the size of a trained model's."""
    linear = Linear(n, k, fmt, bias=bias)
    if fmt.bits == 4:
        linear.qweight = pack(torch.randint(0, 16, (n, k)), fmt.group_size)
        linear.scales = pack_scales(0.005 + 0.01 * torch.rand(n, k // fmt.group_size)).half()
        linear.mins = None if fmt.symmetric else pack_scales(-0.08 * torch.rand(n, k // fmt.group_size)).half()
    elif fmt.bits == 8:
        linear.weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        linear.scales = 0.001 * (1 + torch.rand(n))
    else:
        linear.weight = torch.randn(n, k).half()
    linear.bias = torch.randn(n).half() if bias else None
    return linear


FORMATS = {
    "int4-g32-sym": TensorFormat(4, 32),
    "int4-g32-min": TensorFormat(4, 32, symmetric=False),
    "int4-g64-sym": TensorFormat(4, 64),
    "int4-g64-min": TensorFormat(4, 64, symmetric=False),
    "int4-g128-sym": TensorFormat(4, 128),
    "int4-g128-min": TensorFormat(4, 128, symmetric=False),
    "int8": TensorFormat(8),
    "bf16": TensorFormat(16),
}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("shape", [(48, 128), (1024, 896), (20, 384), (48, 200), (400, 72)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_cpu_product_equals_the_reference(fmt: TensorFormat, tokens: int, shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    n, k = shape
    if fmt.bits == 4 and k % fmt.group_size:
        pytest.skip("such a matrix is stored as INT8 rows")
    linear, x = make_linear(n, k, fmt, bias), torch.randn(tokens, k)
    reference = ReferenceOps()
    reference.prepare(linear)
    wanted = reference.product(x, linear)
    cpu = CpuOps()
    cpu.prepare(linear)
    assert (linear.cpu_qweight is not None) == (fmt.bits == 4 and n % 16 == 0)  # the fast path is the one tested
    assert (linear.cpu_scales is not None) == (fmt.bits == 8 and k % 16 == 0)
    got = cpu.product(x, linear)
    assert got.dtype == torch.float32
    assert float((got - wanted).norm() / wanted.norm()) < 5e-3


def test_a_large_input_does_not_overflow() -> None:
    linear = make_linear(32, 128, TensorFormat(4, 32))
    x = 1e5 * torch.randn(1, 128)
    wanted = ReferenceOps().product(x, linear)
    cpu = CpuOps()
    cpu.prepare(linear)
    assert float((cpu.product(x, linear) - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.parametrize("fmt", [TensorFormat(8), TensorFormat(16), TensorFormat(4, 64)], ids=["int8", "bf16", "int4"])
def test_the_largest_logits_are_those_of_the_reference(fmt: TensorFormat) -> None:
    torch.manual_seed(0)
    head, norm, x = make_linear(4096, 256, fmt), RMSNorm(256, 1e-6), torch.randn(3, 256)
    norm.weight = torch.rand(256)
    if fmt.bits == 16:
        head.weight = head.weight.bfloat16()
    wanted, cpu = ReferenceOps().logits(x, norm, head_in_fp32(head)), CpuOps()
    cpu.prepare(head)
    got = cpu.logits(x, norm, head)
    best = wanted.topk(8).indices
    bound = 5e-3 if fmt.bits == 4 else 1e-5  # a 4-bit head is not computed twice
    assert float((got.gather(1, best) / wanted.gather(1, best) - 1).abs().max()) < bound
    assert float((got - wanted).norm() / wanted.norm()) < 5e-3


def head_in_fp32(head: Linear) -> Linear:
    """A copy that the reference can multiply with."""
    copied = copy.copy(head)
    copied._buffers = dict(head._buffers)
    ReferenceOps().prepare(copied)
    return copied


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        ops_for(torch.device("meta"))
