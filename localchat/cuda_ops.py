"""The table for an NVIDIA card: every operation of a decode step is a Triton kernel from kernels/.

The residual stream is fp32, products take fp16 inputs with a power of two per row ("scaled half"), the cache is bf16 or
INT8. A step over more than CROSSOVER tokens (prefill) goes another way: one matrix at a time is dequantised into bf16
scratch, and the library's dense product reads that. It costs 2.5 times the matrix's size in traffic, which many tokens
share, and reaches a rate that the packed product does not.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localchat.kernels.attention import attention_decode, attention_prefill
from localchat.kernels.gated_delta_net import gated_delta_net_decode
from localchat.kernels.gated_delta_net_prefill import gated_delta_net_prefill
from localchat.kernels.int4_matmul import dequantize_int4, int4_matmul
from localchat.kernels.int8_embedding import int8_embedding
from localchat.kernels.int8_matmul import dequantize_int8, int8_matmul
from localchat.kernels.rms_norm import rms_norm
from localchat.kernels.rope_kv_write import rope_kv_write
from localchat.kernels.rotary import rotary_table
from localchat.kernels.scaled_half import scaled_half
from localchat.kernels.swiglu import swiglu
from localchat.ops import ReferenceOps, split_gate
from localchat.rope import Rotary

if TYPE_CHECKING:
    from localchat.model import GatedDeltaNet, Linear, RMSNorm

# Tokens of one step above which matrices are dequantised for the dense product. H200, 2026-11-30.
CROSSOVER = 32
# Key heads of a gated delta net, each of which takes an integer; real models have 16.
_MOST_KEY_HEADS = 1024
# What a product takes: scaled half (values, row scales), or bf16 values and None.
Activation = tuple[Tensor, Tensor | None]


class CudaOps(ReferenceOps):
    """See the module."""

    weight_dtype = torch.bfloat16
    cache_dtype = torch.bfloat16
    embedding_on_host = True
    prefill_chunk = 2048

    def __init__(self, device: torch.device) -> None:
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._scratch = torch.empty(0, dtype=torch.bfloat16, device=device)
        self._arrivals = torch.zeros(_MOST_KEY_HEADS, dtype=torch.int32, device=device)

    def embedding(self, ids: Tensor, table: "Linear") -> Tensor:
        if table.bits == 8:
            return int8_embedding(ids, table.weight, table.scales)
        return super().embedding(ids, table)

    def rotary(self, positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Rotary:
        return Rotary(positions, *rotary_table(positions, inv_freq, attention_factor))

    def norm_linears(self, x: Tensor, norm: "RMSNorm", *linears: "Linear") -> list[Tensor]:
        normed = rms_norm(x, norm.weight, norm.eps, half=_few(x))
        return [self._product(normed, linear) for linear in linears]

    def attention(
        self,
        qkv: Tensor,
        q_norm: "RMSNorm | None",
        k_norm: "RMSNorm | None",
        rope: Rotary,
        cache: tuple[Tensor, ...],
        *,
        gated: bool = False,
    ) -> Tensor:
        q_weight, k_weight = (q_norm.weight, k_norm.weight) if q_norm and k_norm else (None, None)
        eps = q_norm.eps if q_norm else 0.0
        keys, values, *scales = cache
        qkv, gate = split_gate(qkv, keys) if gated else (qkv, None)
        angles = (rope.cos, rope.sin, rope.positions)
        q = rope_kv_write(qkv, q_weight, k_weight, eps, *angles, keys, values, scales=scales)
        if q.shape[0] > 1:
            return attention_prefill(q, keys, values, rope.positions, gate=gate, scales=scales)
        splits = max(1, self._multiprocessors // keys.shape[0])
        return attention_decode(q, keys, values, rope.positions, splits=splits, gate=gate, scales=scales)

    def gated_delta_net(self, qkvz: Tensor, ba: Tensor, mixer: "GatedDeltaNet", cache: tuple[Tensor, ...]) -> Tensor:
        weights = (mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight)
        if qkvz.shape[0] == 1:
            return gated_delta_net_decode(qkvz, ba, *weights, mixer.norm.eps, *cache, arrivals=self._arrivals)
        dtype = torch.float32 if _few(qkvz) else torch.bfloat16  # what linear_add rounds to
        return gated_delta_net_prefill(qkvz, ba, *weights, mixer.norm.eps, *cache, dtype=dtype)

    def linear_add(self, x: "Tensor | Activation", linear: "Linear", residual: Tensor) -> Tensor:
        if isinstance(x, Tensor):
            x = scaled_half(x) if _few(x) else (x.to(torch.bfloat16), None)
        return self._product(x, linear, residual)

    def norm_swiglu(self, x: Tensor, norm: "RMSNorm", gate_up: "Linear") -> "Activation":  # type: ignore[override]
        return swiglu(self.norm_linear(x, norm, gate_up), half=_few(x))

    def logits(self, x: Tensor, norm: "RMSNorm", head: "Linear") -> Tensor:
        rows = [x[i : i + CROSSOVER] for i in range(0, x.shape[0], CROSSOVER)]
        parts = [self._product(rms_norm(part, norm.weight, norm.eps, half=True), head) for part in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _product(self, activation: "Activation", linear: "Linear", residual: Tensor | None = None) -> Tensor:
        x, row_scale = activation
        if row_scale is not None and linear.bits != 16:
            if linear.bits == 4:
                stored = (linear.qweight, linear.scales, linear.mins)
                return int4_matmul(x, row_scale, *stored, linear.bias, residual, rows=linear.n)
            return int8_matmul(x, row_scale, linear.weight, linear.scales, linear.bias, residual)
        if row_scale is not None:
            x = (x.float() * row_scale[:, None]).to(torch.bfloat16)
        y: Tensor = torch.nn.functional.linear(x, self._dense(linear))
        if linear.bias is not None:
            y = y + linear.bias
        return y if residual is None else residual + y

    def _dense(self, linear: "Linear") -> Tensor:
        """The matrix in bf16 [N, K], in scratch that all share: it grows to the largest one that a prefill needs."""
        if linear.bits == 16:
            return linear.weight
        n, k = linear.weight.shape if linear.bits == 8 else (linear.n, linear.qweight.shape[1] * 8)
        if n * k > self._scratch.numel():
            self._scratch = torch.empty(n * k, dtype=torch.bfloat16, device=self._scratch.device)
        out = self._scratch[: n * k].view(n, k)
        if linear.bits == 8:
            return dequantize_int8(linear.weight, linear.scales, out)
        return dequantize_int4(linear.qweight, linear.scales, linear.mins, out)


def _few(x: Tensor) -> bool:
    return x.shape[0] <= CROSSOVER
