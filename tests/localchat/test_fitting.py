"""How long a context is taken, how keys and values are kept, and what is offered where a model does not fit."""

import json
import re
from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import pytest

from localchat import cli, fitting, ledger, memory_table, session
from localchat.config import ModelConfig
from localchat.errors import DoesNotFit, UsageError
from localchat.fitting import Fit, fit, fixes_for
from localchat.ledger import Ledger
from localchat.memory_table import Memory
from localchat.registry import MODELS

GB = 10**9
BIG = MODELS["qwen3.5-27b"].config


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "memory_used", lambda: (0, 64 * GB))


def big(int8_kv: bool, context: int = 1) -> Ledger:
    return ledger.ledger(BIG, context, "cuda", int8_kv=int8_kv)


def big_on_cpu(int8_kv: bool) -> Ledger:
    return ledger.ledger(BIG, 1, "cpu", int8_kv=int8_kv)


def card(size: int, others: int = 0) -> Memory:
    return Memory("cuda:0", "Some Card", size, others)


def test_the_longest_context_that_fits_is_named_and_taken() -> None:
    """Of 8K, which is wanted where nobody says more, down to one token; the wide form as long as it holds that."""
    small = MODELS["smollm2-135m"].config

    def table(int8_kv: bool, context: int = 1) -> Ledger:
        return ledger.ledger(small, context, "cpu", int8_kv=int8_kv)

    def machine(size: int) -> Memory:
        return Memory("cpu", "this machine", size)

    assert fit(table, machine(table(False, 8192).total)) == Fit(8192, int8_kv=False)
    in_int8 = fit(table, machine(table(False, 8192).total - 1))
    assert (in_int8.context, in_int8.int8_kv) == (8192, True)
    assert in_int8.notice == (
        "keys and values are kept as INT8: a context of 8,192 tokens does not fit in fp32; "
        "--kv-cache bf16 has room for 8,191"
    )
    exact = machine(table(True, 100).total)
    assert fit(table, exact).context == 100
    assert fit(table, exact, 100).context == 100
    with pytest.raises(DoesNotFit, match="a context of 101 tokens do not fit") as caught:
        fit(table, exact, 101)
    assert caught.value.hint.startswith("--ctx 100 fits")


def test_int8_where_bf16_has_no_room_for_what_is_wanted() -> None:
    room = card(big(False, 50_000).total)
    assert fit(big, room, 50_000) == Fit(50_000, int8_kv=False)
    longer = fit(big, room, 50_001)
    assert longer.int8_kv and longer.notice.endswith("does not fit in bf16; --kv-cache bf16 has room for 50,000")
    assert fit(big, card(big(True, 1000).total)).notice.endswith(
        "does not fit in bf16; --kv-cache bf16 has room for 507"
    )
    assert fit(big, card(big(True, 1).total)).notice.endswith("a context of 1 token does not fit in bf16")


def test_a_form_that_was_chosen_stays_and_nothing_is_said() -> None:
    room = card(big(False, 50_000).total)
    assert fit(big, room, 50_000, "int8") == Fit(50_000, int8_kv=True)
    assert fit(big, card(big(False, 77).total), None, "bf16") == Fit(77, int8_kv=False)
    assert fit(big, card(big(True, 77).total), None, "int8") == Fit(77, int8_kv=True)
    with pytest.raises(DoesNotFit) as caught:
        fit(big, room, 60_000, "bf16", on_cpu=big_on_cpu)
    assert caught.value.hint == ("--kv-cache int8 fits; --ctx 50000 fits; --gpu cpu takes the machine's memory.")


def test_a_model_without_attention_has_nothing_to_narrow() -> None:
    def table(int8_kv: bool) -> Ledger:
        return Ledger((), 0, 1, 4096, 0)

    assert fit(table, card(GB)) == Fit(4096, int8_kv=False)


def test_a_card_s_free_memory_counts_and_fixes_are_named() -> None:
    others = 20 * GB
    with pytest.raises(DoesNotFit, match=r"do not fit into 12\.0 GB") as caught:
        fit(big, card(32 * GB, others), on_cpu=big_on_cpu)
    needed = f"{ceil(big(True).total / GB * 10) / 10:.1f} GB"
    wanted = ["other programs hold 20.0 GB of the card: close them", "`localchat run qwen3-14b` fits"]
    assert caught.value.hint.removesuffix(".").split("; ") == [*wanted, "--gpu cpu takes the machine's memory"]
    assert fixes_for(big, card(3 * GB), on_cpu=big_on_cpu) == [
        f"`localchat run {fitting.largest_model(3 * GB, 1, 'cuda')}` fits",
        "--gpu cpu takes the machine's memory",
        f"a card with {needed} free holds it",
    ]


def test_the_largest_model_that_fits_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"small": 1, "middle": 5, "large": 9}
    models = [SimpleNamespace(alias=name, config=name, max_position_embeddings=100 * sizes[name]) for name in sizes]
    monkeypatch.setattr(fitting.registry, "MODELS", {model.alias: model for model in models})
    monkeypatch.setattr(ledger, "ledger", lambda name, *_, int8_kv: SimpleNamespace(total=sizes[name]))
    assert fitting.largest_model(8, 100, "cuda") == "middle"
    assert fitting.largest_model(0, 100, "cuda") is None
    assert fitting.largest_model(99, 501, "cuda") == "large"
    assert fitting.largest_model(8, 501, "cuda") is None  # "middle" would fit, and was not made for so many tokens


