"""The contenders of scripts/bench_peers: each loads a model, and gives prefill and decode rates and its memory.

On a card all have the shapes of a registry entry and random weights, made on the card: nobody's speed depends on the
values. A contender whose package is missing says so in its row.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from localchat import bench
from localchat.config import ModelConfig
from localchat.kernels.int4_packing import unpack_scales
from localchat.kernels.rope_kv_write import rope_kv_write_reference
from localchat.model import Linear, RMSNorm
from localchat.ops import ReferenceOps
from localchat.registry import Entry
from localchat.rope import Rotary
from localchat.synthetic import synthetic_model

REPEATS = 3


@dataclass(frozen=True)
class Row:
    """Medians of REPEATS runs behind a warm-up, tokens per second; the peak of allocated device memory, GB (1e9)."""

    name: str
    prefill: float = 0.0
    decode: float = 0.0
    peak_gb: float = 0.0
    missing: str = ""


def localchat(entry: Entry, prompt: int, tokens: int) -> Row:
    """This program: `localchat bench --synthetic`."""
    result = bench.run(entry, device="cuda", prompt_tokens=prompt, decode_tokens=tokens, repeats=REPEATS)
    return Row("localchat INT4", result.prefill_rate, result.decode_rate, result.memory_bytes / 1e9)


def transformers_bf16(entry: Entry, prompt: int, tokens: int) -> Row:
    """transformers as it comes, unquantised."""
    return transformers_row("bf16", _random_on_card(_transformers_on_meta(entry)), prompt, tokens)


def transformers_nf4(entry: Entry, prompt: int, tokens: int) -> Row:
    """transformers with `load_in_4bit` as most people use it: NF4 with double quantisation, bf16 arithmetic."""
    try:
        import bitsandbytes
    except ModuleNotFoundError:
        return Row("transformers 4 bit", missing="bitsandbytes is not installed")
    model = _transformers_on_meta(entry)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            n, k, bias = module.out_features, module.in_features, module.bias is not None
            packed = bitsandbytes.nn.Linear4bit(
                k, n, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
            )
            weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02
            packed.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").cuda()
            if bias:
                packed.bias = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda"))
            model.set_submodule(name, packed)
    return transformers_row(f"4 bit (bitsandbytes {bitsandbytes.__version__})", _random_on_card(model), prompt, tokens)


def transformers_row(kind: str, model: Any, prompt: int, tokens: int, device: str = "cuda") -> Row:
    """Prefill, then token by token with the library's own cache, the drawn id read on the host each time."""
    import transformers

    ids = torch.arange(1, prompt + 1, device=device)[None]

    def run() -> tuple[float, float]:
        cache = transformers.DynamicCache(config=model.config)
        start = time.perf_counter()
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        int(token)
        first = time.perf_counter()
        for _ in range(tokens - 1):
            token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            int(token)
        return prompt / (first - start), (tokens - 1) / (time.perf_counter() - first)

    return _row(f"transformers {transformers.__version__} {kind}", run)


def transformers_of(source: Path) -> Any:
    """transformers' model of a checkpoint folder or .gguf file, in bf16 on the CPU."""
    import transformers

    where = {"pretrained_model_name_or_path": str(source)}
    if source.is_file():
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    return transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).eval()


