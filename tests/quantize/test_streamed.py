"""Models of a hub that are converted while they come, against a hub on the loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat import download as room
from localchat import hub, prepare
from localchat.arguments import parse_command_line
from localchat.config import load_config
from localchat.errors import BadCheckpoint, ModelNotFound, UsageError, UserError
from localchat.quantize.convert import Recipe, convert, default_recipe, recipe_for
from localchat.quantize.streamed import open_streamed
from localchat.shard_feed import AHEAD
from localchat.shards import open_shards
from localchat.streamed_shards import StreamedShards, stream
from localchat.transfer import Notice

Make = Callable[..., Any]
Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]
REPO = "Some/Model"
SHARDS = 9
ROOT = Path(__file__).parents[2]


class Hub(ThreadingHTTPServer):
    """One repository. held: the second half of this file waits. got: (file, Range) of every GET of a weight file.

    sent: what is sent instead of a file's content.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.sent: dict[str, bytes] = {}
        self.held: str | None = None
        self.got: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def show(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.sent = dict(self.files)

    def fetched(self) -> list[str]:
        """The weight files that were asked for from their beginning to their end, without the looks at headers."""
        return [file for file, asked in self.got if asked is None]


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": f, "size": len(b), "blobId": "b"} | _lfs(f, b) for f, b in files.items()]
            self._answer(200, json.dumps({"id": REPO, "sha": "5" * 40, "siblings": siblings}).encode(), {}, "")
        elif name not in files:
            self._answer(404, b"", {}, "")
        else:
            body, asked = self.server.sent[name], self.headers.get("Range")
            headers = {"ETag": f'"{_sha256(files[name])}"', "X-Repo-Commit": "5" * 40}
            if self.command == "GET" and name.endswith(".safetensors"):
                self.server.got.append((name, asked))
            start, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            part = body[int(start) : int(end) + 1 if end else None]
            if asked:
                headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}"
            self._answer(206 if asked else 200, body if self.command == "HEAD" else part, headers, name)

    def _answer(self, status: int, body: bytes, headers: dict[str, str], name: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2])
        whole = not (self.headers.get("Range") or "").startswith("bytes=0-")
        while whole and name and self.server.held == name:
            time.sleep(0.01)
        self.wfile.write(body[len(body) // 2 :])


def _lfs(file: str, body: bytes) -> dict[str, Any]:
    lfs = {"size": len(body), "sha256": _sha256(body), "pointerSize": 1}
    return {"lfs": lfs} if file.endswith(".safetensors") else {}


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
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
        running.held = None
        running.shutdown()


@pytest.fixture
def source(make_hf: Make, server: Hub) -> Path:
    """A checkpoint in nine files, whose tensors lie in the order of their names as the hub's do; the server has it."""
    folder: Path = make_hf("qwen3_5", shards=SHARDS, num_hidden_layers=4, in_order=True)
    server.show(folder)
    return folder


def opened(folder: Path) -> StreamedShards:
    """The model's shards, with the feed's folder set."""
    records = stream(REPO)
    try:
        while True:
            next(records)
    except StopIteration as end:
        shards: StreamedShards = end.value
    shards.feed.folder = folder
    return shards


def streamed(out: Path, recipe: Recipe | None = None) -> Iterator[set[str]]:
    """Converts, and after each step says which weight files are there."""
    folder = out.with_name(out.name + ".partial") / "download"
    shards = opened(folder)
    with shards.feed, open_streamed(shards) as model:
        recipe = recipe or Recipe(32, False)
        for _ in convert(model, out, recipe, resume=True, source_id=REPO, revision="5" * 40):
            yield {path.name.removesuffix(".part") for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, bytes]:
    with open_shards(folder) as shards:
        return {name: bytes(shards.get(name).reshape(-1).view(torch.uint8).numpy()) for name in shards.names}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_tensors_as_of_the_whole_folder(source: Path, server: Hub, tmp_path: Path) -> None:
    list(convert(source, tmp_path / "wanted", Recipe(32, False), source_id=REPO, revision="5" * 40))
    present = list(streamed(tmp_path / "out"))
    assert tensors(tmp_path / "out") == tensors(tmp_path / "wanted")
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("out", "wanted")]
    assert configs[0] == configs[1]
    assert sorted(server.fetched()) == sorted(f for f in server.files if f.endswith(".safetensors"))  # each once
    assert max(map(len, present)) <= 3 + AHEAD  # files are so small here that a layer lies in three
    assert {path.name for path in tmp_path.iterdir()} == {"source", "hub", "out", "wanted"}
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    assert not (tmp_path / "out" / "download").exists()


def test_files_come_no_sooner_than_they_may(source: Path, server: Hub, tmp_path: Path) -> None:
    names = sorted(file for file in server.files if file.endswith(".safetensors"))
    steps = streamed(tmp_path / "out")
    next(steps)
    time.sleep(0.3)
    assert set(server.fetched()) < set(names)
    last = max(map(names.index, server.fetched()))
    assert last < SHARDS - 1
    list(steps)


def test_what_they_take_on_the_disk_is_known_before(
    source: Path, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("localchat.quantize.convert.check_disk_space", lambda _, wanted: asked.append(wanted))
    list(convert(source, tmp_path / "wanted", Recipe(32, False)))
    present = list(streamed(tmp_path / "out"))
    sizes = {file: len(body) for file, body in server.files.items()}
    most = max(sum(sizes[file] for file in files) for files in present)
    allowed = asked[1] - asked[0]
    assert most <= allowed < sum(size for file, size in sizes.items() if file.endswith(".safetensors"))


def test_a_file_of_the_hubs_cache_is_used_and_stays(source: Path, server: Hub, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    name = sorted(file for file in server.files if file.endswith(".safetensors"))[1]
    here = Path(hf_hub_download(REPO, name, revision="5" * 40))
    server.got.clear()
    list(streamed(tmp_path / "out"))
    assert name not in [file for file, _ in server.got]
    assert here.read_bytes() == server.files[name]


def test_closed_and_continued(source: Path, server: Hub, tmp_path: Path) -> None:
    """What is converted is neither fetched nor converted again, and the bytes are those of one run."""
    list(streamed(tmp_path / "wanted"))
    steps = streamed(tmp_path / "out")
    for _ in range(8):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    present = {path.name for path in (tmp_path / "out.partial" / "download").glob("*.safetensors")}
    assert present
    server.got.clear()
    list(streamed(tmp_path / "out"))
    assert content(tmp_path / "out") == content(tmp_path / "wanted")
    assert not present & set(server.fetched())
    assert len(server.fetched()) < SHARDS


def test_the_command_killed_in_the_middle(source: Path, server: Hub, tmp_path: Path) -> None:
    """kill -9 while a file is half here; the next run goes on with that half."""
    server.held = name = sorted(file for file in server.files if file.endswith(".safetensors"))[4]
    variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environment = os.environ | variables
    environment.pop("HF_HUB_OFFLINE", None)
    words = [sys.executable, "-m", "localchat", "quantize", REPO, "--stream", "-y", "-o"]
    part = tmp_path / "out.partial" / "download" / f"{name}.part"
    with subprocess.Popen([*words, str(tmp_path / "out")], env=environment, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 100
        while not (part.is_file() and part.stat().st_size == len(server.files[name]) // 2):
            assert time.monotonic() < end, "it has not come so far"
            time.sleep(0.01)
        process.kill()
    server.held = None
    server.got.clear()
    for out in ("out", "wanted"):
        done = subprocess.run(
            [*words, str(tmp_path / out)], env=environment, capture_output=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
        if out == "out":
            assert (name, f"bytes={len(server.files[name]) // 2}-") in server.got
            assert len(server.fetched()) < SHARDS
            assert b"converting Some/Model while it comes" in done.stderr
    assert content(tmp_path / "out") == content(tmp_path / "wanted")


def test_a_hub_that_fails_in_the_middle(
    source: Path, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence; and when it is well again the conversion goes on."""
    monkeypatch.setattr(room, "_PAUSE", 0.01)
    list(streamed(tmp_path / "wanted"))
    name = sorted(file for file in server.files if file.endswith(".safetensors"))[5]
    steps = streamed(tmp_path / "out")
    next(steps)
    server.sent[name] = b"x" * len(server.files[name])
    with pytest.raises(ModelNotFound, match=f"{name} arrived damaged twice"):
        list(steps)
    server.sent = dict(server.files)
    list(streamed(tmp_path / "out"))
    assert content(tmp_path / "out") == content(tmp_path / "wanted")


def test_a_disk_that_is_full_in_the_middle(
    source: Path, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("localchat.download._Stream.run", full)
    with pytest.raises(UserError, match=r"could not be saved to .*out\.partial/download: No space left"):
        list(streamed(tmp_path / "out"))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\xff" * 8, "a header of"),
        (b"\x02\0\0\0\0\0\0\0[]", "no object"),
        (b"\x04\0\0\0\0\0\0\0{,,}", "not a safetensors file"),
        (b'\x09\0\0\0\0\0\0\0{"a": 11}', "has no shape"),
    ],
)
def test_a_beginning_that_is_damaged(source: Path, server: Hub, tmp_path: Path, header: bytes, words: str) -> None:
    name = sorted(file for file in server.files if file.endswith(".safetensors"))[2]
    server.sent[name] = header + server.files[name][len(header) :]
    with pytest.raises(BadCheckpoint, match=words):
        list(streamed(tmp_path / "out"))
    assert not (tmp_path / "out.partial").exists()


def test_a_header_longer_than_the_first_look(
    source: Path, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.shard_feed._FIRST", 20)
    list(convert(source, tmp_path / "wanted", Recipe(32, False)))
    list(streamed(tmp_path / "out"))
    assert tensors(tmp_path / "out") == tensors(tmp_path / "wanted")


def test_a_file_that_holds_something_else_than_its_beginning_said(source: Path, server: Hub, tmp_path: Path) -> None:
    names = sorted(file for file in server.files if file.endswith(".safetensors"))
    shards = opened(tmp_path / "download")
    server.files[names[0]] = server.sent[names[0]] = server.files[names[1]]
    shards.feed._todo = shards.feed._todo.__class__(
        REPO, "5" * 40, shards.feed._todo.files, 0, {names[0]: _sha256(server.files[names[1]])}
    )
    with shards.feed, open_streamed(shards) as model:
        model.arrival.keep(model.shapes)  # type: ignore[union-attr]
        name = next(name for name in model.shapes if {file.name for file in model.files_of(name)} == {names[0]})
        with pytest.raises(BadCheckpoint, match="holds other tensors than its beginning said"):
            model.read(name)


def test_one_file_without_an_index(make_hf: Make, server: Hub, tmp_path: Path) -> None:
    server.show(make_hf(name="single"))
    list(convert(tmp_path / "single", tmp_path / "wanted", Recipe(32, False)))
    list(streamed(tmp_path / "out"))
    assert tensors(tmp_path / "out") == tensors(tmp_path / "wanted")


def random_words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns)).to(torch.int32)


def gptq(n: int, k: int, order: torch.Tensor | None = None) -> Quantised:
    """The tensors of a matrix, with the bias of zeros that GPTQ's tools write beside each; its weights are not used."""
    groups = torch.arange(k) // 32
    kinds = {
        "qweight": random_words(k // 8, n),
        "qzeros": random_words(k // 32, n // 8),
        "scales": (torch.rand(k // 32, n) / 64 + 0.001).half(),
        "g_idx": (groups if order is None else groups[order[:k]]).to(torch.int32),
        "bias": torch.zeros(n, dtype=torch.float16),
    }
    return kinds, torch.zeros(n, k)


def act_order(n: int, k: int) -> Quantised:
    return gptq(n, k, torch.randperm(k))


def awq(n: int, k: int) -> Quantised:
    scales = (torch.rand(k // 32, n) / 64 + 0.001).half()
    return {"qweight": random_words(k, n // 8), "qzeros": random_words(k // 32, n // 8), "scales": scales}, torch.zeros(
        n, k
    )


def fp8(n: int, k: int) -> Quantised:
    return {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(1, 1)}, torch.zeros(
        n, k
    )


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
QUANTISED = {
    "gptq": (gptq, GPTQ, "are kept, nothing is rounded again"),
    "act-order": (act_order, GPTQ | {"desc_act": True}, "with act-order; its groups do not fit ours"),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32}, "are kept, nothing is rounded again"),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "to FP8, so it is rounded a second time"),
}


@pytest.mark.parametrize("case", QUANTISED)
def test_what_another_tool_has_quantised(
    make_quantised: Make, server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """The recipe, the notice and the tensors are those of the whole folder, also where a matrix lies in two files."""
    torch.manual_seed(0)
    matrix, words, lost = QUANTISED[case]
    folder, _ = make_quantised(matrix, words, shards=SHARDS, num_hidden_layers=4, in_order=True)
    server.show(folder)
    recipe = default_recipe(folder)
    assert recipe_for(load_config(folder)) == recipe
    list(convert(folder, tmp_path / "wanted", recipe))
    assert prepare.quantize(parse_command_line(["quantize", REPO, "--stream", "-o", str(tmp_path / "out")]))
    assert tensors(tmp_path / "out") == tensors(tmp_path / "wanted")
    assert sorted(server.fetched()) == sorted(f for f in server.files if f.endswith(".safetensors"))  # each once
    assert lost in capsys.readouterr().err
    shards = opened(tmp_path / "download")
    with shards.feed, open_streamed(shards) as model:
        split = [name for name in model.shapes if len(model.files_of(name)) > 1]
        assert split
        for name in split:
            last = max(shards.feed.files.index(file.name) for file in model.files_of(name))
            assert model.arrival is not None and model.arrival.rank(name) == last
            model.arrival.keep([name])
            assert set(shards.feed._wanted) == {file.name for file in model.files_of(name)}
        assert default_recipe(model) == recipe


def test_a_bias_that_nobody_expects(make_quantised: Make, server: Hub, tmp_path: Path) -> None:
    """Of zeros it is left out; it is seen when it is here that it is not."""

    def with_bias(n: int, k: int) -> Quantised:
        tensors, weight = gptq(n, k)
        return {**tensors, "bias": torch.ones(n, dtype=torch.float16)}, weight

    folder, _ = make_quantised(with_bias, GPTQ, only=".1.mlp.up_proj", shards=SHARDS, in_order=True)
    server.show(folder)
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.up_proj\.bias is unexpected"):
        list(streamed(tmp_path / "out"))
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.up_proj\.bias is unexpected"):
        list(convert(folder, tmp_path / "out", Recipe(32, False)))


def test_an_index_that_names_a_file_that_is_not_there(source: Path, server: Hub, tmp_path: Path) -> None:
    del server.files[sorted(file for file in server.files if file.endswith(".safetensors"))[3]]
    with pytest.raises(BadCheckpoint, match="is missing although the index names it"):
        list(streamed(tmp_path / "out"))


@pytest.mark.parametrize("words", [["./source", "--stream"], [REPO, "--stream", "--offline"]])
def test_only_for_the_hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--stream downloads a model of the hub"):
        prepare.quantize(parse_command_line(["quantize", *words]))


def test_what_comes_cannot_be_calibrated(source: Path, server: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--stream never has all of it"):
        prepare.quantize(parse_command_line(["quantize", REPO, "--stream", "--method", "gptq"]))
    assert server.got == []
    with pytest.raises(UsageError, match="whole model, which is not here yet"):
        list(streamed(tmp_path / "out", Recipe(32, False, method="gptq")))
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("flags", [["--stream"], [], ["--dry-run"]])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised by bitsandbytes"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "mixture-of-experts models are not supported"),
    ],
)
def test_what_is_not_read_is_refused_before_its_weights_come(
    source: Path, server: Hub, tmp_path: Path, flags: list[str], keys: dict[str, Any], words: str
) -> None:
    config = json.loads(server.files["config.json"])
    server.files["config.json"] = server.sent["config.json"] = json.dumps({**config, **keys}).encode()
    with pytest.raises(BadCheckpoint, match=words):
        prepare.quantize(parse_command_line(["quantize", REPO, "-o", str(tmp_path / "out"), *flags]))
    assert server.fetched() == []
    assert not list(tmp_path.glob("out*"))


def test_into_the_users_cache(source: Path, server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare.quantize(parse_command_line(["quantize", REPO, "--stream"]))
    assert folder is not None
    assert folder.parent == tmp_path / "cache" / "packed"
    assert (folder / "config.json").is_file()
    assert "converting Some/Model while it comes" in capsys.readouterr().err


def test_the_plan_needs_no_weights(source: Path, server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.quantize(parse_command_line(["quantize", REPO, "--dry-run"])) is None
    assert "layers.3.self_attn.qkv_proj" in capsys.readouterr().out
    assert server.got == []


def test_the_plan_asks_nobody_offline(
    source: Path, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", REPO, "--dry-run", "--offline"]
    asked = hub.plan
    monkeypatch.setattr(hub, "plan", lambda _: pytest.fail("the hub was asked"))
    with pytest.raises(ModelNotFound, match="--offline forbids"):
        prepare.quantize(parse_command_line(words))
    monkeypatch.setattr(hub, "plan", asked)
    prepare.quantize(parse_command_line(["quantize", REPO, "-o", str(tmp_path / "out")]))
    monkeypatch.setattr(hub, "plan", lambda _: pytest.fail("the hub was asked"))
    assert prepare.quantize(parse_command_line(words)) is None
    assert "layers.3.self_attn.qkv_proj" in capsys.readouterr().out


def test_another_name_is_said(source: Path, server: Hub) -> None:
    records = stream("some/MODEL")
    with pytest.raises(ModelNotFound):
        list(records)
    assert not any(isinstance(record, Notice) for record in stream(REPO))
