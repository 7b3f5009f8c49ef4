"""The packed format: what is written comes back, and the definition in the docstring is what the code does."""

import pytest
import torch

from localchat import config
from localchat.kernels import int4_packing as packing


@pytest.mark.parametrize(("n", "k", "group"), [(1, 32, 32), (3, 64, 64), (16, 576, 64), (5, 4864, 128), (7, 192, 32)])
def test_pack_and_unpack_are_inverse(n: int, k: int, group: int) -> None:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    packed = packing.pack(codes, group)
    assert packed.shape == (16, k // 8) == (packing.padded_rows(n), k // 8)
    assert packed.dtype == torch.int32
    assert torch.equal(packing.unpack(packed, group, n), codes)
    assert not packing.unpack(packed, group, 16)[n:].any()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_words_are_laid_out_as_documented(group: int) -> None:
    """33 rows are three blocks of 16; 5 groups of 32 or 64 end in a tile that is narrower."""
    n, k, per_group = 33, 5 * group, group // 8
    codes = torch.randint(0, 16, (n, k))
    words = [int(word) & 0xFFFFFFFF for word in packing.pack(codes, group).flatten()]
    for row in range(n):
        for i in range(k // 8):
            width = min(16, k // 8 - i // 16 * 16)
            word = words[row // 16 * 16 * k // 8 + i // 16 * 256 + row % 16 * width + i % 16]
            first, c = i // per_group * group, i % per_group
            for p in range(4):
                pair = word >> (4 * p) & 0x000F000F
                even = first + 2 * (c + p * per_group)
                assert (pair & 0xF, pair >> 16) == (int(codes[row, even]), int(codes[row, even + 1]))


def test_rows_are_stacked_as_codes() -> None:
    """As words only where every part is a multiple of 16, which is why a conversion packs what it has stacked."""
    codes = torch.randint(0, 16, (48, 192))
    whole = packing.pack(codes, 32)
    assert torch.equal(torch.cat([packing.pack(part, 32) for part in codes.split(16)]), whole)
    assert torch.cat([packing.pack(part, 32) for part in codes.split(24)]).shape != whole.shape


def test_unpack_refuses_what_has_another_number_of_rows() -> None:
    qweight = packing.pack(torch.zeros(20, 64, dtype=torch.int32), 32)
    with pytest.raises(ValueError, match=r"wanted int32 \[16, K/8\] for 16 rows"):
        packing.unpack(qweight, 32, 16)
    with pytest.raises(ValueError, match="wanted int32"):
        packing.unpack(qweight.float(), 32, 20)


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
    with pytest.raises(ValueError, match=r"wanted \[N rounded up to 16, K/8\]"):
        packing.dequantize(qweight, torch.ones(17, 2), None)
    with pytest.raises(ValueError, match=r"wanted \[N rounded up to 16, K/8\]"):
        packing.dequantize(qweight, torch.ones(4, 2), torch.ones(4, 1))


def test_rows_have_one_scale_each() -> None:
    weight, scales = torch.tensor([[1, -127], [2, 0]], dtype=torch.int8), torch.tensor([0.5, 2.0])
    assert torch.equal(packing.dequantize_rows(weight, scales), torch.tensor([[0.5, -63.5], [4.0, 0.0]]))


@pytest.mark.parametrize(
    ("k", "wanted", "got"), [(576, 128, 64), (5120, 128, 128), (4864, 128, 128), (96, 64, 32), (40, 128, None)]
)
def test_group_size_divides_k(k: int, wanted: int, got: int | None) -> None:
    assert packing.group_size_for(k, wanted) == got


def test_the_torch_free_copies_agree() -> None:
    assert config.GROUP_SIZES == packing.GROUP_SIZES
    assert config.TILE_ROWS == packing.TILE_ROWS
