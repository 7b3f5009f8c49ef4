"""The numbers of a reply as text: the live bottom line, the line that stays, Ollama's block."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localchat.counted import counted
from localchat.limit import CardLimit
from localchat.stats import Stats, memory_used

if TYPE_CHECKING:
    from localchat.chat import Chunk

_BAR_WIDTH = 20
_LEAST_BAR = 5
_WORTH_A_BAR = 1.0  # seconds


@dataclass(frozen=True)
class Reply:
    """What is left of a reply when it was printed: the last chunk (None if there was none), and whether it was cut."""

    last: "Chunk | None"
    interrupted: bool


def status_line(stats: Stats, device: str, limit: CardLimit | None = None) -> str:
    """The numbers of a running reply: speed, its share of the card's limit, time to first token, tokens, context,
    memory."""
    parts = [f"{stats.decode_rate:.1f} tok/s"] if stats.generated_tokens > 1 else []
    if parts and limit is not None:
        parts.append(f"{100 * limit.share(stats.decode_rate, stats.context_used):.0f} % of this card's limit")
    parts += [f"ttft {stats.ttft_seconds:.2f} s", f"{stats.generated_tokens:,} tok"]
    if stats.context_size:
        parts.append(f"ctx {100 * stats.context_used / stats.context_size:.0f} %")
    used, total = memory_used(device)
    return " - ".join([*parts, f"{used / 1e9:.1f}/{total / 1e9:.1f} GB"])


def prefill_line(stats: Stats, width: int = 200) -> str:
    """The bar while the prompt is read: share, tokens, speed, time left. Where it is read in about a second: "".

    In fewer than `width` columns the bar is shorter, then tokens and speed are left out: the time left comes first.
    """
    total = max(stats.prompt_tokens - stats.cached_tokens, 1)
    done = min(stats.prefilled_tokens, total)
    expected = total / stats.prefill_rate if stats.prefill_rate > 0 else stats.prefill_seconds
    if expected < _WORTH_A_BAR:
        return ""
    count, speed = f"{done:,}/{total:,} tok", f"{stats.prefill_rate:.0f} tok/s"
    again = f"{stats.reread_tokens:,} of them read again"
    parts = [f"{100 * done // total} %", count]
    if stats.prefill_rate > 0:
        parts += [speed, f"{(total - done) / stats.prefill_rate:.0f} s left"]
    if stats.reread_tokens:
        parts.append(again)
    for least in (again, count, speed):
        if len("prefill " + " - ".join(parts)) > width and least in parts:
            parts.remove(least)
    text = " - ".join(parts)
    size = min(_BAR_WIDTH, width - len(f"prefill [] {text}"))
    if size >= _LEAST_BAR:
        return f"prefill [{'#' * (size * done // total):-<{size}}] {text}"
    return f"prefill {text}" if len(f"prefill {text}") <= width else text


def thought_line(stats: Stats) -> str:
    """What is left of a thought that is folded."""
    return f"thought for {stats.thought_seconds:.0f} s, {counted(stats.thought_tokens, 'token')}"


def closing_line(reply: Reply, device: str, limit: CardLimit | None = None) -> str:
    """The line that stays after a reply; says how much of the prompt was in the cache, and why the reply ended, unless
    the model ended it."""
    if reply.last is None:
        return ""
    stats = reply.last.stats
    cached = f" - cached {stats.cached_tokens:,}/{stats.prompt_tokens:,}" if stats.cached_tokens else ""
    if reply.interrupted:
        why = " - interrupted"
    else:
        reasons = {"length": " - stopped at the limit of tokens", "context": " - stopped, the context is full"}
        why = reasons.get(reply.last.finish_reason or "", "")
    return status_line(stats, device, limit) + cached + why


def notices(reply: Reply) -> list[str]:
    """What a user should know of a reply beside its numbers, a line each."""
    again = reply.last.stats.reread_tokens if reply.last is not None else 0
    if not again:
        return []
    read = f"{counted(again, 'token')} of earlier turns {'was' if again == 1 else 'were'} read again"
    return [f"{read}: the state to return to was no longer kept"]


def without_answer(reply: Reply) -> str:
    """That a reply ended inside its thought, if it did and was not interrupted there; else ""."""
    return "the reply ended inside its thought, before an answer" if reply.last and reply.last.in_thought else ""


def stats_block(stats: Stats, seed: int, load_seconds: float = 0.0) -> str:
    """The figures of a reply, laid out as Ollama's --verbose does."""
    rows = (
        ("total duration", f"{load_seconds + stats.ttft_seconds + stats.decode_seconds:.3f}s"),
        ("load duration", f"{load_seconds:.3f}s"),
        ("prompt eval count", f"{stats.prefilled_tokens} token(s), {stats.cached_tokens} more were cached"),
        ("prompt eval duration", f"{stats.prefill_seconds:.3f}s"),
        ("prompt eval rate", f"{stats.prefill_rate:.2f} tokens/s"),
        ("eval count", f"{stats.generated_tokens} token(s)"),
        ("eval duration", f"{stats.decode_seconds:.3f}s"),
        ("eval rate", f"{stats.decode_rate:.2f} tokens/s"),
        ("seed", str(seed)),
    )
    return "\n".join(f"{name + ':':<22}{value}" for name, value in rows)
