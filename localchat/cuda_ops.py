"""The table for an NVIDIA card: every operation of a decode step is a Triton kernel from kernels/.

The residual stream is fp32, products take fp16 inputs with a factor per row ("scaled half"), the cache is bf16. In a
step over few tokens, what stands between two products happens at the end of the first: SwiGLU, and of an RMSNorm its
gain and the sums of its squares, of which the second makes the factor. So a block is few launches: five for one token,
six or seven for a few, and torch computes nothing between them. From nine tokens on these are kernels of their own.

A step over more tokens than the card's `crossover` (kernels/cards.py; prefill) goes another way: one matrix at a time
is dequantised into bf16 scratch, and the library's dense product reads that. It writes and reads 4 bytes a weight,
which many tokens share, and reaches a rate that the packed product does not.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from localchat.kernels.attention import attention_prefill
from localchat.kernels.attention_decode import attention_decode, decode_splits
from localchat.kernels.attention_slabs import slabs_for
from localchat.kernels.cards import card_of
from localchat.kernels.early import can_read_early
from localchat.kernels.gated_delta_net_decode import StepProduct, gated_delta_net_decode
from localchat.kernels.gated_delta_net_few_tokens import MOST_TOKENS, gated_delta_net_few_tokens
from localchat.kernels.gated_delta_net_prefill import gated_delta_net_prefill
from localchat.kernels.int4_few_tokens import FEW_TOKENS
from localchat.kernels.int4_matmul import dequantize_int4, int4_matmul, int4_matmul_norm, int4_matmul_swiglu, takes
from localchat.kernels.int8_embedding import int8_embedding
from localchat.kernels.int8_matmul import dequantize_int8, int8_matmul
from localchat.kernels.many_tokens import MANY_TOKENS, arrivals_for
from localchat.kernels.rms_norm import rms_norm
from localchat.kernels.rope_kv_write import rope_kv_write
from localchat.kernels.rotary import rotary_table
from localchat.kernels.scaled_half import UNIT, Squares
from localchat.kernels.swiglu import swiglu
from localchat.ops import ReferenceOps, split_gate
from localchat.rope import Rotary

if TYPE_CHECKING:
    from localchat.model import GatedDeltaNet, Linear, RMSNorm

# KV heads of attention and key heads of a delta net, each of which counts arrivals; real models have up to 32.
_MOST_HEADS = 1024
# Tokens of which logits are computed at once.
_LOGITS = 128
# Tokens up to which a delta net takes them one after the other in one launch: 13 us for 8 and 21 for 16 on an H200.
_IN_TURN = MOST_TOKENS
# What a product takes: scaled half (values, row scales or what they follow from), or bf16 values and None.
Activation = tuple[Tensor, Tensor | Squares | None]


class Early(NamedTuple):
    """An activation that the product behind it may read while it is still written (kernels/early.py)."""

    values: Tensor
    factors: Tensor


class Summed(NamedTuple):
    """The residual stream fp32 [T, H], and the scaled half that `norm`, which stands behind it, gives."""

    norm: "RMSNorm"
    x: Tensor
    half: Tensor
    squares: Squares


Stream = Tensor | Summed


class CudaOps(ReferenceOps):
    """See the module."""

    weight_dtype = torch.bfloat16
    cache_dtype = torch.bfloat16
    embedding_on_host = True
    prefill_chunk = 2048
    takes_padding = True

    def __init__(self, device: torch.device) -> None:
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._scratch = torch.empty(0, dtype=torch.bfloat16, device=device)
        self._units = torch.full((MANY_TOKENS,), UNIT, device=device)
        self._arrivals = torch.zeros(_MOST_HEADS, dtype=torch.int32, device=device)
        self._product_arrivals = arrivals_for(device)
        # fp16 [FEW_TOKENS, intermediate size] of a model whose gate_up ends slowly: what `down` may read early
        self._inner: Tensor | None = None
        self._unwritten: Tensor | None = None  # as many of its rows as this layer's first product has filled

    def embedding(self, ids: Tensor, table: "Linear") -> Tensor:
        if table.bits == 8:
            return int8_embedding(ids, table.weight, table.scales)
        return super().embedding(ids, table)

    def rotary(self, positions: Tensor, inv_freq: Tensor, attention_factor: float) -> Rotary:
        return Rotary(positions, *rotary_table(positions, inv_freq, attention_factor))

    def norm_linear(self, x: Stream, norm: "RMSNorm", linear: "Linear") -> Tensor:  # type: ignore[override]
        values, factors = _normed(x, norm)
        self._unwritten = None if factors is None else self._to_fill(linear, len(values))
        return self._product((values, factors), linear, unwritten=self._unwritten)

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
        if qkv.shape[0] == 1:
            splits = decode_splits(keys, self._multiprocessors)
            heads = (qkv, q_weight, k_weight, eps, *angles, keys, values)
            counters = self._arrivals
            return attention_decode(*heads, splits=splits, arrivals=counters, gate=gate, scales=scales, units=True)
        rows = qkv.shape[0] * (qkv.shape[1] // (keys.shape[0] * keys.shape[2]) - 2)
        slabs = slabs_for(rows, keys, rope.length, self._scratch) if scales else None
        q_dtype = torch.bfloat16 if slabs is None else slabs.memory.dtype
        q = rope_kv_write(qkv, q_weight, k_weight, eps, *angles, keys, values, scales=scales, q_dtype=q_dtype)
        cached, dtype, fill = (keys, values, rope.positions), _mixer_dtype(q), self._multiprocessors
        return attention_prefill(q, *cached, gate=gate, scales=scales, dtype=dtype, multiprocessors=fill, slabs=slabs)

    def gated_delta_net(  # type: ignore[override]
        self,
        x: Stream,
        norm: "RMSNorm",
        qkvz: Tensor,
        mixer: "GatedDeltaNet",
        positions: Tensor,
        cache: tuple[Tensor, ...],
    ) -> Tensor:
        linear, (values, factors), eps = mixer.in_proj_ba, _normed(x, norm), mixer.norm.eps
        weights = (mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight)
        if len(qkvz) == 1 and factors is not None and linear.bits == 8 and linear.bias is None:
            inside = StepProduct(values, factors, linear.weight, linear.scales)
            return gated_delta_net_decode(qkvz, inside, *weights, eps, positions, *cache, units=True)
        ba = self._product((values, factors), linear)
        if len(qkvz) == 1:
            return gated_delta_net_decode(qkvz, ba, *weights, eps, positions, *cache, units=True)
        if len(qkvz) <= _IN_TURN and _few(qkvz):
            states, counters = (positions, *cache), self._arrivals
            return gated_delta_net_few_tokens(qkvz, ba, *weights, eps, *states, arrivals=counters, units=True)
        dtype = _mixer_dtype(qkvz)
        return gated_delta_net_prefill(qkvz, ba, *weights, eps, positions, *cache, dtype=dtype)

    def linear_add(  # type: ignore[override]
        self, x: "Tensor | Activation", linear: "Linear", residual: Stream, behind: "RMSNorm | None"
    ) -> Stream:
        residual = residual.x if isinstance(residual, Summed) else residual
        if isinstance(x, Tensor):
            x = self._activation(x)
        values, factors = x
        if behind is None or factors is None or not _fused(linear, len(values)):
            return self._product(x, linear, residual)
        stored = (linear.qweight, linear.scales, linear.mins, linear.bias)
        gain = (behind.weight, behind.eps)
        early = isinstance(x, Early)
        return Summed(behind, *int4_matmul_norm(values, factors, *stored, residual, *gain, early=early))

    def norm_swiglu(self, x: Stream, norm: "RMSNorm", gate_up: "Linear") -> "Activation":  # type: ignore[override]
        values, factors = _normed(x, norm)
        if factors is None or not _fused(gate_up, len(values)):
            return swiglu(self._product((values, factors), gate_up), half=factors is not None)
        stored = (gate_up.qweight, gate_up.scales, gate_up.mins, gate_up.bias)
        out, self._unwritten = self._unwritten, None
        if self._inner is None and card_of(values.device).ends_slowly(gate_up.rows):
            self._inner = torch.empty(FEW_TOKENS, gate_up.rows // 2, dtype=torch.float16, device=values.device)
        inside = int4_matmul_swiglu(values, factors, *stored, rows=gate_up.rows, out=out)
        units = self._units[: len(values)]
        return (inside, units) if out is None else Early(inside, units)

    def logits(self, x: Tensor, norm: "RMSNorm", head: "Linear") -> Tensor:
        rows = torch.split(x, min(_LOGITS, card_of(x.device).settings.crossover))
        parts = [self._product(rms_norm(part, norm.weight, norm.eps, half=True), head) for part in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _to_fill(self, linear: "Linear", tokens: int) -> Tensor | None:
        """Where SwiGLU of this layer goes, if `down` may read it early and `linear`, the first product, can fill it."""
        if self._inner is None or not _fused(linear, tokens) or not can_read_early(self._inner):
            return None
        return self._inner[:tokens]

    def _activation(self, heads: Tensor) -> "Activation":
        """What a mixer gives, as the product behind it takes it."""
        if heads.dtype == torch.float16:
            return heads, self._units[: len(heads)]
        return heads.to(torch.bfloat16), None

    def _product(
        self,
        activation: "Activation",
        linear: "Linear",
        residual: Tensor | None = None,
        unwritten: Tensor | None = None,
    ) -> Tensor:
        x, row_scale = activation
        arrivals = self._product_arrivals
        if row_scale is not None and linear.bits == 4 and takes(len(x), linear.scales):
            stored = (linear.qweight, linear.scales, linear.mins, linear.bias, residual)
            return int4_matmul(x, row_scale, *stored, rows=linear.rows, arrivals=arrivals, unwritten=unwritten)
        if row_scale is not None and linear.bits == 8:
            return int8_matmul(x, row_scale, linear.weight, linear.scales, linear.bias, residual, arrivals=arrivals)
        if row_scale is not None:
            factors = row_scale.row_scale(x.shape[1]) if isinstance(row_scale, Squares) else row_scale
            x = (x.float() * factors[:, None]).to(torch.bfloat16)
        y: Tensor = torch.nn.functional.linear(x, self._dense(linear))
        if linear.bias is not None:
            y = y + linear.bias
        return y if residual is None else residual + y

    def _dense(self, linear: "Linear") -> Tensor:
        """The matrix in bf16 [N, K], in scratch that all share: it grows to the largest one that a prefill needs.

        A graph has memory of its own, as what grows moves.
        """
        if linear.bits == 16:
            return linear.weight
        n, k = linear.weight.shape if linear.bits == 8 else (linear.rows, linear.qweight.shape[1] * 8)
        if self._scratch.is_cuda and torch.cuda.is_current_stream_capturing():
            out = torch.empty(n, k, dtype=torch.bfloat16, device=self._scratch.device)
        else:
            if n * k > self._scratch.numel():
                self._scratch = torch.empty(n * k, dtype=torch.bfloat16, device=self._scratch.device)
            out = self._scratch[: n * k].view(n, k)
        if linear.bits == 8:
            return dequantize_int8(linear.weight, linear.scales, out)
        return dequantize_int4(linear.qweight, linear.scales, linear.mins, out)


def _few(x: Tensor) -> bool:
    return x.shape[0] <= card_of(x.device).settings.crossover


def _mixer_dtype(x: Tensor) -> torch.dtype:
    """What a mixer of several tokens gives: what the product behind it takes."""
    return torch.float16 if _few(x) else torch.bfloat16


def _fused(linear: "Linear", tokens: int) -> bool:
    """Whether the product's kernel has an end that does more."""
    return linear.bits == 4 and tokens <= FEW_TOKENS


def _normed(x: Stream, norm: "RMSNorm") -> "Activation":
    if isinstance(x, Summed):
        if x.norm is not norm:
            raise ValueError("a sum was told of another norm behind it than the one that reads it")
        return x.half, x.squares
    return rms_norm(x, norm.weight, norm.eps, half=_few(x))
