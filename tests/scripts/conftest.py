"""Scripts as modules, and a small model whose kernels run in the interpreter."""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from localchat.registry import MODELS, Entry

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """script("roofline"): that file of scripts/ as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        loader = SourceFileLoader(name.removesuffix(".py"), str(SCRIPTS / name))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        if spec is None:
            raise ImportError(name)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, loader.name, module)
        loader.exec_module(module)
        return module

    return load


@pytest.fixture
def tiny_entry() -> Entry:
    """A layer of each kind of a very small Qwen3.5: the interpreter takes its time."""
    return replace(
        MODELS["qwen3.5-27b"], hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=64, full_attention_interval=2, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip


@pytest.fixture
def interpreted(tiny_entry: Entry, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model of it on the table of a card."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the card in this process (-m gpu)")
    import torch

    from localchat.cuda_ops import CudaOps
    from localchat.synthetic import synthetic_model

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
    return synthetic_model(tiny_entry, "cpu", ops=CudaOps(torch.device("cpu")))
