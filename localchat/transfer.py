"""The records that a download is told in, and the look at the disk before it starts."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localchat.errors import UserError


@dataclass(frozen=True)
class Plan:
    """What is to be downloaded: (file name, size in bytes) pairs, and how much of it is not on this machine yet.

    `etags` names the content of the files that the hub names it of; `packed_bytes` is the size of the packed model.
    """

    source_id: str
    revision: str
    files: tuple[tuple[str, int], ...]
    missing_bytes: int
    etags: Mapping[str, str] = field(default_factory=dict)
    packed_bytes: int = 0

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
    check_disks((folder, wanted))


def check_disks(*wanted: tuple[Path, int]) -> None:
    """The same for several folders, which may be on one disk."""
    disks: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in wanted:
        existing = _existing(folder)
        first, before = disks.get(existing.stat().st_dev, (folder, 0))
        disks[existing.stat().st_dev] = (first, before + nbytes)
    for folder, nbytes in disks.values():
        free = free_space(folder)
        if nbytes > free:
            raise UserError(f"{folder} has {free / 1e9:.1f} GB free, but {nbytes / 1e9:.1f} GB are needed: make room.")


def free_space(folder: Path) -> int:
    """Bytes that can still be written on the disk that holds (or will hold) `folder`."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
