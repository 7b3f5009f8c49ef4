"""How long a context is taken, and what is offered where a model does not fit."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from localchat import ledger, session
from localchat.config import load_config
from localchat.errors import DoesNotFit

GB = 10**9


@pytest.fixture
def folder(scripted: Callable[..., Path]) -> Path:
    return scripted("ok")


def test_a_card_s_free_memory_counts_and_fixes_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(folder)
    weights = ledger.ledger_of_folder(folder, 0, "cuda").total
    held = 20 * GB
    monkeypatch.setattr(session, "memory_used", lambda device: (held, held + weights - ledger.CUDA_CONTEXT + 1))
    with pytest.raises(DoesNotFit) as caught:
        session.context_length(None, config, folder, "cuda:0")
    first, *others = caught.value.hint.removesuffix(".").split("; ")
    assert first == f"other programs hold {(held - ledger.CUDA_CONTEXT) / GB:.1f} GB of the card: close them"
    assert others == ["--gpu cpu takes the machine's memory"]


def test_the_longest_context_that_fits_is_named_and_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(folder)
    table = ledger.ledger_of_folder(folder, 100, "cpu")
    monkeypatch.setattr(session, "memory_used", lambda device: (0, table.total))
    assert session.context_length(None, config, folder) == 100
    assert session.context_length(100, config, folder) == 100
    with pytest.raises(DoesNotFit) as caught:
        session.context_length(101, config, folder)
    assert caught.value.hint.startswith("--ctx 100 fits")


def test_the_largest_model_that_fits_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"small": 1, "middle": 5, "large": 9}
    models = [SimpleNamespace(alias=name, config=name, max_position_embeddings=100 * sizes[name]) for name in sizes]
    monkeypatch.setattr(session.registry, "MODELS", {model.alias: model for model in models})
    monkeypatch.setattr(ledger, "ledger", lambda name, *_: SimpleNamespace(total=sizes[name]))
    assert session.largest_model(8, 100, "cuda") == "middle"
    assert session.largest_model(0, 100, "cuda") is None
    assert session.largest_model(99, 501, "cuda") == "large"
    assert session.largest_model(8, 501, "cuda") is None  # "middle" would fit, and was not made for so many tokens
