"""The model: a dense decoder of the Llama, Qwen2 and Qwen3 families, for one sequence.

Reads like the block diagram. Each block is five operations, each of them one kernel on a GPU, all taken from the
table `ops`. Activations are [T, features]: T tokens of one conversation, no batch dimension.
"""

import torch
from torch import Tensor, nn

from localchat.cache import KVCache
from localchat.config import ModelConfig, TensorFormat
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
        self.bits, self.group_size = fmt.bits, fmt.group_size
        if fmt.bits == 4:
            groups = k // fmt.group_size
            self.register_buffer("qweight", torch.empty(n, k // 8, dtype=torch.int32))
            self.register_buffer("scales", torch.empty(n, groups, dtype=torch.float16))
            self.register_buffer("mins", None if fmt.symmetric else torch.empty(n, groups, dtype=torch.float16))
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
    """Grouped-query attention with rotary positions; Qwen3 normalises q and k per head."""

    def __init__(self, config: ModelConfig, name: str, ops: ReferenceOps) -> None:
        super().__init__()
        self.ops = ops
        qkv_rows = config.q_size + 2 * config.kv_size
        self.qkv_proj = _linear(config, f"{name}.qkv_proj", qkv_rows, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = _linear(config, f"{name}.o_proj", config.hidden_size, config.q_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, norm: RMSNorm, rope: Rotary, cache: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self.ops.norm_linear(x, norm, self.qkv_proj)
        heads = self.ops.attention(qkv, self.q_norm, self.k_norm, rope, cache)
        return self.ops.linear_add(heads, self.o_proj, x)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig, name: str, ops: ReferenceOps) -> None:
        super().__init__()
        self.ops = ops
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = _linear(config, f"{name}.gate_up_proj", 2 * inner, hidden, bias=config.mlp_bias)
        self.down_proj = _linear(config, f"{name}.down_proj", hidden, inner, bias=config.mlp_bias)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.ops.linear_add(self.ops.norm_swiglu(x, norm, self.gate_up_proj), self.down_proj, x)


class Block(nn.Module):
    """x <- x + attention(norm(x)); x <- x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, name: str, ops: ReferenceOps) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, f"{name}.self_attn", ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, f"{name}.mlp", ops)

    def forward(self, x: Tensor, rope: Rotary, cache: tuple[Tensor, Tensor]) -> Tensor:
        x = self.self_attn(x, self.input_layernorm, rope, cache)
        return self.mlp(x, self.post_attention_layernorm)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Ids in, hidden states out, logits on request. Build it on `meta` and assign the stored tensors."""

    def __init__(self, config: ModelConfig, ops: ReferenceOps) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.embed_tokens = _linear(config, "embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, f"layers.{i}", ops) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(config, "lm_head", config.vocab_size, config.hidden_size)
        self.inv_freq = inverse_frequencies(config.rope, config.head_dim)

    def forward(self, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """ids, positions int64 [T] -> hidden states [T, H] before the final norm; writes T rows of the cache."""
        x = self.ops.embedding(ids, self.embed_tokens)
        rope = self.ops.rotary(positions, self.inv_freq, self.config.rope.attention_factor)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, cache.layer(i))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] as `forward` returned them -> fp32 [T, V]. Take only the rows that are needed: V is large."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return self.ops.logits(hidden, self.norm, head)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device


def _linear(config: ModelConfig, name: str, n: int, k: int, *, bias: bool = False) -> Linear:
    fmt = config.quantization.format_of(name) if config.quantization else TensorFormat(16)
    return Linear(n, k, fmt, bias=bias)
