"""The ledger as a table: where rows live, what others hold, what fits, and what was measured after loading."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat import cli, memory_table
from localchat.engine import Engine
from localchat.errors import UsageError
from localchat.ledger import CUDA_CONTEXT, ledger, ledger_of_folder
from localchat.memory_table import Measured, Memory, measure, memory_of, table_rows, table_text
from localchat.registry import MODELS

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
BIG = MODELS["qwen3.5-27b"].config
CARD = Memory("cuda:0", "Some Card", 24_000_000_000, others=3_000_000_000)


def cells(table: list[tuple[str, str, str, str]]) -> dict[str, tuple[str, str, str]]:
    return {name.partition(",")[0]: rest for name, *rest in table for rest in [tuple(rest)]}


def test_rows_on_the_host_and_what_others_hold() -> None:
    table = ledger(BIG, 8192, device="cuda")
    rows = cells(table_rows(table, CARD))
    assert rows["embedding"] == ("host", "1.3 GB", "")
    assert rows["lm_head"] == ("card", "1.3 GB", "")
    assert rows["snapshots"][0] == "host"
    assert rows["other programs"] == ("card", "3.0 GB", "")
    assert rows["memory of Some Card"][1] == "24.0 GB"
    left = 21_000_000_000 - table.total
    assert rows["left"][1] == f"{left / 1e9:.1f} GB"
    assert rows["largest context that fits"][1] == f"{table.largest_context(21_000_000_000):,} tokens"


def test_a_cap_and_what_does_not_fit() -> None:
    table = ledger(BIG, 8192, device="cuda")
    rows = cells(table_rows(table, Memory("cuda:0", "Card", 24_000_000_000, 1_000_000_000, cap=10_000_000_000)))
    assert rows["--vram"][1] == "10.0 GB"
    assert rows["missing"][1] == f"{(table.total - 10_000_000_000) / 1e9:.1f} GB"
    assert rows["largest context that fits"][1] == "none"
    assert "left" not in rows


def test_plain_columns_are_aligned_and_empty_ones_left_out() -> None:
    table = ledger(MODELS["smollm2-135m"].config, 1024)
    memory = Memory("cpu", "this machine", 8_000_000_000)
    lines = table_text(table, memory, for_terminal=False).splitlines()
    assert lines[0].split() == ["computed"]
    assert len({len(line) for line in lines}) == 1
    assert not [line for line in lines if line != line.rstrip()]
    measured = table_text(table, memory, Measured(5_000_000, {"scales": 13_000_000}), for_terminal=False).splitlines()
    assert measured[0].split() == ["computed", "measured"]
    assert re.search(r"^scales +13 MB +13 MB$", "\n".join(measured), re.MULTILINE)
    assert re.search(r"^total +\d+ MB +5 MB$", "\n".join(measured), re.MULTILINE)


@pytest.mark.parametrize(("encoding", "rule"), [("utf-8", "────"), ("ascii", "----")])
def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch, encoding: str, rule: str) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    monkeypatch.setenv("COLUMNS", "60")
    text = table_text(ledger(BIG, 8192, device="cuda"), CARD, for_terminal=True)
    assert rule in text
    assert text.encode(encoding)
    assert max(map(len, text.splitlines())) <= 60
    assert re.search(r"embedding\W+host\W+1\.3 GB", text)


@pytest.mark.parametrize("int8_kv", [False, True])
def test_what_a_loaded_model_takes(scripted: Callable[..., Path], int8_kv: bool) -> None:
    from localchat.checkpoint import load_model

    folder = scripted("abc")
    engine = Engine(load_model(folder), 100, int8_kv=int8_kv)
    table = ledger_of_folder(folder, 100, int8_kv=int8_kv)
    found = measure(engine, Memory("cpu", "this machine", 10**10), before=123)
    computed = {row.name.partition(",")[0]: row.nbytes for row in table.rows}
    assert found.rows["INT4 weights"] == computed["INT4 weights"]
    assert found.rows["KV cache"] == computed["KV cache"] == engine.cache.nbytes
    # The processor's kernel wants a zero beside every scale, and bf16 scales of INT8 rows: more than the files have.
    assert found.rows["scales"] >= computed["scales"]
    assert computed["lm_head"] <= found.rows["lm_head"] <= 1.1 * computed["lm_head"]
    assert found.rows["Python and torch"] == 123
    assert found.total > 50_000_000


def test_states_and_snapshots_are_measured(hybrid: Any) -> None:
    engine = Engine(hybrid, 64, snapshot_budget=1 << 20)
    assert measure(engine, Memory("cpu", "", 1), 0).rows["snapshots"] == 0
    list(engine.prefill([1, 2, 3], snapshot_at=3))
    rows = measure(engine, Memory("cpu", "", 1), 0).rows
    assert rows["recurrent state"] == rows["snapshots"] == engine.cache.snapshot_nbytes > 0


def test_on_a_card_it_is_the_drop_of_free_memory(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_table, "memory_used", lambda device: (9_000_000_000, 24_000_000_000))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 700_000_000)
    engine = Engine(hybrid, 64)
    found = measure(engine, CARD, before=2_000_000_000)
    assert found.total == 7_000_000_000 + CUDA_CONTEXT  # and the CUDA context, which was there before
    assert 600_000_000 < found.rows["workspace"] < 700_000_000 - engine.cache.nbytes


def test_which_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_table, "_may_have_card", lambda: False)
    assert memory_of().device == memory_of("cpu").device == "cpu"
    assert memory_of(vram=16) == Memory("cuda", "a card of 16 GB", 16_000_000_000)
    with pytest.raises(UsageError):
        memory_of("cpu", 16)
    assert memory_of(vram=16, vram_asked=False) == memory_of("cpu", 16, vram_asked=False) == memory_of("cpu")
    monkeypatch.setattr(memory_table, "_may_have_card", lambda: True)
    monkeypatch.setattr("localchat.device.choose_device", lambda *_, **__: "cuda:0")
    monkeypatch.setattr(memory_table, "memory_used", lambda device: (2_000_000_000 + CUDA_CONTEXT, 24_000_000_000))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Some Card")
    found = memory_of("0", 16)
    assert found == Memory("cuda:0", "Some Card", 24_000_000_000, 2_000_000_000, 16_000_000_000)
    assert found.available == 16_000_000_000
    assert memory_of().available == 22_000_000_000


def test_show_says_what_run_would_take(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_table, "_may_have_card", lambda: False)
    monkeypatch.setattr("localchat.ledger.memory_used", lambda: (0, 64 << 30))
    assert cli.main(["show", "qwen3.5-27b", "--vram", "24", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert (memory["device"], memory["context"], memory["available"]) == ("cuda", 32768, 24_000_000_000)
    assert {row["name"] for row in memory["rows"] if row["on_host"]} == {"embedding", "snapshots, at most 27"}
    monkeypatch.setattr("localchat.ledger.memory_used", lambda: (0, 16 << 30))  # an eighth of which is for them
    assert cli.main(["show", "qwen3.5-27b", "--vram", "24", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["memory"]["rows"]
    assert "snapshots, at most 13" in {row["name"] for row in rows}
    assert memory["largest_context"] > 100_000
    assert cli.main(["show", "qwen3.5-27b", "--vram", "16"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"KV cache, 3,\d+ tokens, INT8 +card", text)
    assert re.search(r"^left +\d MB$", text, re.MULTILINE)
    assert "\x1b" not in text


def test_the_chats_table_has_both_columns(terminal: Callable[..., Any], scripted: Callable[..., Path]) -> None:
    window = terminal("run", scripted("abc"), rows=40)
    window.wait_for(lambda text: text.endswith(">>>"))
    window.send("/show memory\r")
    screen = window.wait_for(lambda text: "largest context" in text and text.endswith(">>>"))
    assert re.search(r"computed +measured\n", screen)
    assert "────" in screen
    assert re.search(r"KV cache, 8,192 tokens +(\d+ MB) +\1\n", screen)
    assert re.search(r"total +\d+ MB +\d+ MB", screen)
