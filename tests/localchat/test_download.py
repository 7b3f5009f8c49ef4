"""Downloads that do not go well: killed, cut, changed, damaged, continued; against a hub on the loopback."""

import fcntl
import hashlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localchat import download as room
from localchat import hub
from localchat.errors import ModelNotFound, UserError
from localchat.registry import MODELS
from localchat.transfer import Fetched, Notice, Plan, Progress

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
REPO, OLD_NAME = "Some/Model", "Some/Older-Name"
FILE = "model.safetensors"
CONFIG = json.dumps(MODELS["qwen3-0.6b"].config_dict()).encode()
WEIGHTS = bytes(range(256)) * 2000


class Hub(ThreadingHTTPServer):
    """A hub as the real one answers, with one repository that has two names.

    ranges: whether a Range is honoured. cut: bytes after which a weight file's connection is dropped, once for each
    entry. held: weight files stop half way while it is set. `got` lists (file, Range) of every GET of a file.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.sent = files, dict(files)  # what it says that it has, and what it sends
        self.sha = "0123456789abcdef0123456789abcdef01234567"
        self.ranges = True
        self.cut: list[int] = []
        self.held = threading.Event()
        self.got: list[tuple[str, str | None]] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def weights_got(self) -> list[str | None]:
        return [asked for file, asked in self.got if file.endswith(".safetensors")]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "/Some/" in path:  # huggingface_hub asks for something of its own besides
            self.server.tokens.add(self.headers.get("Authorization"))
        if OLD_NAME in path:
            self._answer(307, b"", {"Location": path.replace(OLD_NAME, REPO)})
        elif path.startswith(f"/api/models/{REPO}"):
            self._answer(200, json.dumps({"id": REPO, "sha": self.server.sha, "siblings": self._siblings()}).encode())
        elif (name := path.rpartition("/")[2]) in self.server.files:
            self._file(name)
        else:
            self._answer(404, b"")

    def _siblings(self) -> list[dict[str, Any]]:
        return [
            {"rfilename": name, "size": len(body), "blobId": "b"}
            | ({"lfs": {"size": len(body), "sha256": _sha256(body), "pointerSize": 1}} if name == FILE else {})
            for name, body in self.server.files.items()
        ]

    def _file(self, name: str) -> None:
        body, asked = self.server.sent[name], self.headers.get("Range")
        headers = {"ETag": f'"{_sha256(self.server.files[name])}"', "X-Repo-Commit": self.server.sha}
        if self.command == "HEAD":
            self._answer(200, body, headers)
            return
        self.server.got.append((name, asked))
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and self.server.ranges else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._answer(206 if start else 200, body[start:], headers, is_weight=name.endswith(".safetensors"))

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, is_weight: bool = False) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_weight and self.server.cut:
            self.wfile.write(body[: self.server.cut.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(body[: len(body) // 2])
        while is_weight and self.server.held.is_set():
            time.sleep(0.01)
        self.wfile.write(body[len(body) // 2 :])


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The loopback hub, used by huggingface_hub as HF_ENDPOINT and HF_HOME would make it (it reads them on import)."""
    from huggingface_hub import constants

    with Hub({"config.json": CONFIG, "tokenizer.json": b"{}", FILE: WEIGHTS}) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("LOCALCHAT_CACHE", str(tmp_path / "cache"))
        yield running
        running.held.clear()
        running.shutdown()


def parts(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("hub/*/blobs/*.part"))


def sizes(tmp_path: Path) -> list[int]:
    return [part.stat().st_size for part in parts(tmp_path)]


def fetched(records: Iterator[Any]) -> tuple[bytes, list[str]]:
    """What the weights are in the end, and the notices on the way."""
    seen = list(records)
    assert isinstance(seen[-1], Fetched)
    return (seen[-1].path / FILE).read_bytes(), [record.text for record in seen if isinstance(record, Notice)]


def interrupted(server: Hub) -> int:
    """Begin a download and leave it half way: how many bytes of the weights are here."""
    server.held.set()
    records = hub.fetch(REPO)
    half = len(CONFIG) + 2 + len(WEIGHTS) // 2
    assert any(isinstance(record, Progress) and record.done_bytes >= half for record in records)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "download")
    records.close()
    server.held.clear()
    thread.join(60)
    server.got.clear()
    return len(WEIGHTS) // 2


