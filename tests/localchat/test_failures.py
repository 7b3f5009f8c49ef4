"""What is said when memory runs out: whose, and the numbers."""

import pytest
import torch

from localchat import cli, synthetic
from localchat.failures import failure_of

ASKED = "CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 22.35 GiB."


def test_a_full_card_is_named_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30_000_000_000, 48_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 22_900_000_000)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.5)
    plain = failure_of(RuntimeError("CUDA error: out of memory"))
    assert plain.sentence.startswith("the card's memory ran out: this process holds 22.9 GB")
    failure = failure_of(torch.OutOfMemoryError(ASKED))
    assert failure.sentence == (
        "the card's memory ran out: 3.8 GB more were asked for, this process holds 22.9 GB, "
        "and 1.1 GB of 24.0 GB are free."
    )
    assert failure.exit_code == 4
    assert "--ctx" in failure.hint


def test_a_hint_names_flags_of_the_command_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(synthetic, "fill_linear", full)
    assert cli.main(["bench", "smollm2-135m", "--synthetic", "--gpu", "cpu"]) == 4
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint == "fewer tokens (-p, -n, --prompt, --depth) or a smaller model need less."
    assert failure_of(MemoryError(), "quantize").hint == "a smaller model needs less."


def test_the_machine_s_own_memory() -> None:
    failure = failure_of(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert failure.exit_code == 4
    assert failure.sentence.startswith("memory ran out: this process holds ")
