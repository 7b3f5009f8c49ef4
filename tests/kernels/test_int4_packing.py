"""The packed format: what is written comes back, and the definition in the docstring is what the code does."""

import pytest
import torch

from localchat import config
from localchat.kernels import int4_packing as packing


@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, 32), (3, 64, 64), (16, 576, 64), (5, 4864, 128), (7, 192, 32)])
def test_pack_and_unpack_are_inverse(n: int, k: int, group: int) -> None:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    packed = packing.pack(codes, group)
    assert packed.shape == (n, k // 8)
    assert packed.dtype == torch.int32
    assert torch.equal(packing.unpack(packed, group), codes)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_words_are_laid_out_as_documented(group: int) -> None:
    codes = torch.randint(0, 16, (1, 2 * group))
    words = [int(word) & 0xFFFFFFFF for word in packing.pack(codes, group)[0]]
    per_group = group // 8
    for i, word in enumerate(words):
        first, c = i // per_group * group, i % per_group
        for p in range(4):
            pair = word >> (4 * p) & 0x000F000F
            even = first + 2 * (c + p * per_group)
            assert (pair & 0xF, pair >> 16) == (int(codes[0, even]), int(codes[0, even + 1]))


@pytest.mark.parametrize(
    "codes", [torch.full((1, 32), 16), torch.full((1, 32), -1), torch.zeros(1, 48, dtype=torch.int32)]
)
def test_what_cannot_be_packed_is_refused(codes: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="wanted"):
        packing.pack(codes, 32)


def test_dequantize_follows_both_formulas() -> None:
    codes = torch.randint(0, 16, (4, 96))
    scales, mins = torch.rand(4, 3).half(), torch.randn(4, 3).half()
    each = torch.arange(96) // 32
    symmetric = scales.float()[:, each] * (codes.float() - 8)
    with_min = scales.float()[:, each] * codes.float() + mins.float()[:, each]
    assert torch.equal(packing.dequantize(packing.pack(codes, 32), scales, None), symmetric)
    assert torch.equal(packing.dequantize(packing.pack(codes, 32), scales, mins), with_min)


def test_dequantize_refuses_shapes_that_do_not_belong_together() -> None:
    qweight = packing.pack(torch.zeros(4, 64, dtype=torch.int32), 32)
    with pytest.raises(ValueError, match=r"wanted \[N, K/8\]"):
        packing.dequantize(qweight, torch.ones(3, 2), None)
    with pytest.raises(ValueError, match=r"wanted \[N, K/8\]"):
        packing.dequantize(qweight, torch.ones(4, 2), torch.ones(4, 1))


def test_rows_have_one_scale_each() -> None:
    weight, scales = torch.tensor([[1, -127], [2, 0]], dtype=torch.int8), torch.tensor([0.5, 2.0])
    assert torch.equal(packing.dequantize_rows(weight, scales), torch.tensor([[0.5, -63.5], [4.0, 0.0]]))


@pytest.mark.parametrize(
    ("k", "wanted", "got"), [(576, 128, 64), (5120, 128, 128), (4864, 128, 128), (96, 64, 32), (40, 128, None)]
)
def test_group_size_divides_k(k: int, wanted: int, got: int | None) -> None:
    assert packing.group_size_for(k, wanted) == got


def test_the_torch_free_copy_of_the_group_sizes_agrees() -> None:
    assert config.GROUP_SIZES == packing.GROUP_SIZES
