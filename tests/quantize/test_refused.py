"""What is not read: each by its name and with what to use instead, in one sentence, before anything is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from localchat.cli import main
from localchat.errors import BadCheckpoint
from localchat.foreign import USE_INSTEAD
from localchat.quantize.convert import open_source
from localchat.quantize.gguf_types import READ, check_types

Make = Callable[..., Any]
NO_EXPERTS = "mixture-of-experts models are not supported, use a dense one such as qwen3.5-27b"
OTHER_FILE = "use the model's Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16 file, or its unquantised repository"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(form: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"format": form, "targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """refused(source, *words): every command says one sentence with these words, and leaves all files as they are."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("LOCALCHAT_CACHE", str(cache))

    def files() -> dict[Path, tuple[int, int]]:
        found = (path for path in tmp_path.rglob("*") if path.is_file())
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    def check(source: Path, *words: str) -> None:
        before = files()
        for line in (
            ["quantize", source, "-o", tmp_path / "out"],
            ["quantize", source],
            ["quantize", source, "-o", tmp_path / "out", "--method", "gptq", "--resume"],
            ["quantize", source, "--dry-run"],
            ["run", source, "--no-stdin", "hi"],
            ["show", source],
        ):
            code, written = main(list(map(str, line))), capsys.readouterr()
            assert (code, written.out) == (1, ""), line
            sentence = written.err.removeprefix("localchat: error: ")
            assert sentence != written.err and sentence.count("\n") == 1 and sentence.endswith(".\n"), line
            assert all(word in sentence for word in words), (line, sentence)
        assert files() == before
        assert sorted(path.name for path in tmp_path.iterdir() if path != cache) == [source.name]

    return check


FOREIGN = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes (nf4)",
    ),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes (int8)"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVIDIA's ModelOpt (NVFP4)"),
    "nvfp4": (compressed("nvfp4-pack-quantized"), "compressed-tensors in the layout nvfp4-pack-quantized"),
    "mxfp4": ({"quant_method": "mxfp4"}, "MXFP4"),
    "compressed mxfp4": (compressed("mxfp4-pack-quantized"), "compressed-tensors in the layout mxfp4-pack-quantized"),
    "hqq": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "HQQ"),
    "gptq 3": (GPTQ | {"bits": 3}, "GPTQ with 3 bits"),
    "gptq 2": (GPTQ | {"bits": 2}, "GPTQ with 2 bits"),
    "auto-round 2": (GPTQ | {"quant_method": "auto-round", "bits": 2}, "GPTQ with 2 bits"),
    "awq gemv": (AWQ | {"version": "gemv"}, "AWQ in the layout gemv"),
    "awq gemv_fast": (AWQ | {"version": "gemv_fast"}, "AWQ in the layout gemv_fast"),
    "awq marlin": (AWQ | {"version": "marlin"}, "AWQ in the layout marlin"),
    "awq llm": (AWQ | {"backend": "llm-awq"}, "AWQ in the layout llm-awq"),
    "mlx": ({"group_size": 64, "bits": 4}, "MLX"),
}


def edited(folder: Path, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return folder


@pytest.mark.parametrize("case", FOREIGN)
def test_of_another_tool(make_hf: Make, refused: Make, case: str) -> None:
    words, name = FOREIGN[case]
    refused(edited(make_hf(), quantization_config=words), f"is quantised by {name}", USE_INSTEAD)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 128}, "'qwen3_moe'"),
        ({"model_type": "qwen3_5_moe"}, "'qwen3_5_moe'"),
        ({"model_type": "mixtral"}, "'mixtral'"),
        (
            {"model_type": "gpt_oss", "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}},
            "gpt_oss",
        ),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "'deepseek_v3'"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
    ],
)
def test_experts(make_hf: Make, refused: Make, keys: dict[str, Any], name: str) -> None:
    refused(edited(make_hf(), **keys), name, NO_EXPERTS)


# The tensors of a matrix as tools leave them whose config.json says nothing: ModelOpt's has a file of its own.
SILENT: dict[str, tuple[dict[str, Tensor], str]] = {
    "bitsandbytes": (
        {
            "weight": torch.zeros(2048, 1, dtype=torch.uint8),
            "weight.absmax": torch.zeros(64),
            "weight.quant_map": torch.zeros(16),
        },
        "bitsandbytes",
    ),
    "nvfp4": (
        {
            "weight": torch.zeros(64, 32, dtype=torch.uint8),
            "weight_scale": torch.zeros(64, 4).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(1.0),
            "input_scale": torch.tensor(1.0),
        },
        "NVIDIA's ModelOpt (NVFP4)",
    ),
    "hqq": ({"W_q": torch.zeros(32, 64, dtype=torch.uint8)}, "HQQ"),
    "mlx": (
        {
            "weight": torch.zeros(64, 8, dtype=torch.int32),
            "scales": torch.zeros(64, 1, dtype=torch.float16),
            "biases": torch.zeros(64, 1, dtype=torch.float16),
        },
        "MLX",
    ),
    "awq": ({"qweight": torch.zeros(64, 8, dtype=torch.int32)}, "GPTQ or AWQ"),
}


