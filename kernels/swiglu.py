"""SwiGLU: y = silu(gate) * up, the two halves of the fused gate_up product.

gate_up [T, 2I] (gate | up), y [T, I], both in the model's dtype; computed in fp32. Source: arXiv 2002.05202.
"""

import torch
from torch import Tensor


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