def torch_compile_int4(entry: Entry, prompt: int, tokens: int) -> Row:
    """The recipe of gpt-fast: plain torch operations around torch's INT4 product, compiled, one CUDA graph a token.

    The model is this program's own model.py with another table of operations, so the arithmetic of a block is the
    same. Prefill runs the same operations uncompiled.
    """
    if "linear_attention" in entry.layer_types:
        return Row("torch.compile + torch's INT4 product", missing="no gated delta net in plain torch operations")
    model = synthetic_model(entry, "cuda", ops=TorchOps(prompt + tokens))
    cache: Any = LayerCaches(model.config, prompt + tokens)
    token, position = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = model(ids, positions, cache)
        return model.logits(hidden[-1:]).argmax(-1)

    compiled = torch.compile(forward, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        start = time.perf_counter()
        for _ in range(2):
            compiled(token, position)
        torch.cuda.synchronize()
        compile_seconds = time.perf_counter() - start
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drawn = compiled(token, position)
    ids, positions = (torch.arange(first, first + prompt, device="cuda") for first in (1, 0))

    def run() -> tuple[float, float]:
        with torch.inference_mode():
            start = time.perf_counter()
            token.copy_(forward(ids, positions))
            int(token)
            first = time.perf_counter()
            for step in range(tokens - 1):
                position.fill_(prompt + step)
                graph.replay()
                token.copy_(drawn)
                int(token)
            return prompt / (first - start), (tokens - 1) / (time.perf_counter() - first)

    name = f"torch.compile + torch's INT4 product (compiled in {compile_seconds:.0f} s)"
    return _row(name, run)


class TorchOps(ReferenceOps):
    """bf16 throughout, torch's INT4 product (groups of 128) and its attention; INT8 rows are kept as bf16."""

    dtype = weight_dtype = cache_dtype = torch.bfloat16

    def __init__(self, capacity: int, device: str = "cuda") -> None:
        self._columns = torch.arange(capacity, device=device)

    def prepare(self, linear: Linear) -> None:
        if linear.bits == 4:
            codes = linear.qweight[: linear.rows].view(torch.uint8)  # random codes, so their order does not matter
            linear.cpu_qweight = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
            scales = unpack_scales(linear.scales, linear.rows)
            stacked = torch.stack((scales, torch.zeros_like(scales)), -1)
            linear.cpu_scales_zeros = stacked.transpose(0, 1).bfloat16().contiguous()
            linear.qweight = linear.scales = torch.empty(0, device="cuda")
        elif linear.bits == 8:
            linear.weight = (linear.weight * linear.scales[:, None]).bfloat16()
            linear.bits = 16
        if linear.bias is not None:
            linear.bias = linear.bias.bfloat16()

    def product(self, x: Tensor, linear: Linear) -> Tensor:
        if linear.bits == 16:
            return nn.functional.linear(x, linear.weight, linear.bias)
        y: Tensor = torch.ops.aten._weight_int4pack_mm(x, linear.cpu_qweight, 128, linear.cpu_scales_zeros)
        return y if linear.bias is None else y + linear.bias

    def attention(
        self,
        qkv: Tensor,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        rope: Rotary,
        cache: tuple[Tensor, Tensor],
        *,
        gated: bool = False,
    ) -> Tensor:
        if gated:
            raise ValueError("TorchOps.attention: got a gated attention, wanted a dense model")
        q_weight, k_weight = (q_norm.weight, k_norm.weight) if q_norm and k_norm else (None, None)
        eps = q_norm.eps if q_norm else 0.0
        q = rope_kv_write_reference(qkv, q_weight, k_weight, eps, rope.cos, rope.sin, rope.positions, *cache)
        visible = self._columns <= rope.positions[:, None]
        keys, values = cache
        group = q.view(q.shape[0], keys.shape[0], -1, q.shape[-1]).transpose(0, 1)  # [Hkv, T, Hq / Hkv, D]
        rows = group.reshape(keys.shape[0], -1, q.shape[-1])  # those of one KV head share its keys: nothing is copied
        scores = torch.bmm(rows, keys.transpose(1, 2)).float() * q.shape[-1] ** -0.5
        hidden = ~visible.repeat_interleave(group.shape[2], 0)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(values.dtype)
        return torch.bmm(weights, values).view_as(group).transpose(0, 1).reshape(q.shape[0], -1)


class LayerCaches:
    """Keys and values, a tensor of its own for each layer: the compiler copies what it sees written to in part."""

    def __init__(self, config: ModelConfig, max_length: int, device: str = "cuda") -> None:
        shape = (config.num_key_value_heads, max_length, config.head_dim)
        new = functools.partial(torch.zeros, shape, dtype=torch.bfloat16, device=device)
        self._layers = [(new(), new()) for _ in range(config.num_hidden_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """As KVCache.layer."""
        return self._layers[index]


CONTENDERS: dict[str, Callable[[Entry, int, int], Row]] = {
    "localchat": localchat,
    "torch-compile-int4": torch_compile_int4,
    "transformers-4bit": transformers_nf4,
    "transformers-bf16": transformers_bf16,
}


def _transformers_on_meta(entry: Entry) -> Any:
    import transformers

    raw = entry.config_dict()
    kind = {"qwen3_5": "qwen3_5_text"}.get(entry.model_type, entry.model_type)  # without the wrapper for images
    raw.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **raw)
    if (config.hidden_size, config.num_hidden_layers) != (entry.hidden_size, entry.num_hidden_layers):
        raise ValueError(f"transformers made {config} of {entry.alias}")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _random_on_card(model: Any) -> Any:
    """What is still on meta: matrices random, norms one, rotary frequencies computed."""
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                values = torch.empty_like(parameter, device="cuda")
                values = values.normal_(0.0, 0.02) if values.dim() == 2 else values.fill_(1.0)
                setattr(module, key, nn.Parameter(values, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config, device="cuda")
    return model


def _row(name: str, run: Callable[[], tuple[float, float]]) -> Row:
    with torch.inference_mode():
        runs = [run() for _ in range(REPEATS + 1)][1:]
    prefill, decode = (statistics.median(rates) for rates in zip(*runs, strict=True))
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    return Row(name, prefill, decode, peak)
