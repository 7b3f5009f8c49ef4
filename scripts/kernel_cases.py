"""What scripts/bench_kernels times: calls of the operations of a model, each on memory of its own, and what they move.

A step reads every matrix once, so a call that found its weights in the card's cache would be too fast. The calls of a
case therefore go through all layers of a model with random weights, or as many caches as make WALK bytes. Activations
are shared: in a step, too, the kernel before has just written them.

Groups: "operation" - what the model calls in a decode step, an entry of the table `ops` each; "product" - the packed
products alone, with torch's INT4 product beside them; "small" - kernels that are part of operations and move next to
nothing; "prefill" - operations over many tokens, with a dense bf16 product of the same shape beside them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.cuda_ops import Summed
from localchat.kernels.cards import card_of
from localchat.kernels.gated_delta_net_few_tokens import MOST_TOKENS
from localchat.kernels.int4_matmul import int4_matmul
from localchat.kernels.int8_matmul import int8_matmul
from localchat.kernels.many_tokens import arrivals_for
from localchat.kernels.rms_norm import rms_norm
from localchat.kernels.sampling import sample, sampling_scratch, sampling_settings
from localchat.kernels.swiglu import swiglu
from localchat.model import Linear, Model, RMSNorm
from localchat.sampling import Sampling

WALK = 600_000_000  # bytes: ten times the L2 of an H200
_LAYERS = 64  # calls of a case at the most
_PREFILL_CALLS = 4
_FEW = (8, 16)  # tokens that a delta net takes in one launch, as one
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Calls that do the same work; bytes and flops are those of one (flops 0: none worth counting).

    tokens: new ones; context: tokens that attention sees, 0 where that plays no part. `peer` does the work another way.
    in_memory: the bytes come from memory, not from the kernel before.
    """

    group: str
    name: str
    shape: str
    tokens: int
    context: int
    calls: Sequence[Call]
    nbytes: int
    flops: int
    peer: Sequence[Call] = ()
    in_memory: bool = True


