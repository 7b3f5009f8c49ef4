"""`rm`: what this program keeps of a model, counted, asked about, and removed.

That is its packed folders, and its download where it came from a Python package. The hub's own cache is shared with
other programs: a copy there is only removed with --downloads, and named otherwise. A folder of the user's is never
touched. A packed folder is renamed before it goes, so that a model half removed is not taken for one.
"""

import difflib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localchat import registry, store, wheels
from localchat.config import packed_format
from localchat.errors import ModelNotFound, UsageError, UserError
from localchat.prepare import say, size_text
from localchat.text_safety import one_line


@dataclass(frozen=True)
class Kept:
    """Something on the disk that belongs to a model.

    `in_hub_cache`: other programs may use it. `remove` deletes it where that takes more than deleting `path`.
    """

    what: str
    path: Path
    nbytes: int
    in_hub_cache: bool = False
    remove: Callable[[], None] | None = None


def remove(name: str, *, downloads: bool, sure: bool) -> int:
    """The `rm` command: 0 once it is gone.

    Raises:
        ModelNotFound: nothing of it is on this machine.
        UsageError: `name` is a folder of the user's own, or nobody is there to be asked.
        UserError: the user does not want it, or another process is writing it.
    """
    kept = list(_kept(name))
    going = [k for k in kept if downloads or not k.in_hub_cache]
    staying = [k for k in kept if k not in going]
    if not going:
        raise _nothing(name, staying)
    freed = sum(k.nbytes for k in going)
    for k in going:
        say(f"{k.what}, {size_text(k.nbytes)}: {k.path}")
    if not sure:
        ask(f"remove {one_line(name)} and free {size_text(freed)}? [y/N] ")
    for k in going:
        _remove(k)
    say(f"removed {one_line(name)}: {size_text(freed)} are free")
    for k in staying:
        say(f"{k.what} stays, {size_text(k.nbytes)}, other programs may use it (--downloads removes it)")
    return 0


def _nothing(name: str, staying: list[Kept]) -> UserError:
    if staying:
        size = size_text(sum(k.nbytes for k in staying))
        return ModelNotFound(
            f"only a download of {one_line(name)} is on this machine, {size} in the hub's cache.",
            "--downloads removes it; other programs may use it.",
        )
    here = [stored.name for stored in store.listing()] if registry.lookup(name) is None else []
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}?" if near else "`localchat list` names what is here."
    return ModelNotFound(f"{one_line(name)} is not on this machine, so there is nothing to remove.", hint)


def ask(question: str) -> None:
    """Go on only where the person says yes.

    Raises:
        UsageError: nobody is there to be asked.
        UserError: it is a no.
    """
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("nobody is there to be asked whether to remove it.", "-y removes without asking.")
    print(question, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was removed.")


def _kept(name: str) -> Iterator[Kept]:
    """What is on the disk of the model `name`: an alias, a hub id (optionally "@revision"), or a path."""
    path = store.as_path(name)
    if path is not None:
        yield from _kept_of_path(name, path)
        return
    base, _, revision = name.partition("@")
    entry = registry.lookup(base)
    hub_id = entry.hub_id if entry else base
    sources = {hub_id, base} | ({entry.wheel.requirement} if entry and entry.wheel else set())
    for stored in store.listing():
        if (stored.source_id in sources or stored.name == base) and revision in ("", stored.revision):
            yield Kept("the packed model", stored.path, stored.nbytes)
    download = wheels.cached(entry.wheel) if entry and entry.wheel and not revision else None
    if download:
        yield Kept(f"its download from {download.source_id}", download.path, download.path.stat().st_size)
    yield from _in_hub_cache(hub_id, revision)


def _kept_of_path(name: str, path: Path) -> Iterator[Kept]:
    """A packed folder inside our cache, or what was packed from the user's own files."""
    path = path.resolve()
    for stored in store.listing():
        if path in (stored.path.resolve(), Path(stored.source_id)):
            yield Kept("the packed model", stored.path, stored.nbytes)
            break
    else:
        if packed_format(path):
            raise UsageError(f"{one_line(name)} is a folder of your own, which `localchat rm` does not touch.")


def _in_hub_cache(repo: str, revision: str) -> Iterator[Kept]:
    """The snapshots of a repository in the hub's cache, one thing together."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        info = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    found = [r for r in info.repos if r.repo_type == "model" and r.repo_id == repo]
    commits = [r.commit_hash for r in (found[0].revisions if found else ()) if revision in ("", r.commit_hash, *r.refs)]
    if commits:
        strategy = info.delete_revisions(*commits)
        size = strategy.expected_freed_size
        yield Kept(
            "its download in the hub's cache", found[0].repo_path, size, in_hub_cache=True, remove=strategy.execute
        )


def _remove(kept: Kept) -> None:
    """Delete one thing.

    Raises:
        UserError: another process is writing it.
    """
    if kept.remove is not None:
        kept.remove()
    elif kept.path.is_file():
        kept.path.unlink()
    elif store.is_locked(kept.path):
        raise UserError(f"another localchat is writing {one_line(str(kept.path))}: it was not removed.")
    else:
        with store.locked(kept.path):
            going = kept.path.with_name(f"{kept.path.name}.old")
            shutil.rmtree(going, ignore_errors=True)
            kept.path.rename(going)
            shutil.rmtree(going)
