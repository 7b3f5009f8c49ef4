"""How fast a packed model runs on this machine: prefill and decode tokens per second, and what that means in bytes.

Every figure is the median of `repeats` runs in this process, after one run that is thrown away. Decode counts the
tokens after the first, so prefill is not in it. Greedy, with stop ids ignored.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.model import Linear, Model
from localchat.sampling import Sampling
from localchat.stats import memory_used


@dataclass(frozen=True)
class BenchResult:
    """One measurement. Rates are in tokens per second, sizes in bytes, times in seconds."""

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

    @property
    def bandwidth(self) -> float:
        """Bytes of weights read per second while decoding."""
        return self.bytes_per_token * self.decode_rate

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {**asdict(self), "bandwidth": self.bandwidth}


def run(folder: Path, *, prompt_tokens: int = 512, decode_tokens: int = 128, repeats: int = 3) -> BenchResult:
    """Load the packed model in `folder` and measure it.

    Raises:
        BadCheckpoint: the folder cannot be loaded.
    """
    start = time.perf_counter()
    model = load_model(folder)
    load_seconds = time.perf_counter() - start
    engine = Engine(model, prompt_tokens + decode_tokens)
    runs = [measure(engine, prompt_tokens, decode_tokens) for _ in range(repeats + 1)][1:]
    return BenchResult(
        model=folder.name,
        device=str(model.device),
        threads=torch.get_num_threads(),
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        load_seconds=load_seconds,
        prefill_rate=statistics.median(prefill for prefill, _ in runs),
        decode_rate=statistics.median(decode for _, decode in runs),
        bytes_per_token=bytes_per_token(model),
        memory_bytes=memory_used(str(model.device))[0],
    )


def measure(engine: Engine, prompt_tokens: int, decode_tokens: int) -> tuple[float, float]:
    """One run over a made-up prompt -> (prefill rate, decode rate)."""
    engine.rewind(0)
    prompt = [i % engine.vocab_size for i in range(1, prompt_tokens + 1)]
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
