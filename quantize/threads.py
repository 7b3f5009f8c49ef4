"""Processor threads for the arithmetic of a conversion."""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def worker_pool() -> Iterator[Executor]:
    """As many workers as torch has threads, each running its operations on one thread; torch's own setting returns.

    Torch's threads meet after every operation. A conversion is many short ones, and where the machine is busy each
    meeting waits for a time slice: smollm2-135m took 35 s on two shared cores that way, and 3 s this way.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
