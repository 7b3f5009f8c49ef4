"""kernels/int8_codes.py on a card: assembly against torch's casts, for every code."""

import pytest
import torch

from localchat.kernels.gpu import tl, triton
from localchat.kernels.int8_codes import exact_half


@triton.jit
def _kernel(codes_ptr, out_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, exact_half(tl.load(codes_ptr + at)))


@pytest.mark.gpu
def test_every_code_as_fp16(card: torch.device) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8, device=card)
    out = torch.empty(256, dtype=torch.float16, device=card)
    _kernel[(1,)](codes, out, num_warps=1)
    assert torch.equal(out, codes.half())
