"""A .gguf file as a conversion's source: llama.cpp's single-file format, read back into Hugging Face terms.

The `gguf` package parses the file and turns its block formats into floats. Here, metadata becomes a config.json,
tensor names become transformers', and the row permutation that llama.cpp applies to the query and key matrices of
llama-architecture files is undone (it rotates neighbouring pairs, transformers rotates halves). What it does to
Qwen3.5 is undone in gguf_qwen35.py.
"""

import hashlib
import json
import math
import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderField, ReaderTensor
from gguf.quants import Q4_K, dequantize
from torch import Tensor

from localchat.config import ModelConfig, TensorFormat
from localchat.errors import BadCheckpoint
from localchat.quantize import gguf_qwen35, qwen3_5
from localchat.quantize.gguf_config import Metadata, check_architecture, config_from, generation_config_from
from localchat.quantize.gguf_types import UNQUANTISED, check_types
from localchat.quantize.source import Grid, Source

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Frequencies that follow from the config (checked in gguf_config.py).
_DERIVED = ("rope_freqs.weight",)
_GRIDS_OF_32 = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)


class _Reader(GGUFReader):
    """The package's reader, except that a value which lies past the end of the file is an error.

    numpy cuts a slice short in silence, so that a damaged length would be looped over without an end. And a kind of
    model or of tensor that is not read here is refused before the package, which may not know it, looks at a tensor.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        check_architecture(Metadata(self._path, self))
        check_types(self._path, {field.name: int(field.parts[4][0]) for field in fields})
        super()._build_tensors(start_offs, fields)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"the file ends before byte {offset + int(count) * np.dtype(dtype).itemsize}")
        return super()._get(offset, dtype, count, override_order)


class GGUFSource(Source):
    """See `Source`. Construct with `open_gguf`."""

    kind = "gguf"

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.name = str(path)
        self._metadata = Metadata(path, reader)
        self._pages = reader.data.base  # the mapped file
        stored = {tensor.name: tensor for tensor in reader.tensors}
        self.config = config_from(self._metadata, stored)
        self.model_config = ModelConfig.from_dict(self.config)
        self._hybrid = qwen3_5.is_qwen3_5(self.model_config)
        self._tensors = {self._canonical(name): tensor for name, tensor in stored.items() if name not in _DERIVED}
        self.shapes = {name: _shape(t) for name, t in self._tensors.items()}
        if self._hybrid:
            self._tensors = qwen3_5.with_gates(self._tensors)
            self.shapes = {name: qwen3_5.our_shape(name, _shape(t)) for name, t in self._tensors.items()}
            for name in qwen3_5.incomplete_mtp(self.shapes, self.model_config):
                del self._tensors[name], self.shapes[name]
        layers = [t for name, t in self._tensors.items() if name.startswith("layers.") and len(t.shape) == 2]
        if 2 * sum(t.tensor_type in _GRIDS_OF_32 for t in layers) > len(layers):
            self.kept_format = TensorFormat(4, 32, symmetric=False)
        self._types = Counter(t.tensor_type for t in layers)

    def read(self, name: str) -> Tensor:
        """See Source.read: F16 and BF16 as they are, every other type as fp32."""
        tensor = self._tensors[name]
        with _translated(Path(self.name), f"the tensor {tensor.name}"):
            weight = _to_torch(tensor)
        self._let_go(tensor)
        if name.endswith(".A_log"):
            weight = gguf_qwen35.a_log(tensor.name, weight)
        return self._in_order(name, weight)

    def grid(self, name: str) -> Grid | None:
        """See Source.grid."""
        found = _grid_of(self._tensors[name])
        self._let_go(self._tensors[name])
        if found is None or (self._hybrid and ".out_proj." in name and self.model_config.linear_value_head_dim % 32):
            return None  # or a group lies across two heads, whose order is another
        return self._in_order(name, found[0]), self._in_order(name, found[1])

    def what_is_lost(self, group_size: int, symmetric: bool) -> str:
        """See Source.what_is_lost."""
        return what_is_lost(self._types, group_size, symmetric)

    def nbytes(self, name: str) -> int:
        """See Source.nbytes."""
        tensor = self._tensors[name]
        return int(tensor.n_bytes) * math.prod(self.shapes[name]) // math.prod(_shape(tensor))

    def files(self) -> dict[str, bytes]:
        """See Source.files: rebuilt from the metadata."""
        from localchat.quantize.gguf_tokenizer import tokenizer_files

        generation = generation_config_from(self._metadata)
        return {**tokenizer_files(self._metadata), "generation_config.json": json.dumps(generation, indent=2).encode()}

    def digest(self) -> str:
        """See Source.digest."""
        index = {n: [t.tensor_type.name, [int(x) for x in t.shape]] for n, t in self._tensors.items()}
        return hashlib.sha256(json.dumps([self.config, index], sort_keys=True).encode()).hexdigest()

    def _canonical(self, name: str) -> str:
        common = canonical_name(name)
        return gguf_qwen35.canonical_name(name, common, self.model_config.num_hidden_layers) if self._hybrid else common

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """`rows` of a tensor in transformers' order."""
        heads = {"q": self.model_config.num_attention_heads, "k": self.model_config.num_key_value_heads}
        for part, count in heads.items():
            if self.model_config.model_type == "llama" and f".self_attn.{part}_proj." in name:
                return unpermuted(rows, count)
        if self._hybrid:
            rows = gguf_qwen35.in_our_order(name, rows, self.model_config)
            return qwen3_5.ours(name, rows, self.model_config, zero_centred=False)
        return rows

    def _let_go(self, tensor: ReaderTensor) -> None:
        """Give back the pages of a tensor, or all of the file would count as this process's memory in the end."""
        if isinstance(self._pages, mmap.mmap):
            start = int(tensor.data_offset) // mmap.PAGESIZE * mmap.PAGESIZE
            self._pages.madvise(mmap.MADV_DONTNEED, start, int(tensor.data_offset + tensor.n_bytes) - start)

    def close(self) -> None:
        """See Source.close: the map of the file goes with its last tensor."""
        self._tensors = {}


