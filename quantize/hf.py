"""A Hugging Face model folder as a conversion's source: config.json, safetensors, tokenizer files.

Every spelling of tensor names that text models are saved under is brought to one (see source.py). What another tool
has quantised is refused by that tool's name: its numbers are not weights.
"""

import hashlib
import json
from pathlib import Path

from torch import Tensor

from localchat.config import ModelConfig, read_json
from localchat.errors import BadCheckpoint, UserError
from localchat.quantize import qwen3_5
from localchat.quantize.source import TEXT_FILES, Source
from localchat.shards import Shards, Span, open_shards

_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
# Buffers that old checkpoints carry; they follow from the config.
_BUFFERS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}
# A tensor suffix that shows by itself which tool has quantised a checkpoint.
_QUANTISED = {
    ".qweight": "gptq or awq",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".weight_scale": "compressed-tensors",
    ".quant_map": "bitsandbytes",
}


class HFSource(Source):
    """See `Source`. Construct with `open_hf`."""

    kind = "safetensors"

    def __init__(self, folder: Path, config: dict[str, object], shards: Shards) -> None:
        self.name = str(folder)
        self.config = config
        self.model_config = ModelConfig.from_dict(config)
        self._folder = folder
        self._shards = shards
        self._hybrid = qwen3_5.is_qwen3_5(self.model_config)
        self._stored = _canonical_names(folder, shards, skipped=qwen3_5.VISION if self._hybrid else ())
        if self.model_config.tie_word_embeddings:
            self._stored.pop("lm_head.weight", None)  # transformers ignores it as well
        self.shapes = {name: shards.shape(stored) for name, stored in self._stored.items()}
        if self._hybrid:
            self._stored = qwen3_5.with_gates(self._stored)
            self.shapes = {n: qwen3_5.our_shape(n, shards.shape(stored)) for n, stored in self._stored.items()}
            for name in qwen3_5.incomplete_mtp(self.shapes, self.model_config):
                del self._stored[name], self.shapes[name]

    def read(self, name: str) -> Tensor:
        """See Source.read."""
        return self.formed(name, self._shards.read(self._stored[name]))

    def span(self, name: str) -> Span | None:
        """See Source.span."""
        return self._shards.span(self._stored[name])

    def formed(self, name: str, stored: Tensor) -> Tensor:
        """See Source.formed."""
        return qwen3_5.ours(name, stored, self.model_config, zero_centred=True) if self._hybrid else stored

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._shards.names[self._stored[name]]

    def nbytes(self, name: str) -> int:
        """See Source.nbytes."""
        size = _FLOATS[self._shards.dtype(self._stored[name])]
        for n in self.shapes[name]:
            size *= n
        return size

    def files(self) -> dict[str, bytes]:
        """See Source.files."""
        paths = {name: self._folder / name for name in TEXT_FILES}
        return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}

    def digest(self) -> str:
        """See Source.digest."""
        index = {name: [self._shards.dtype(name), list(self._shards.shape(name))] for name in self._shards.names}
        return hashlib.sha256(json.dumps([self.config, index], sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        """See Source.close."""
        self._shards.close()


def open_hf(folder: Path, shards: Shards | None = None) -> HFSource:
    """Open a model folder; `shards` are its weights, where they are not in it.

    Raises:
        BadCheckpoint: config or files are damaged, quantised by another tool, or would be computed wrongly.
        UserError: the folder was packed by this program already.
    """
    config = read_json(folder / "config.json")
    model_config = ModelConfig.from_dict(config)
    if model_config.quantization is not None:
        raise UserError(f"{folder}: is already packed by localchat; quantise the original model instead.")
    if model_config.foreign_quantization is not None:
        raise _already_quantised(folder, str(model_config.foreign_quantization.get("quant_method", "another tool")))
    shards = shards or open_shards(folder)
    try:
        return HFSource(folder, config, shards)
    except BadCheckpoint:
        shards.close()
        raise


def _canonical_names(folder: Path, shards: Shards, skipped: tuple[str, ...]) -> dict[str, str]:
    """Canonical name -> name as stored, every dtype checked; without buffers and names that begin with `skipped`."""
    stored: dict[str, str] = {}
    for name in sorted(shards.names):
        canonical = canonical_name(name)
        if name.endswith(_BUFFERS) or canonical.startswith(skipped):
            continue
        for suffix, tool in _QUANTISED.items():
            if name.endswith(suffix):
                raise _already_quantised(folder, tool)
        dtype = shards.dtype(name)
        if dtype not in _FLOATS:
            raise BadCheckpoint(f"{folder}: {name} has the dtype {dtype}, wanted one of {', '.join(_FLOATS)}.")
        if canonical in stored:
            raise BadCheckpoint(f"{folder}: {stored[canonical]} and {name} are the same tensor under two names.")
        stored[canonical] = name
    return stored


def canonical_name(name: str) -> str:
    """ "model.language_model.layers.0.mlp.up_proj.weight" -> "layers.0.mlp.up_proj.weight"."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _already_quantised(folder: Path, tool: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{folder}: is already quantised as {tool}: not supported yet, use the unquantised repository."
    )
