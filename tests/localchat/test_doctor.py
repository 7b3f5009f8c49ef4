"""`doctor` on machines that lack one thing or another: it never falls over, and says what to do."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localchat import device, doctor, nvidia, tuning
from localchat.errors import UserError
from localchat.ledger import CUDA_CONTEXT

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
CARD = nvidia.Card(0, "GPU-ab12", "RTX 4090", "570.86", 24 << 30, 1 << 30)


def without(module: str, environment: dict[str, str]) -> dict[str, Any]:
    """What `doctor --json` says, as a process in which `module` cannot be imported, and its exit code."""
    program = (
        f"import sys\nsys.modules[{module!r}] = None\nfrom localchat.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, "doctor", "--json"]
    done = subprocess.run(words, env=environment | NOWHERE, capture_output=True, timeout=120, check=False)
    assert done.stderr == b""
    return {"code": done.returncode, **json.loads(done.stdout)}


def of(name: str, found: list[Any]) -> Any:
    return next(finding for finding in found if finding["name"] == name)


def test_a_machine_without_card_driver_and_network(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("doctor", PATH=str(tmp_path), **NOWHERE)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert b"\x1b" not in done.stdout
    assert text.startswith("ok   localchat  ")
    assert "there is no nvidia-smi" in text
    assert "warn hub        http://127.0.0.1:9 cannot be reached" in text
    assert "agrees with its reference" in text
    assert text.endswith("\na model can run here\n")


def test_without_triton(environment: dict[str, str]) -> None:
    said = without("triton", environment)
    assert (said["code"], said["can_run"]) == (0, True)
    assert of("triton", said["findings"])["text"].startswith("is not installed")


def test_without_torch(environment: dict[str, str]) -> None:
    said = without("torch", environment)
    assert (said["code"], said["can_run"]) == (1, False)
    assert of("torch", said["findings"])["status"] == "bad"
    assert "pip install" in of("torch", said["findings"])["fix"]
    assert of("disk", said["findings"])["status"] == "ok"
    assert not [finding for finding in said["findings"] if finding["name"] in ("kernels", "models")]


def test_a_cache_that_cannot_be_written(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("doctor", "--json", LOCALCHAT_CACHE=str(tmp_path / "file" / "cache"), **NOWHERE)
    assert done.returncode == 1
    assert of("disk", json.loads(done.stdout)["findings"])["fix"] == "set LOCALCHAT_CACHE to a folder of yours"


def test_offline_is_said(command: Callable[..., Any]) -> None:
    done = command("doctor", "--json", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in of("hub", json.loads(done.stdout)["findings"])["text"]


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_space", lambda folder: 10**8)
    for finding in doctor._disk():
        assert (finding.status, finding.text[:10]) == ("warn", "100 MB fre")
        assert "another disk" in finding.fix


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with 23 of 24 GB taken."""
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda index=0: (1_000_000_000, 24_000_000_000),
        "get_device_name": lambda index=0: "RTX 4090",
        "get_device_capability": lambda index: (8, 9),
        "get_device_properties": lambda index: SimpleNamespace(uuid="ab12"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def test_who_uses_the_card(card: None) -> None:
    users = (nvidia.Process("GPU-ab12", 7, "/opt/ga\x1b[2Jme", 5_000_000_000), nvidia.Process("GPU-other", 8, "x", 1))
    found = list(doctor._guarded("card", lambda: doctor._cards(nvidia.Report((CARD,), users))))
    assert [f.text for f in found] == [
        "0: RTX 4090, compute capability 8.9, 24.0 GB",
        "1.0 GB of 24.0 GB free; used by ga^[[2Jme (process 7) 5.0 GB",
    ]
    assert (found[1].status, found[1].fix) == ("warn", "close what else uses the card")
    (_, alone) = doctor._cards(nvidia.Report())
    used = (23_000_000_000 - CUDA_CONTEXT) / 1e9
    assert alone.text.endswith(f"used {used:.1f} GB by processes that are not listed")


def test_a_card_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (finding,) = doctor._cards(nvidia.Report((CARD,)))
    assert "torch is for the processor only" in finding.text
    assert "CUDA" in finding.fix
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (finding,) = doctor._cards(nvidia.Report((CARD,)))
    assert "torch does not see it" in finding.text
    assert "update the driver" in finding.fix


def test_a_card_that_cannot_run_the_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> str:
        raise UserError("Card is there, but Triton cannot compile for it (no C compiler).", "--gpu cpu runs.")

    monkeypatch.setattr(device, "choose_device", refuse)
    monkeypatch.setattr(doctor, "_hub", lambda: iter(()))
    assert doctor.print_findings(as_json=False) == 1
    text = capsys.readouterr().out
    assert "bad  kernels    Card is there, but Triton cannot compile" in text
    assert "fix: install a C compiler" in text
    assert text.endswith("no model can run here before what is bad is mended\n")


def test_where_a_cards_settings_come_from(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known, measured here, and neither; nothing is measured by looking."""
    origins = iter(["measured 2026-12-01 in 6 s, kept in /x", ""])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(tuning, "origin", lambda device: next(origins))
    assert [(finding.status, finding.text) for finding in doctor._settings()] == [
        ("ok", "0: measured 2026-12-01 in 6 s, kept in /x"),
        ("ok", "1: not measured on this card yet: the first `run` does it, in some ten seconds"),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(doctor._settings()) == []


def test_where_compiled_kernels_are(command: Callable[..., Any], environment: dict[str, str], tmp_path: Path) -> None:
    """In the cache, unless the user says otherwise."""
    (tmp_path / "kernel.cubin").write_bytes(b"x" * 3_000_000)
    for variables, folder, size in (
        ({"TRITON_CACHE_DIR": ""}, f"{environment['HOME']}/.cache/localchat/triton", "0 MB"),
        ({"TRITON_CACHE_DIR": str(tmp_path)}, str(tmp_path), "3 MB"),
    ):
        said = json.loads(command("doctor", "--json", **variables, **NOWHERE).stdout)
        assert of("triton", said["findings"])["text"].endswith(f"; {size} of compiled kernels in {folder}")
    said = json.loads(command("doctor", "--json", TRITON_CACHE_DIR="", TRITON_HOME=str(tmp_path), **NOWHERE).stdout)
    assert "compiled" not in of("triton", said["findings"])["text"]


def test_a_wrong_product_of_the_processor_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._processor_error() < 0.02
    monkeypatch.setattr(doctor, "_processor_error", lambda: 0.5)
    (finding,) = doctor._kernels()
    assert finding.status == "bad"
    assert "50% off" in finding.text


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Iterator[doctor.Finding]:
        raise ZeroDivisionError("by \x1b zero")

    monkeypatch.setattr(doctor, "_memory", fail)
    monkeypatch.setattr(doctor, "_hub", lambda: iter(()))
    found = {finding.name: finding for finding in doctor.findings()}
    assert found["memory"].text == "the look at it failed: ZeroDivisionError: by ^[ zero"
    assert (found["memory"].status, found["models"].status) == ("warn", "ok")
    assert [finding.status for finding in doctor._guarded("kernels", fail)] == ["bad"]  # `run` would fail as well


class _Answers(BaseHTTPRequestHandler):
    """Answers everything with the server's `status` and `body`; `late` waits for the test."""

    def do_GET(self) -> None:
        server: Any = self.server
        if "agent" in self.path:  # huggingface_hub asks for something of its own besides
            self.send_error(404)
            return
        server.asked.append((self.path, self.headers.get("Authorization")))
        if server.body == b"late":
            server.end.wait(20)
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from huggingface_hub import constants

    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        running: Any = server
        running.status, running.body, running.asked, running.end = 200, b"[]", [], threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield running
        running.end.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "token", "wanted", "text"),
    [
        (200, b"[]", "", "ok", "without a token"),
        (200, b'{"name": "me"}', "hf_secret", "ok", "with your token"),
        (401, b"{}", "hf_wrong", "warn", "does not accept your token"),
        (503, b"{}", "", "warn", "cannot be reached"),
        (200, b"<html>log in</html>", "", "warn", "does not answer as a model hub does"),
    ],
)
def test_what_the_hub_says(
    hub: Any, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, token: str, wanted: str, text: str
) -> None:
    hub.status, hub.body = status, body
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    (finding,) = doctor._hub()
    assert finding.status == wanted
    assert text in finding.text
    assert bool(finding.fix) == (wanted == "warn")
    assert hub.asked[-1][1] == (f"Bearer {token}" if token else None)
    assert token not in str(finding) or not token


def test_a_hub_that_does_not_answer_is_not_waited_for(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_HUB_SECONDS", 0.2)
    hub.body = b"late"
    start = time.monotonic()
    (finding,) = doctor._hub()
    assert finding.status == "warn"
    assert time.monotonic() - start < 5
