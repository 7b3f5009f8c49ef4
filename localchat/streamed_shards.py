"""The safetensors files of a model that are still on their way, with the face of a folder of them.

Names, shapes and dtypes come from the files' first bytes; reading a tensor waits for its file. When a file has come it
is checked like any other, and must hold what its beginning said.
"""

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from localchat import hub
from localchat.download import download, is_large
from localchat.errors import BadCheckpoint
from localchat.shard_feed import ShardFeed
from localchat.shard_files import find_index, read_index
from localchat.shards import Shards, Span, check_file, indexed, merged, read_header, span_of
from localchat.transfer import Notice, Plan, Progress


class StreamedShards(Shards):
    """See `Shards`. `feed` brings the files, `texts` is the folder with everything that is not weights."""

    arriving = True

    def __init__(self, feed: ShardFeed, texts: Path) -> None:
        self.feed = feed
        self.texts = texts
        self._announced = {Path(file): _checked(file, feed.header(file)) for file in feed.files}
        held = {path: set(header) for path, header in self._announced.items()}
        index = find_index(texts)
        super().__init__(indexed(Path(), read_index(index), held) if index else merged(held), {}, ExitStack())
        self._places: dict[Path, Path] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """See Shards.shape."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> str:
        """See Shards.dtype."""
        return str(self._entry(name)["dtype"])

    def span(self, name: str) -> Span:
        """See Shards.span. Waits for the file."""
        path = self._path(name)
        if path not in self._headers:
            place = self.feed.path(path.name)
            check_file(place)
            begin, header = read_header(place)
            header.pop("__metadata__", None)
            if header != self._announced[path]:
                raise BadCheckpoint(f"{place}: holds other tensors than its beginning said: try again.")
            self._headers[path] = begin, header
            self._places[path] = place
        begin, header = self._headers[path]
        return span_of(self._places[path], name, begin, header[name])

    def get(self, name: str) -> Any:
        """See Shards.read: nothing stays mapped of a file that is going to be deleted."""
        return self.read(name)

    def _entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = self._announced[self._path(name)][name]
        return entry


def _checked(file: str, header: dict[str, Any]) -> dict[str, Any]:
    """A header without its metadata, if every entry has the form that one has.

    Raises:
        BadCheckpoint: it has not.
    """
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape) or "dtype" not in entry:
            raise BadCheckpoint(f"{file}: is not a safetensors file ({name} has no shape or no dtype).")
    return entries


def stream(name: str) -> Generator[Plan | Notice | Progress, None, StreamedShards]:
    """Find the model `name` on the hub, get everything but its weights; returns these, which come when they are read.

    name: an alias or hub id, optionally with "@revision". The feed's folder has still to be set.

    Raises:
        ModelNotFound: see hub.plan.
        BadCheckpoint: a weight file's beginning is damaged.
    """
    todo, called = hub.plan(name)
    if called.casefold() != todo.source_id.casefold():
        yield Notice(f"{todo.source_id} is called {called} on the hub now")
    yield todo
    small = tuple((file, size) for file, size in todo.files if not is_large(file))
    try:
        texts = yield from download(replace(todo, files=small))
    except hub.failures() as error:
        raise hub.explained(error, todo.source_id, todo.revision) from error
    index = find_index(texts)
    large = sorted(file for file, _ in todo.files if is_large(file))
    files = sorted(set(read_index(index).values())) if index else large
    for file in files:
        if file not in large:
            raise BadCheckpoint(f"{todo.source_id}: the file {file} is missing although the index names it.")
    return StreamedShards(ShardFeed(todo, files), texts)
