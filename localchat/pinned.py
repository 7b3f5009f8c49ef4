"""Host memory for copies to and from a card.

For a card it is pinned, so that a copy runs at the bus's speed and beside the host. torch's own pinned allocations are
rounded up to a power of two (torch 2.13, CachingHostAllocator: 256 MiB for the 147 of one state of a 27B), so plain
pages are registered with the driver instead: what is asked for is what is taken.
"""

import mmap
import weakref

import torch
from torch import Tensor


def host_bytes(nbytes: int, device: torch.device) -> Tensor:
    """Uninitialised host memory, uint8 [nbytes], pinned if `device` is a card; given back with its last tensor.

    Raises:
        MemoryError: the machine, or the driver, has no more of it.
    """
    try:
        pages = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(f"host_bytes: got no {nbytes:,} bytes of memory ({error})") from error
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        fault = int(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if fault:
            _forget_error(device)
            raise MemoryError(f"host_bytes: the driver does not pin {nbytes:,} bytes (CUDA error {fault})")
        weakref.finalize(pages, cudart.cudaHostUnregister, memory.data_ptr())
    return memory


def _forget_error(device: torch.device) -> None:
    """The runtime keeps a failed call's error for whoever asks next, which would be an innocent kernel launch."""
    try:
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    except RuntimeError:  # this launch was that one
        return
