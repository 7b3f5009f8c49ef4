"""compressed-tensors' layout against a decoder that reads the format's definition word by word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign
from localchat.quantize import compressed_tensors

Make = Callable[..., Any]


def random_matrix(n: int, k: int, groups: int, zero_points: bool = False, bits: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def words(rows: int, columns: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32)

    tensors = {
        "weight_packed": words(n, -(-k * bits // 32)),
        "weight_scale": (torch.rand(n, groups, generator=generator) / 64 + 1e-4).bfloat16(),
        "weight_shape": torch.tensor([n, k]),
    }
    return {**tensors, "weight_zero_point": words(-(-n * bits // 32), groups)} if zero_points else tensors


def decoded(tensors: dict[str, Tensor], bits: int = 4) -> Tensor:
    """W fp32 [N, K], one weight at a time: signed codes and zero points, stored with half the range added."""
    words, scales = tensors["weight_packed"].tolist(), tensors["weight_scale"].tolist()
    (n_rows, columns), groups = tensors["weight_shape"].tolist(), len(scales[0])
    zeros = tensors["weight_zero_point"].tolist() if "weight_zero_point" in tensors else None
    per_word, mask, half = 32 // bits, 2**bits - 1, 2 ** (bits - 1)
    given = tensors["weight_g_idx"].tolist() if "weight_g_idx" in tensors else [-1]
    group_of = given if given[0] >= 0 else [k // (columns // groups) for k in range(columns)]
    rows = []
    for n in range(n_rows):
        row = []
        for k in range(columns):
            code = (words[n][k // per_word] >> bits * (k % per_word) & mask) - half
            zero = 0
            if zeros is not None:
                zero = (zeros[n // per_word][group_of[k]] >> bits * (n % per_word) & mask) - half
            row.append(scales[n][group_of[k]] * (code - zero))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "groups", "ours"),
    [
        *((24, 256, 2, 128), (40, 576, 9, 64), (20, 896, 7, 128), (5, 4864, 38, 128)),
        *((16, 192, 6, 32), (1, 64, 2, 32), (12, 576, 1, 64), (9, 256, 1, 128)),
    ],
)
def test_every_weight(
    parts_of: Make, packed_again: Make, n: int, k: int, groups: int, ours: int, zero_points: bool
) -> None:
    tensors = random_matrix(n, k, groups, zero_points)
    parts = parts_of(Foreign("compressed-tensors", 4, k // groups), **tensors)
    want = decoded(tensors)
    assert compressed_tensors.layout(parts).shape == (n, k)
    codes = compressed_tensors.decode(parts)
    assert torch.equal(codes.values(), want)
    assert torch.equal(packed_again(codes, ours, symmetric=False), want)
    again = packed_again(codes, ours, symmetric=True)
    assert (again is None) if zero_points else torch.equal(again, want)


def test_rows_that_fill_no_word(parts_of: Make) -> None:
    tensors = random_matrix(3, 100, 1)
    assert tensors["weight_packed"].shape == (3, 13)
    codes = compressed_tensors.decode(parts_of(Foreign("compressed-tensors", 4), **tensors))
    assert torch.equal(codes.values(), decoded(tensors))


def test_zero_points_as_numbers(parts_of: Make, packed_again: Make) -> None:
    """As the first versions of the tool wrote them: int8, not packed."""
    tensors = random_matrix(16, 128, 4)
    zeros = torch.randint(-8, 8, (16, 4), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    codes = compressed_tensors.decode(
        parts_of(Foreign("compressed-tensors", 4, 32), **tensors, weight_zero_point=zeros)
    )
    shift = (tensors["weight_scale"].float() * zeros).repeat_interleave(32, 1)
    torch.testing.assert_close(codes.values(), decoded(tensors) - shift, rtol=0, atol=1e-6)
    assert torch.equal(packed_again(codes, 32, symmetric=False), codes.values())


def test_zero_points_that_are_not_there(parts_of: Make) -> None:
    """Without them every weight would be off by some steps. Of a matrix of 8 bits among those of 4 nothing is known."""
    foreign = Foreign("compressed-tensors", 4, 32, symmetric=False)
    with pytest.raises(BadCheckpoint, match=r"x\.weight_zero_point is missing, and config\.json does not say symm"):
        compressed_tensors.layout(parts_of(foreign, **random_matrix(16, 128, 4)))
    assert compressed_tensors.layout(parts_of(foreign, **random_matrix(16, 128, 4, bits=8))).symmetric


def test_one_scale_for_all(parts_of: Make) -> None:
    tensors = random_matrix(16, 64, 1)
    want = decoded({**tensors, "weight_scale": torch.full((16, 1), 0.25)})
    tensors["weight_scale"] = torch.tensor([0.25])
    assert torch.equal(compressed_tensors.decode(parts_of(Foreign("compressed-tensors", 4), **tensors)).values(), want)


def test_act_order(parts_of: Make, packed_again: Make) -> None:
    tensors = random_matrix(16, 256, 4, zero_points=True)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    tensors["weight_g_idx"] = (order // 64).to(torch.int32)
    codes = compressed_tensors.decode(parts_of(Foreign("compressed-tensors", 4, 64), **tensors))
    assert torch.equal(codes.values(), decoded(tensors))
    assert packed_again(codes, 32, symmetric=False) is None
    tensors["weight_g_idx"].fill_(-1)  # "in a row"
    codes = compressed_tensors.decode(parts_of(Foreign("compressed-tensors", 4, 64), **tensors))
    assert torch.equal(packed_again(codes, 64, symmetric=False), decoded(tensors))


def test_8_bits(parts_of: Make) -> None:
    tensors = random_matrix(6, 64, 2, zero_points=True, bits=8)
    codes = compressed_tensors.decode(parts_of(Foreign("compressed-tensors", 8, 32), **tensors))
    assert torch.equal(codes.values(), decoded(tensors, bits=8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_shape": torch.tensor([24, 300])}, r"x\.weight_packed has 32 words for 300 inputs"),
        ({"weight_shape": torch.tensor([23, 256])}, r"x\.weight_shape is \[23, 256\]"),
        ({"weight_scale": torch.ones(24, 3)}, r"x has 3 groups of scales"),
        ({"weight_scale": torch.ones(24, 0)}, r"x has 0 groups of scales"),
        ({"weight_scale": torch.ones(23, 2)}, r"x\.weight_scale is F32 \[23, 2\]"),
        ({"weight_scale": None}, r"x\.weight_scale is missing"),
        ({"weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}, r"x\.weight_zero_point is I32 \[2, 2\]"),
        ({"weight_packed": torch.zeros(24, 32, dtype=torch.uint8)}, r"x\.weight_packed is U8"),
    ],
)
def test_damaged(parts_of: Make, change: dict[str, Tensor | None], words: str) -> None:
    tensors = {**random_matrix(24, 256, 2, zero_points=True), **change}
    kept = {kind: tensor for kind, tensor in tensors.items() if tensor is not None}
    with pytest.raises(BadCheckpoint, match=words):
        compressed_tensors.decode(parts_of(Foreign("compressed-tensors", 4, 128), **kept))
