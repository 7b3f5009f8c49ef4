"""The weight files of a hub repository one after the other: each comes before it is needed and goes afterwards.

So a checkpoint can be converted on a disk that could not hold it. What the files hold is known before any of them is
here, from their first bytes. Only so many files are fetched ahead of the one that is being read; a file that the hub's
own cache has already is taken from there, and stays.
"""

import json
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from localchat import hub
from localchat.download import Counter, FileDownload, Stopped, first_bytes, located
from localchat.errors import BadCheckpoint
from localchat.shards import read_header
from localchat.transfer import Plan

AHEAD = 2  # files that may come beyond the one that is being read
_FIRST = 1 << 20  # bytes of a file that are asked for first: a header seldom has more
_MOST_HEADER = 100_000_000  # bytes, as the safetensors library has it


class ShardFeed:
    """Weight files on their way. Close it, or use it as a context manager.

    files: their names in the order in which they come. folder: where they lie while they are needed, to be set before
    the first one is; what an earlier feed has left there is used.
    """

    def __init__(self, todo: Plan, files: Collection[str]) -> None:
        self.files = tuple(files)
        self.folder: Path | None = None
        self._todo = todo
        self._sizes = dict(todo.files)
        self._done = dict.fromkeys(self.files, 0)
        self._wanted: list[str] = []
        self._begun: set[str] = set()  # a thread has taken it
        self._ready: set[str] = set()  # it is here
        self._asked = 0  # the place of the last file that was asked for
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._notices: list[str] = []
        self._threads: list[threading.Thread] = []

    def size(self, file: str) -> int:
        """Bytes of a file."""
        return self._sizes[file]

    def arrived_bytes(self) -> int:
        """How much of the files has come, those that are gone again included."""
        return sum(self._done.values())

    def take_notices(self) -> list[str]:
        """What a person should read, once."""
        taken = self._notices[:]
        del self._notices[: len(taken)]
        return taken

    def header(self, file: str) -> dict[str, Any]:
        """The header of a file, which need not be here.

        Raises:
            BadCheckpoint: it has none.
            UserError: the hub does not give it.
        """
        here = self._here(file)
        if here is not None:
            return read_header(here)[1]
        try:
            header = json.loads(self._header_bytes(file))
        except (ValueError, RecursionError) as error:
            raise BadCheckpoint(f"{self._todo.source_id}: {file} is not a safetensors file ({error}).") from error
        except hub.failures() as error:
            raise hub.explained(error, self._todo.source_id, self._todo.revision) from error
        if not isinstance(header, dict):
            raise BadCheckpoint(f"{self._todo.source_id}: {file} is not a safetensors file (its header is no object).")
        return header

    def keep(self, files: Collection[str]) -> None:
        """From now on only these are needed: they come in order, and what is here of others is deleted."""
        with self._news:
            self._wanted = [file for file in self.files if file in files]
            for file in self.files:
                if file not in files:
                    self._place(file).unlink(missing_ok=True)
                    self._done[file] = self._sizes[file]
            if not self._threads:
                self._asked = self.files.index(self._wanted[0]) if self._wanted else 0
                self._threads = [threading.Thread(target=self._run, name="feed", daemon=True) for _ in range(AHEAD)]
                for thread in self._threads:
                    thread.start()
            self._news.notify_all()

    def path(self, file: str) -> Path:
        """Where a file lies; waits until it has come.

        Raises:
            UserError: it could not be had.
            Stopped: the feed was closed meanwhile.
        """
        with self._news:
            self._asked = max(self._asked, self.files.index(file))
            self._news.notify_all()
            while file not in self._ready:
                if self._error is not None:
                    raise self._error
                if self._stop.is_set():
                    raise Stopped
                self._news.wait()
        return self._here(file) or self._place(file)

    def close(self) -> None:
        """Let nothing more come, without waiting for the server; what has come stays for a later feed."""
        self._stop.set()
        with self._news:
            self._news.notify_all()

    def __enter__(self) -> "ShardFeed":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        """One thread: the next file that may come, until there is none."""
        while True:
            with self._news:
                while not self._stop.is_set() and self._next() is None:
                    self._news.wait()
                file = self._next()
                if self._stop.is_set() or file is None:
                    return
                self._begun.add(file)
            try:
                self._fetch(file)
            except Stopped:
                return
            except Exception as error:  # noqa: BLE001 - raised again where somebody waits for the file
                self._error = self._error or self._explained(error)
                self.close()
                return
            with self._news:
                self._ready.add(file)
                self._done[file] = self._sizes[file]
                self._news.notify_all()

    def _next(self) -> str | None:
        last = self._asked + AHEAD
        return next((f for f in self._wanted if f not in self._begun and self.files.index(f) <= last), None)

    def _fetch(self, file: str) -> None:
        if self._here(file) is None:
            url, size, etag = located(self._todo, file)
            count = Counter(self._done, file)
            download = FileDownload(file, count, self._stop, self._notices)
            download.run(url, size or self._sizes[file], self._todo.etags.get(file, etag), self._place(file))

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, hub.failures()):
            return hub.explained(error, self._todo.source_id, self._todo.revision, self.folder)
        return error

    def _header_bytes(self, file: str) -> bytes:
        url = located(self._todo, file)[0]
        begin = first_bytes(url, _FIRST)
        length = int.from_bytes(begin[:8], "little")
        if not 0 < length <= min(_MOST_HEADER, self._sizes[file]):
            raise ValueError(f"a header of {length:,} bytes")
        if 8 + length > len(begin):
            begin = first_bytes(url, 8 + length)
        return begin[8 : 8 + length]

    def _place(self, file: str) -> Path:
        if self.folder is None:
            raise ValueError(f"there is no folder for {file} yet")
        return self.folder / file

    def _here(self, file: str) -> Path | None:
        """Where all of a file lies already: in the hub's cache, or in the folder."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self._todo.source_id, file, revision=self._todo.revision)
        if isinstance(cached, str):
            return Path(cached)
        return self._place(file) if self.folder and self._place(file).is_file() else None
