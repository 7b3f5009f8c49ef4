"""The random folder is one that loads, and is there whole or not at all."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers

from localchat.checkpoint import load_model
from localchat.config import load_config
from localchat.ops import ReferenceOps
from localchat.registry import MODELS, Entry

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_random_packed.py"
TEMPLATE = Path(__file__).parents[1] / "data" / "smollm2_chat_template.jinja"
Run = Callable[..., str]


@pytest.fixture
def run(script: Callable[[str], ModuleType], tiny_entry: Entry, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(OUT, TOKENIZER): the script, for a model of 64 ids; returns the sentence that it fails with, or ""."""
    module = script("make_random_packed.py")
    monkeypatch.setitem(MODELS, "qwen3.5-27b", tiny_entry)

    def main(out: Path, tokenizer: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["script", "qwen3.5-27b", str(out), "--tokenizer", str(tokenizer)])
        try:
            module.main()
        except SystemExit as exit_:
            return str(exit_.code)
        return ""

    return main


def tokenizer_of(folder: Path, ids: int) -> Path:
    folder.mkdir()
    vocabulary = {f"w{i}": i for i in range(ids)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    backend.save(str(folder / "tokenizer.json"))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


def test_it_loads_and_is_not_overwritten(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "smollm2-135m", tmp_path / "packed"]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "smollm2-135m's shapes" in first.stdout
    model = load_model(tmp_path / "packed", ops=ReferenceOps())
    assert model.config.num_hidden_layers == 30
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "exists already" in again.stderr


def test_the_tokenizer_is_taken_along(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert run(out, tokenizer_of(tmp_path / "tokenizer", 64)) == ""
    assert load_config(out).vocab_size == 64
    assert {"tokenizer.json", "chat_template.jinja"} < {path.name for path in out.iterdir()}
    assert list(out.parent.iterdir()) == [out]


def test_a_tokenizer_that_cannot_be_used_is_refused_first(run: Run, tmp_path: Path) -> None:
    nowhere, large = tmp_path / "nowhere", tokenizer_of(tmp_path / "large", 65)
    without = tokenizer_of(tmp_path / "without", 64)
    (without / "chat_template.jinja").unlink()
    said = f"make_random_packed.py: {nowhere}: there is no tokenizer.json, so this is not a complete model folder."
    assert run(tmp_path / "out", nowhere) == said
    assert run(tmp_path / "out", large) == (
        f"make_random_packed.py: {large}: the tokenizer has 65 ids, and qwen3.5-27b has room for 64; "
        "take the tokenizer of a model with as many or fewer."
    )
    assert "template" in run(tmp_path / "out", without)
    assert set(tmp_path.iterdir()) == {large, without}


def test_a_run_that_is_cut_leaves_no_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, tokenizer = tmp_path / "out", tokenizer_of(tmp_path / "tokenizer", 64)

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("localchat.quantize.writer.ShardWriter.finish", cut)
        with pytest.raises(KeyboardInterrupt):
            run(out, tokenizer)
    assert list(tmp_path.iterdir()) == [tokenizer]
    (tmp_path / "out.partial").mkdir()  # of a run that was killed
    (tmp_path / "out.partial" / "config.json").write_text("{}")
    assert run(out, tokenizer) == ""
    assert set(tmp_path.iterdir()) == {out, tokenizer}
