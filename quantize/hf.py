"""A Hugging Face model folder as a conversion's source: config.json, safetensors, tokenizer files.

Every spelling of tensor names that text models are saved under is brought to one (see source.py). What another tool
has quantised is read by that tool's rules (quantised.py), or refused by its name.
"""

import hashlib
import json
from math import prod
from pathlib import Path

from torch import Tensor

from localchat.config import ModelConfig, read_json
from localchat.errors import BadCheckpoint, UserError
from localchat.foreign import USE_INSTEAD
from localchat.quantize import qwen3_5
from localchat.quantize.codes import Codes
from localchat.quantize.quantised import IGNORED, QuantisedMatrix, by_matrix, kept_format, what_is_lost
from localchat.quantize.source import TEXT_FILES, Source, expected_shapes
from localchat.shards import Shards, open_shards

_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
# Buffers that old checkpoints carry; they follow from the config.
_BUFFERS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}
# A tensor suffix that shows which tool has quantised a checkpoint whose config.json is silent about it.
_QUANTISED = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8",
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
        skipped = qwen3_5.VISION if self._hybrid else ()
        self._stored = _stored(folder, shards, self.model_config, skipped)
        if self.model_config.tie_word_embeddings:
            self._stored.pop("lm_head.weight", None)  # transformers ignores it as well
        of_layers = [m for name, m in self._stored.items() if isinstance(m, QuantisedMatrix) and name[:7] == "layers."]
        self._quantised = of_layers
        self.kept_format = kept_format(of_layers)
        self.shapes = {name: self._shape(place) for name, place in self._stored.items()}
        if self._hybrid:
            self._stored = qwen3_5.with_gates(self._stored)
            self.shapes = {n: qwen3_5.our_shape(n, self._shape(place)) for n, place in self._stored.items()}
            for name in qwen3_5.incomplete_mtp(self.shapes, self.model_config):
                del self._stored[name], self.shapes[name]

    def read(self, name: str) -> Tensor:
        """See Source.read; a tensor that nobody has quantised is mapped from its file."""
        place = self._stored[name]
        tensor = self._shards.get(place) if isinstance(place, str) else place.weight()
        return self._ours(name, tensor)

    def codes(self, name: str) -> Codes | None:
        """See Source.codes."""
        place = self._stored[name]
        codes = None if isinstance(place, str) else place.codes()
        return None if codes is None else codes.of_rows(lambda tensor: self._ours(name, tensor))

    def what_is_lost(self, group_size: int, symmetric: bool) -> str:
        """See Source.what_is_lost."""
        return what_is_lost(self._quantised, group_size, symmetric)

    def nbytes(self, name: str) -> int:
        """See Source.nbytes."""
        place = self._stored[name]
        size = _FLOATS[self._shards.dtype(place)] * prod(self._shape(place)) if isinstance(place, str) else place.nbytes
        return size * prod(self.shapes[name]) // max(1, prod(self._shape(place)))

    def _shape(self, place: str | QuantisedMatrix) -> tuple[int, ...]:
        return self._shards.shape(place) if isinstance(place, str) else place.shape

    def _ours(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as stored, or the codes or scales of one, in the form of the packed folder."""
        return qwen3_5.ours(name, tensor, self.model_config, zero_centred=True) if self._hybrid else tensor

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


def open_hf(folder: Path) -> HFSource:
    """Open a model folder.

    Raises:
        BadCheckpoint: config or files are damaged, quantised in a way that is not read, or would be computed wrongly.
        UserError: the folder was packed by this program already.
    """
    config = read_json(folder / "config.json")
    model_config = ModelConfig.from_dict(config)
    if model_config.quantization is not None:
        raise UserError(f"{folder}: is already packed by localchat; quantise the original model instead.")
    shards = open_shards(folder)
    try:
        return HFSource(folder, config, shards)
    except BadCheckpoint:
        shards.close()
        raise


def _stored(
    folder: Path, shards: Shards, config: ModelConfig, skipped: tuple[str, ...]
) -> dict[str, str | QuantisedMatrix]:
    """Canonical name -> name as stored, or the tensors that a quantised matrix is made of; every dtype checked.

    Without buffers and names that begin with `skipped`, and without biases of zeros that GPTQ gives to matrices that
    have none.
    """
    foreign = config.foreign_quantization
    names = _canonical_names(folder, shards, (*_BUFFERS, *(IGNORED if foreign else ())), skipped)
    matrices, plain = by_matrix(names) if foreign else ({}, names)
    expected = expected_shapes(config) if matrices else {}
    stored: dict[str, str | QuantisedMatrix] = {}
    for canonical, name in plain.items():
        suffix = next((suffix for suffix in _QUANTISED if name.endswith(suffix)), None)
        if suffix:
            raise BadCheckpoint(
                f"{folder}: {name} is quantised by {_QUANTISED[suffix]}, but config.json has no quantization_config "
                f"that says how: {USE_INSTEAD}."
            )
        if shards.dtype(name) not in _FLOATS:
            raise BadCheckpoint(
                f"{folder}: {name} has the dtype {shards.dtype(name)}, wanted one of {', '.join(_FLOATS)}."
            )
        stem, _, kind = canonical.rpartition(".")
        if not (kind == "bias" and stem in matrices and canonical not in expected and not shards.get(name).any()):
            stored[canonical] = name
    try:
        if foreign:
            stored |= {
                f"{stem}.weight": QuantisedMatrix(stem, kinds, shards, foreign) for stem, kinds in matrices.items()
            }
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{folder}: {error}") from error
    return stored


def _canonical_names(
    folder: Path, shards: Shards, ignored: tuple[str, ...], skipped: tuple[str, ...]
) -> dict[str, str]:
    """Canonical name -> name as stored, without names that end in `ignored` or begin with `skipped`."""
    names: dict[str, str] = {}
    for name in sorted(shards.names):
        canonical = canonical_name(name)
        if name.endswith(ignored) or canonical.startswith(skipped):
            continue
        if canonical in names:
            raise BadCheckpoint(f"{folder}: {names[canonical]} and {name} are the same tensor under two names.")
        names[canonical] = name
    return names


def canonical_name(name: str) -> str:
    """ "model.language_model.layers.0.mlp.up_proj.weight" -> "layers.0.mlp.up_proj.weight"."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