def test_run_takes_it_and_tells_who_chose(
    scripted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's cache, the banner, /show parameters and /show memory agree."""
    folder = scripted("ok")
    tight = ledger.ledger_of_folder(folder, 50, "cpu", int8_kv=True).total

    def opened(*flags: str) -> session.Opened:
        from localchat import settings
        from localchat.arguments import parse_command_line

        args = parse_command_line(["run", str(folder), *flags])
        settings.complete(args)
        return session.open_chat(folder, args)

    monkeypatch.setattr(session, "memory_on", lambda *_: Memory("cpu", "this machine", tight))
    narrow = opened()
    assert narrow.chat.engine.cache.int8 and narrow.chat.engine.max_length == 50
    assert "context 50 in INT8" in narrow.banner
    assert ("kv_cache", "int8", "what fits") in narrow.about.fixed
    assert not isinstance(narrow.about.memory, str)
    assert re.search(r"^KV cache, 50 tokens, INT8 +(\d+ MB) +\1$", narrow.about.memory(), re.MULTILINE)
    assert "keys and values are kept as INT8: a context of 50 tokens does not fit in fp32" in capsys.readouterr().err
    with pytest.raises(DoesNotFit, match="a context of 51 tokens"):
        opened("--ctx", "51")
    with pytest.raises(UsageError, match="--ctx 70,000 is more than the 65,536 tokens"):
        opened("--ctx", "70000")
    monkeypatch.undo()
    assert ("kv_cache", "fp32", "built-in") in opened("--ctx", "60").about.fixed
    chosen = opened("--ctx", "60", "--kv-cache", "int8")
    assert ("kv_cache", "int8", "flag") in chosen.about.fixed
    assert chosen.chat.engine.cache.int8
    assert "INT8" not in capsys.readouterr().err


def test_show_says_what_run_would_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_table, "_may_have_card", lambda: False)

    def shown(*flags: str) -> str:
        assert cli.main(["show", "qwen3.5-27b", *flags]) == 0
        return capsys.readouterr().out

    text = shown("--vram", "16")
    assert "KV cache, 3,574 tokens, INT8" in text
    assert text.endswith(
        "\n\nkeys and values are kept as INT8: a context of 3,574 tokens does not fit in bf16; "
        "--kv-cache bf16 has room for 1,815\n"
    )
    assert "what helps" not in text and "INT8: " not in shown("--vram", "24")
    assert "KV cache, 1,815 tokens " in shown("--vram", "16", "--kv-cache", "bf16")
    assert "KV cache, 32,768 tokens, INT8" in shown("--vram", "24", "--kv-cache", "int8")
    lines = shown("--vram", "13").splitlines()
    fixes = lines[lines.index("it does not fit; what helps:") + 1 :]
    assert len(fixes) == 3 and fixes[0] == "  `localchat run qwen3-14b` fits"
    memory = json.loads(shown("--vram", "24", "--ctx", "200000", "--kv-cache", "bf16", "--json"))["memory"]
    assert memory["fixes"][:2] == ["--kv-cache int8 fits", "--ctx 123885 fits"]
    assert (memory["kv_cache"], memory["context"]) == ("bf16", 200_000)


@pytest.mark.parametrize("kv_cache", [None, "bf16", "int8"])
def test_a_card_of_the_size_that_is_named_holds_it(kv_cache: str | None) -> None:
    """In the digits that are said."""
    for name in ("smollm2-135m", "qwen3-14b", "qwen3.5-27b"):
        config = MODELS[name].config

        def table(int8_kv: bool, config: ModelConfig = config) -> Ledger:
            return ledger.ledger(config, 1, "cuda", int8_kv=int8_kv)

        for wanted in (None, 1, 100, 777, 1000, 1234, 1777, 2000):
            fixes = fixes_for(table, card(GB // 2), wanted, kv_cache)
            ((number, unit),) = re.findall(r"a card with (\S+) (GB|MB) free holds it", "; ".join(fixes))
            size = int(float(number) * (GB if unit == "GB" else GB // 1000))
            found = fit(table, card(size), wanted, kv_cache)
            assert found.context == wanted or wanted is None


def test_the_processor_is_offered_where_it_holds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = "--gpu cpu takes the machine's memory"
    assert offer not in fixes_for(big, card(3 * GB), 1000)
    needed = ledger.ledger(BIG, 1000, "cpu", int8_kv=True).total
    for size, offered in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(fitting, "memory_used", lambda size=size: (0, size))
        assert (offer in fixes_for(big, card(3 * GB), 1000, on_cpu=big_on_cpu)) is offered
        assert offer not in fixes_for(big, card(3 * GB), 1000, "bf16", on_cpu=big_on_cpu)


def test_show_refuses_what_the_model_was_not_made_for(capsys: pytest.CaptureFixture[str]) -> None:
    """As `run` does."""
    assert cli.main(["show", "qwen3.5-27b", "--ctx", "300000"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "localchat: error: --ctx 300,000 is more than the 262,144 tokens that this model was made for.\n"
    )
