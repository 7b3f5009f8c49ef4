"""`run --json`: one answer and everything that is known of it as one JSON object.

{"text", "thinking" (null without), "finish_reason": "stop" | "length" | "context" | "interrupted",
 "usage": {"prompt_tokens", "cached_tokens", "prefilled_tokens", "completion_tokens", "total_tokens"},
 "timings": {"load_seconds", "prefill_seconds", "ttft_seconds", "decode_seconds",
             "prefill_tokens_per_second", "decode_tokens_per_second"},
 "sampling": {"temperature", ..., "seed"}, "seed", "context",
 "model": {"name", "source", "revision", "path"}, "quantization": {"format", "hash"}}

The texts are exact: JSON itself escapes control characters. "code" is there with --extract: the first block, or null.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localchat.config import QuantizationConfig, load_config
from localchat.extract import FirstCodeBlock
from localchat.listing import describe_quantization
from localchat.statusline import Reply

if TYPE_CHECKING:
    from localchat.chat import Chunk
    from localchat.sampling import Sampling
    from localchat.stats import Stats

_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Collector:
    """A printer that prints nothing and keeps the texts."""

    def __init__(self) -> None:
        self.texts = {"thought": "", "answer": ""}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to end."""

    def push(self, chunk: "Chunk") -> None:
        if chunk.kind in self.texts:
            self.texts[chunk.kind] += chunk.text

    def finish(self, reply: Reply) -> None:
        """Nothing is added."""


def envelope(
    texts: dict[str, str], reply: Reply, sampling: "Sampling", *, name: str, folder: Path, load_seconds: float
) -> dict[str, Any]:
    """The object; `texts` are a Collector's."""
    last, stats = reply.last, reply.last.stats if reply.last else None
    quantization = load_config(folder).quantization
    return {
        "text": texts["answer"],
        "thinking": texts["thought"] or None,
        "finish_reason": "interrupted" if reply.interrupted or last is None else last.finish_reason,
        **_counts(stats, load_seconds),
        "sampling": asdict(sampling),
        "seed": sampling.seed,
        "context": stats.context_size if stats else None,
        "model": _model(name, folder, quantization),
        "quantization": quantization
        and {"format": describe_quantization(quantization), "hash": packed_hash(folder, quantization)},
    }


def with_code(answer: dict[str, Any]) -> dict[str, Any]:
    """The same with "code", the first code block of its text."""
    block = FirstCodeBlock()
    code = block.push(answer["text"]) + block.flush()
    return {**answer, "code": code if block.found else None}


def packed_hash(folder: Path, quantization: QuantizationConfig) -> str:
    """16 hex digits that differ where two packings of a model do: the format, and of each file of tensors its size, its
    header's start and 64 samples. All of it would take longer to read than the answer to make."""
    seen = hashlib.sha256(json.dumps(quantization.to_dict(), sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        seen.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                seen.update(file.read(_SAMPLE_BYTES))
    return seen.hexdigest()[:16]


def _counts(stats: "Stats | None", load_seconds: float) -> dict[str, Any]:
    if stats is None:
        return {"usage": None, "timings": None}
    usage = {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "prefilled_tokens": stats.prefilled_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
    }
    timings = {
        "load_seconds": load_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "ttft_seconds": stats.ttft_seconds,
        "decode_seconds": stats.decode_seconds,
        "prefill_tokens_per_second": stats.prefill_rate,
        "decode_tokens_per_second": stats.decode_rate,
    }
    return {"usage": usage, "timings": {name: round(value, 6) for name, value in timings.items()}}


def _model(name: str, folder: Path, quantization: QuantizationConfig | None) -> dict[str, str]:
    source = quantization.source if quantization else {}
    source_id, revision = str(source.get("id", "")), str(source.get("revision", ""))
    return {"name": name, "source": source_id, "revision": revision, "path": str(folder)}