def open_gguf(path: Path) -> GGUFSource:
    """Open a .gguf file.

    Raises:
        BadCheckpoint: it is damaged, one part of several, or of an architecture that would be computed wrongly.
    """
    with _translated(path, "its header"):
        reader = _Reader(path)
    return GGUFSource(path, reader)


def canonical_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "layers.3.self_attn.q_proj.weight"; an unknown name stays as it is."""
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, number, stem = (*stem.split(".", 2), "")[:3]
        layer = f"layers.{number}."
    return f"{layer}{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix [heads * d, K], or its bias [heads * d], from llama.cpp's order to transformers'.

    Row 2j + h of a head's file rows is row j + h * d/2 in transformers.
    """
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise BadCheckpoint(f"A query or key matrix has {rows} rows, which are not {heads} heads of an even size.")
    return weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _to_torch(tensor: ReaderTensor) -> Tensor:
    """A stored tensor as bf16, fp16 or fp32, in a copy of its own."""
    data, kind = tensor.data, tensor.tensor_type
    if kind in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
        return torch.from_numpy(np.array(data))
    if kind == GGMLQuantizationType.BF16:
        return torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(dequantize(data, kind))


def _grid_of(tensor: ReaderTensor) -> Grid | None:
    """The scales and mins of the 4-bit block formats, from the first bytes of their blocks."""
    kind = tensor.tensor_type
    if kind not in _GRIDS_OF_32 or len(tensor.shape) != 2:
        return None
    blocks = tensor.data.reshape(len(tensor.data), -1, GGML_QUANT_SIZES[kind][1])
    first, second = (np.array(blocks[..., i : i + 2]).view(np.float16).astype(np.float32) for i in (0, 2))
    if kind == GGMLQuantizationType.Q4_0:  # w = d * (code - 8)
        scales, mins = first, -8 * first
    elif kind == GGMLQuantizationType.Q4_1:  # w = d * code + m
        scales, mins = first, second
    else:  # Q4_K: w = d * s * code - dmin * m with s and m of six bits for each 32 of the 256 weights
        s, m = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
        scales, mins = first * s.reshape(*first.shape[:2], 8), -second * m.reshape(*first.shape[:2], 8)
    return torch.from_numpy(scales.reshape(len(blocks), -1)), torch.from_numpy(mins.reshape(len(blocks), -1))


def what_is_lost(types: Counter[GGMLQuantizationType], group_size: int, symmetric: bool) -> str:
    """See Source.what_is_lost, of a file with matrices of these types."""
    quantised = [kind for kind, _ in types.most_common() if kind not in UNQUANTISED]
    grids = _GRIDS_OF_32[: 1 if symmetric else 3] if group_size == 32 else ()
    lost = [kind.name for kind in quantised if kind not in grids]
    narrowed = GGMLQuantizationType.Q4_K in quantised and GGMLQuantizationType.Q4_K in grids
    if not lost and narrowed:
        return "its Q4_K codes are kept, and their scales rounded to fp16"
    if not lost:
        return "its 4-bit codes and scales are kept, nothing is rounded again" if quantised else ""
    part = "it is" if len(lost) == len(quantised) else f"what is {' or '.join(lost)} is"
    more = ", and Q4_K's scales are rounded to fp16" if narrowed else ""
    names = " and ".join(kind.name for kind in quantised)
    return f"it was quantised to {names}, so {part} rounded a second time{more}"


@contextmanager
def _translated(path: Path, what: str) -> Iterator[None]:
    """The package's errors on damaged input as one sentence."""
    try:
        yield
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
        raise BadCheckpoint(f"{path}: {what} is damaged or this is not a GGUF file ({error}).") from error
