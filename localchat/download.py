"""The files of a plan, from the hub into the hub's own cache: a few at a time, and what has arrived stays.

huggingface_hub gives up the part of a file that it has when a download is interrupted, and a weight file has
gigabytes. So weights are fetched here: into blobs/<etag>.part, beside the place that the cache has for them, and
the next time the rest is asked for with a Range request. The name changes with the content, so parts of two versions
cannot meet. Where the etag is a sha256, as it is for weights on the hub, the whole file must have it. Everything
else, links included, is left to huggingface_hub.
"""

import fcntl
import hashlib
import re
import threading
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from localchat.errors import ModelNotFound
from localchat.transfer import Notice, Plan, Progress

_STREAMS = 4  # files at once: one connection alone seldom fills a line
_BLOCK = 1 << 20  # bytes of one read while a file is checked
_PATIENCE = 5  # attempts without a new byte until a file is given up
_PAUSE = 1.0  # seconds before the second attempt, doubled before each further one
_SAFE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Stopped(Exception):
    """Raised inside the download's threads once nobody listens any more."""


def present_bytes(repo: str, revision: str, file: str, size: int, etag: str | None) -> int:
    """How much of a file is on this machine already; `etag` is its name in the cache, where that is known."""
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repo, file, revision=revision), str):
        return size
    if etag is None or not _SAFE_NAME.fullmatch(etag):
        return 0
    blob = _blobs(repo) / etag
    if blob.exists():
        return size
    part = _part(blob)
    return min(part.stat().st_size, size) if part.exists() else 0


