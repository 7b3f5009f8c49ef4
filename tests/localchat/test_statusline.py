"""The numbers of a reply as text."""

from dataclasses import replace

import pytest

from localchat import statusline
from localchat.chat import Chunk
from localchat.stats import Stats

STATS = Stats(
    prompt_tokens=2800,
    cached_tokens=100,
    prefilled_tokens=1350,
    generated_tokens=129,
    prefill_seconds=4.5,
    decode_seconds=2.0,
    ttft_seconds=0.214,
    context_used=1065,
    context_size=8192,
)


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statusline, "memory_used", lambda device: (15_100_000_000, 24_000_000_000))


def test_status_line() -> None:
    line = statusline.status_line(STATS, "cuda")
    assert line == "64.0 tok/s - ttft 0.21 s - 129 tok - ctx 13 % - 15.1/24.0 GB"
    first = statusline.status_line(replace(STATS, generated_tokens=1), "cuda")
    assert first.startswith("ttft 0.21 s - 1 tok")


def test_prefill_line() -> None:
    line = statusline.prefill_line(STATS)
    assert line == "prefill [##########----------] 50 % - 1,350/2,700 tok - 300 tok/s - 4 s left"
    assert "[####################] 100 %" in statusline.prefill_line(replace(STATS, prefilled_tokens=9999))


def test_a_narrow_terminal_keeps_the_time_left() -> None:
    """131,072 tokens in the 79 columns of an ordinary terminal, and in fewer: nothing is cut off at the end."""
    long = replace(STATS, prompt_tokens=131_172, prefilled_tokens=107_000, prefill_seconds=14.3)
    for stats in (long, replace(long, reread_tokens=90_000)):
        lines = {width: statusline.prefill_line(stats, width) for width in range(19, 120)}
        assert all(len(line) <= width and " s left" in line for width, line in lines.items())
    assert lines[19] == "81 % - 3 s left"
    assert lines[39] == "prefill 81 % - 7483 tok/s - 3 s left"
    assert lines[79] == "prefill [##############----] 81 % - 107,000/131,072 tok - 7483 tok/s - 3 s left"
    assert lines[119].endswith(" - 3 s left - 90,000 of them read again")


def test_a_prompt_gets_its_bar_after_a_second_even_before_its_first_layer_is_done() -> None:
    nothing_yet = replace(STATS, prefilled_tokens=0)
    assert statusline.prefill_line(replace(nothing_yet, prefill_seconds=0.3)) == ""
    line = statusline.prefill_line(replace(nothing_yet, prefill_seconds=1.5))
    assert line == "prefill [--------------------] 0 % - 0/2,700 tok"


@pytest.mark.parametrize(
    ("finish", "interrupted", "why"),
    [
        ("stop", False, " GB - cached 100/2,800"),
        ("length", False, " - stopped at the limit of tokens"),
        ("context", False, " - stopped, the context is full"),
        (None, True, " - interrupted"),
    ],
)
def test_closing_line_says_why(finish: str | None, interrupted: bool, why: str) -> None:
    last = Chunk("end" if finish else "answer", "", STATS, finish)  # type: ignore[arg-type]
    assert statusline.closing_line(statusline.Reply(last, interrupted), "cpu").endswith(why)


def test_a_first_turn_says_nothing_of_the_cache() -> None:
    last = Chunk("end", "", replace(STATS, cached_tokens=0), "stop")
    assert statusline.closing_line(statusline.Reply(last, interrupted=False), "cpu").endswith("15.1/24.0 GB")


def test_what_is_read_again_is_said() -> None:
    again = replace(STATS, reread_tokens=1234)
    assert statusline.prefill_line(again).endswith(" - 4 s left - 1,234 of them read again")
    reply = statusline.Reply(Chunk("end", "", again, "stop"), interrupted=False)
    assert statusline.notices(reply) == [
        "1,234 tokens of earlier turns were read again: the state to return to was no longer kept"
    ]


def test_a_reply_that_ends_inside_its_thought_says_so() -> None:
    for in_thought in (True, False):
        last = Chunk("end", "", STATS, "length", in_thought=in_thought)
        said = statusline.without_answer(statusline.Reply(last, interrupted=False))
        assert said == "the reply ended inside its thought, before an answer" * in_thought
    assert statusline.without_answer(statusline.Reply(None, interrupted=True)) == ""
    assert statusline.notices(statusline.Reply(None, interrupted=True)) == []


def test_stats_block() -> None:
    rows = [line.split(":", 1) for line in statusline.stats_block(STATS, seed=7, load_seconds=1.0).splitlines()]
    assert {name: value.strip() for name, value in rows} == {
        "total duration": "3.214s",
        "load duration": "1.000s",
        "prompt eval count": "1350 token(s), 100 more were cached",
        "prompt eval duration": "4.500s",
        "prompt eval rate": "300.00 tokens/s",
        "eval count": "129 token(s)",
        "eval duration": "2.000s",
        "eval rate": "64.00 tokens/s",
        "seed": "7",
    }
