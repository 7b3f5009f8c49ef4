"""The script's checkpoints are what they say, and can be quantised."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from localchat.quantize.convert import convert, default_recipe, open_source
from localchat.quantize.source import check

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny_checkpoint.py"


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", ["--tied"]),
        ("qwen2", ["--shards", "3", "--dtype", "float32"]),
        ("qwen3", []),
        ("qwen3_5", ["--shards", "2"]),
    ],
)
def test_checkpoint(tmp_path: Path, arch: str, options: list[str]) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "tiny"
    command = [sys.executable, str(SCRIPT), "--arch", arch, "--out", str(folder), *options]
    subprocess.run(command, check=True, capture_output=True)
    with open_source(folder) as source:
        check(source)
        config = source.model_config
        assert config.model_type == arch and config.tie_word_embeddings == ("--tied" in options)
        norm = source.read("norm.weight")
        assert norm.dtype == (torch.float32 if "float32" in options or arch == "qwen3_5" else torch.bfloat16)
        assert norm.float().std() > 0.1
        list(convert(source, tmp_path / "out", default_recipe(source)))
    assert len(list(folder.glob("*.safetensors"))) > (1 if "--shards" in options else 0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") == 258
    assert tokenizer.decode(tokenizer.encode("Zoë: 1\n").ids) == "Zoë: 1\n"
