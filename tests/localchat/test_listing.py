"""`list` and `show`: tables and JSON, without a model, for a packed folder, and for a checkpoint."""

import json
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


def test_show_of_nothing() -> None:
    with pytest.raises(ModelNotFound):
        listing.print_model("nobody/nothing", context=None, as_json=False)
