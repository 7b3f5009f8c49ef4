"""How a checkpoint is stored: the recipe a person chooses, and the plan that follows from it.

A plan lists the matrices of the packed folder: which of the source's are stacked into one (q, k, v and attention's gate
into qkv_proj; gate, up into gate_up_proj; a delta net's into in_proj_qkvz and in_proj_ba: one product instead of
several), and in which format each is kept.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localchat.config import ModelConfig, QuantizationConfig, TensorFormat, flat_config
from localchat.errors import UsageError
from localchat.kernels.int4_packing import GROUP_SIZES, LAYOUT, VERSION, group_size_for, padded_rows
from localchat.quantize.source import Source

METHODS = ("rtn", "gptq")
_ROWS8 = TensorFormat(8)


@dataclass(frozen=True)
class Recipe:
    """How to store the matrices. keep: (regex, bits) pairs for matrix names such as "layers.0.mlp.down_proj"; bits 8 or
    16; the first that matches counts. max_shard_size in bytes. search: look for better scales than plain rounding's.
    exact: of a source that is 4 bit already every weight is kept to the last bit, with scales in fp32 where fp16 has no
    room; otherwise in fp16, where mins may be off by 1/128 of a step.
    method: "rtn" rounds every weight for itself; "gptq" measures the inputs of each matrix with the text in the file
    `calibration` (None: the one that comes with the program), at most so many tokens of it, and feeds errors back.
    placement: (regex, format) pairs of the matrices that get another format than the rest; `keep` comes first.
    """

    group_size: int = 128
    symmetric: bool = True
    keep: tuple[tuple[str, int], ...] = ()
    max_shard_size: int = 5_000_000_000
    search: bool = True
    exact: bool = True
    method: str = "rtn"
    calibration: Path | None = None
    calibration_tokens: int = 1 << 18
    placement: tuple[tuple[str, TensorFormat], ...] = ()


@dataclass(frozen=True)
class Matrix:
    """One matrix of the packed folder: its parts in the source, stacked along the rows, and its format.

    shape: [N, K]. norm: the norm in front of it, whose squared gain is the energy of its inputs, or "".
    alternate: the rows of the parts take turns, instead of one part below the other.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, int]
    format: TensorFormat
    bias: bool = False
    norm: str = ""
    alternate: bool = False

    def stacked(self, parts: Sequence[Tensor]) -> Tensor:
        """What the parts have, rows of the matrix first, as the matrix has it; in the widest of their dtypes."""
        if len(parts) == 1:
            return parts[0]
        dtype = parts[0].dtype
        for part in parts[1:]:
            dtype = torch.promote_types(dtype, part.dtype)
        same = [part.to(dtype) for part in parts]
        return torch.stack(same, 1).flatten(0, 1) if self.alternate else torch.cat(same)


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that has no meaning.

    Raises:
        UsageError: naming the value.
    """
    if recipe.group_size not in GROUP_SIZES:
        raise UsageError(f"group size {recipe.group_size} is not one of {', '.join(map(str, GROUP_SIZES))}.")
    if recipe.max_shard_size <= 0:
        raise UsageError(f"a shard size of {recipe.max_shard_size} bytes has no meaning.")
    if recipe.method not in METHODS:
        raise UsageError(f"method {recipe.method!r} is not one of {', '.join(METHODS)}.")
    for pattern, bits in recipe.keep:
        if bits not in (8, 16):
            raise UsageError(f"--keep {pattern}: {bits} bits are not possible, wanted 8 or 16.")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"--keep {pattern}: is not a regular expression ({error}).") from error


def kept_by(config: ModelConfig) -> TensorFormat | None:
    """The format that keeps the levels of a 4-bit checkpoint of another tool, as far as its config says it."""
    foreign = config.foreign_quantization
    size = foreign.kept_group_size if foreign else 0
    return TensorFormat(4, size, foreign.symmetric) if foreign and size else None


def plan(config: ModelConfig, recipe: Recipe, *, mtp: bool = False) -> list[Matrix]:
    """The matrices of the packed folder in the order of the forward pass.

    mtp: Qwen3.5's head for the token after the next is there as well; it comes last.

    Raises:
        UsageError: a `keep` pattern matches none of them.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    matrices = [Matrix("embed_tokens", ("embed_tokens",), (vocab, hidden), _ROWS8)]
    for i, kind in enumerate(config.layer_types):
        matrices += _block(config, recipe, f"layers.{i}", kind)
    if not config.tie_word_embeddings:
        matrices.append(Matrix("lm_head", ("lm_head",), (vocab, hidden), _ROWS8))
    if mtp:
        matrices.append(Matrix("mtp.fc", ("mtp.fc",), (hidden, 2 * hidden), _format_for(2 * hidden, recipe)))
        matrices += _block(config, recipe, "mtp.layers.0", "full_attention")
    return _with_kept([_placed(matrix, recipe) for matrix in matrices], recipe)


def _block(config: ModelConfig, recipe: Recipe, layer: str, kind: str) -> list[Matrix]:
    """The matrices of one block, whose mixer is of `kind`."""
    hidden, inter, mlp = config.hidden_size, config.intermediate_size, f"{layer}.mlp"
    int4_h, int4_i = _format_for(hidden, recipe), _format_for(inter, recipe)
    gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    norm = f"{layer}.post_attention_layernorm.weight"
    mixer = _attention if kind == "full_attention" else _delta_net
    return [
        *mixer(config, recipe, layer),
        Matrix(f"{mlp}.gate_up_proj", gate_up, (2 * inter, hidden), int4_h, config.mlp_bias, norm, alternate=True),
        Matrix(f"{mlp}.down_proj", (f"{mlp}.down_proj",), (hidden, inter), int4_i, config.mlp_bias),
    ]


