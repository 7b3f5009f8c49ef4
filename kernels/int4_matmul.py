"""Product with a packed INT4 matrix: y = x W^T + bias, W stored as kernels/int4_packing.py defines.

x [T, K], y [T, N] in the model's dtype; qweight int32 [N, K/8], scales and mins [N, K/G], bias [N].
Bytes moved for one token: N * K / 2 codes + 2 N K / G a scale (twice that with mins); x and y are nothing beside it.
"""

from torch import Tensor

from localchat.kernels.int4_packing import dequantize


def int4_matmul_reference(
    x: Tensor, qweight: Tensor, scales: Tensor, mins: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Dequantise W in fp32, multiply in fp32, round once to x's dtype. -> [T, N]."""
    y = x.float() @ dequantize(qweight, scales, mins).T
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)
