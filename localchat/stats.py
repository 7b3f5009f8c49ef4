"""The numbers beside a reply: how much was computed, how fast, how full the context and the memory are.

Every streamed piece of text carries one Stats record, so whoever shows it needs no second source.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stats:
    """Counts in tokens, times in seconds, of one reply up to the moment the record was made.

    `prompt_tokens` is the whole rendered conversation; `cached_tokens` of them were in the cache already and
    `prefilled_tokens` were computed for this reply, as counted by the model's forward. `reread_tokens` of these had
    been computed before, and the state to return to behind them was not kept. `generated_tokens` includes the stop
    token; `thought_tokens` of them were drawn inside a thought, which took `thought_seconds`. `ttft_seconds` (time to
    first token) runs from the call to the first generated token, `decode_seconds` from there on. `context_used` is the
    number of tokens in the cache.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    reread_tokens: int = 0
    generated_tokens: int = 0
    thought_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    thought_seconds: float = 0.0
    ttft_seconds: float = 0.0
    context_used: int = 0
    context_size: int = 0

    @property
    def decode_rate(self) -> float:
        """Tokens per second without the first token, whose time is prefill's; 0.0 while there is only one."""
        return _rate(self.generated_tokens - 1, self.decode_seconds)

    @property
    def prefill_rate(self) -> float:
        """Prefilled tokens per second; 0.0 before anything was prefilled."""
        return _rate(self.prefilled_tokens, self.prefill_seconds)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0


def memory_used(device: str = "cpu") -> tuple[int, int]:
    """(used, total) bytes: of the card for a CUDA device, else this process's resident set and the physical RAM."""
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info(torch.device(device))
        return total - free, total
    return _resident_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def card_memory() -> tuple[int, int, int] | None:
    """(held by this process's tensors, free, total) bytes of the current card; None without one.

    Where --vram limits this process, total is what that leaves for tensors, and free at most what is left of it.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    limit = int(total * torch.cuda.get_per_process_memory_fraction())
    return held, max(0, min(free, limit - held)), limit


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")  # Linux: pages, the second number is the resident set
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS tells the peak only, in bytes
    return peak if sys.platform == "darwin" else peak * 1024
