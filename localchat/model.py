"""The model: a dense decoder of the Llama, Qwen2, Qwen3 and Qwen3.5 families, for one sequence.

Reads like the block diagram. Each block is five operations, all taken from the table `ops`.
Activations are [T, features]: T tokens of one conversation, no batch dimension.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from localchat.cache import KVCache
from localchat.config import ModelConfig, TensorFormat
from localchat.kernels.int4_packing import TILE_ROWS, padded_rows
from localchat.ops import ReferenceOps
from localchat.rope import Rotary, inverse_frequencies


class Linear(nn.Module):
    """One matrix W [n, k] in the format it is stored in (kernels/int4_packing.py); only `ops` looks inside."""

    qweight: Tensor
    weight: Tensor
    scales: Tensor
    mins: Tensor | None
    bias: Tensor | None
    cpu_qweight: Tensor | None = None
    cpu_scales_zeros: Tensor | None = None
    cpu_scales: Tensor | None = None

    def __init__(self, n: int, k: int, fmt: TensorFormat, *, bias: bool = False) -> None:
        super().__init__()
        self.rows, self.columns = n, k
        self.bits, self.group_size = fmt.bits, fmt.group_size
        if fmt.bits == 4:
            groups = (padded_rows(n) // TILE_ROWS, k // fmt.group_size, TILE_ROWS)
            self.register_buffer("qweight", torch.empty(padded_rows(n), k // 8, dtype=torch.int32))
            self.register_buffer("scales", torch.empty(groups, dtype=torch.float16))
            self.register_buffer("mins", None if fmt.symmetric else torch.empty(groups, dtype=torch.float16))
        else:
            self.register_buffer("weight", torch.empty(n, k, dtype=torch.int8 if fmt.bits == 8 else None))
            if fmt.bits == 8:
                self.register_buffer("scales", torch.empty(n, dtype=torch.float32))
        self.register_buffer("bias", torch.empty(n) if bias else None)


class RMSNorm(nn.Module):
    """The gain and epsilon of a norm; `ops` folds it into the product that follows."""

    weight: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(size))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; Qwen3 normalises q and k per head, Qwen3.5 also gates the result.

    The rows of qkv_proj are all queries, keys, values and, where there is one, the gate.
    """

    def __init__(self, config: ModelConfig, name: str, ops: ReferenceOps) -> None:
        super().__init__()
        self.ops = ops
        self.gated = config.attn_output_gate
        qkv_rows = config.q_size * (1 + self.gated) + 2 * config.kv_size
        self.qkv_proj = _linear(config, f"{name}.qkv_proj", qkv_rows, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = _linear(config, f"{name}.o_proj", config.hidden_size, config.q_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, norm: RMSNorm, rope: Rotary, cache: tuple[Tensor, ...], behind: RMSNorm) -> Tensor:
        qkv = self.ops.norm_linear(x, norm, self.qkv_proj)
        heads = self.ops.attention(qkv, self.q_norm, self.k_norm, rope, cache, gated=self.gated)
        return self.ops.linear_add(heads, self.o_proj, x, behind)


class DepthwiseConv(nn.Module):
    """The weights of a causal convolution over the tokens, one short filter per channel; the last one is for now."""

    weight: Tensor

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(channels, width))


