"""The one table through which the model calls its operations.

A model's forward names five operations a block and one at each end; this file decides which code runs for them.
`ReferenceOps` is the fp32-accurate specification, composed of the references in kernels/. `CpuOps` replaces its
matrix products by torch's packed CPU kernels. Another device is another class here: the model does not change.

Activations are [T, features] in `dtype`; there is no batch dimension.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localchat.kernels import int4_packing
from localchat.kernels.attention import attention_reference
from localchat.kernels.gated_delta_net import gated_delta_net_chunked, gated_delta_net_reference
from localchat.kernels.int4_matmul import int4_matmul_reference
from localchat.kernels.int8_embedding import int8_embedding_reference
from localchat.kernels.int8_matmul import int8_matmul_reference
from localchat.kernels.rms_norm import rms_norm_reference
from localchat.kernels.rope_kv_write import rope_kv_write_reference
from localchat.kernels.sampling import sample_reference
from localchat.kernels.swiglu import swiglu_reference
from localchat.rope import Rotary, rotary

# Logits that the CPU computes again in fp32, the largest ones of each row.
_REFINED_LOGITS = 64

if TYPE_CHECKING:
    from localchat.model import GatedDeltaNet, Linear, RMSNorm
    from localchat.sampling import Sampling


class ReferenceOps:
    """Every operation as its reference in kernels/, in fp32.

    `dtype` is that of activations, `weight_dtype` that of unquantised matrices, `cache_dtype` that of keys and values
    (where they are not INT8) and of the convolutions' inputs.
    """

    dtype = torch.float32
    weight_dtype = torch.float32
    cache_dtype = torch.float32
    embedding_on_host = False  # of a model whose head has a matrix of its own
    prefill_chunk = 256  # tokens of one forward during prefill: bounds memory, and how long Ctrl-C waits
    takes_padding = False  # rows that fill a call up (kernels/padding.py): the references take every row for a token

    def prepare(self, linear: "Linear") -> None:
        """Called once per matrix after loading: bring its tensors into the form that `product` wants."""
        if linear.bits == 16:
            linear.weight = linear.weight.to(self.weight_dtype)
        if linear.bias is not None:
            linear.bias = linear.bias.to(self.dtype)

    def product(self, x: Tensor, linear: "Linear") -> Tensor:
        """x [T, K] -> x W^T + bias [T, N]."""
        if linear.bits == 4:
            return int4_matmul_reference(x, linear.qweight, linear.scales, linear.mins, linear.bias, rows=linear.rows)
        if linear.bits == 8:
            return int8_matmul_reference(x, linear.weight, linear.scales, linear.bias)
        return torch.nn.functional.linear(x, linear.weight, linear.bias)

    def embedding(self, ids: Tensor, table: "Linear") -> Tensor:
        """ids int64 [T] -> [T, H]."""
        if table.bits == 8:
            return int8_embedding_reference(ids, table.weight, table.scales, self.dtype)
        return table.weight[ids].to(self.dtype)

    def rotary(self, positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Rotary:
        """What the attention of every layer needs to know of the positions int64 [T] of this step."""
        return rotary(positions, inv_freq, attention_factor)

    def norm_linear(self, x: Tensor, norm: "RMSNorm", linear: "Linear") -> Tensor:
        """RMSNorm and the product that follows it. [T, H] -> [T, N]."""
        return self.product(rms_norm_reference(x, norm.weight, norm.eps), linear)

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
        """q/k norm, RoPE, cache write and grouped-query attention. qkv [T, q + k + v rows] -> [T, Hq * D].

        cache: keys, values, and of an INT8 cache the scales of both.
        gated: behind q, k and v there is a gate [T, Hq * D], whose sigmoid multiplies the result.
        """
        q_weight, k_weight = (q_norm.weight, k_norm.weight) if q_norm and k_norm else (None, None)
        eps = q_norm.eps if q_norm else 0.0
        keys, values, *scales = cache
        qkv, gate = split_gate(qkv, keys) if gated else (qkv, None)
        angles = (rope.cos, rope.sin, rope.positions)
        q = rope_kv_write_reference(qkv, q_weight, k_weight, eps, *angles, keys, values, scales=scales)
        return attention_reference(q, keys, values, rope.positions, gate=gate, scales=scales)

    def gated_delta_net(
        self,
        x: Tensor,
        norm: "RMSNorm",
        qkvz: Tensor,
        mixer: "GatedDeltaNet",
        positions: Tensor,
        cache: tuple[Tensor, ...],
    ) -> Tensor:
        """Steps and decays (RMSNorm of x and in_proj_ba), convolution, delta rule and gated norm.

        x [T, H], qkvz [T, C + V], positions int64 [T] -> [T, V]; moves both states on.
        """
        ba = self.norm_linear(x, norm, mixer.in_proj_ba)
        weights = (mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight)
        return self.delta_rule(len(x))(qkvz, ba, *weights, mixer.norm.eps, positions, *cache)

    def delta_rule(self, tokens: int) -> Callable[..., Tensor]:
        """The form of gated_delta_net_reference for so many tokens."""
        return gated_delta_net_reference

    def linear_add(self, x: Tensor, linear: "Linear", residual: Tensor, behind: "RMSNorm | None") -> Tensor:
        """residual + product. [T, K], [T, H] -> [T, H]; behind: the norm that reads the sum next, if one does."""
        return residual + self.product(x, linear)

    def norm_swiglu(self, x: Tensor, norm: "RMSNorm", gate_up: "Linear") -> Tensor:
        """RMSNorm, the gate_up product and SwiGLU. [T, H] -> [T, I]."""
        return swiglu_reference(self.norm_linear(x, norm, gate_up))

    def logits(self, x: Tensor, norm: "RMSNorm", head: "Linear") -> Tensor:
        """The final norm and lm_head. [T, H] -> fp32 [T, V]."""
        return self.norm_linear(x, norm, head).float()

    def sample(self, logits: Tensor, seen: Tensor, sampling: "Sampling", position: int) -> Tensor:
        """logits fp32 [V], seen uint8 [V] -> the id of the token at `position`, int64 []."""
        return sample_reference(
            logits,
            seen,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            seed=sampling.seed,
            position=position,
        )


def split_gate(qkv: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """qkv [T, q + k + v + q rows] of a gated attention -> q, k, v and the gate. keys: the layer's cache [Hkv, S, D]."""
    kv_rows = 2 * keys.shape[0] * keys.shape[2]
    q_rows = (qkv.shape[1] - kv_rows) // 2
    return qkv[:, : q_rows + kv_rows], qkv[:, q_rows + kv_rows :]