def download(todo: Plan) -> Generator[Progress | Notice, None, Path]:
    """Fetch what is missing of the plan; returns the folder that holds all of it.

    Closing the generator stops the download without waiting for the server; what has arrived is kept.

    Raises:
        ModelNotFound: a file arrived damaged, twice.
        Exception: whatever huggingface_hub, its HTTP client or the disk had to say.
    """
    work = _Work(todo)
    threads = [
        # Daemons: Ctrl-C must not wait for a stalled connection.
        threading.Thread(target=work.run, name="download", daemon=True)
        for _ in range(min(_STREAMS, max(1, sum(map(is_large, work.sizes)))))
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not work.stop.wait(0.1):
            yield from map(Notice, work.take_notices())
            yield Progress(work.current, min(work.done_bytes, todo.total_bytes), todo.total_bytes)
    finally:
        work.stop.set()
    if work.error is not None:
        raise work.error
    yield from map(Notice, work.take_notices())
    if any(is_large(file) for file in work.sizes):
        _remove_old_parts(todo)
    return work.folder


class _Work:
    """What the threads share. Each takes the next file until there is none, or one of them has failed."""

    def __init__(self, todo: Plan) -> None:
        self.todo = todo
        self.sizes = dict(sorted(todo.files, key=lambda item: is_large(item[0])))  # small ones first
        self.stop = threading.Event()
        self.error: Exception | None = None
        self.folder = Path()
        self.current = ""
        self._done = {
            file: present_bytes(todo.source_id, todo.revision, file, size, todo.etags.get(file))
            for file, size in todo.files
        }
        self._queue = iter(self.sizes)
        self._lock = threading.Lock()
        self._notices: list[str] = []

    @property
    def done_bytes(self) -> int:
        return sum(self._done.values())

    def take_notices(self) -> list[str]:
        taken, self._notices = self._notices, []
        return taken

    def run(self) -> None:
        """One thread."""
        while not self.stop.is_set():
            with self._lock:
                file = next(self._queue, None)
            if file is None:
                return
            try:
                self.current = file
                self._file(file)
                self._done[file] = self.sizes[file]
            except Stopped:
                return
            except Exception as error:  # noqa: BLE001 - raised again where somebody listens
                self.error = self.error or error
                self.stop.set()

    def _file(self, file: str) -> None:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

        repo, revision, size = self.todo.source_id, self.todo.revision, self.sizes[file]
        cached = isinstance(try_to_load_from_cache(repo, file, revision=revision), str)
        if is_large(file) and not cached and size < constants.MAX_HTTP_DOWNLOAD_SIZE:
            self._weights(file)
        # Small files, and for a blob that is there only the link to it.
        path = hf_hub_download(repo, file, revision=revision, tqdm_class=_counting_bar(self._count(file), self.stop))
        self.folder = Path(path).parent

    def _weights(self, file: str) -> None:
        """Bring a file's content to its place among the cache's blobs."""
        url, size, etag = located(self.todo, file)
        if not etag or not _SAFE_NAME.fullmatch(etag) or not size:
            return  # no hub that this program knows: huggingface_hub may
        blob = _blobs(self.todo.source_id) / etag
        FileDownload(file, self._count(file), self.stop, self._notices).run(url, size, etag, blob)

    def _count(self, file: str) -> "Counter":
        return Counter(self._done, file)


def located(todo: Plan, file: str) -> tuple[str, int, str]:
    """Where the hub has a file of the plan, its size, and the name of its content; 0 and "" where it does not say."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(todo.source_id, file, revision=todo.revision, endpoint=constants.ENDPOINT)
    metadata = get_hf_file_metadata(url, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    return url, metadata.size or 0, metadata.etag or ""


def first_bytes(url: str, count: int) -> bytes:
    """The beginning of a file on the hub: `count` bytes, or all where it has no more.

    Raises:
        Exception: whatever the HTTP client or huggingface_hub had to say.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes=0-{count - 1}"}
    got = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        if response.status_code >= 400:
            response.read()
            hf_raise_for_status(response)
        for block in response.iter_bytes():
            got += block
            if len(got) >= count:  # a server that ignores the range would send all of it
                break
    return bytes(got[:count])


class FileDownload:
    """One weight file on its way to its place, by way of a part beside it that a later download goes on with.

    stop: ends it, with Stopped. notices: what a person should read is added here.
    """

    def __init__(self, file: str, count: "Counter", stop: threading.Event, notices: list[str]) -> None:
        self._file, self._count, self._stop, self._notices = file, count, stop, notices

    def run(self, url: str, size: int, etag: str, place: Path) -> None:
        """Bring the whole file to `place`, whose folder is made.

        Raises:
            ModelNotFound: it arrived damaged, twice.
        """
        place.parent.mkdir(parents=True, exist_ok=True)
        part = _part(place)
        part.touch()
        with part.open("r+b") as out:
            self._lock(out)
            if place.exists():  # somebody else has brought it meanwhile
                return
            for attempt in range(2):
                _Stream(url, out, size, self._count, self._stop, self._notices).run(self._file)
                if self._is_whole(out, etag):
                    part.replace(place)
                    return
                out.truncate(0)
                if not attempt:
                    self._notices.append(f"{self._file} arrived damaged: it is fetched once more")
        raise ModelNotFound(f"{self._file} arrived damaged twice: its sha256 is not the hub's.")

    def _lock(self, out: BinaryIO) -> None:
        """Only one process writes a part; another waits for it."""
        waiting = False
        while True:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not waiting:
                    self._notices.append(f"another process is downloading {self._file}: waiting for it")
                waiting = True
                if self._stop.wait(0.2):
                    raise Stopped from None

    def _is_whole(self, out: BinaryIO, etag: str) -> bool:
        if not _SHA256.fullmatch(etag):
            return True
        out.seek(0)
        seen = hashlib.sha256()
        while block := out.read(_BLOCK):
            if self._stop.is_set():
                raise Stopped
            seen.update(block)
        return seen.hexdigest() == etag


class Counter:
    """Where the bytes of one file are counted."""

    def __init__(self, done: dict[str, int], file: str) -> None:
        self._done, self._file = done, file

    def set(self, count: int) -> None:
        self._done[self._file] = count


class _Stream:
    """One file over HTTP, from where its part ends to its own end, through lost connections."""

    def __init__(
        self, url: str, out: BinaryIO, size: int, count: Counter, stop: threading.Event, notices: list[str]
    ) -> None:
        self._url, self._out, self._size = url, out, size
        self._count, self._stop, self._notices = count, stop, notices

    def run(self, file: str) -> None:
        """Returns once the part has its full size; raises what the last attempt raised."""
        from huggingface_hub import errors

        http: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
        failed = 0
        while (start := self._start()) < self._size:
            try:
                self._request(start, file)
                if self._start() < self._size:
                    raise ConnectionError(f"{file} ended after {self._start():,} of {self._size:,} bytes")
            except (http, ConnectionError) as error:
                failed = 1 if self._start() > start else failed + 1
                if failed > _PATIENCE or _is_final(error):
                    raise
                if self._stop.wait(_PAUSE * min(2 ** (failed - 1), 8)):
                    raise Stopped from None

    def _start(self) -> int:
        """Where to go on: the part's end, or its beginning where it is longer than the whole."""
        end = self._out.seek(0, 2)
        if end > self._size:
            end = self._out.truncate(0)
            self._out.seek(0)
        return end

    def _request(self, start: int, file: str) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        request = get_session().stream("GET", self._url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with request as response:
            if response.status_code >= 400:
                if response.status_code == 416:  # what is here is not the beginning of what is there
                    self._out.truncate(0)
                response.read()
                hf_raise_for_status(response)
            if start and not _continues(response, start):
                self._notices.append(f"the server does not continue {file}: it is fetched from its beginning")
                self._out.truncate(0)
                start = self._out.seek(0)
            self._count.set(start)
            for block in response.iter_bytes():
                if self._stop.is_set():
                    raise Stopped
                self._out.write(block)
                self._out.flush()  # at Ctrl-C this thread dies with what its buffer holds
                start += len(block)
                self._count.set(min(start, self._size))


def _continues(response: Any, start: int) -> bool:
    """Whether this is the rest of the file from `start` on."""
    where = str(response.headers.get("Content-Range", ""))
    return bool(response.status_code == 206) and where.startswith(f"bytes {start}-")


def _is_final(error: Exception) -> bool:
    """Whether asking again is no use: the hub has refused."""
    response = getattr(error, "response", None)
    return response is not None and response.status_code < 500 and response.status_code not in (408, 416, 429)


def _counting_bar(count: Counter, stop: threading.Event) -> Any:
    """A tqdm class that draws nothing: it counts bytes, and ends the download once `stop` is set."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    class CountingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise Stopped
            self.n += n or 0
            count.set(int(self.n))

    return CountingBar


def is_large(file: str) -> bool:
    """Whether it holds weights."""
    return file.endswith(".safetensors")


def _blobs(repo: str) -> Path:
    """Where the hub's cache keeps the content of a model's files."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"


def _part(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.part")


def _remove_old_parts(todo: Plan) -> None:
    """Parts of another version are of no use once this one is complete, unless somebody is at work on them."""
    for part in _blobs(todo.source_id).glob("*.part"):
        with suppress(OSError), part.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()
