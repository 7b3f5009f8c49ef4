"""The folder a conversion writes: never half there, never in the place of something that is not ours.

Everything goes to `NAME.partial` beside the final place, which is renamed when it is complete. A lock on that folder
keeps two conversions of the same model apart; it goes away with the process, so a killed run leaves no trap. What a
killed run has left is removed, or continued by one that was asked to.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localchat.config import packed_format
from localchat.errors import BadCheckpoint, UserError

# The names a conversion writes, and the folder of what it downloads meanwhile.
_OURS = re.compile(r"shard-\d+|model-\d+-of-\d+\.safetensors|[a-z_.]+\.jsonl?|chat_template\.jinja")
DOWNLOADS = "download"


def check_target(source: Path, out: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists (unless it is a packed folder to overwrite) or touches the source.

    Raises:
        UserError: saying which.
    """
    here, there = source.resolve(), out.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise UserError(f"{out}: the output may not be the source, inside it, or around it; choose another folder.")
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{out}: exists already; choose another folder or pass --overwrite.")
    if out.is_symlink():
        raise UserError(f"{out}: is a link, which is not overwritten; give the folder it points to.")
    if packed_format(out) is None:
        raise UserError(f"{out}: is not a packed model folder, so it is not overwritten; choose another folder.")


def partial_path(out: Path) -> Path:
    """The unfinished folder of `out`."""
    return out.with_name(out.name + ".partial")


def downloads_path(out: Path) -> Path:
    """Where files lie that are only there until they are converted."""
    return partial_path(out) / DOWNLOADS


@contextmanager
def partial_folder(out: Path, *, resume: bool = False) -> Iterator[Path]:
    """`out`.partial, ours alone; removed when anything goes wrong before it was moved into place.

    It is empty, unless `resume`: then it holds what an earlier run has left, and what this one has done, if anything,
    stays for the next, whatever happens, except where the source itself is at fault.

    Raises:
        UserError: another process is writing it, or it holds files that no conversion writes.
    """
    partial = partial_path(out)
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        left = list(partial.iterdir())  # from a run that was killed
        foreign = [path for path in left if not _is_ours(path)]
        if foreign:
            raise UserError(f"{partial}: is in the way and holds {foreign[0].name}; move it or choose another output.")
        for path in left if not resume else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield partial
        except BaseException as error:  # also Ctrl-C and a generator that is closed
            if not resume or isinstance(error, BadCheckpoint) or not any(partial.iterdir()):
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _is_ours(path: Path) -> bool:
    """Whether a conversion writes something of this name."""
    if path.is_dir():
        return path.name == DOWNLOADS and not path.is_symlink()
    return _OURS.fullmatch(path.name) is not None


def move_into_place(partial: Path, out: Path) -> None:
    """Make the complete folder final; an old one at `out` (checked before) is removed once the new one stands there."""
    _sync(partial)
    old = out.with_name(out.name + ".old")
    if packed_format(old):  # from a run that was killed between the two renames
        shutil.rmtree(old)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    _sync(out.parent)
    if old.exists():
        shutil.rmtree(old)


def _sync(folder: Path) -> None:
    """Make sure that the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """An exclusive lock on `folder` for this process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"{folder}: another process is writing this model; wait for it.") from None
    finally:
        os.close(handle)
