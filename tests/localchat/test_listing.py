"""`list` and `show`: tables and JSON, without a model, for a packed folder, and for a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat import cli, listing
from localchat.errors import ModelNotFound

Capture = pytest.CaptureFixture[str]


def test_list(capsys: Capture) -> None:
    assert cli.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"name": "smollm2-135m", "path": "", "quantization": ""}.items() <= rows[0].items()
    assert {"qwen3.5-27b", "qwen3.6-27b", "qwen3.8-27b"} < {row["name"] for row in rows}
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["smollm2-135m", "95", "MB", "not", "downloaded"]
    assert "localchat run NAME" in text


def test_show_of_a_name_works_offline(capsys: Capture) -> None:
    assert cli.main(["show", "qwen2.5-27b", "--json", "-c", "1000"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["hub_id"], shown["num_hidden_layers"]) == ("Qwen/Qwen3.5-27B", 64)
    assert "never released" in shown["notice"]
    assert shown["memory"]["context"] == 1000
    assert shown["memory"]["total"] == sum(r["bytes"] for r in shown["memory"]["rows"] if r["in_total"])


def test_show_of_folders(capsys: Capture, scripted: Callable[..., Path]) -> None:
    packed = scripted("abc")
    assert cli.main(["show", str(packed)]) == 0
    text = capsys.readouterr().out
    assert "INT4 groups of 32, symmetric" in text
    assert "largest context that fits" in text
    assert cli.main(["show", str(packed.parent / "source"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == ""


def test_show_of_a_packed_folder_without_its_weights(
    capsys: Capture, scripted: Callable[..., Path], tmp_path: Path
) -> None:
    """As `run` says it."""
    packed = shutil.copytree(scripted("abc"), tmp_path / "packed")
    shards = sorted(packed.glob("*.safetensors"))
    for path in shards:
        path.unlink()
    told = []
    for command in (["show"], ["run", "--no-stdin"]):
        assert cli.main([*command, str(packed), *(["hi"] if command[0] == "run" else [])]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        told.append(said.err)
    assert told[0] == told[1]
    named = f"the file {shards[0].name} is missing although model.safetensors.index.json names it"
    assert told[0] == f"localchat: error: {packed}: {named}; download the model again.\n"
    (packed / "model.safetensors.index.json").unlink()
    assert cli.main(["show", str(packed)]) == 1
    assert "there is no .safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nosuch", "`localchat list` names the models; a hub id is org/name."),
        ("nobody/nothing", "`localchat pull nobody/nothing` downloads a model first."),
        ("qwen3.5-72b", "did you mean"),
    ],
)
def test_show_of_nothing(name: str, hint: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        listing.print_model(name, context=None, as_json=False)
    assert caught.value.hint.startswith(hint)