class Cases:
    """The cases of one model, whose table of operations runs them. Memory is taken case by case."""

    def __init__(self, model: Model) -> None:
        self.model, self.ops, self.config, self.device = model, model.ops, model.config, model.device
        layers: list[Any] = list(model.layers)[:_LAYERS]
        self.attention = [layer for layer in layers if layer.kind == "full_attention"]
        self.delta_nets = [layer for layer in layers if layer.kind == "linear_attention"]
        self.layers = layers
        self.head: Linear = model.embed_tokens if self.config.tie_word_embeddings else model.lm_head
        self.few = card_of(self.device).settings.crossover  # tokens that the packed products take
        self.left_out: list[str] = []  # for want of memory

    def matrices(self) -> dict[str, list[Linear]]:
        """The large matrices by name, of all layers."""
        found = {
            "gate_up": [layer.mlp.gate_up_proj for layer in self.layers],
            "down": [layer.mlp.down_proj for layer in self.layers],
            "qkv": [layer.self_attn.qkv_proj for layer in self.attention],
            "o": [layer.self_attn.o_proj for layer in self.attention],
            "in_proj": [layer.linear_attn.in_proj_qkvz for layer in self.delta_nets],
            "out": [layer.linear_attn.out_proj for layer in self.delta_nets],
        }
        return {name: linears for name, linears in found.items() if linears}

    def operations(self, contexts: Sequence[int]) -> Iterator[Case]:
        """One token through each entry of the table, and through a delta net also a few."""
        x, ops, config = self._random(1, self.config.hidden_size), self.ops, self.config
        ids = torch.randint(0, config.vocab_size, (_LAYERS, 1), device=self.device)
        calls: list[Call] = [partial(ops.embedding, row, self.model.embed_tokens) for row in ids]
        yield Case("operation", "embedding", f"{config.hidden_size}", 1, 0, calls, config.hidden_size, 0, (), False)
        for name, calls in self._weighted(x):
            yield self._product_case("operation", name, self.matrices()[name][:1], 1, calls)
        for context in contexts:
            yield from self.attention_case("operation", 1, context)
        for tokens in (1, *_FEW):
            yield from self.delta_net_case("operation", tokens)
        calls = [partial(ops.logits, x, self.model.norm, self.head)] * _PREFILL_CALLS
        yield self._product_case("operation", "norm + lm_head", [self.head], 1, calls)
        settings = {
            "greedy": Sampling(temperature=0.0),
            "top-k, top-p": Sampling(temperature=0.6, top_k=20, top_p=0.95),
        }
        vocab = config.vocab_size
        for name, sampling in settings.items():
            calls = [self._sampling_call(sampling)] * _LAYERS
            yield Case("operation", f"sampling {name}", f"{vocab}", 1, 0, calls, 9 * vocab, 0, (), False)

    def products(self, tokens: Sequence[int]) -> Iterator[Case]:
        """The packed products by themselves, as a step of so many tokens calls them."""
        arrivals = arrivals_for(self.device)
        for name, linears in {**self.matrices(), "lm_head": [self.head] * _PREFILL_CALLS}.items():
            n, k = linears[0].rows, linears[0].columns
            packed = self._torch_int4(n, k) if linears[0].bits == 4 else []
            for count in tokens:
                y, scale = self._random(count, k).half(), torch.ones(count, device=self.device)
                residual = self._random(count, n) if name in ("down", "o", "out") else None
                peer: list[Call] = []
                if packed:
                    half = self._random(count, k).bfloat16()
                    peer = [partial(torch.ops.aten._weight_int4pack_mm, half, w, 128, s) for w, s in packed]
                calls = [_packed_product(y, scale, linear, residual, arrivals) for linear in linears]
                yield self._product_case("product", name, linears[:1], count, calls, peer)

    def small(self) -> Iterator[Case]:
        """Kernels between the products of one token."""
        hidden, inter, ops = self.config.hidden_size, self.config.intermediate_size, self.ops
        x, gate_up = self._random(1, hidden), self._random(1, 2 * inter)
        positions, norm = torch.tensor([1000], device=self.device), self.model.norm
        cases: list[tuple[str, int, Call]] = [
            ("rms_norm", hidden * 6, partial(rms_norm, x, norm.weight, norm.eps, half=True)),
            ("swiglu", inter * 10, partial(swiglu, gate_up, half=True)),
            ("rotary", 8 * len(self.model.inv_freq), partial(ops.rotary, positions, self.model.inv_freq, 1.0)),
        ]
        for name, nbytes, call in cases:
            yield Case("small", name, "", 1, 0, [call] * _LAYERS, nbytes, 0, (), False)

    def prefill(self, tokens: Sequence[int], attention: Sequence[tuple[int, int]], delta_net: int) -> Iterator[Case]:
        """Operations over many tokens; `attention`: new tokens and the context they end."""
        for count in tokens:
            x = self._random(count, self.config.hidden_size)
            for name, calls in self._weighted(x):
                linears = self.matrices()[name][:1]
                dense = self._dense(count, linears[0].rows, linears[0].columns)
                yield self._product_case("prefill", name, linears, count, calls[:_PREFILL_CALLS], dense)
        for count, context in attention:
            yield from self.attention_case("prefill", count, context)
        yield from self.delta_net_case("prefill", delta_net)

    def attention_case(self, group: str, tokens: int, context: int) -> Iterator[Case]:
        """q/k norm, RoPE, the cache's new rows and attention, for the last `tokens` of `context`."""
        config = self.config
        row = 2 * config.kv_size * self.ops.cache_dtype.itemsize
        copies = self._copies(row * context) if tokens == 1 else 1
        if not self.attention or not self._room(copies * row * context, f"attention at {context:,} tokens"):
            return
        kinds = ("full_attention",) * copies
        cache = self._cache(replace(config, num_hidden_layers=copies, layer_types=kinds), context)
        first, width = self.attention[0].self_attn, config.q_size * (1 + config.attn_output_gate) + 2 * config.kv_size
        qkv = self._random(tokens, width)
        if tokens > self.few:
            qkv = qkv.bfloat16()
        positions = torch.arange(context - tokens, context, device=self.device)
        rope = self.ops.rotary(positions, self.model.inv_freq, config.rope.attention_factor)
        calls = [
            partial(self.ops.attention, qkv, first.q_norm, first.k_norm, rope, cache.layer(i), gated=first.gated)
            for i in range(copies)
        ]
        pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
        shape = f"{config.num_attention_heads} heads on {config.num_key_value_heads}, {config.head_dim}"
        yield Case(group, "attention", shape, tokens, context, calls, row * context, 4 * config.q_size * pairs)

    def delta_net_case(self, group: str, tokens: int) -> Iterator[Case]:
        """Steps and decays, convolution to gated norm; the state goes in and out once."""
        config = self.config
        if not self.delta_nets:
            return
        heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        state = heads * dk * dv * 4
        in_turn = tokens <= MOST_TOKENS
        copies = self._copies(2 * state) if in_turn else 1
        kinds = ("linear_attention",) * copies
        cache = self._cache(replace(config, num_hidden_layers=copies, layer_types=kinds), 1)
        qkvz = self._random(tokens, config.conv_channels + config.linear_value_size)
        if tokens > self.few:
            qkvz = qkvz.bfloat16()
        positions = torch.arange(tokens, device=self.device)
        stream, calls = self._stream(tokens), []
        for i in range(copies):
            layer = self.delta_nets[i % len(self.delta_nets)]
            norm, mixer = layer.input_layernorm, layer.linear_attn
            call = partial(self.ops.gated_delta_net, _for(stream, norm), norm, qkvz, mixer, positions, cache.layer(i))
            calls.append(call)
        in_proj = self.delta_nets[0].linear_attn.in_proj_ba
        nbytes = 2 * state + _nbytes(in_proj) + (qkvz.nbytes + 2 * tokens * heads * dv if tokens > 1 else 0)
        flops = tokens * heads * (6 * dk * dv + (0 if in_turn else 64 * (4 * dk + 4 * dv + 64)))
        flops += 2 * tokens * in_proj.rows * in_proj.columns
        yield Case(group, "gated delta net", f"{heads} heads of {dk} x {dv}", tokens, 0, calls, nbytes, flops)

    def _weighted(self, x: Tensor) -> Iterator[tuple[str, list[Call]]]:
        """The operations that read large matrices, with the names of these, for an input x [T, H].

        Each has what the one before it gives, as in a step.
        """
        ops, tokens = self.ops, x.shape[0]
        mlps = [(layer.input_layernorm, layer.post_attention_layernorm, layer.mlp) for layer in self.layers]
        before, behind, mlp = mlps[0]
        stream = x
        if self.attention:
            mixers = [(layer.post_attention_layernorm, layer.self_attn) for layer in self.attention]
            heads = self._heads(tokens, self.config.q_size)
            yield "o", [partial(ops.linear_add, heads, mixer.o_proj, x, norm) for norm, mixer in mixers]
            stream = ops.linear_add(heads, mixers[0][1].o_proj, x, behind)
        if self.delta_nets:
            nets = [(layer.post_attention_layernorm, layer.linear_attn) for layer in self.delta_nets]
            heads = self._heads(tokens, self.config.linear_value_size)
            yield "out", [partial(ops.linear_add, heads, net.out_proj, x, norm) for norm, net in nets]
            stream = ops.linear_add(heads, nets[0][1].out_proj, x, behind)
        yield "gate_up", [partial(ops.norm_swiglu, _for(stream, n), n, mlp.gate_up_proj) for _, n, mlp in mlps]
        inner = ops.norm_swiglu(stream, behind, mlp.gate_up_proj)
        yield "down", [partial(ops.linear_add, inner, mlp.down_proj, x, norm) for norm, _, mlp in mlps]
        stream = ops.linear_add(inner, mlp.down_proj, x, before)
        if self.attention:
            norms = [(layer.input_layernorm, layer.self_attn.qkv_proj) for layer in self.attention]
            yield "qkv", [partial(ops.norm_linear, _for(stream, norm), norm, linear) for norm, linear in norms]
        if self.delta_nets:
            norms = [(layer.input_layernorm, layer.linear_attn.in_proj_qkvz) for layer in self.delta_nets]
            yield "in_proj", [partial(ops.norm_linear, _for(stream, norm), norm, linear) for norm, linear in norms]

    def _stream(self, tokens: int) -> Tensor | Summed:
        """What a mixer reads: the sum at the end of a layer."""
        layer, inner = self.layers[0], self._heads(tokens, self.config.intermediate_size)
        x = self._random(tokens, self.config.hidden_size)
        stream: Tensor | Summed = self.ops.linear_add(inner, layer.mlp.down_proj, x, layer.input_layernorm)
        return stream

    def _heads(self, tokens: int, size: int) -> Tensor:
        """What a mixer gives: fp16 of few tokens."""
        return self._random(tokens, size).to(torch.float16 if tokens <= self.few else torch.bfloat16)

    def _product_case(
        self,
        group: str,
        name: str,
        linears: list[Linear],
        tokens: int,
        calls: Sequence[Call],
        peer: Sequence[Call] = (),
    ) -> Case:
        shape = f"{linears[0].rows} x {linears[0].columns}"
        flops = sum(2 * tokens * linear.rows * linear.columns for linear in linears)
        return Case(group, name, shape, tokens, 0, calls, sum(map(_nbytes, linears)), flops, peer)

    def _sampling_call(self, sampling: Sampling) -> Call:
        vocab = self.config.vocab_size
        settings = [tensor.to(self.device) for tensor in sampling_settings(**vars(sampling))]
        seen = torch.zeros(vocab, dtype=torch.uint8, device=self.device)
        place, out = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
        scratch = sampling_scratch(vocab, self.device)
        return partial(sample, self._random(1, vocab), seen, *settings, place, out, scratch)

    def _torch_int4(self, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
        """Random matrices as torch's INT4 product takes them, groups of 128; none where it does not exist."""
        if self.device.type != "cuda" or k % 128 or not self._room(WALK, "torch's INT4 product"):
            return []
        packed = []
        for _ in range(self._copies(n * k // 2)):
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=self.device)
            scales = torch.full((k // 128, n, 2), 0.01, dtype=torch.bfloat16, device=self.device)
            packed.append((torch.ops.aten._convert_weight_to_int4pack(codes, 8), scales))
        return packed

    def _dense(self, tokens: int, n: int, k: int) -> list[Call]:
        x, weight = self._random(tokens, k).bfloat16(), self._random(n, k).bfloat16()
        return [partial(torch.nn.functional.linear, x, weight)] * _PREFILL_CALLS

    def _cache(self, config: Any, length: int) -> KVCache:
        cache = KVCache(config, length, dtype=self.ops.cache_dtype, device=self.device)
        for index in range(config.num_hidden_layers):
            for rows in cache.layer(index):
                if rows.is_floating_point():
                    rows.normal_(0.0, 0.1)
                else:
                    rows.random_(-127, 128)
        return cache

    def _copies(self, nbytes: int) -> int:
        return max(1, min(_LAYERS, -(-WALK // nbytes)))

    def _room(self, nbytes: int, what: str) -> bool:
        """Whether the card has so much left, twice over; else `what` is noted as left out."""
        if self.device.type != "cuda" or torch.cuda.mem_get_info()[0] > 2 * nbytes:
            return True
        self.left_out.append(what)
        return False

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)


def _packed_product(y: Tensor, scale: Tensor, linear: Linear, residual: Tensor | None, arrivals: Tensor) -> Call:
    if linear.bits == 4:
        stored = (linear.qweight, linear.scales, linear.mins, linear.bias, residual)
        return partial(int4_matmul, y, scale, *stored, rows=linear.rows, arrivals=arrivals)
    return partial(int8_matmul, y, scale, linear.weight, linear.scales, linear.bias, residual, arrivals=arrivals)


def _for(stream: Any, norm: RMSNorm) -> Any:
    """A sum of another layer as if `norm` stood behind it; it takes the same time."""
    return stream._replace(norm=norm) if isinstance(stream, Summed) else stream


def _nbytes(linear: Linear) -> int:
    return sum(tensor.nbytes for tensor in linear.buffers())
