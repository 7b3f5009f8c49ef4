"""Checkpoints that another tool has quantised: which are read, what is said of the others, and what the commands do."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localchat.config import ModelConfig, load_config
from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign, read_foreign
from localchat.ledger import ledger, ledger_of_folder
from localchat.registry import MODELS

Command = Callable[..., subprocess.CompletedProcess[bytes]]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": given}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (GPTQ, Foreign("gptq", 4, 128, True, zero_offset=1)),
        (GPTQ | {"sym": False, "desc_act": True}, Foreign("gptq", 4, 128, False, True, zero_offset=1)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, Foreign("gptq", 4, 0, True)),
        (GPTQ | {"bits": 8, "dynamic": {"-:.*attn.*": {}}}, Foreign("gptq", 8, 128, True, zero_offset=1)),
        (GPTQ | {"quant_method": "auto-round"}, Foreign("gptq", 4, 128, True, zero_offset=1)),
        (AWQ, Foreign("awq", 4, 32, False)),
        (AWQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, Foreign("awq", 4, 32, False)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Foreign("awq", 4, 64, False)),
        (compressed(), Foreign("compressed-tensors", 4, 32)),
        (compressed(symmetric=False, actorder="group"), Foreign("compressed-tensors", 4, 32, False, True)),
        (compressed(actorder="weight"), Foreign("compressed-tensors", 4, 32)),
        (compressed(strategy="channel", group_size=None), Foreign("compressed-tensors", 4, 0)),
        (compressed("float-quantized", type="float", num_bits=8), Foreign("compressed-tensors", 8)),
        (
            compressed("float-quantized", type="float", num_bits=8, block_structure=[128, 128]),
            Foreign("compressed-tensors", 8, block=(128, 128)),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Foreign("fp8", 8, block=(128, 128))),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Foreign("fp8", 8)),
    ],
)
def test_what_is_read(raw: dict[str, Any], wanted: Foreign) -> None:
    assert read_foreign(raw) == wanted


def test_the_group_that_has_4_bits_speaks_for_all() -> None:
    raw = compressed(num_bits=8)
    raw["config_groups"]["group_1"] = compressed(group_size=128)["config_groups"]["group_0"]
    assert read_foreign(raw) == Foreign("compressed-tensors", 4, 128)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (nf4)"),
        ({"load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes (int8)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVIDIA's ModelOpt (NVFP4)"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "MXFP4"),
        ({"quant_method": "quark"}, "quark"),
        ({"group_size": 64, "bits": 4}, "MLX"),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, "MLX"),
        ({"bits": 4}, "an unnamed tool"),
        (GPTQ | {"bits": 3}, "GPTQ with 3 bits"),
        (GPTQ | {"bits": 2}, "GPTQ with 2 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ in the layout marlin"),
        (GPTQ | {"is_marlin_format": True}, "GPTQ in the layout marlin"),
        (AWQ | {"version": "gemv"}, "AWQ in the layout gemv"),
        (AWQ | {"backend": "llm-awq"}, "AWQ in the layout llm-awq"),
        (AWQ | {"bits": 8}, "AWQ with 8 bits"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2", "bits": 4}, "AutoRound in the"),
        (compressed("nvfp4-pack-quantized", type="float"), "in the layout nvfp4-pack-quantized"),
        (compressed("mxfp4-pack-quantized", type="float"), "in the layout mxfp4-pack-quantized"),
        (compressed("int-quantized", num_bits=8), "in the layout int-quantized"),
        (compressed("naive-quantized", num_bits=8), "int weights of 8 bits in the layout naive-quantized"),
        (compressed(num_bits=2), "compressed-tensors with 2 bits"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "in the layout sparse-24-bitmask"),
        (compressed() | {"transform_config": {"config_groups": {}}}, "rotated inputs"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 e5m2"),
    ],
)
def test_refused_by_name_with_what_to_use_instead(raw: dict[str, Any], name: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read_foreign(raw)
    sentence = str(caught.value)
    assert f"is quantised by {name}" in sentence or (name in sentence and "is quantised by" in sentence)
    assert sentence.endswith(
        "use the unquantised repository, or its GPTQ, AWQ, compressed-tensors (INT4), FP8 or GGUF version."
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (GPTQ | {"group_size": 0}, "group_size in quantization_config is 0"),
        (GPTQ | {"group_size": "128"}, "group_size in quantization_config is '128'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "block size in quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "block size in quantization_config"),
        (compressed() | {"config_groups": {}}, "no config_groups"),
        (compressed() | {"config_groups": {"group_0": 5}}, "no config_groups"),
    ],
)
def test_values_without_meaning(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        read_foreign(raw)


@pytest.mark.parametrize(
    ("foreign", "size"),
    [
        (Foreign("gptq", 4, 128), 128),
        (Foreign("gptq", 4, 256), 128),
        (Foreign("gptq", 4, 0), 128),
        (Foreign("gptq", 4, 96), 32),
        (Foreign("gptq", 4, 16), 0),
        (Foreign("gptq", 8, 128), 0),
        (Foreign("gptq", 4, 128, act_order=True), 0),
    ],
)
def test_kept_group_size(foreign: Foreign, size: int) -> None:
    assert foreign.kept_group_size == size


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_every_key_is_looked_at(key: str) -> None:
    raw = MODELS["qwen3-8b"].config_dict()
    assert ModelConfig.from_dict(raw | {key: GPTQ}).foreign_quantization == read_foreign(GPTQ)
    with pytest.raises(BadCheckpoint, match="MLX"):
        ModelConfig.from_dict(raw | {key: {"group_size": 64, "bits": 4}})


@pytest.mark.parametrize(
    ("raw", "bits"), [(GPTQ, 4 + 16 / 128), (AWQ, 4 + 2 * 32 / 32), (GPTQ | {"desc_act": True}, 4 + 16 / 128)]
)
def test_the_ledger_counts_the_groups_that_are_kept(raw: dict[str, Any], bits: float) -> None:
    """Zero points take scales and mins of fp32; what is rounded again has the groups of any other checkpoint."""
    config = ModelConfig.from_dict(MODELS["qwen3-8b"].config_dict() | {"quantization_config": raw})
    sizes = {row.name: row.nbytes for row in ledger(config, 1).rows}
    weights = 36 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 12288)
    assert sizes["INT4 weights"] + sizes["scales"] == weights * bits / 8


@pytest.fixture
def awq(scripted: Callable[..., Path], tmp_path: Path) -> Path:
    """The scripted model "abc" as AutoAWQ would have it: none of its matrices but embedding and head matters."""
    folder = tmp_path / "tiny-AWQ"
    shutil.copytree(scripted("abc").parent / "source", folder)
    tensors = load_file(folder / "model.safetensors")
    chance = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if ".layers." in n and n.endswith("_proj.weight")]:
        (n, k), stem = tensors.pop(name).shape, name.removesuffix(".weight")
        silent = name.endswith(("o_proj.weight", "down_proj.weight"))
        for kind, rows in (("qweight", k), ("qzeros", k // 32)):
            words = torch.randint(-(2**31), 2**31, (rows, n // 8), generator=chance).to(torch.int32)
            tensors[f"{stem}.{kind}"] = torch.full_like(words, -0x77777778) if silent else words
        tensors[f"{stem}.scales"] = (torch.rand(k // 32, n, generator=chance) / 8 + 0.01).half()
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, AWQ)
    return folder


def set_config(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def test_show_and_run_of_such_a_folder(command: Command, awq: Path) -> None:
    shown = json.loads(command("show", awq, "--json", "-c", "100").stdout)
    assert shown["quantization"] == "awq, 4 bits in groups of 32, zero points"
    done = command("run", awq, "hi")
    assert (done.returncode, done.stdout) == (0, b"abc\n")
    assert done.stderr.decode() == (
        "localchat: packing tiny-AWQ, once: its 4-bit codes and scales are kept, nothing is rounded again\n"
    )
    again = command("run", awq, "hi")
    assert (again.stdout, again.stderr) == (b"abc\n", b"")


def test_the_ledger_of_such_a_folder_is_that_of_its_packed_one(command: Command, awq: Path, tmp_path: Path) -> None:
    tensors = load_file(awq / "model.safetensors")
    for name in [n for n in tensors if n.endswith("qzeros")]:
        tensors[name].fill_(0x33333333)  # no power of two: fp16 has no room for it
    save_file(tensors, awq / "model.safetensors")
    assert command("quantize", awq, "-o", tmp_path / "out").returncode == 0
    before, after = ledger(load_config(awq), 1), ledger_of_folder(tmp_path / "out", 1)
    assert {row.name: row.nbytes for row in before.rows} == {row.name: row.nbytes for row in after.rows}


def test_quantize_says_what_is_lost(command: Command, awq: Path, tmp_path: Path) -> None:
    done = command("quantize", awq, "-o", tmp_path / "out", "--sym")
    assert "it was quantised in other groups than groups of 32, symmetric, so it is rounded a second time" in (
        done.stderr.decode()
    )
    narrow, wide = (tmp_path / "narrow", tmp_path / "wide")
    assert command("quantize", awq, "-o", narrow, "--fp16-scales").returncode == 0
    assert command("quantize", awq, "-o", wide).returncode == 0
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (narrow, wide)]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("words", [("show",), ("pull",), ("run",), ("quantize",)])
def test_every_command_refuses_by_name(command: Command, awq: Path, words: tuple[str, ...]) -> None:
    set_config(awq, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    done = command(*words, awq, *(("hi",) if words == ("run",) else ()))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == (
        "localchat: error: config.json: this checkpoint is quantised by bitsandbytes (nf4), which is not read here: "
        "use the unquantised repository, or its GPTQ, AWQ, compressed-tensors (INT4), FP8 or GGUF version.\n"
    )
