"""The folder a conversion writes: never half there, never in the place of something that is not ours.

Everything goes to `NAME.partial` beside the final place, which is renamed when it is complete. A lock on that folder
keeps two conversions of the same model apart; it goes away with the process, so a killed run leaves no trap.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localchat.config import packed_format
from localchat.errors import UserError

# The names a conversion writes.
_OURS = re.compile(r"shard-\d+|model-\d+-of-\d+\.safetensors|[a-z_.]+\.json|chat_template\.jinja")


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


@contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """`out`.partial, empty and ours alone; removed when anything goes wrong before it was moved into place.

    Raises:
        UserError: another process is writing it, or it holds files that no conversion writes.
    """
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        left = list(partial.iterdir())  # from a run that was killed
        foreign = [path for path in left if not _OURS.fullmatch(path.name) or path.is_dir()]
        if foreign:
            raise UserError(f"{partial}: is in the way and holds {foreign[0].name}; move it or choose another output.")
        for path in left:
            path.unlink()
        try:
            yield partial
        except BaseException:  # also Ctrl-C and a generator that is closed
            shutil.rmtree(partial, ignore_errors=True)
            raise


def move_into_place(partial: Path, out: Path) -> None:
    """Make the complete folder final; an old one at `out` (checked before) is removed once the new one stands there."""
    old = out.with_name(out.name + ".old")
    if packed_format(old):  # from a run that was killed between the two renames
        shutil.rmtree(old)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    if old.exists():
        shutil.rmtree(old)


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
