"""The records that a download is told in, and the look at the disk before it starts."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from localchat.errors import UserError


@dataclass(frozen=True)
class Plan:
    """What is to be downloaded: (file name, size in bytes) pairs, and how much of it is not on this machine yet."""

    source_id: str
    revision: str
    files: tuple[tuple[str, int], ...]
    missing_bytes: int

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class Progress:
    """How far the download is; `file` is the one being fetched."""

    file: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Notice:
    """Something the user should read once, e.g. that the model comes from another place than expected."""

    text: str


@dataclass(frozen=True)
class Fetched:
    """A model's files on this machine: a Hugging Face folder or a .gguf file, and what identifies its content.

    `source_id` is a hub id, a Python requirement or an absolute path; `revision` changes when the content does.
    """

    path: Path
    source_id: str
    revision: str


def check_disk_space(folder: Path, wanted: int) -> None:
    """Make sure that `wanted` bytes fit on the disk that holds (or will hold) `folder`.

    Raises:
        UserError: they do not.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if wanted > free:
        raise UserError(f"{folder} has {free / 1e9:.1f} GB free, but {wanted / 1e9:.1f} GB are needed: make room.")