class GatedDeltaNet(nn.Module):
    """Linear attention with a state that forgets and corrects itself (arXiv 2412.06464).

    in_proj_qkvz has the rows q, k, v (the convolution's channels) and z (the gate of the norm); in_proj_ba those that
    become each value head's step (beta) and decay.
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, config: ModelConfig, name: str, ops: ReferenceOps) -> None:
        super().__init__()
        self.ops = ops
        hidden, values, heads = config.hidden_size, config.linear_value_size, config.linear_num_value_heads
        self.in_proj_qkvz = _linear(config, f"{name}.in_proj_qkvz", config.conv_channels + values, hidden)
        self.in_proj_ba = _linear(config, f"{name}.in_proj_ba", 2 * heads, hidden)
        self.conv1d = DepthwiseConv(config.conv_channels, config.linear_conv_kernel_dim)
        self.register_buffer("A_log", torch.empty(heads, dtype=torch.float32))
        self.register_buffer("dt_bias", torch.empty(heads, dtype=torch.float32))
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = _linear(config, f"{name}.out_proj", hidden, values)

    def forward(self, x: Tensor, norm: RMSNorm, rope: Rotary, cache: tuple[Tensor, ...], behind: RMSNorm) -> Tensor:
        qkvz = self.ops.norm_linear(x, norm, self.in_proj_qkvz)
        heads = self.ops.gated_delta_net(x, norm, qkvz, self, rope.positions, cache)
        return self.ops.linear_add(heads, self.out_proj, x, behind)


class MLP(nn.Module):
    """SwiGLU feed-forward; the rows of gate and up take turns in gate_up_proj."""

    def __init__(self, config: ModelConfig, name: str, ops: ReferenceOps) -> None:
        super().__init__()
        self.ops = ops
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = _linear(config, f"{name}.gate_up_proj", 2 * inner, hidden, bias=config.mlp_bias)
        self.down_proj = _linear(config, f"{name}.down_proj", hidden, inner, bias=config.mlp_bias)

    def forward(self, x: Tensor, norm: RMSNorm, behind: RMSNorm | None) -> Tensor:
        return self.ops.linear_add(self.ops.norm_swiglu(x, norm, self.gate_up_proj), self.down_proj, x, behind)


class Block(nn.Module):
    """x <- x + mixer(norm(x)); x <- x + mlp(norm(x)). The mixer is attention or a gated delta net.

    A sum is told which norm stands behind it, so that one launch can serve both.
    """

    def __init__(self, config: ModelConfig, name: str, kind: str, ops: ReferenceOps) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if kind == "full_attention":
            self.self_attn = Attention(config, f"{name}.self_attn", ops)
        else:
            self.linear_attn = GatedDeltaNet(config, f"{name}.linear_attn", ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, f"{name}.mlp", ops)

    def forward(self, x: Tensor, rope: Rotary, cache: tuple[Tensor, ...], behind: RMSNorm | None) -> Tensor:
        mixer = self.self_attn if self.kind == "full_attention" else self.linear_attn
        x = mixer(x, self.input_layernorm, rope, cache, self.post_attention_layernorm)
        return self.mlp(x, self.post_attention_layernorm, behind)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Ids in, hidden states out, logits on request. Build it on `meta` and assign the stored tensors."""

    def __init__(self, config: ModelConfig, ops: ReferenceOps) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.embed_tokens = _linear(config, "embed_tokens", config.vocab_size, config.hidden_size)
        blocks = (Block(config, f"layers.{i}", kind, ops) for i, kind in enumerate(config.layer_types))
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(config, "lm_head", config.vocab_size, config.hidden_size)
        self.inv_freq = inverse_frequencies(config.rope, config.rotary_dim)

    def forward(self, ids: Tensor, positions: Tensor, cache: KVCache, length: int | None = None) -> Tensor:
        """ids, positions int64 [T] -> hidden states [T, H] before the final norm.

        Writes T rows of the cache and moves its recurrent states on by T tokens. length: one more than the last
        position, where the host knows it; some kernels are launched otherwise then, so not while a graph is captured.
        """
        return deque(self.layer_by_layer(ids, positions, cache, length), maxlen=1).pop()

    def layer_by_layer(
        self, ids: Tensor, positions: Tensor, cache: KVCache, length: int | None = None
    ) -> Iterator[Tensor]:
        """`forward` with a pause after each layer, for a caller who wants to look up meanwhile, or to stop.

        What it yields before the last one is for the next layer only.
        """
        x = self.ops.embedding(ids, self.embed_tokens)
        rope = replace(self.ops.rotary(positions, self.inv_freq, self.config.rope.attention_factor), length=length)
        for i, layer in enumerate(self.layers):
            behind = self.layers[i + 1].input_layernorm if i + 1 < len(self.layers) else None
            x = layer(x, rope, cache.layer(i), behind)
            yield x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] as `forward` returned them -> fp32 [T, V]. Take only the rows that are needed: V is large."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return self.ops.logits(hidden, self.norm, head)

    @property
    def on_host(self) -> frozenset[str]:
        """Names of tensors that stay in the host's memory: an embedding of which a token reads one row."""
        alone = not self.config.tie_word_embeddings and self.embed_tokens.bits == 8
        return frozenset({"embed_tokens.weight"}) if alone and self.ops.embedding_on_host else frozenset()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device


def _linear(config: ModelConfig, name: str, n: int, k: int, *, bias: bool = False) -> Linear:
    fmt = config.quantization.format_of(name) if config.quantization else TensorFormat(16)
    return Linear(n, k, fmt, bias=bias)
