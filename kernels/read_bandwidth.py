"""How fast this card reads memory: the ceiling that every decode figure is measured against.

A plain Triton kernel sums several gigabytes of fp32; nothing that reads weights once can be faster.
"""

import torch

from localchat.kernels.gpu import tl, triton

# Bandwidth by the vendors' data sheets, bytes per second, by a part of the name that torch reports.
SHEET = {
    "H200": 4.8e12,
    "H100": 3.35e12,
    "A100": 2.039e12,
    "RTX 5090": 1.792e12,
    "RTX 4090": 1.008e12,
    "RTX 3090": 0.936e12,
}
_BLOCK, _ITERATIONS = 8192, 8
_LEAST = 256_000_000  # bytes


@triton.jit
def _read_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK * ITERATIONS
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(ITERATIONS):
        acc += tl.load(x_ptr + base + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0), tl.sum(acc, 0))


def read_bandwidth(nbytes: int = 4_000_000_000) -> float:
    """Bytes per second of reading `nbytes` on the current CUDA device, median of repeated runs.

    Where a card has no room for so many, half of them, and so on, but no fewer than miss every card's cache.

    Raises:
        torch.OutOfMemoryError: there is no room for these either.
    """
    while True:
        try:
            return _measured(nbytes)
        except torch.OutOfMemoryError:
            if nbytes // 2 < _LEAST:
                raise
        torch.cuda.empty_cache()
        nbytes //= 2


def _measured(nbytes: int) -> float:
    from triton.testing import do_bench

    programs = nbytes // (4 * _BLOCK * _ITERATIONS)
    x = torch.randn(programs * _BLOCK * _ITERATIONS, device="cuda")
    y = torch.empty(programs, device="cuda")
    milliseconds = do_bench(
        lambda: _read_kernel[(programs,)](x, y, BLOCK=_BLOCK, ITERATIONS=_ITERATIONS, num_warps=8),
        return_mode="median",
    )
    return x.numel() * 4 / float(milliseconds) * 1e3


def sheet_bandwidth(device_name: str) -> float | None:
    """What the data sheet says of the card with this name, bytes per second; None for one that is not in the table."""
    return next((rate for part, rate in SHEET.items() if part in device_name), None)