def _attention(config: ModelConfig, recipe: Recipe, layer: str) -> list[Matrix]:
    hidden, queries, name = config.hidden_size, config.q_size, f"{layer}.self_attn"
    kinds = ("q", "k", "v", "gate") if config.attn_output_gate else ("q", "k", "v")
    parts = tuple(f"{name}.{kind}_proj" for kind in kinds)
    rows = queries * (1 + config.attn_output_gate) + 2 * config.kv_size
    norm, int4_h, int4_q = f"{layer}.input_layernorm.weight", _format_for(hidden, recipe), _format_for(queries, recipe)
    return [
        Matrix(f"{name}.qkv_proj", parts, (rows, hidden), int4_h, config.qkv_bias, norm),
        Matrix(f"{name}.o_proj", (f"{name}.o_proj",), (hidden, queries), int4_q, config.o_bias),
    ]


def _delta_net(config: ModelConfig, recipe: Recipe, layer: str) -> list[Matrix]:
    """The decays and steps of in_proj_ba act over all later tokens and are few: INT8."""
    hidden, values, name = config.hidden_size, config.linear_value_size, f"{layer}.linear_attn"
    qkvz, ba = ((f"{name}.in_proj_{a}", f"{name}.in_proj_{b}") for a, b in (("qkv", "z"), ("b", "a")))
    rows, heads, norm = config.conv_channels + values, config.linear_num_value_heads, f"{layer}.input_layernorm.weight"
    return [
        Matrix(f"{name}.in_proj_qkvz", qkvz, (rows, hidden), _format_for(hidden, recipe), norm=norm),
        Matrix(f"{name}.in_proj_ba", ba, (2 * heads, hidden), _ROWS8, norm=norm),
        Matrix(f"{name}.out_proj", (f"{name}.out_proj",), (hidden, values), _format_for(values, recipe)),
    ]


def packed_config(
    source: Source, matrices: list[Matrix], recipe: Recipe, source_id: str, revision: str
) -> dict[str, Any]:
    """config.json of the packed folder: the source's, flat, with our quantization_config."""
    default = TensorFormat(4, recipe.group_size, recipe.symmetric)
    always = {"embed_tokens", "lm_head"}
    exceptions = {m.name: m.format for m in matrices if m.format != default or m.name in always}
    origin = {
        "id": source_id or Path(source.name).name,
        "revision": revision,
        "format": source.kind,
        "sha256": source.digest(),
        "search": recipe.search,
        "method": recipe.method,
    }
    flat = flat_config(source.config)
    if ends := _ends(source.config):
        flat["eos_token_id"] = ends
    for key in ("quantization_config", "compression_config", "auto_map", "_name_or_path", "vision_config"):
        flat.pop(key, None)
    flat["dtype"] = flat.pop("torch_dtype", None) or flat.get("dtype") or "bfloat16"
    flat["model_type"] = source.model_config.model_type
    flat["head_dim"] = source.model_config.head_dim
    flat["tie_word_embeddings"] = source.model_config.tie_word_embeddings
    flat["quantization_config"] = QuantizationConfig(LAYOUT, VERSION, default, exceptions, origin).to_dict()
    return flat


def _ends(raw: dict[str, Any]) -> list[int]:
    """The ids that end a turn, by the wrapper and by the language model in it, which need not name the same."""
    nested = raw.get("text_config")
    parts = [raw, nested] if isinstance(nested, dict) else [raw]
    values = [part.get("eos_token_id") for part in parts]
    given = [value if isinstance(value, list) else [value] for value in values]
    return list(dict.fromkeys(i for ids in given for i in ids if isinstance(i, int)))


def _format_for(k: int, recipe: Recipe) -> TensorFormat:
    """INT4 in the largest group that divides K, or INT8 rows where none does."""
    group_size = group_size_for(k, recipe.group_size)
    return TensorFormat(8) if group_size is None else TensorFormat(4, group_size, recipe.symmetric)


def _placed(matrix: Matrix, recipe: Recipe) -> Matrix:
    """With the format that `placement` gives it, in the largest group that divides K."""
    for pattern, wanted in recipe.placement if matrix.format.bits == 4 else ():
        if re.search(pattern, matrix.name):
            group_size = group_size_for(matrix.shape[1], wanted.group_size) if wanted.bits == 4 else 0
            return replace(matrix, format=replace(wanted, group_size=group_size or matrix.format.group_size))
    return matrix


def _with_kept(matrices: list[Matrix], recipe: Recipe) -> list[Matrix]:
    used: set[str] = set()
    result = []
    for matrix in matrices:
        for pattern, bits in recipe.keep:
            if re.search(pattern, matrix.name):
                matrix = replace(matrix, format=TensorFormat(bits))
                used.add(pattern)
                break
        result.append(matrix)
    for pattern, _ in recipe.keep:
        if pattern not in used:
            raise UsageError(f"--keep {pattern}: matches no matrix; their names are like {matrices[1].name}.")
    return result


def upper_size(matrix: Matrix, wide: bool = False) -> int:
    """The most bytes a matrix takes in the packed folder, with scales of fp16 or of fp32 (`wide`).

    A little more in the rare case that fp16 has no room for a scale that was found by rounding.
    """
    n, k = matrix.shape
    if matrix.format.bits == 4:
        rows = padded_rows(n)
        scales = rows * (k // matrix.format.group_size) * (1 if matrix.format.symmetric else 2)
        return rows * k // 2 + scales * (4 if wide else 2)
    return n * k * (4 if matrix.format.bits == 16 else 1) + 4 * n
