"""What another tool's `quantization_config` says of a checkpoint: whether it can be read here, and how it is stored.

Read are the formats whose numbers stand for the weights by a scale alone: GPTQ, AWQ, compressed-tensors and FP8.
Everything else is refused by its name, before a tensor is read or downloaded. Nothing here imports torch.

Sources: the quantization_config that AutoGPTQ, GPTQModel, AutoRound, AutoAWQ, llm-compressor and transformers write.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localchat.errors import BadCheckpoint

USE_INSTEAD = "use the unquantised repository, or its GPTQ, AWQ, compressed-tensors (INT4), FP8 or GGUF version"
_GROUP_SIZES = (128, 64, 32)  # as in kernels/int4_packing.py
# Tools and formats people will meet, in the words of their users. Another one is named as it names itself.
_NAMES = {"mxfp4": "MXFP4", "modelopt": "NVIDIA's ModelOpt", "hqq": "HQQ"}
_CONTAINERS = ("pack-quantized", "float-quantized", "naive-quantized")  # compressed-tensors' formats that are read


@dataclass(frozen=True)
class Foreign:
    """A checkpoint that another tool has quantised.

    tool: whose layout of tensors it is: "gptq", "awq", "compressed-tensors" or "fp8". bits: of one weight.
    group_size: inputs that share a scale, 0 for a whole row. symmetric: there are no zero points. act_order: the inputs
    were sorted first, so that a group need not be neighbours. zero_offset: what is added to a stored zero point.
    block: rows and inputs that share a scale of FP8; (0, 0): a row or the whole matrix does.
    """

    tool: str
    bits: int
    group_size: int = 0
    symmetric: bool = True
    act_order: bool = False
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)

    @property
    def kept_group_size(self) -> int:
        """The largest of our groups in which its levels can be kept as they are; 0 where none is."""
        if self.bits != 4 or self.act_order:
            return 0
        return next((g for g in _GROUP_SIZES if self.group_size % g == 0), 0)

    def describe(self) -> str:
        """As in "gptq, 4 bits in groups of 128, symmetric"."""
        if self.tool == "fp8":
            return "FP8"
        groups = f"groups of {self.group_size}" if self.group_size else "whole rows"
        order = ", act-order" if self.act_order else ""
        return f"{self.tool}, {self.bits} bits in {groups}, {'symmetric' if self.symmetric else 'zero points'}{order}"


def read_foreign(raw: Mapping[str, Any]) -> Foreign:
    """The content of another tool's `quantization_config`.

    Raises:
        BadCheckpoint: it is a kind that is not read here, by its name, or a value has no meaning.
    """
    method = raw.get("quant_method")
    if method is None:
        method = "bitsandbytes" if raw.get("load_in_4bit") or raw.get("load_in_8bit") else "an unnamed tool"
        method = "MLX" if "mode" in raw or {"group_size", "bits"} == set(raw) else method
    if str(method) not in _READERS:
        raise _refused(_named(str(method), raw))
    return _READERS[str(method)](raw)


def _named(method: str, raw: Mapping[str, Any]) -> str:
    """A tool with the format that it was told to write."""
    form = raw.get("quant_algo") or raw.get("bnb_4bit_quant_type" if raw.get("load_in_4bit") else "")
    form = form or ("int8" if raw.get("load_in_8bit") else "")
    return f"{_NAMES.get(method, method)} ({form})" if form else _NAMES.get(method, method)


def _gptq(raw: Mapping[str, Any]) -> Foreign:
    form = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or raw.get("is_marlin_format"):
        raise _refused(f"GPTQ in the layout {form if form != 'gptq' else 'marlin'}")
    return Foreign(
        "gptq",
        _bits(raw.get("bits"), "GPTQ", (4, 8)),
        _group_size(raw.get("group_size", -1)),
        raw.get("sym", True) is not False,
        raw.get("desc_act") is True,
        zero_offset=int(form == "gptq"),
    )


def _awq(raw: Mapping[str, Any]) -> Foreign:
    version = str(raw.get("version") or raw.get("format") or "gemm").lower()
    if version != "gemm" or raw.get("backend") == "llm-awq":
        raise _refused(f"AWQ in the layout {'llm-awq' if version == 'gemm' else version}")
    bits = _bits(raw.get("bits", raw.get("w_bit")), "AWQ", (4,))
    return Foreign("awq", bits, _group_size(raw.get("group_size", raw.get("q_group_size", -1))), symmetric=False)


def _auto_round(raw: Mapping[str, Any]) -> Foreign:
    """AutoRound writes the tensors of another tool, which packing_format names."""
    form = str(raw.get("packing_format", "auto_round:auto_gptq")).rpartition(":")[2]
    if form in ("auto_gptq", "gptq"):
        return _gptq({**raw, "checkpoint_format": "gptq"})
    if form in ("auto_awq", "awq"):
        return _awq({**raw, "version": "gemm"})
    raise _refused(f"AutoRound in the layout {form}")


def _fp8(raw: Mapping[str, Any]) -> Foreign:
    if raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"FP8 {raw['fmt']}")
    return Foreign("fp8", 8, block=_block(raw.get("weight_block_size")))


def _compressed(raw: Mapping[str, Any]) -> Foreign:
    """The first group that has 4 bits speaks for all; each tensor shows by its own shape how it is stored."""
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        raise BadCheckpoint("config.json: quantization_config of compressed-tensors has no config_groups.")
    sparsity = raw.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refused(f"compressed-tensors in the layout {sparsity['format']}")
    if raw.get("transform_config"):
        raise _refused("compressed-tensors with rotated inputs (transform_config)")
    found = [_compressed_group(group, str(group.get("format") or raw.get("format"))) for group in groups.values()]
    return next((foreign for foreign in found if foreign.bits == 4), found[0])


def _compressed_group(group: Mapping[str, Any], form: str) -> Foreign:
    weights = group.get("weights") or {}
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    if form not in _CONTAINERS:
        raise _refused(f"compressed-tensors in the layout {form}")
    if kind == "float" and bits == 8:
        return Foreign("compressed-tensors", 8, block=_block(weights.get("block_structure")))
    if kind != "int" or form != "pack-quantized":
        raise _refused(f"compressed-tensors with {kind} weights of {bits} bits in the layout {form}")
    return Foreign(
        "compressed-tensors",
        _bits(bits, "compressed-tensors", (4, 8)),
        _group_size(weights.get("group_size") or -1),
        weights.get("symmetric", True) is not False,
        weights.get("actorder") in ("group", True),
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], Foreign]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}


def _bits(value: Any, tool: str, known: tuple[int, ...]) -> int:
    if value not in known:
        raise _refused(f"{tool} with {value} bits")
    return int(value)


def _group_size(value: Any) -> int:
    """-1 is a whole row, here 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value == 0 or value < -1:
        raise BadCheckpoint(f"config.json: group_size in quantization_config is {value!r}, wanted a count or -1.")
    return max(value, 0)


def _block(value: Any) -> tuple[int, int]:
    if value is None:
        return 0, 0
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise BadCheckpoint(f"config.json: the block size in quantization_config is {value!r}, wanted two counts.")
    return value[0], value[1]


def _refused(what: str) -> BadCheckpoint:
    return BadCheckpoint(f"config.json: this checkpoint is quantised by {what}, which is not read here: {USE_INSTEAD}.")
