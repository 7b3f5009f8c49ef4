"""GPTQ's layout against a decoder that reads the format's definition word by word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign
from localchat.quantize import compressed_tensors, gptq_format

Make = Callable[..., Any]


def random_matrix(n: int, k: int, group_size: int, bits: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Any bits are a matrix. Groups in a row."""
    generator, groups = torch.Generator().manual_seed(seed), -(-k // group_size)

    def words(rows: int, columns: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32)

    return {
        "qweight": words(k * bits // 32, n),
        "qzeros": words(groups, -(-n * bits // 32)),
        "scales": (torch.rand(groups, n, generator=generator) / 64 + 1e-4).half(),
        "g_idx": (torch.arange(k) // group_size).to(torch.int32),
    }


def decoded(tensors: dict[str, Tensor], offset: int, bits: int = 4) -> Tensor:
    """W fp32 [N, K], one weight at a time."""
    words, zeros, scales = (tensors[kind].tolist() for kind in ("qweight", "qzeros", "scales"))
    per_word, mask = 32 // bits, 2**bits - 1
    rows = []
    for n in range(tensors["qweight"].shape[1]):
        row = []
        for k, group in enumerate(tensors["g_idx"].tolist()):
            code = words[k // per_word][n] >> bits * (k % per_word) & mask
            zero = ((zeros[group][n // per_word] >> bits * (n % per_word) & mask) + offset) & mask
            row.append(scales[group][n] * (code - zero))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize(("form", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize(
    ("n", "k", "group_size", "ours"),
    [
        *((24, 256, 128, 128), (40, 576, 64, 64), (8, 896, 128, 128), (8, 4864, 128, 64)),
        *((20, 192, 128, 64), (1, 64, 32, 32), (24, 256, 256, 128), (16, 192, 96, 32)),
    ],
)
def test_every_weight(
    parts_of: Make, packed_again: Make, form: str, offset: int, n: int, k: int, group_size: int, ours: int
) -> None:
    """Also groups that end inside ours (192 = 128 + 64), and rows that fill no word of zero points."""
    tensors = random_matrix(n, k, group_size)
    foreign = Foreign("gptq", 4, group_size, symmetric=False, zero_offset=offset)
    want = decoded(tensors, offset)
    for without in ((), ("g_idx",)):  # which may be left out where groups are in a row
        parts = parts_of(foreign, **{kind: t for kind, t in tensors.items() if kind not in without})
        assert gptq_format.layout(parts).shape == (n, k)
        codes = gptq_format.decode(parts)
        assert torch.equal(codes.values(), want)
        assert torch.equal(packed_again(codes, ours, symmetric=False), want)
        assert packed_again(codes, ours, symmetric=True) is None


def test_symmetric_words(parts_of: Make, packed_again: Make) -> None:
    """As official repositories have them: 0x77777777 is a zero point of 8."""
    tensors = random_matrix(24, 256, 128)
    tensors["qzeros"].fill_(0x77777777)
    codes = gptq_format.decode(parts_of(Foreign("gptq", 4, 128, zero_offset=1), **tensors))
    want = decoded(tensors, 1)
    assert int(codes.zeros.min()) == int(codes.zeros.max()) == 8
    assert torch.equal(packed_again(codes, 128, symmetric=True), want)
    assert codes.repacked(128, symmetric=True)["scales"].dtype == torch.float16


def test_act_order(parts_of: Make, packed_again: Make) -> None:
    """Inputs of any group anywhere: decoded, but no format of ours has such groups."""
    tensors = random_matrix(16, 256, 64)
    tensors["g_idx"] = tensors["g_idx"][torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    parts = parts_of(Foreign("gptq", 4, 64, act_order=True, zero_offset=1), **tensors)
    codes = gptq_format.decode(parts)
    assert torch.equal(codes.values(), decoded(tensors, 1))
    assert all(packed_again(codes, size, symmetric=False) is None for size in (32, 64, 128))
    assert not any(gptq_format.layout(parts).is_kept(size, False) for size in (32, 64, 128))


@pytest.mark.parametrize("tool", [gptq_format, compressed_tensors])
def test_act_order_without_an_order(parts_of: Make, tool: Any) -> None:
    """Groups in a row would decode to noise, without a word. One group for a whole row needs no order."""
    for groups, size in ((4, 64), (1, 256)):
        words, scales = torch.zeros(32, 24, dtype=torch.int32), torch.ones(groups, 24)
        kinds = {"qweight": words, "qzeros": torch.zeros(groups, 3, dtype=torch.int32), "scales": scales}
        if tool is compressed_tensors:
            kinds = {"weight_packed": words.t(), "weight_scale": scales.t()}
        name = "gptq" if tool is gptq_format else "compressed-tensors"
        parts = parts_of(Foreign(name, 4, size, act_order=True), **kinds)
        if groups == 1:
            assert tool.decode(parts).codes.shape == (24, 256)
            continue
        with pytest.raises(BadCheckpoint, match=r"x\.(weight_)?g_idx is missing, and config\.json says act-order"):
            tool.decode(parts)


def test_groups_in_another_order_are_kept(parts_of: Make, packed_again: Make) -> None:
    tensors = random_matrix(16, 256, 64)
    tensors["g_idx"] = 3 - tensors["g_idx"]
    codes = gptq_format.decode(parts_of(Foreign("gptq", 4, 64, act_order=True, zero_offset=1), **tensors))
    assert torch.equal(packed_again(codes, 64, symmetric=False), decoded(tensors, 1))


def test_8_bits(parts_of: Make, packed_again: Make) -> None:
    tensors = random_matrix(24, 64, 32, bits=8)
    codes = gptq_format.decode(parts_of(Foreign("gptq", 8, 32, zero_offset=1), **tensors))
    assert torch.equal(codes.values(), decoded(tensors, 1, bits=8))
    assert packed_again(codes, 32, symmetric=False) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qzeros": torch.zeros(3, 3, dtype=torch.int32)}, r"x\.qzeros is I32 \[3, 3\], wanted I32 or I64 \[2, 3\]"),
        ({"qzeros": torch.zeros(2, 3)}, r"x\.qzeros is F32"),
        ({"scales": torch.ones(2, 23)}, r"x\.scales is F32 \[2, 23\]"),
        ({"scales": torch.ones(3, 24)}, r"x has 3 groups of scales, wanted 2"),
        ({"scales": torch.ones(24)}, r"x\.scales has the shape \[24\], wanted two dimensions"),
        ({"g_idx": torch.full((256,), 2)}, r"x\.g_idx names groups"),
        ({"g_idx": torch.zeros(250, dtype=torch.int32)}, r"wanted 4 or 8 bits"),
        ({"qweight": torch.zeros(0, 24, dtype=torch.int32)}, r"x\.qweight has 0 words"),
        ({"qzeros": None}, r"x\.qzeros is missing"),
    ],
)
def test_damaged(parts_of: Make, change: dict[str, Tensor | None], words: str) -> None:
    tensors = {**random_matrix(24, 256, 128), **change}
    if "scales" in change:
        del tensors["g_idx"]
    kept = {kind: tensor for kind, tensor in tensors.items() if tensor is not None}
    with pytest.raises(BadCheckpoint, match=words):
        gptq_format.decode(parts_of(Foreign("gptq", 4, 128), **kept))
