"""Between two decode steps: the drawn id becomes the next input, and both positions move on by one.

drawn, token, position, draw_position int64 [1]. So a captured step feeds itself, and the host only reads `drawn`.
"""

import torch
from torch import Tensor

from localchat.kernels.checks import check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous


def advance_reference(drawn: Tensor, token: Tensor, position: Tensor, draw_position: Tensor) -> None:
    """In place: token = drawn, position += 1, draw_position += 1."""
    token.copy_(drawn)
    position.add_(1)
    draw_position.add_(1)


@triton.jit
def _advance_kernel(drawn_ptr, token_ptr, position_ptr, draw_position_ptr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_previous(PDL)
    tl.store(token_ptr, tl.load(drawn_ptr))
    tl.store(position_ptr, tl.load(position_ptr) + 1)
    tl.store(draw_position_ptr, tl.load(draw_position_ptr) + 1)


def advance(drawn: Tensor, token: Tensor, position: Tensor, draw_position: Tensor) -> None:
    """See `advance_reference`.

    Raises:
        ValueError: a tensor is not int64 [1].
    """
    for name, tensor in (("drawn", drawn), ("token", token), ("position", position), ("draw_position", draw_position)):
        check_tensor(f"advance: {name}", tensor, (torch.int64,), (1,))
    _advance_kernel[(1,)](drawn, token, position, draw_position, num_warps=1, **pdl_options(drawn))
