"""Where converted models live in the user's cache, and how a name finds them again without the network.

    <cache>/packed/<name>-<hash>/         one packed folder; the hash names source, revision, format and recipe
    <cache>/packed/<name>-<hash>.lock     held while somebody writes that folder
    <cache>/downloads/                    model files that did not come from the hub (the hub has its own cache)
    <cache>/triton/                       kernels that were compiled for the card; Triton's own folder
    <cache>/cards/                        how they are launched best: localchat/tuning.py

<cache> is $LOCALCHAT_CACHE, else $XDG_CACHE_HOME/localchat, else ~/.cache/localchat. A folder that is being written
is called *.partial, one that is being replaced *.old: neither counts. Nor does one in an older packed format: it is
converted anew.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localchat import registry
from localchat.config import QuantizationConfig, packed_format
from localchat.errors import ModelNotFound, UserError
from localchat.transfer import Fetched


@dataclass(frozen=True)
class Stored:
    """A packed model in the cache. `name` is its alias where it has one; `modified` is in seconds since 1970."""

    name: str
    path: Path
    quantization: QuantizationConfig
    nbytes: int
    modified: float

    @property
    def source_id(self) -> str:
        """What it was converted from: a hub id, a Python requirement or a path."""
        return str(self.quantization.source.get("id", ""))

    @property
    def revision(self) -> str:
        """Which content of the source."""
        return str(self.quantization.source.get("revision", ""))


def cache_dir() -> Path:
    """The folder that holds everything this program keeps for the user."""
    if own := os.environ.get("LOCALCHAT_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache") / "localchat"


def compiled_kernels() -> Path | None:
    """Where Triton is to keep what it compiles; None: the user's variables say it, or it cannot be in our cache."""
    if os.environ.get("TRITON_CACHE_DIR") or os.environ.get("TRITON_HOME"):
        return None
    folder = cache_dir() / "triton"
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return folder if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) else None


def as_path(name: str) -> Path | None:
    """The file or folder that `name` means, or None where it is an alias or a hub id.

    Raises:
        ModelNotFound: `name` is spelt as a path (./x, ~/x, /x, x.gguf) and nothing is there, or it is empty.
    """
    if not name.strip():
        raise ModelNotFound("the name of the model is empty: give an alias, a hub id or a path.")
    path = Path(name).expanduser()
    if path.exists() and (os.sep in name or registry.lookup(name) is None):
        return path
    if name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf"):
        raise ModelNotFound(f"{name}: there is no such file or folder.")
    return None


def local_source(path: Path) -> Fetched:
    """A model folder or .gguf file of the user's as a source: its revision is a hash of names, sizes and dates."""
    path = path.resolve()
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    seen = hashlib.sha256()
    for file in files:
        status = file.stat()
        seen.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return Fetched(path, str(path), seen.hexdigest()[:12])


def find(name: str) -> Path | None:
    """The packed folder in the cache for an alias, a hub id (optionally "@revision") or a path. Newest first.

    Raises:
        ModelNotFound: `name` is a path and nothing is there.
    """
    path = as_path(name)
    if path is not None:
        return find_source(local_source(path))
    base, _, revision = name.partition("@")
    entry = registry.lookup(base)
    wanted = {entry.hub_id if entry else base}
    if entry and entry.wheel and not revision:
        wanted.add(entry.wheel.requirement)
    return _newest([s for s in listing() if s.source_id in wanted and revision in ("", s.revision)])


def find_source(source: Fetched) -> Path | None:
    """The packed folder in the cache that was converted from exactly this source."""
    wanted = (source.source_id, source.revision)
    return _newest([s for s in listing() if (s.source_id, s.revision) == wanted])


def target(source: Fetched, recipe: str = "") -> Path:
    """Where the conversion of `source` by `recipe` (its repr) belongs; the parent folder exists afterwards."""
    from localchat.kernels.int4_packing import LAYOUT, VERSION

    entry = registry.of_source(source.source_id)
    name = entry.alias if entry else Path(source.source_id).name.lower()
    slug = re.sub(r"[^a-z0-9.]+", "-", name).strip("-.")[:60] or "model"
    identity = "\0".join((source.source_id, source.revision, LAYOUT, str(VERSION), recipe))
    digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:10]
    return _packed_dir(create=True) / f"{slug}-{digest}"


def listing() -> list[Stored]:
    """All complete packed models in the cache, by name. Reads config.json only: needs no torch."""
    folders = _packed_dir().iterdir() if _packed_dir().is_dir() else iter(())
    stored = [_stored(folder) for folder in folders if folder.suffix not in (".partial", ".old") and folder.is_dir()]
    return sorted((s for s in stored if s), key=lambda s: (s.name, s.modified))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the right to write `folder`; waits while another process holds it. Look again for `folder` inside.

    Raises:
        UserError: the lock's file cannot be made.
    """
    try:
        lock = _lock_path(folder).open("a")
    except OSError as error:
        raise UserError(f"{folder.parent} cannot be written ({error.strerror}): set LOCALCHAT_CACHE.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_locked(folder: Path) -> bool:
    """Whether somebody is writing `folder` at this moment, so that `locked` would wait."""
    if not _lock_path(folder).exists():
        return False
    with _lock_path(folder).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _packed_dir(create: bool = False) -> Path:
    folder = cache_dir() / "packed"
    if create:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror}): set LOCALCHAT_CACHE.") from error
    return folder


def _stored(folder: Path) -> Stored | None:
    """What lies in `folder`, or None where it is no complete packed model."""
    quantization = packed_format(folder)
    if quantization is None:
        return None
    source_id = str(quantization.source.get("id", ""))
    entry = registry.of_source(source_id)
    return Stored(
        name=entry.alias if entry else source_id or folder.name,
        path=folder,
        quantization=quantization,
        nbytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        modified=(folder / "config.json").stat().st_mtime,
    )


def _newest(candidates: list[Stored]) -> Path | None:
    """The newest of `candidates` in today's packed format. (The format's file imports torch: only look if need be.)"""
    if not candidates:
        return None
    from localchat.kernels.int4_packing import LAYOUT, VERSION

    current = [s for s in candidates if (s.quantization.layout, s.quantization.version) == (LAYOUT, VERSION)]
    return max(current, key=lambda s: s.modified).path if current else None
