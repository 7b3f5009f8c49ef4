"""GGUF files as a source: weights as transformers has them, and damaged files refused in one sentence."""

import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from localchat.config import ModelConfig, TensorFormat
from localchat.errors import BadCheckpoint, UserError
from localchat.quantize.convert import Recipe, convert
from localchat.quantize.gguf import canonical_name, open_gguf, unpermuted, what_is_lost
from localchat.quantize.source import check
from localchat.shards import open_shards

MakeGGUF = Callable[..., Path]
Weights = dict[str, Tensor]
Make = Callable[..., Any]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back(make_gguf: MakeGGUF, config_of: Make, weights_of: Make, arch: str, tied: bool) -> None:
    """All names, q/k rows of llama un-permuted (and only there), biases and norms of the heads."""
    config = config_of(arch, tie_word_embeddings=tied)
    weights = weights_of(config)
    with open_gguf(make_gguf(config, weights)) as source:
        check(source)
        assert source.model_config.tie_word_embeddings == tied
        assert set(source.shapes) == set(weights)
        for name, weight in weights.items():
            assert torch.equal(source.read(name), weight), name


def test_biases_of_llama_are_unpermuted_too(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    config = config_of("llama", attention_bias=True)
    weights = weights_of(config)
    with open_gguf(make_gguf(config, weights)) as source:
        check(source)
        assert torch.equal(source.read("layers.0.self_attn.q_proj.bias"), weights["layers.0.self_attn.q_proj.bias"])


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_qwen3_5_comes_back(
    make_gguf: MakeGGUF, config_of: Make, weights_of: Make, mtp_of: Make, mtp: bool, key_heads: int
) -> None:
    """Names, the order of the value heads, the decays; the block behind the last layer is the mtp head."""
    config = config_of("qwen3_5", linear_num_key_heads=key_heads, num_hidden_layers=4)
    weights = {**weights_of(config), **(mtp_of(config) if mtp else {})}
    with open_gguf(make_gguf(config, weights)) as source:
        check(source)
        assert source.model_config == ModelConfig.from_dict(config)
        assert source.shapes == {name: tuple(weight.shape) for name, weight in weights.items()}
        for name, weight in weights.items():
            exact = 1e-6 if name.endswith("A_log") else 0  # exp and log
            torch.testing.assert_close(source.read(name), weight, rtol=exact, atol=exact, msg=name)
        assert sum(source.nbytes(name) for name in weights) == 4 * sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
def test_grids_of_qwen3_5_move_with_their_rows(
    make_gguf: MakeGGUF, config_of: Make, weights_of: Make, kind: Type
) -> None:
    config = config_of("qwen3_5")
    weights = weights_of(config)
    with open_gguf(make_gguf(config, weights, kind)) as source:
        moved = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "gate_proj", "o_proj")
        for name in (n for n in weights if n.endswith(tuple(f"{m}.weight" for m in moved)) and ".mlp." not in n):
            grid = source.grid(name)
            assert grid is not None
            scales, mins = (part.repeat_interleave(32, 1) for part in grid)
            codes = (source.read(name) - mins) / scales
            assert float((codes - codes.round()).abs().max()) < 1e-3, name


