"""From a packed folder to a model that is ready to run."""

from pathlib import Path

import torch
from torch import Tensor

from localchat.config import ModelConfig, load_config
from localchat.errors import BadCheckpoint
from localchat.kernels import int4_packing
from localchat.model import Linear, Model
from localchat.ops import ReferenceOps, ops_for
from localchat.shards import Span, open_shards
from localchat.upload import upload

_MTP = "mtp."  # Qwen3.5's head for the token after the next: stored, and not used yet


def load_model(folder: Path, device: str = "cpu", ops: ReferenceOps | None = None) -> Model:
    """Build the model on `meta` and give it the stored tensors, one after the other.

    `ops` is the table of operations; by default the one for `device`.

    Raises:
        BadCheckpoint: the folder is unfinished, of another layout or version, or its tensors do not fit its config.
    """
    if folder.name.endswith(".partial"):
        raise BadCheckpoint(f"{folder}: the conversion was not finished, run it again.")
    config = load_config(folder)
    check_layout(folder, config)
    target = torch.device(device)
    with torch.device("meta"):
        model = Model(config, ops or ops_for(target))
    wanted = model.state_dict()
    with open_shards(folder) as shards:
        _compare_names(folder, set(wanted), {name for name in shards.names if not name.startswith(_MTP)})
        for name, tensor in wanted.items():
            _check(folder, name, shards.span(name), tensor)
        if target.type == "cpu":  # mapped: pages are read when they are used
            stored = {name: shards.get(name) for name in wanted}
        else:
            stored = upload(shards, list(wanted), target, model.on_host)
        model.load_state_dict(stored, assign=True)
        del stored
        model.inv_freq = model.inv_freq.to(target)
        with torch.inference_mode():
            for module in model.modules():
                if isinstance(module, Linear):
                    model.ops.prepare(module)
    return model.eval()


def check_layout(folder: Path, config: ModelConfig) -> None:
    """Refuse, by name, a folder that this version cannot read.

    Raises:
        BadCheckpoint: the folder is not packed, or in another layout or version than kernels/int4_packing.py defines.
    """
    quantization = config.quantization
    if quantization is None:
        raise BadCheckpoint(f"{folder}: is not packed, convert it with `localchat quantize` first.")
    got = f"{quantization.layout} version {quantization.version}"
    wanted = f"{int4_packing.LAYOUT} version {int4_packing.VERSION}"
    if got != wanted:
        raise BadCheckpoint(f"{folder}: has the layout {got}, this program reads {wanted}: quantize the source again.")


def _compare_names(folder: Path, wanted: set[str], got: set[str]) -> None:
    for names, word in ((wanted - got, "is missing"), (got - wanted, "is not part of the model")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise BadCheckpoint(f"{folder}: the tensor {min(names)}{more} {word}, quantize the source again.")


def _check(folder: Path, name: str, got: Span, wanted: Tensor) -> None:
    """A tensor has its format's shape; integers have their dtype, floats may be wider or narrower, but no bytes."""
    is_float = got.dtype.is_floating_point and got.dtype.itemsize > 1
    kinds_agree = got.dtype == wanted.dtype or (is_float and wanted.is_floating_point())
    if got.shape != wanted.shape or not kinds_agree:
        raise BadCheckpoint(
            f"{folder}: {name} is {got.dtype} {list(got.shape)}, wanted {wanted.dtype} {list(wanted.shape)}."
        )
