"""Opening a folder's safetensors: what is read, and that damaged or hostile folders are refused in one sentence."""

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localchat.errors import BadCheckpoint
from localchat.shards import open_shards


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def raw_safetensors(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def test_single_file(tmp_path: Path) -> None:
    tensor = torch.randn(3, 5, dtype=torch.bfloat16)
    save_file({"a": tensor, "b": torch.arange(4)}, tmp_path / "model.safetensors")
    with open_shards(tmp_path) as shards:
        assert set(shards.names) == {"a", "b"}
        assert shards.names["a"] == tmp_path / "model.safetensors"
        assert (shards.shape("a"), shards.dtype("a"), shards.dtype("b")) == ((3, 5), "BF16", "I64")
        assert torch.equal(shards.get("a"), tensor)


def test_tensor_outlives_its_shards(tmp_path: Path) -> None:
    save_file({"a": torch.arange(10.0)}, tmp_path / "model.safetensors")
    with open_shards(tmp_path) as shards:
        tensor = shards.get("a")
    assert torch.equal(tensor, torch.arange(10.0))


def test_without_index_all_files_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "y.safetensors")
    with open_shards(tmp_path) as shards:
        assert {name: path.name for name, path in shards.names.items()} == {"a": "x.safetensors", "b": "y.safetensors"}


def test_index_decides_which_files_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "odd.safetensors-1-of-2.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, {"a": "odd.safetensors-1-of-2.safetensors"})
    with open_shards(tmp_path) as shards:
        assert set(shards.names) == {"a"}
        assert torch.equal(shards.get("a"), torch.ones(2))


def test_file_that_is_a_link_is_read(tmp_path: Path) -> None:
    """The hub's cache is folders of links to blobs elsewhere."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "1f3a")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/1f3a")
    with open_shards(tmp_path / "snapshot") as shards:
        assert torch.equal(shards.get("a"), torch.ones(2))


@pytest.mark.parametrize(
    "file",
    [
        *("../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "c:x.safetensors"),
        *("a\\b.safetensors", "model.bin", 7),
    ],
)
def test_index_cannot_leave_the_folder(tmp_path: Path, file: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    write_index(folder, {"a": file})
    with pytest.raises(BadCheckpoint, match="not a file of this folder"):
        open_shards(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_weight_map(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(BadCheckpoint, match="weight_map"):
        open_shards(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    with pytest.raises(BadCheckpoint, match=r"model-00002-of-00002\.safetensors is missing"):
        open_shards(tmp_path)


def test_tensor_the_index_promises_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"a": "model.safetensors", "b": "model.safetensors"})
    with pytest.raises(BadCheckpoint, match="does not hold b"):
        open_shards(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(BadCheckpoint, match=r"a is in both x\.safetensors and y\.safetensors"):
        open_shards(tmp_path)


def test_unknown_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_shards(tmp_path) as shards, pytest.raises(BadCheckpoint, match="no tensor named z"):
        shards.get("z")


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(200)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: is damaged.*; download it again\.$"):
        open_shards(tmp_path)


def test_clone_without_its_large_files(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5' * 64}\nsize 4967215360\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: is only git's pointer to the file; `git lfs pull`"):
        open_shards(tmp_path)


def test_hostile_headers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    hostile: list[tuple[object, bytes, int | None]] = [
        ({"a": entry}, b"", None),  # no data
        ({"a": entry}, bytes(8), 2**63),  # header longer than any file
        ({"a": entry}, bytes(8), 99_000_000),
        ({"a": entry, "b": entry}, bytes(8), None),  # two tensors in one place
        ({"a": {**entry, "data_offsets": [8, 0]}}, bytes(8), None),
        ({"a": {**entry, "data_offsets": [0, 2**62]}}, bytes(8), None),
        ({"a": {**entry, "shape": [2**62, 2**62]}}, bytes(8), None),
        ({"a": {**entry, "dtype": "F31"}}, bytes(8), None),
        (["a"], bytes(8), None),
    ]
    for header, data, length in hostile:
        raw_safetensors(path, header, data, length)
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors: is damaged"):
            open_shards(tmp_path)


def test_pickle_files_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin.*never loaded"):
        open_shards(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no \.safetensors file"):
        open_shards(tmp_path)
