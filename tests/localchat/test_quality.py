"""What a report says of kinds of matrices, and what asks for one in vain."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from localchat import prepare
from localchat.errors import UsageError, UserError
from localchat.quality import Report, errors_by_kind, print_report
from localchat.quantize.report import Quality


def test_errors_by_kind() -> None:
    errors = {"layers.0.mlp.down_proj": 0.1, "layers.10.mlp.down_proj": 0.3, "lm_head": 0.01}
    found = errors_by_kind(errors)
    assert found["mlp.down_proj"] == (pytest.approx(0.2), 0.3, "layers.10.mlp.down_proj")
    assert found["lm_head"] == (0.01, 0.01, "lm_head")


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    quality = Quality(9, float("nan"), 0.1, 0.5, float("inf"), 3.0, {"lm_head": float("nan")})
    print_report(Report(quality, 1, 4.5, 1, 2.0, 512, "here"), as_json=True)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    figures = found["quality"]
    assert figures["kl"] is figures["source_perplexity"] is figures["errors"]["lm_head"] is None
    assert figures["perplexity"] == 3.0 and found["device"] == "here"


def arguments(source: Path, **given: Any) -> argparse.Namespace:
    plain: dict[str, Any] = dict.fromkeys(("output", "group_size", "max_shard_size", "calib", "report"))
    plain |= dict.fromkeys(("overwrite", "offline", "yes", "json", "sym", "min", "uniform"), False)
    plain |= dict.fromkeys(("resume", "stream", "dry_run", "fp16_scales"), False)
    return argparse.Namespace(**{**plain, "source": str(source), "keep": [], "method": "rtn", **given})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"calib": "x"}, "--calib is for --method gptq"),
        ({"json": True}, "--json is how a"),
        ({"report": "", "dry_run": True}, "with its source: --dry-run leaves nothing"),
        ({"report": "", "stream": True}, "with its source: --stream leaves nothing"),
        ({"method": "gptq", "stream": True}, "--stream never has all of it"),
    ],
)
def test_flags_that_do_nothing_are_refused(tmp_path: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        prepare.quantize(arguments(tmp_path, **given))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("nothing", None, "nothing: cannot be read as a UTF-8 text"),
        ("short", "hello", "short: has 5 tokens, which are too few"),
        ("", None, "the model: there is no tokenizer.json"),
        ("tall", "\x7f" * 100, r"source: its tokenizer gives the id \d+, its embedding has 40 rows"),
    ],
)
def test_what_no_report_can_be_made_with_is_said_before_the_conversion(
    scripted: Callable[..., Path], tmp_path: Path, file: str, text: str | None, words: str
) -> None:
    """And not after it, which takes long."""
    source = Path(shutil.copytree(scripted("abc").parent / "source", tmp_path / "source"))
    if not file:
        (source / "tokenizer.json").unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    if file == "tall":
        tensors = load_file(source / "model.safetensors")
        cut = {name: t[:40].clone() if len(t) == 288 and t.dim() == 2 else t for name, t in tensors.items()}
        save_file(cut, source / "model.safetensors")
    given = {"output": str(tmp_path / "out"), "report": str(tmp_path / file) if file else ""}
    with pytest.raises(UserError, match=words):
        prepare.quantize(arguments(source, **given))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_talked_to_is_said_before_the_conversion(
    scripted: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is packed all the same: a tokenizer can be put into the folder later."""
    source = Path(shutil.copytree(scripted("abc").parent / "source", tmp_path / "source"))
    prepare.quantize(arguments(source, output=str(tmp_path / "whole")))
    assert capsys.readouterr().err == ""
    (source / "tokenizer.json").unlink()
    prepare.quantize(arguments(source, output=str(tmp_path / "mute")))
    said = capsys.readouterr().err
    assert "there is no tokenizer.json" in said and said.endswith("`run` will refuse what is packed.\n")
    assert (tmp_path / "mute" / "config.json").exists()