class CpuOps(ReferenceOps):
    """Matrix products by torch's packed bf16 kernels, everything else by the references.

    Those kernels take and give bf16. The residual stream between them stays fp32, and the logits that can win are
    computed once more in fp32: with bf16 throughout, a trained model's near-ties (0.1 of 25) are lost in the rounding.
    torch's INT4 kernel has its own order of nibbles, so each matrix is repacked once on load. It takes N that is a
    multiple of 16, the INT8 kernel K that is one (it reads past the end of others); what does not fit, which is nothing
    of a real model, stays with the reference.
    """

    weight_dtype = torch.bfloat16

    def prepare(self, linear: "Linear") -> None:
        super().prepare(linear)
        if linear.bits == 4 and linear.rows % 16 == 0:
            codes = int4_packing.unpack(linear.qweight, linear.group_size, linear.rows).to(torch.int32)
            linear.cpu_qweight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 8)
            # The kernel computes scale * (q - 8) + zero. [K/G, N, 2]
            scales, zeros = int4_packing.unpack_scales(linear.scales, linear.rows).float(), torch.zeros(())
            if linear.mins is not None:
                zeros = int4_packing.unpack_scales(linear.mins, linear.rows) + 8 * scales
            stacked = torch.stack((scales, zeros.expand_as(scales)), dim=-1).transpose(0, 1).contiguous()
            linear.cpu_scales_zeros = stacked.to(torch.bfloat16)
            linear.qweight = linear.scales = torch.empty(0)
            linear.mins = None
        if linear.bits == 8 and linear.weight.shape[1] % 16 == 0:
            linear.cpu_scales = linear.scales.to(torch.bfloat16)

    def product(self, x: Tensor, linear: "Linear") -> Tensor:
        half, y = x.to(torch.bfloat16), None
        if linear.bits == 16:
            y = torch.nn.functional.linear(half, linear.weight)
        elif linear.cpu_scales is not None:
            y = torch.ops.aten._weight_int8pack_mm(half, linear.weight, linear.cpu_scales)
        elif linear.cpu_qweight is not None:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(
                half, linear.cpu_qweight, linear.group_size, linear.cpu_scales_zeros
            )
        else:
            return super().product(x, linear)
        return y.float() if linear.bias is None else y + linear.bias

    def delta_rule(self, tokens: int) -> Callable[..., Tensor]:
        return gated_delta_net_reference if tokens == 1 else gated_delta_net_chunked

    def logits(self, x: Tensor, norm: "RMSNorm", head: "Linear") -> Tensor:
        normed = rms_norm_reference(x, norm.weight, norm.eps)
        logits = self.product(normed, head)
        if head.bits == 4:  # its own error is larger than that of the product
            return logits
        best = logits.topk(min(_REFINED_LOGITS, logits.shape[-1]), dim=-1).indices  # [T, n]
        refined = (head.weight[best].float() @ normed.unsqueeze(-1)).squeeze(-1)
        return logits.scatter_(-1, best, refined * head.scales[best] if head.bits == 8 else refined)


def ops_for(device: torch.device) -> ReferenceOps:
    """The table for a device.

    Raises:
        ValueError: there are no kernels for this kind of device.
    """
    if device.type == "cpu":
        return CpuOps()
    if device.type == "cuda":
        from localchat import tuning
        from localchat.cuda_ops import CudaOps

        tuning.adopt(device)
        return CudaOps(device)
    raise ValueError(f"ops_for: got device {device}, wanted cpu or cuda")
