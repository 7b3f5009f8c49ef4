"""Product with INT8 rows: y = x (scales * W)^T + bias; for lm_head and for matrices kept at 8 bits.

x [T, K], y [T, N] in the model's dtype; weight int8 [N, K], scales fp32 [N], bias [N].
Bytes moved for one token: N * K codes + 4 N of scales.
"""

from torch import Tensor


def int8_matmul_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the codes in fp32, scale each output, round once to x's dtype. -> [T, N]."""
    y = (x.float() @ weight.float().T) * scales.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)
