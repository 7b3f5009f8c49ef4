"""Which device is chosen, and how a card that cannot be used is named. The card itself is faked."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
import torch

from localchat import device
from localchat.device import choose_device
from localchat.errors import UsageError, UserError
from localchat.ledger import CUDA_CONTEXT

UUIDS = ("5c3a1d2e-0000", "5c3b0000-0000")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """One card of capability 8.9 with 24 GB; what is asked of it is recorded."""
    asked: dict[str, float] = {}
    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda index: asked.update(index=index),
        "get_device_name": lambda index: "Card",
        "get_device_capability": lambda index: (8, 9),
        "get_device_properties": lambda index: SimpleNamespace(total_memory=24e9, uuid=UUIDS[index]),
        "set_per_process_memory_fraction": lambda fraction, index: asked.update(fraction=fraction),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return asked


def test_without_a_card_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device() == choose_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="torch sees 0 NVIDIA cards"):
        choose_device("0")
    with pytest.raises(UsageError, match="--vram"):
        choose_device("auto", 8)


@pytest.mark.parametrize("command_line", [["run", "hi"], ["bench", "-p", "4", "-n", "2"]])
def test_a_card_that_torch_does_not_see_is_named(
    command: Callable[..., CompletedProcess[bytes]],
    scripted: Callable[..., Path],
    tmp_path: Path,
    command_line: list[str],
) -> None:
    """Once, by `run` and `bench`, and not where the processor was asked for."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $1 in --query-gpu*) echo '0, GPU-ab12, RTX 4090, 570.86, 24564, 1250';; esac\n")
    smi.chmod(0o755)
    hidden = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    name, *rest = command_line
    words = [name, str(scripted("ok")), *rest]
    done = command(*words, **hidden)
    assert done.returncode == 0
    (notice,) = done.stderr.decode().splitlines()
    assert notice.startswith("localchat: the processor is used: RTX 4090 is there, but torch ")
    assert notice.endswith("; `localchat doctor` says what helps")
    chosen = command(*words, "--gpu", "cpu", **hidden)
    assert (chosen.returncode, chosen.stderr) == (0, b"")
    capped = command(*words, "--vram", "8", **hidden)
    assert capped.returncode == 2
    assert b"\nRTX 4090 is there, but torch " in capped.stderr


@pytest.mark.parametrize("command_line", [["run", "hi"], ["bench", "-p", "4", "-n", "2"], ["show"]])
def test_a_limit_that_no_flag_gave_is_for_cards_only(
    command: Callable[..., CompletedProcess[bytes]],
    scripted: Callable[..., Path],
    tmp_path: Path,
    command_line: list[str],
) -> None:
    """A config file is shared by machines with and without a card."""
    config = tmp_path / "localchat" / "config.toml"
    config.parent.mkdir()
    config.write_text("vram = 24\n")
    name, *rest = command_line
    words = [name, str(scripted("ok")), *rest]
    for given in ({"XDG_CONFIG_HOME": str(tmp_path)}, {"LOCALCHAT_VRAM": "24"}):
        done = command(*words, **given, PATH="/nowhere", CUDA_VISIBLE_DEVICES="")
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"CUDA context" not in done.stdout
    refused = command(*words, "--vram", "24", "--gpu", "cpu", CUDA_VISIBLE_DEVICES="")
    assert (refused.returncode, refused.stderr.count(b"--vram limits the memory of a card")) == (2, 1)


def test_a_card_is_taken_and_capped(card: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_check_card", lambda index: None)
    assert choose_device("auto", 12) == "cuda:0"
    assert card == {"index": 0, "fraction": (12e9 - CUDA_CONTEXT) / 24e9}  # both together are what --vram says
    choose_device("auto", 6, vram_asked=False)
    assert card["fraction"] == (6e9 - CUDA_CONTEXT) / 24e9
    for vram, fraction in ((0.5, 0.0), (100, 1.0)):
        choose_device("auto", vram)
        assert card["fraction"] == fraction
    assert choose_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="torch sees 1 NVIDIA card") as caught:
        choose_device("3")
    assert "--gpu cpu" in caught.value.hint


@pytest.mark.parametrize("name", ["GPU-5c3b0000-0000", "GPU-5c3b", "5C3B0000-0000"])
def test_a_card_is_found_by_its_uuid(card: dict[str, float], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(device, "_check_card", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(name) == "cuda:1"
    assert card["index"] == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("GPU-5c3", "is the start of 2 cards' UUIDs"),
        ("GPU-77", "torch sees 2"),
        ("GPU-", "torch sees 2"),
        ("²", "sees"),
    ],
)
def test_a_uuid_that_means_no_single_card(
    card: dict[str, float], monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=sentence) as caught:
        choose_device(name)
    assert "1 (GPU-5c3b0000-0000)" in caught.value.hint


def test_an_old_card_is_named_and_the_processor_offered(
    card: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(UserError, match=r"Card has compute capability 7\.5") as caught:
        choose_device()
    assert "--gpu cpu" in caught.value.hint


def test_a_card_that_triton_cannot_compile_for(card: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*size: int, **options: object) -> None:
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(UserError, match=r"Triton cannot compile for it \(no driver\)"):
        choose_device()