@pytest.mark.parametrize("case", SILENT)
def test_tensors_of_a_tool_that_the_config_does_not_name(make_hf: Make, case: str, tmp_path: Path) -> None:
    tensors, name = SILENT[case]

    def change(weights: dict[str, Tensor]) -> None:
        stem = "model.layers.0.self_attn.o_proj"
        del weights[f"{stem}.weight"]
        weights |= {f"{stem}.{kind}": tensor for kind, tensor in tensors.items()}

    code = main(["quantize", str(make_hf(change=change)), "-o", str(tmp_path / "out")])
    assert (code, {path.name for path in tmp_path.iterdir()}) == (1, {"source"})
    with pytest.raises(BadCheckpoint) as caught:
        open_source(tmp_path / "source")
    assert f"is quantised by {name}, but config.json has no quantization_config" in str(caught.value)
    assert str(caught.value).endswith(f"{USE_INSTEAD}.")


def test_a_matrix_of_2_bits_among_others_of_4(make_quantised: Make) -> None:
    """As GPTQModel's `dynamic` makes them."""

    def matrix(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
        kinds = {
            "qweight": torch.zeros(k // 16, n, dtype=torch.int32),
            "qzeros": torch.zeros(k // 32, n // 16, dtype=torch.int32),
            "scales": torch.ones(k // 32, n, dtype=torch.float16),
            "g_idx": (torch.arange(k) // 32).to(torch.int32),
        }
        return kinds, torch.zeros(n, k)

    folder, _ = make_quantised(matrix, GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, only=".1.mlp.up_proj")
    with pytest.raises(BadCheckpoint, match=r"up_proj\.qweight has 4 words for 64 inputs, wanted 4 or 8 bits.*: use"):
        open_source(folder)


# Bytes of a block of 256 weights (of the last two: of 32).
BLOCKS = {
    Type.Q2_K: 84, Type.Q3_K: 110, Type.IQ2_XXS: 66, Type.IQ2_XS: 74, Type.IQ2_S: 82, Type.IQ3_XXS: 98, Type.IQ3_S: 110,
    Type.IQ1_S: 50, Type.IQ1_M: 56, Type.IQ4_XS: 136, Type.TQ1_0: 54, Type.TQ2_0: 66, Type.IQ4_NL: 18, Type.MXFP4: 17,
}  # fmt: skip


def with_tensor(make: Make, config: dict[str, Any], weights: dict[str, Tensor], kind: Type, row_bytes: int) -> Path:
    """A file whose blk.0.ffn_up.weight [96, 256] is of this type."""
    del weights["layers.0.mlp.up_proj.weight"]
    rows = np.zeros((96, row_bytes), np.uint8)
    path: Path = make(config, weights, metadata=lambda w: w.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=kind))
    return path


@pytest.mark.parametrize("kind", BLOCKS)
def test_types_of_a_gguf(make_gguf: Make, config_of: Make, weights_of: Make, refused: Make, kind: Type) -> None:
    config = config_of("qwen3", hidden_size=256, num_hidden_layers=1)
    blocks = 8 if kind in (Type.IQ4_NL, Type.MXFP4) else 1
    path = with_tensor(make_gguf, config, weights_of(config), kind, blocks * BLOCKS[kind])
    refused(path, f"holds tensors of {kind.name} (blk.0.ffn_up.weight), which are not read here", OTHER_FILE)


def test_a_type_that_the_package_has_never_heard_of(
    make_gguf: Make, config_of: Make, weights_of: Make, refused: Make
) -> None:
    """The number in the file's header is another one; NVFP4 is new, and 99 is nothing yet."""
    config = config_of("qwen3", hidden_size=256, num_hidden_layers=1)
    path = with_tensor(make_gguf, config, weights_of(config), Type.TQ2_0, BLOCKS[Type.TQ2_0])
    content = path.read_bytes()
    at = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    assert content[at : at + 4] == int(Type.TQ2_0).to_bytes(4, "little")
    for number, name in ((40, "NVFP4"), (31, "Q4_0_4_4"), (99, "type 99")):
        path.write_bytes(content[:at] + number.to_bytes(4, "little") + content[at + 4 :])
        refused(path, f"holds tensors of {name} (blk.0.ffn_up.weight)", OTHER_FILE)


def test_several_types_are_all_named() -> None:
    with pytest.raises(BadCheckpoint, match=r"of Q2_K and Q3_K \(b and 2 more\)"):
        check_types(Path("x"), {"a": Type.Q6_K, "b": Type.Q2_K, "c": Type.Q3_K, "d": Type.Q2_K})
    check_types(Path("x"), {kind.name: kind for kind in READ})
    assert {kind.name for kind in READ} == {
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    }


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        (lambda w: w.add_uint32("qwen3.expert_count", 128), "qwen3.expert_count = 128"),
        (lambda w: w.add_string("general.architecture", "qwen3moe"), "the architecture 'qwen3moe'"),
    ],
)
def test_experts_of_a_gguf(
    make_gguf: Make,
    config_of: Make,
    weights_of: Make,
    refused: Make,
    monkeypatch: pytest.MonkeyPatch,
    metadata: Any,
    name: str,
) -> None:
    if "moe" in name:
        monkeypatch.setattr(gguf.GGUFWriter, "add_architecture", metadata)
    config = config_of("qwen3")
    refused(make_gguf(config, weights_of(config), metadata=None if "moe" in name else metadata), name, NO_EXPERTS)
