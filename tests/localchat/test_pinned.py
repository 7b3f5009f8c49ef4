"""Host memory by the byte, and what is said where there is none."""

import gc

import pytest
import torch

from localchat.pinned import host_bytes

CPU = torch.device("cpu")


def test_memory_can_be_written_and_viewed() -> None:
    memory = host_bytes(4096, CPU)
    assert (memory.shape, memory.dtype) == ((4096,), torch.uint8)
    numbers = memory[64:128].view(torch.float32)
    numbers.copy_(torch.arange(16.0))
    del memory
    gc.collect()
    assert numbers.tolist() == list(range(16))


def test_what_the_machine_does_not_have() -> None:
    with pytest.raises(MemoryError, match=r"got no 4,611,686,018,427,387,904 bytes"):
        host_bytes(1 << 62, CPU)


@pytest.mark.gpu
def test_memory_for_a_card_is_pinned_and_given_back() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    values = torch.arange(1 << 20, device="cuda")
    for _ in range(3):  # an address that comes again must not be registered any more
        memory = host_bytes(values.nbytes, values.device)
        assert memory.is_pinned()
        copy = memory.view(torch.int64)
        copy.copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(copy, values.cpu())
        del memory, copy
        gc.collect()
