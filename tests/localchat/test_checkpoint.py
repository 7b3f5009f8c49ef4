"""Loading a packed folder: what is complete loads, everything else is named in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localchat.checkpoint import load_model
from localchat.errors import BadCheckpoint
from localchat.ops import ReferenceOps


@pytest.fixture
def folder(scripted: Callable[..., Path], tmp_path: Path) -> Path:
    """A private copy of a tiny packed model."""
    return Path(shutil.copytree(scripted("ok"), tmp_path / "packed"))


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(raw))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    index = {"weight_map": dict.fromkeys(tensors, path.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sentence(folder: Path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        load_model(folder)
    return str(caught.value)


def test_a_complete_folder_loads_with_real_tensors_only(folder: Path) -> None:
    model = load_model(folder)
    assert all(not tensor.is_meta for tensor in (*model.buffers(), model.inv_freq))
    assert load_model(folder, ops=ReferenceOps()).ops.cache_dtype == torch.float32


@pytest.mark.parametrize(("change", "word"), [({"version": 0}, "version 0"), ({"layout": "older"}, "older")])
def test_another_layout_or_version_is_refused_by_name(folder: Path, change: dict[str, Any], word: str) -> None:
    edit_config(folder, **change)
    assert word in sentence(folder)
    assert "quantize the source again" in sentence(folder)


def test_a_folder_that_is_not_packed_says_how_to_pack_it(folder: Path) -> None:
    edit_config(folder, quant_method="gptq", bits=4)
    assert "localchat quantize" in sentence(folder)


def test_an_unfinished_folder_is_refused(folder: Path) -> None:
    partial = folder.with_name("packed.partial")
    folder.rename(partial)
    assert "not finished" in sentence(partial)


def test_a_missing_or_foreign_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("norm.weight"))
    assert "norm.weight is missing" in sentence(folder)
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(288), "extra": torch.ones(1)}))
    assert "extra is not part" in sentence(folder)


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(3), torch.ones(288, dtype=torch.int32), torch.ones(288).to(torch.float8_e4m3fn)],
    ids=["shape", "dtype", "bytes"],
)
def test_a_tensor_of_the_wrong_kind_is_named(folder: Path, wrong: torch.Tensor) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"norm.weight": wrong}))
    assert "norm.weight is" in sentence(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])
    assert path.name in sentence(folder)
