"""A Hugging Face model folder as a conversion's source: config.json, safetensors, tokenizer files.

Every spelling of tensor names that text models are saved under is brought to one (see source.py). What another tool
has quantised is read by that tool's rules (quantised.py), or refused by its name.
"""

import hashlib
import json
from collections.abc import Collection
from math import prod
from pathlib import Path

from torch import Tensor

from localchat.config import ModelConfig, TensorFormat, read_json
from localchat.errors import BadCheckpoint, UserError
from localchat.foreign import USE_INSTEAD
from localchat.quantize import qwen3_5
from localchat.quantize.codes import Codes
from localchat.quantize.quantised import IGNORED, QuantisedMatrix, by_matrix, kept_format, what_is_lost
from localchat.quantize.source import TEXT_FILES, Source, expected_shapes
from localchat.shards import Shards, Span, open_shards

_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
# Buffers that old checkpoints carry; they follow from the config.
_BUFFERS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}
# A tensor suffix that shows which tool has quantised a checkpoint whose config.json is silent about it: the first one.
_QUANTISED = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8",
    ".weight_scale_2": "NVIDIA's ModelOpt (NVFP4)",
    ".weight_scale": "compressed-tensors or NVIDIA's ModelOpt",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes (int8)",
    ".W_q": "HQQ",
    "_blocks": "MXFP4",
    ".biases": "MLX",
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
        """See Source.read."""
        place = self._stored[name]
        return self.formed(name, self._shards.read(place) if isinstance(place, str) else place.weight())

    def span(self, name: str) -> Span | None:
        """See Source.span."""
        place = self._stored[name]
        return self._shards.span(place) if isinstance(place, str) else None

    def formed(self, name: str, stored: Tensor) -> Tensor:
        """See Source.formed; also of the codes or scales of a tensor, which have the same rows."""
        return qwen3_5.ours(name, stored, self.model_config, zero_centred=True) if self._hybrid else stored

    def codes(self, name: str) -> Codes | None:
        """See Source.codes."""
        place = self._stored[name]
        codes = None if isinstance(place, str) else place.codes()
        return None if codes is None else codes.of_rows(lambda tensor: self.formed(name, tensor))

    def has_wide_scales(self, name: str, format_: TensorFormat) -> bool:
        """See Source.has_wide_scales."""
        place = self._stored[name]
        return not isinstance(place, str) and place.has_wide_scales(format_)

    def what_is_lost(self, group_size: int, symmetric: bool) -> str:
        """See Source.what_is_lost."""
        return what_is_lost(self._quantised, group_size, symmetric)

    def files_of(self, name: str) -> set[Path]:
        """The files that hold a tensor, or what a quantised one is made of."""
        place = self._stored[name]
        return {self._shards.names[stored] for stored in ((place,) if isinstance(place, str) else place.stored)}

    def nbytes(self, name: str) -> int:
        """See Source.nbytes."""
        place = self._stored[name]
        size = _FLOATS[self._shards.dtype(place)] * prod(self._shape(place)) if isinstance(place, str) else place.nbytes
        return size * prod(self.shapes[name]) // max(1, prod(self._shape(place)))

    def _shape(self, place: str | QuantisedMatrix) -> tuple[int, ...]:
        return self._shards.shape(place) if isinstance(place, str) else place.shape

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
        BadCheckpoint: config or files are damaged, quantised in a way that is not read, or would be computed wrongly.
        UserError: the folder was packed by this program already.
    """
    config = read_json(folder / "config.json")
    model_config = ModelConfig.from_dict(config)
    if model_config.quantization is not None:
        raise UserError(f"{folder}: is already packed by localchat; quantise the original model instead.")
    shards = shards or open_shards(folder)
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
    if not foreign:
        _refuse_quantised(folder, plain.values())
    for canonical, name in plain.items():
        if foreign and shards.dtype(name).startswith("F8_"):
            raise BadCheckpoint(f"{folder}: {name} is FP8 and has no scale beside it, so the checkpoint is incomplete.")
        if shards.dtype(name) not in _FLOATS:
            raise BadCheckpoint(
                f"{folder}: {name} has the dtype {shards.dtype(name)}, wanted one of {', '.join(_FLOATS)}."
            )
        stem, _, kind = canonical.rpartition(".")
        unexpected = kind == "bias" and stem in matrices and canonical not in expected
        if unexpected and (shards.arriving or not shards.read(name).any()):
            matrices[stem]["bias"] = name  # where it is still to come, the matrix looks at it
        else:
            stored[canonical] = name
    try:
        if foreign:
            stored |= {
                f"{stem}.weight": QuantisedMatrix(stem, kinds, shards, foreign) for stem, kinds in matrices.items()
            }
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{folder}: {error}") from error
    return stored


def _refuse_quantised(folder: Path, names: Collection[str]) -> None:
    """Name the tool that has quantised some of these tensors, of which config.json does not speak."""
    found = ((name, tool) for suffix, tool in _QUANTISED.items() for name in names if name.endswith(suffix))
    name, tool = next(found, ("", ""))
    if tool:
        raise BadCheckpoint(
            f"{folder}: {name} is quantised by {tool}, but config.json has no quantization_config that says how: "
            f"{USE_INSTEAD}."
        )


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
