"""Rows of a benchmark: prompts of several lengths, and decoding, behind contexts of several depths.

Each figure is a median in this process, after a short run that is thrown away. What is deep is not read but made
(synthetic.deepen), which takes a second instead of the minutes of a prefill of 128K.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from localchat.bench import bytes_per_token, card_limits, ledger_bytes_of, load, name_of, refuse_beyond
from localchat.engine import Engine
from localchat.errors import UsageError
from localchat.model import Linear, Model
from localchat.registry import Entry
from localchat.sampling import Sampling
from localchat.stats import memory_used
from localchat.synthetic import deepen, made_up

# Seconds after which a row is not measured another time.
_PATIENCE = 20.0


@dataclass(frozen=True)
class GridRow:
    """`tokens` new ones behind `depth`: read together ("prefill", to the first drawn id) or drawn ("decode").

    seconds and rate (tokens per second) are of all of them, medians of `repeats`. bytes: what decoding one token moves
    at the least, weights, states (in and out) and half of the way's keys and values; 0 for prefill. flops: of all
    tokens' matrix products and attention. extra_bytes: the most that a card held beside weights and cache.
    """

    kind: str
    tokens: int
    depth: int
    repeats: int
    seconds: float
    rate: float
    bytes: int
    flops: int
    extra_bytes: int | None = None


@dataclass(frozen=True)
class Grid:
    """The rows of one run, and what they are to be seen against; fields as in BenchResult."""

    model: str
    device: str
    threads: int
    context: int
    load_seconds: float
    bytes_per_token: int
    kv_bytes_per_token: int
    rows: tuple[GridRow, ...]
    sheet_bandwidth: float | None = None
    read_bandwidth: float | None = None
    synthetic: bool = False
    memory_bytes: int | None = None
    card_bytes: int | None = None
    ledger_bytes: int | None = None
    int8_kv: bool = False

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def run_grid(
    model: Path | Entry,
    *,
    device: str = "cpu",
    prompts: Sequence[int] = (512,),
    depths: Sequence[int] = (0,),
    decode_tokens: int = 128,
    repeats: int = 3,
    int8_kv: bool = False,
    vram: float | None = None,
) -> Grid:
    """For each of `depths` a row for each of `prompts`, and one for decoding; int8_kv, vram: as in bench.run.

    A row that takes long is measured less often than `repeats` times, but once.

    Raises:
        BadCheckpoint: the model cannot be loaded.
        UsageError: it was not made for that many tokens, or a prompt is empty.
        DoesNotFit: memory does not hold it with so many.
    """
    if min(prompts) < 1:
        raise UsageError("a prompt of 0 tokens cannot be read.", "--depth 0 is an empty cache.")
    context = max(depths) + max(*prompts, decode_tokens + 1)  # the last drawn id of a row needs no room
    what = f"{context:,} tokens, the longest row,"
    refuse_beyond(model, context, what, device=device, int8_kv=int8_kv, vram=vram)
    loaded, load_seconds = load(model, device)
    engine, on_card = Engine(loaded, context, int8_kv=int8_kv), loaded.device.type == "cuda"
    held = torch.cuda.memory_allocated() if on_card else 0
    rows, peak = [], held
    for depth in depths:
        for kind, tokens in [*(("prefill", prompt) for prompt in prompts), ("decode", decode_tokens)]:
            if on_card:
                torch.cuda.reset_peak_memory_stats()
            seconds = _timed(engine, kind, tokens, depth, repeats)
            peak = max(peak, torch.cuda.max_memory_allocated()) if on_card else 0
            extra = torch.cuda.max_memory_allocated() - held if on_card else None
            median, moved = statistics.median(seconds), 0
            if kind == "decode":
                moved = bytes_per_token(loaded) + bytes_of_context(engine, depth + tokens // 2)
            flops = prefill_flops(loaded, tokens, depth) if kind == "prefill" else decode_flops(loaded, tokens, depth)
            rows.append(GridRow(kind, tokens, depth, len(seconds), median, tokens / median, moved, flops, extra))
    taken = memory_used(device)[0] if on_card else None
    sheet, read = card_limits() if on_card else (None, None)
    return Grid(
        model=name_of(model),
        device=torch.cuda.get_device_name() if on_card else "cpu",
        threads=torch.get_num_threads(),
        context=context,
        load_seconds=load_seconds,
        bytes_per_token=bytes_per_token(loaded),
        kv_bytes_per_token=bytes_of_context(engine, 1) - bytes_of_context(engine, 0),
        rows=tuple(rows),
        sheet_bandwidth=sheet,
        read_bandwidth=read,
        synthetic=isinstance(model, Entry),
        memory_bytes=peak if on_card else memory_used(device)[0],
        card_bytes=taken,
        ledger_bytes=ledger_bytes_of(model, engine) if on_card else None,
        int8_kv=int8_kv,
    )


def _timed(engine: Engine, kind: str, tokens: int, depth: int, repeats: int) -> list[float]:
    """Seconds of each run of a row, after a short one that is thrown away."""
    chunk = engine.model.ops.prefill_chunk
    run: Callable[[int], float]
    if kind == "prefill":
        run, short = (lambda count: prefill_seconds(engine, count, depth)), min(tokens, chunk + tokens % chunk)
    else:
        run, short = (lambda count: decode_seconds(engine, count, depth)), min(tokens, 4)
    run(short)  # a whole chunk and the last one: all that has to be compiled
    seconds: list[float] = []
    while not seconds or (len(seconds) < repeats and sum(seconds) < _PATIENCE):
        seconds.append(run(tokens))
    return seconds


def prefill_seconds(engine: Engine, tokens: int, depth: int) -> float:
    """From the prompt to the first drawn id."""
    _go_to(engine, depth)
    prompt = made_up(engine.vocab_size, tokens)
    start = time.perf_counter()
    for _ in engine.prefill(prompt):
        continue
    next(engine.generate(Sampling(temperature=0.0), (), 1))
    return time.perf_counter() - start


def decode_seconds(engine: Engine, tokens: int, depth: int) -> float:
    """From the first drawn id to the last of `tokens` more."""
    _go_to(engine, depth)
    for _ in engine.prefill([1]):
        continue
    drawn = engine.generate(Sampling(temperature=0.0), (), tokens + 1)
    next(drawn)
    start = time.perf_counter()
    count = sum(1 for _ in drawn)
    if count != tokens:
        raise ValueError(f"bench: {count} tokens were drawn, wanted {tokens}")
    return time.perf_counter() - start


def _go_to(engine: Engine, depth: int) -> None:
    """Cut the conversation, or make it longer, to `depth` tokens; nothing is left to do on a card."""
    engine.rewind(depth)
    deepen(engine, depth)
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize()


def bytes_of_context(engine: Engine, tokens: int) -> int:
    """What one more token reads of `tokens` before it: keys and values, and the states, which it also writes."""
    states = engine.cache.snapshot_nbytes
    return 2 * states + tokens * (engine.cache.nbytes - states) // engine.max_length


def prefill_flops(model: Model, tokens: int, depth: int) -> int:
    """Of reading `tokens` behind `depth`: the blocks' products and attention, and the head once.

    A delta net's recurrence is left out: less than a hundredth.
    """
    config = model.config
    pairs = tokens * depth + tokens * (tokens + 1) // 2  # of a query and a key that it sees
    attention = 4 * config.layer_types.count("full_attention") * config.q_size * pairs
    return 2 * tokens * _block_weights(model) + attention + 2 * config.vocab_size * config.hidden_size


def decode_flops(model: Model, tokens: int, depth: int) -> int:
    """Of drawing `tokens` one by one behind `depth`."""
    head = 2 * model.config.vocab_size * model.config.hidden_size
    return prefill_flops(model, tokens, depth) + (tokens - 1) * head


def _block_weights(model: Model) -> int:
    """Elements of the matrices of all blocks."""
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name not in ("embed_tokens", "lm_head"):
            total += module.rows * module.columns
    return total
