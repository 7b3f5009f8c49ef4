"""Which safetensors files a model folder consists of, by its index where it has one. Nothing here imports torch.

A shard is named by a plain file name (an index cannot point outside the folder), and pickle files are never opened.
"""

from pathlib import Path

from localchat.config import read_json
from localchat.errors import BadCheckpoint

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def shard_files(folder: Path) -> list[Path]:
    """The files that hold the tensors of `folder`, in order of their names; all of them are there.

    Raises:
        BadCheckpoint: a file is missing or outside the folder, or the folder holds none or pickle files only.
    """
    index = find_index(folder)
    paths = sorted({folder / file for file in read_index(index).values()}) if index else _all_shards(folder)
    for path in paths:
        if not path.is_file():
            named = f" although {index.name} names it" if index else ""
            raise BadCheckpoint(f"{folder}: the file {path.name} is missing{named}; download the model again.")
    return paths


def find_index(folder: Path) -> Path | None:
    """The index file; its usual name first, since some repositories carry the index of a second format as well."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    usual = folder / INDEX_NAME
    return usual if usual in found else next(iter(found), None)


def read_index(index: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor name -> file name, each a plain name inside the folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index}: has no weight_map of tensor names to file names.")
    for name, file in weight_map.items():
        # Files themselves may be links (the hub's cache is made of them); a name may not leave the folder.
        if not isinstance(file, str) or not file.endswith(".safetensors") or any(c in file for c in "/\\:\0"):
            raise BadCheckpoint(f"{index}: {name} is said to lie in {file!r}, which is not a file of this folder.")
    return weight_map


def _all_shards(folder: Path) -> list[Path]:
    """Every safetensors file of a folder without index, or the reason why there is none."""
    paths = sorted(folder.glob("*.safetensors"))
    if paths:
        return paths
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise BadCheckpoint(
            f"{folder}: holds only pickle files ({pickles[0]}), which can run code and are never loaded here; "
            "use a repository with .safetensors files, or convert it with transformers' save_pretrained."
        )
    raise BadCheckpoint(f"{folder}: there is no .safetensors file, so this is not a model folder.")