def test_a_killed_pull_goes_on_where_it_was(
    server: Hub, scripted: Callable[..., Path], environment: dict[str, str], tmp_path: Path
) -> None:
    """kill -9 in the middle of the weights; HF_ENDPOINT, HF_HOME and HF_TOKEN come from the environment here."""
    source = scripted("abc").parent / "source"
    server.files = server.sent = {file.name: file.read_bytes() for file in source.iterdir()}
    size = len(server.files[FILE])
    variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret"}
    words = [sys.executable, "-m", "localchat", "pull", REPO]
    server.held.set()
    with subprocess.Popen(words, env=environment | variables, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 60
        while sum(sizes(tmp_path)) < size // 2 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert sizes(tmp_path) == [size // 2]
    assert server.tokens == {"Bearer hf_secret"}
    server.held.clear()
    server.got.clear()
    done = subprocess.run(words, env=environment | variables, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"is here already" in done.stderr
    assert server.weights_got() == [f"bytes={size // 2}-"]
    assert parts(tmp_path) == []
    offline = environment | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    words = [*words[:3], "run", REPO, "hi"]
    assert subprocess.run(words, env=offline, capture_output=True, check=False, input=b"").stdout == b"abc\n"


def test_few_bytes_are_in_the_file_too(server: Hub, tmp_path: Path) -> None:
    """Ctrl-C ends the process, and with it what a buffer of the download holds."""
    server.files[FILE] = server.sent[FILE] = bytes(200)
    server.held.set()
    records = hub.fetch(REPO)
    assert any(isinstance(record, Progress) and record.done_bytes >= len(CONFIG) + 2 + 100 for record in records)
    assert sizes(tmp_path) == [100]
    records.close()


def test_only_the_rest_is_counted_and_asked_for(server: Hub) -> None:
    half = interrupted(server)
    plan, first, *rest = hub.fetch(REPO)
    assert isinstance(plan, Plan)
    assert plan.missing_bytes == len(WEIGHTS) - half
    assert isinstance(first, Progress)
    assert first.done_bytes >= plan.total_bytes - plan.missing_bytes  # or the rate would begin with a leap
    assert isinstance(rest[-1], Fetched)
    assert (rest[-1].path / FILE).read_bytes() == WEIGHTS
    assert server.weights_got() == [f"bytes={half}-"]


def test_a_server_that_ignores_the_range(server: Hub) -> None:
    interrupted(server)
    server.ranges = False
    body, notices = fetched(hub.fetch(REPO))
    assert body == WEIGHTS
    assert notices == [f"the server does not continue {FILE}: it is fetched from its beginning"]
    assert len(server.got) == 1


def test_another_version_does_not_continue_this_one(server: Hub, tmp_path: Path) -> None:
    interrupted(server)
    server.files = server.sent = server.files | {FILE: WEIGHTS[::-1]}
    server.sha = "f" * 40
    body, notices = fetched(hub.fetch(REPO))
    assert (body, notices) == (WEIGHTS[::-1], [])
    assert server.weights_got() == [None]
    assert parts(tmp_path) == []


def test_a_part_that_is_damaged_is_fetched_once_more(server: Hub, tmp_path: Path) -> None:
    interrupted(server)
    (part,) = parts(tmp_path)
    part.write_bytes(b"x" * 100)
    body, notices = fetched(hub.fetch(REPO))
    assert (body, notices) == (WEIGHTS, [f"{FILE} arrived damaged: it is fetched once more"])
    assert server.weights_got() == ["bytes=100-", None]


def test_a_part_that_is_too_long_is_begun_anew(server: Hub, tmp_path: Path) -> None:
    interrupted(server)
    (part,) = parts(tmp_path)
    part.write_bytes(WEIGHTS + b"more")
    assert fetched(hub.fetch(REPO)) == (WEIGHTS, [])
    assert server.weights_got() == [None]


def test_what_is_damaged_twice_is_refused(server: Hub, tmp_path: Path) -> None:
    server.sent = server.files | {FILE: b"y" * len(WEIGHTS)}
    with pytest.raises(ModelNotFound, match="arrived damaged twice"):
        list(hub.fetch(REPO))
    assert sizes(tmp_path) == [0]
    assert not list(tmp_path.glob(f"hub/*/snapshots/*/{FILE}"))


def test_a_lost_connection_is_taken_up_again(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PAUSE", 0.01)
    server.cut = [1000, 2000]
    assert fetched(hub.fetch(REPO)) == (WEIGHTS, [])
    assert server.weights_got() == [None, "bytes=1000-", "bytes=3000-"]


def test_a_connection_that_stays_lost(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PAUSE", 0.01)
    server.cut = [1000] + [0] * 20
    with pytest.raises(ModelNotFound, match=r"cannot be reached for Some/Model") as caught:
        list(hub.fetch(REPO))
    assert "goes on from there" in caught.value.hint
    assert sizes(tmp_path) == [1000]
    assert len(server.got) < 12


def test_another_process_on_the_same_file_is_waited_for(server: Hub, tmp_path: Path) -> None:
    interrupted(server)
    (part,) = parts(tmp_path)
    with part.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        records = hub.fetch(REPO)
        notice = next(record for record in records if isinstance(record, Notice))
        assert notice.text == f"another process is downloading {FILE}: waiting for it"
        assert server.got == [("tokenizer.json", None)][: len(server.got)]
    assert fetched(records)[0] == WEIGHTS


def test_several_files_make_one_bar(server: Hub) -> None:
    shards = {f"model-{i}-of-6.safetensors": bytes([i]) * 100_000 for i in range(6)}
    server.files = {name: body for name, body in server.files.items() if name != FILE} | shards
    server.sent = server.files
    plan, *records = hub.fetch(REPO)
    assert isinstance(plan, Plan)
    progress = [record for record in records if isinstance(record, Progress)]
    done = [record.done_bytes for record in progress]
    assert done == sorted(done)
    assert {record.total_bytes for record in progress} == {plan.total_bytes}
    last = records[-1]
    assert isinstance(last, Fetched)
    assert {name: (last.path / name).read_bytes() for name in shards} == shards


def test_the_first_error_ends_all_of_it(server: Hub) -> None:
    names = [f"model-{i}-of-6.safetensors" for i in range(6)]
    server.files = server.files | {name: bytes([i]) * 100_000 for i, name in enumerate(names)}
    server.sent = server.files | {names[2]: b"x" * 100_000}
    with pytest.raises(ModelNotFound, match=names[2]):
        list(hub.fetch(REPO))
    end = time.monotonic() + 30
    while any(thread.name == "download" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_renamed_model_is_said_to_be(server: Hub) -> None:
    body, notices = fetched(hub.fetch(OLD_NAME))
    assert (body, notices) == (WEIGHTS, [f"{OLD_NAME} is called {REPO} on the hub now"])


def test_the_disk_must_hold_the_packed_model_too(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = hub.plan(REPO)
    assert plan.packed_bytes > plan.missing_bytes
    free = plan.packed_bytes + plan.missing_bytes
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free - 1}))
    with pytest.raises(UserError, match="GB free"):
        list(hub.fetch(REPO))
    assert server.weights_got() == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free}))
    assert fetched(hub.fetch(REPO))[0] == WEIGHTS


def test_ctrl_c_during_a_download(
    server: Hub, scripted: Callable[..., Path], terminal: Callable[..., Any], tmp_path: Path
) -> None:
    """One total bar with its rate and the time left; Ctrl-C ends it at once and keeps what has arrived."""
    source = scripted("abc").parent / "source"
    server.files = server.sent = {file.name: file.read_bytes() for file in source.iterdir()}
    server.held.set()
    window = terminal("pull", REPO, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path), columns=100)
    total = sum(len(body) for name, body in server.files.items() if not name.endswith(".md"))
    bar = rf"downloading .*[\d.]+/{total / 1e3:.1f} kB .*(/s|\?) [-\d]+:"
    half = [len(server.files[FILE]) // 2]
    window.wait_for(lambda text: re.search(bar, text) is not None and sizes(tmp_path) == half)
    start = time.monotonic()
    window.send("\x03")
    assert window.end() == 130
    assert time.monotonic() - start < 10  # 2 s on a machine with nothing else to do
    assert window.text.splitlines()[-1] == "localchat: interrupted"
    assert "Traceback" not in window.text
    assert sizes(tmp_path) == half
