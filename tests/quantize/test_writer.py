"""The streaming safetensors writer: what the safetensors library reads back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from localchat.quantize.writer import ShardWriter
from localchat.shards import open_shards


def write(folder: Path, tensors: dict[str, Tensor], max_shard_size: int) -> int:
    with ShardWriter(folder, tensors, max_shard_size) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish()


def some_tensors() -> dict[str, Tensor]:
    return {
        "a.qweight": torch.randint(-(2**31), 2**31 - 1, (6, 8), dtype=torch.int32),
        "a.scales": torch.randn(6, 2).half(),
        "b.weight": torch.randint(-128, 127, (3, 5), dtype=torch.int8),  # 15 bytes: what follows is not aligned
        "b.scales": torch.randn(3),
        "c.weight": torch.randn(7, 3).bfloat16(),
        "d.weight": torch.randn(2, 9).T,  # not contiguous
        'odd "näme"': torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }


@pytest.mark.parametrize("max_shard_size", [1, 100, 10_000])
def test_reads_back(tmp_path: Path, max_shard_size: int) -> None:
    tensors = some_tensors()
    total = write(tmp_path, tensors, max_shard_size)
    with open_shards(tmp_path) as shards:
        assert set(shards.names) == set(tensors)
        for name, tensor in tensors.items():
            got = shards.get(name)
            assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
    assert total == sum(tensor.nbytes for tensor in tensors.values())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total


def test_tensors_lie_at_multiples_of_their_item_size(tmp_path: Path) -> None:
    """Older readers map a tensor where it lies, which a float at an odd offset does not allow."""
    tensors = some_tensors()
    write(tmp_path, tensors, 10_000)
    for path in tmp_path.glob("*.safetensors"):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                assert (8 + size + entry["data_offsets"][0]) % tensors[name].element_size() == 0, name


def test_names_and_sizes_of_shards(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
    write(tmp_path, tensors, max_shard_size=80)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    for path in tmp_path.glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 80


def test_one_shard_has_an_index_too(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)}, 1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": "model-00001-of-00001.safetensors"}


def test_header_room_is_checked(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, ["a"], 10_000) as writer:
        for i in range(10):
            writer.add(f"unannounced.{i}", torch.ones(1))
        with pytest.raises(ValueError, match="reserved"):
            writer.finish()