def test_a_group_across_two_heads_has_no_grid(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    config = config_of("qwen3_5", linear_value_head_dim=16)
    with open_gguf(make_gguf(config, weights_of(config), Type.Q4_0)) as source:
        check(source)
        assert source.grid("layers.0.linear_attn.out_proj.weight") is None
        assert source.grid("layers.0.linear_attn.in_proj_z.weight") is not None


def test_a_state_that_would_grow_is_refused(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    config = config_of("qwen3_5")
    weights = weights_of(config)
    weights["layers.0.linear_attn.A_log"][2] = float("-inf")
    with (
        open_gguf(make_gguf(config, weights)) as source,
        pytest.raises(BadCheckpoint, match=r"blk\.0\.ssm_a is not negative"),
    ):
        source.read("layers.0.linear_attn.A_log")


def test_both_files_of_a_qwen3_5_pack_to_the_same(
    make_gguf: MakeGGUF, make_hf: Make, config_of: Make, weights_of: Make, mtp_of: Make, tmp_path: Path
) -> None:
    config = config_of("qwen3_5")
    sources = [make_gguf(config, {**weights_of(config), **mtp_of(config)}), make_hf("qwen3_5", mtp=True)]
    for i, source in enumerate(sources):
        for _ in convert(source, tmp_path / str(i), Recipe(keep=((".", 16),))):
            continue
    with open_shards(tmp_path / "0") as one, open_shards(tmp_path / "1") as two:
        assert set(one.names) == set(two.names)
        for name in one.names:
            torch.testing.assert_close(one.get(name), two.get(name), rtol=1e-6, atol=1e-6, msg=name)


def test_unpermuted_order() -> None:
    """File row 2j + h of a head of 8 rows is row j + 4h: pairs (0, 1), (2, 3) ... become halves."""
    rows = torch.arange(16.0).unsqueeze(1)
    assert unpermuted(rows, heads=2).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_types(make_gguf: MakeGGUF, config_of: Make, weights_of: Make, kind: Type) -> None:
    config = config_of("qwen3")
    weights = weights_of(config)
    dtype = {Type.F16: torch.float16, Type.BF16: torch.bfloat16}.get(kind, torch.float32)
    with open_gguf(make_gguf(config, weights, kind)) as source:
        check(source)
        for name, weight in weights.items():
            got = source.read(name)
            if weight.dim() == 1:
                assert torch.equal(got, weight)
                continue
            stored = gguf.quants.quantize(weight.numpy(), kind)
            assert got.dtype == dtype
            assert np.array_equal(got.float().numpy(), gguf.quants.dequantize(stored, kind)), name


@pytest.mark.parametrize(("kind", "size"), [(Type.Q4_K, 144), (Type.Q6_K, 210)])
def test_k_types(make_gguf: MakeGGUF, config_of: Make, weights_of: Make, kind: Type, size: int) -> None:
    """The package cannot write these, so a block of chosen bytes is read back by the format's formula."""
    config = config_of("qwen3", hidden_size=256, num_hidden_layers=1)
    weights = weights_of(config)
    del weights["layers.0.mlp.up_proj.weight"]
    blocks = np.random.default_rng(0).integers(0, 256, (96, size), dtype=np.uint8)
    half = np.array([0.5], np.float16).view(np.uint8)
    if kind == Type.Q4_K:
        blocks[:, 0:2], blocks[:, 2:4] = half, half
    else:
        blocks[:, 208:210] = half

    path = make_gguf(config, weights, extra={})
    writer_path = path.with_name("k.gguf")
    with_k = _with_raw_tensor(make_gguf, config, weights, blocks, kind, writer_path.name)
    with open_gguf(with_k) as source:
        check(source)
        got = source.read("layers.0.mlp.up_proj.weight")
    b = blocks.astype(np.int64)
    if kind == Type.Q4_K:  # the first sub-block: scale and min of six bits, low nibbles
        want = 0.5 * (b[:, 4:5] & 63) * (b[:, 16:48] & 15) - 0.5 * (b[:, 8:9] & 63)
    else:  # the first 16: low nibbles and two high bits
        scale = blocks[:, 192:193].view(np.int8).astype(np.int64)
        want = 0.5 * scale * (((b[:, 0:16] & 15) | ((b[:, 128:144] & 3) << 4)) - 32)
    assert np.array_equal(got.numpy()[:, : want.shape[1]], want.astype(np.float32))


def _with_raw_tensor(
    make_gguf: MakeGGUF, config: dict[str, Any], weights: Weights, blocks: np.ndarray, kind: Type, name: str
) -> Path:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=kind)

    return make_gguf(config, weights, metadata=add, name=name)


def test_kept_format(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    config = config_of("qwen2")
    for kind, coarse in [(Type.Q4_0, True), (Type.Q4_1, True), (Type.Q8_0, False), (Type.F16, False)]:
        with open_gguf(make_gguf(config, weights_of(config), kind, name=f"{kind.name}.gguf")) as source:
            assert source.kept_format == (TensorFormat(4, 32, symmetric=False) if coarse else None)


def test_canonical_name() -> None:
    assert canonical_name("blk.12.attn_q_norm.weight") == "layers.12.self_attn.q_norm.weight"
    assert canonical_name("output.weight") == "lm_head.weight"
    assert canonical_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


def test_unexpected_tensor_is_named(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    config = config_of("llama")
    path = make_gguf(config, weights_of(config), extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with open_gguf(path) as source, pytest.raises(BadCheckpoint, match=r"blk\.0\.attn_sinks\.weight is unexpected"):
        check(source)


def test_integer_tensor_is_refused(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    config = config_of("qwen3")
    weights = weights_of(config)
    del weights["norm.weight"]
    path = make_gguf(config, weights, extra={"output_norm.weight": np.ones(64, np.int32)})
    with pytest.raises(BadCheckpoint, match=r"holds tensors of I32 \(output_norm\.weight\), which are not read here"):
        open_gguf(path)


def test_split_file_is_refused(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    path = make_gguf(config_of(), weights_of(config_of()), metadata=lambda w: w.add_uint16("split.count", 3))
    with pytest.raises(BadCheckpoint, match="one of 3 parts"):
        open_gguf(path)


def read_all(path: Path) -> None:
    with open_gguf(path) as source:
        check(source)
        source.files()
        for name in source.shapes:
            source.read(name)


def test_undamaged_file_is_read(make_gguf: MakeGGUF, config_of: Make, weights_of: Make) -> None:
    """What the tests below damage is sound before."""
    read_all(make_gguf(config_of(), weights_of(config_of()), Type.Q8_0))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"not a model at all " * 20, bytes(100)):
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        with pytest.raises(BadCheckpoint, match="not a GGUF file"):
            open_gguf(path)


def test_truncated_anywhere(make_gguf: MakeGGUF, config_of: Make, weights_of: Make, tmp_path: Path) -> None:
    content = make_gguf(config_of(), weights_of(config_of()), Type.Q8_0).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(5, 400, 29), *range(400, len(content), len(content) // 23), len(content) - 1000):
        path.write_bytes(content[:length])
        with pytest.raises(BadCheckpoint, match=r"cut\.gguf: "):
            read_all(path)


@pytest.mark.parametrize(("kind", "length"), [(0, 2**62), (8, 2**62), (9, 2**40)])
def test_endless_list_ends(tmp_path: Path, kind: int, length: int) -> None:
    """A list said to be longer than the file, of bytes, strings, lists."""
    path = tmp_path / "x.gguf"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 9)
    path.write_bytes(header + struct.pack("<IQ", kind, length) + bytes(64))
    with pytest.raises(BadCheckpoint, match="header is damaged"):
        open_gguf(path)


def test_lists_in_lists_without_end(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 9)
    path.write_bytes(header + struct.pack("<IQ", 9, 1) * 5000)
    with pytest.raises(BadCheckpoint, match="header is damaged"):
        open_gguf(path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of products of damaged dimensions
def test_damaged_header_gives_a_sentence_or_reads(
    make_gguf: MakeGGUF, config_of: Make, weights_of: Make, tmp_path: Path
) -> None:
    """Random bytes in the header: a UserError or nothing, but never another exception, and never an endless loop."""
    original = make_gguf(config_of(), weights_of(config_of()), Type.Q8_0).read_bytes()
    path, chance = tmp_path / "bad.gguf", random.Random(0)
    refused = 0
    for _ in range(150):
        content = bytearray(original)
        for _ in range(chance.choice((1, 2, 8))):
            content[chance.randrange(4, 9000)] = chance.choice((0, 1, 127, 255, chance.randrange(256)))
        path.write_bytes(content)
        try:
            read_all(path)
        except UserError:
            refused += 1
    assert refused > 75


@pytest.mark.parametrize(
    ("kind", "group_size", "symmetric", "words"),
    [
        (Type.F16, 32, False, ""),
        (Type.Q4_1, 32, False, "its 4-bit codes and scales are kept, nothing is rounded again"),
        (Type.Q4_0, 32, True, "its 4-bit codes and scales are kept, nothing is rounded again"),
        (Type.Q4_1, 32, True, "it was quantised to Q4_1, so it is rounded a second time"),
        (Type.Q4_0, 128, True, "it was quantised to Q4_0, so it is rounded a second time"),
        (Type.Q8_0, 32, False, "it was quantised to Q8_0, so it is rounded a second time"),
    ],
)
def test_what_is_lost(
    make_gguf: MakeGGUF, config_of: Make, weights_of: Make, kind: Type, group_size: int, symmetric: bool, words: str
) -> None:
    config = config_of("qwen3")
    with open_gguf(make_gguf(config, weights_of(config), kind)) as source:
        assert source.what_is_lost(group_size, symmetric) == words


@pytest.mark.parametrize(
    ("types", "words"),
    [
        ({Type.Q4_K: 9}, "its Q4_K codes are kept, and their scales rounded to fp16"),
        (
            {Type.Q4_K: 9, Type.Q6_K: 2, Type.F16: 1},
            "it was quantised to Q4_K and Q6_K, so what is Q6_K is rounded a second time, and Q4_K's scales are "
            "rounded to fp16",
        ),
        ({Type.Q4_1: 9, Type.Q5_1: 2}, "it was quantised to Q4_1 and Q5_1, so what is Q5_1 is rounded a second time"),
    ],
)
def test_what_is_lost_of_several_types(types: dict[Type, int], words: str) -> None:
    assert what_is_lost(Counter(types), 32, False) == words


# Bytes of one block of 256 (or, of the last two, 32) weights.
SIZES = {Type.Q4_K: 144, Type.Q5_K: 176, Type.Q6_K: 210, Type.Q5_0: 22, Type.Q5_1: 24}


def decoded_block(kind: Type, block: np.ndarray) -> list[float]:
    """One block by the format's definition, a weight at a time."""
    b = [int(x) for x in block]

    def half(at: int) -> float:
        return float(block[at : at + 2].view(np.float16)[0])

    def six_bits(at: int, j: int) -> tuple[int, int]:
        """Scale and min j of the twelve bytes at `at`."""
        s = b[at : at + 12]
        if j < 4:
            return s[j] & 63, s[j + 4] & 63
        return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4

    weights = []
    if kind in (Type.Q5_0, Type.Q5_1):
        start = 2 if kind == Type.Q5_0 else 4
        fifth = int.from_bytes(block[start : start + 4].tobytes(), "little")
        for i in range(32):
            low = b[start + 4 + i % 16] >> 4 * (i // 16) & 15
            code = low | (fifth >> i & 1) << 4
            weights.append(half(0) * (code - 16) if kind == Type.Q5_0 else half(0) * code + half(2))
    elif kind in (Type.Q4_K, Type.Q5_K):
        for i in range(256):
            j, column = i // 32, i % 32
            scale, low = six_bits(4, j)
            at = (16 if kind == Type.Q4_K else 48) + 32 * (j // 2) + column
            code = b[at] >> 4 * (j % 2) & 15
            if kind == Type.Q5_K:
                code |= (b[16 + column] >> j & 1) << 4
            weights.append(half(0) * scale * code - half(2) * low)
    elif kind == Type.Q6_K:
        for i in range(256):
            part, k, column = i // 128, i % 128 // 32, i % 32
            code = b[64 * part + column + 32 * (k % 2)] >> 4 * (k // 2) & 15
            code |= (b[128 + 32 * part + column] >> 2 * k & 3) << 4
            scale = int(block[192 + i // 16].view(np.int8))
            weights.append(half(208) * scale * (code - 32))
    return weights


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q5_0, Type.Q5_1])
def test_every_weight_of_a_block(make_gguf: MakeGGUF, config_of: Make, weights_of: Make, kind: Type) -> None:
    config = config_of("qwen3", hidden_size=256, num_hidden_layers=1)
    weights = weights_of(config)
    del weights["layers.0.mlp.up_proj.weight"]
    size, chance = SIZES[kind], np.random.default_rng(0)
    blocks = chance.integers(0, 256, (96, 256 // (256 if kind.name.endswith("K") else 32), size), dtype=np.uint8)
    for at in {Type.Q6_K: (208,), Type.Q5_0: (0,)}.get(kind, (0, 2)):
        halves = chance.uniform(-0.1, 0.1, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    with open_gguf(_with_raw_tensor(make_gguf, config, weights, blocks.reshape(96, -1), kind, "k.gguf")) as source:
        got = source.read("layers.0.mlp.up_proj.weight")
    want = [[w for block in row for w in decoded_block(kind, block)] for row in blocks]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=1e-6, atol=1e-7)
