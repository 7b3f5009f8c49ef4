"""How fast a model runs on this machine: prefill and decode tokens per second, and what that means in bytes.

Every figure is the median of `repeats` runs in this process, after one run that is thrown away. Decode counts the
tokens after the first, so prefill is not in it. Greedy, with stop ids ignored. On a card, decoding is set against two
limits: the data sheet's bandwidth, and that of a kernel which only reads, measured in the same run.
bench_grid.py measures a row for each of several lengths.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.errors import UsageError
from localchat.fitting import fit
from localchat.ledger import Ledger, ledger, ledger_of_folder
from localchat.memory_table import memory_on
from localchat.model import Linear, Model
from localchat.registry import Entry
from localchat.sampling import Sampling
from localchat.stats import memory_used
from localchat.synthetic import made_up, synthetic_model


@dataclass(frozen=True)
class BenchResult:
    """One measurement. Rates in tokens per second, bandwidths in bytes per second, sizes in bytes, times in seconds.

    memory_bytes: on a card the largest amount that was allocated, else the memory of this process. card_bytes: what is
    taken of a card's memory at the end, by everyone; ledger_bytes: what the ledger says of this model and context.
    sheet_bandwidth and read_bandwidth are the card's limits. None on a CPU, where a card is not in the table, and where
    none of its memory is left to measure with.
    int8_kv: keys and values were kept as INT8.
    """

    model: str
    device: str
    threads: int
    prompt_tokens: int
    decode_tokens: int
    load_seconds: float
    prefill_rate: float
    decode_rate: float
    bytes_per_token: int
    memory_bytes: int
    sheet_bandwidth: float | None = None
    read_bandwidth: float | None = None
    synthetic: bool = False
    card_bytes: int | None = None
    ledger_bytes: int | None = None
    int8_kv: bool = False

    @property
    def bandwidth(self) -> float:
        """Bytes of weights read per second while decoding."""
        return self.bytes_per_token * self.decode_rate

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {**asdict(self), "bandwidth": self.bandwidth}


def run(
    model: Path | Entry,
    *,
    device: str = "cpu",
    prompt_tokens: int = 512,
    decode_tokens: int = 128,
    repeats: int = 3,
    int8_kv: bool = False,
    vram: float | None = None,
) -> BenchResult:
    """Measure the packed model in a folder, or a synthetic one with the shapes of a registry entry.

    vram: the most GB that may be taken of a card, as choose_device was told.

    Raises:
        BadCheckpoint: the model cannot be loaded.
        UsageError: it was not made for that many tokens.
        DoesNotFit: memory does not hold it with so many.
    """
    context = prompt_tokens + decode_tokens
    what = f"{prompt_tokens:,} + {decode_tokens:,} tokens"
    refuse_beyond(model, context, what, device=device, int8_kv=int8_kv, vram=vram)
    loaded, load_seconds = load(model, device)
    engine = Engine(loaded, context, int8_kv=int8_kv)
    runs = [measure(engine, prompt_tokens, decode_tokens) for _ in range(repeats + 1)][1:]
    on_card = loaded.device.type == "cuda"
    memory = torch.cuda.max_memory_allocated() if on_card else memory_used(device)[0]
    taken = memory_used(device)[0]
    sheet, read = card_limits() if on_card else (None, None)
    return BenchResult(
        model=name_of(model),
        device=torch.cuda.get_device_name() if on_card else "cpu",
        threads=torch.get_num_threads(),
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        load_seconds=load_seconds,
        prefill_rate=statistics.median(prefill for prefill, _ in runs),
        decode_rate=statistics.median(decode for _, decode in runs),
        bytes_per_token=bytes_per_token(loaded),
        memory_bytes=memory,
        sheet_bandwidth=sheet,
        read_bandwidth=read,
        synthetic=isinstance(model, Entry),
        card_bytes=taken if on_card else None,
        ledger_bytes=ledger_bytes_of(model, engine) if on_card else None,
        int8_kv=int8_kv,
    )


def load(model: Path | Entry, device: str) -> tuple[Model, float]:
    """The model and the seconds that took."""
    start = time.perf_counter()
    loaded = synthetic_model(model, device) if isinstance(model, Entry) else load_model(model, device)
    return loaded, time.perf_counter() - start


def refuse_beyond(
    model: Path | Entry, tokens: int, what: str, *, device: str, int8_kv: bool, vram: float | None = None
) -> None:
    """Before anything is loaded.

    Raises:
        UsageError: `what`, so many tokens, is more than the model was made for.
        DoesNotFit: the device's memory does not hold the model with so many.
    """
    memory = memory_on(device, vram)

    def ledger_with(int8: bool) -> Ledger:
        return ledger_of(model, 1, memory.kind, int8_kv=int8)

    most = ledger_with(int8_kv).max_context
    if tokens > most:
        raise UsageError(f"{what} are more than the {most:,} of this model.")
    fit(ledger_with, memory, tokens, "int8" if int8_kv else "bf16", "bench")


def name_of(model: Path | Entry) -> str:
    """What a result calls the model."""
    return f"{model.alias}, synthetic weights" if isinstance(model, Entry) else model.name


def ledger_of(model: Path | Entry, context: int, kind: str, *, int8_kv: bool) -> Ledger:
    """The ledger of the model on a "cpu" or "cuda"."""
    if isinstance(model, Entry):
        return ledger(model.config, context, kind, int8_kv=int8_kv)
    return ledger_of_folder(model, context, kind, int8_kv=int8_kv)


def ledger_bytes_of(model: Path | Entry, engine: Engine) -> int:
    """What the ledger says of this model and context."""
    return ledger_of(model, engine.max_length, engine.model.device.type, int8_kv=engine.cache.int8).total


def card_limits() -> tuple[float | None, float | None]:
    """Bandwidth of the current card by its data sheet, and as a read kernel measures it.

    None: not in the table; no memory is left to measure it.
    """
    from localchat.kernels.read_bandwidth import read_bandwidth, sheet_bandwidth

    sheet = sheet_bandwidth(torch.cuda.get_device_name())
    try:
        return sheet, read_bandwidth()
    except torch.OutOfMemoryError:
        return sheet, None


def measure(engine: Engine, prompt_tokens: int, decode_tokens: int) -> tuple[float, float]:
    """One run over a made-up prompt -> (prefill rate, decode rate)."""
    engine.rewind(0)
    prompt = made_up(engine.vocab_size, prompt_tokens)
    start = time.perf_counter()
    for _ in engine.prefill(prompt):
        continue
    tokens = engine.generate(Sampling(temperature=0.0), (), decode_tokens)
    next(tokens)
    first = time.perf_counter()
    rest = sum(1 for _ in tokens)
    end = time.perf_counter()
    return prompt_tokens / (first - start), rest / (end - first)


def bytes_per_token(model: Model) -> int:
    """Weights that one decode step reads: every matrix once, of an untied embedding a single row."""
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not (name == "embed_tokens" and not model.config.tie_word_embeddings):
            stored = (*module.buffers(), module.cpu_qweight, module.cpu_scales_zeros, module.cpu_scales)
            total += sum(t.nbytes for t in stored if t is not None)
    return total
