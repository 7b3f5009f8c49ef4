"""The bar of a long prompt where the answer goes into a pipe."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from localchat import prompt_bar, stream
from localchat.chat import Chunk
from localchat.live import ERASE, SHOW_CURSOR
from localchat.stats import Stats

SLOW = Stats(prompt_tokens=5000, prefilled_tokens=1000, prefill_seconds=10)
QUICK = Stats(prompt_tokens=5000, prefilled_tokens=1000, prefill_seconds=0.1)


def reply(stats: Stats) -> Iterator[Chunk]:
    yield Chunk("prefill", "", stats)
    yield Chunk("prefill", "", stats)
    yield Chunk("answer", "yes", stats)
    yield Chunk("end", "", stats, "stop")


def errors_of(chunks: Iterator[Chunk], **console: Any) -> tuple[str, str]:
    """stdout, a pipe, and stderr, a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with_bar = prompt_bar.with_bar(chunks, Console(**{"file": err, "width": 60, "force_terminal": True} | console))
    stream.stream_reply(with_bar, stream.PlainPrinter(out))
    return out.getvalue(), err.getvalue()


def test_a_bar_is_drawn_and_gone_before_the_answer() -> None:
    out, err = errors_of(reply(SLOW), _environ={})
    assert out == "yes\n"
    assert err.count("20 % - 1,000/5,000 tok - 100 tok/s - 40 s left") == 1  # the second one came at once
    assert err.endswith(ERASE + SHOW_CURSOR)


def test_nothing_is_shown_of_a_short_prompt_or_where_it_cannot_be() -> None:
    assert errors_of(reply(QUICK), _environ={}) == ("yes\n", "")
    assert errors_of(reply(SLOW), _environ={"TERM": "dumb"}) == ("yes\n", "")
    assert errors_of(reply(SLOW), force_terminal=False) == ("yes\n", "")


def test_a_prompt_that_is_stopped_or_fails_leaves_no_bar() -> None:
    closed = []

    def failing() -> Iterator[Chunk]:
        try:
            yield Chunk("prefill", "", SLOW)
            raise ValueError("no")
        finally:
            closed.append(True)

    err = io.StringIO()
    console = Console(file=err, width=60, force_terminal=True, _environ={})
    with pytest.raises(ValueError, match="no"):
        list(prompt_bar.with_bar(failing(), console))
    assert err.getvalue().endswith(ERASE + SHOW_CURSOR)
    chunks = prompt_bar.with_bar(failing(), console)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert err.getvalue().endswith(ERASE + SHOW_CURSOR)
    assert closed == [True, True]


SLOW_PREFILL = """
import sys, time
from localchat import cli, engine
prefill = engine.Engine.prefill
def slow(self, ids, snapshot_at=None):
    for done in prefill(self, ids, snapshot_at):
        time.sleep(0.4)
        yield done
engine.Engine.prefill = slow
sys.stdout = open(sys.argv[1], "w")
sys.exit(cli.main(sys.argv[2:]))
"""


def test_run_shows_it_on_stderr(terminal: Callable[..., Any], scripted: Callable[..., Path], tmp_path: Path) -> None:
    answer = tmp_path / "answer.txt"
    words = ["run", str(scripted("ok")), "long " * 400, "--gpu", "cpu"]
    window = terminal(program=[sys.executable, "-c", SLOW_PREFILL, str(answer), *words])
    assert window.end() == 0
    assert answer.read_text() == "ok\n"
    assert b" s left" in window.raw
