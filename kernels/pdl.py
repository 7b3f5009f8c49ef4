"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it needs its data.

Between two kernels of a CUDA graph 1.5 us pass in which memory is idle. With this launch attribute the next kernel's
programs take their places as soon as all programs of the one before have started, compute their addresses, fetch what
does not depend on anybody (weights), and only then wait. For compute capability 9.0 and newer; older cards launch
plainly.

A kernel that takes part has a constexpr PDL, calls `let_next_start(PDL)` first (but behind loads that have to come
first, as no load passes it), calls `wait_for_previous(PDL)` before its first access to anything that another kernel of
the step writes or reads, in every program, and is launched with `**pdl_options(tensor)`. Some call `let_next_start`
behind their wait: where a step was measured to be faster so (kernels/NOTES.md), or because the next kernel reads early
(early.py). That one is the only exception to the rule: before its wait it reads what the kernel in front writes. All of
a kernel's programs wait before they write, so whoever waits for it has waited for everything before it as well. A step
begins with a plain launch (mark_seen; on the CPU's side of it, a copy), which waits for the step before to end: what
only an earlier step has written, such as a recurrent state, the rows of earlier tokens or the position, may be read
before the wait.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from localchat.kernels.gpu import tl, triton

_OLDEST = 9  # major compute capability
_allowed = True


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """From here on the next kernel may start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the kernel before has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def pdl_options(tensor: Tensor) -> dict[str, Any]:
    """Launch options for a kernel that takes part, on the device of `tensor`."""
    if _allowed and tensor.is_cuda and capability(tensor.device) >= _OLDEST:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@contextmanager
def without_pdl() -> Iterator[None]:
    """Launches within are plain ones: for comparison."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@functools.cache
def capability(device: torch.device) -> int:
    """Major compute capability."""
    return torch.cuda.get_device_capability(device)[0]
