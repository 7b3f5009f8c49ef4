"""A model of real shapes with random weights, made directly on the device: speed and memory before any download.

`deepen` makes a conversation of any length for it, or for any model, without reading one.

Every layer has its own memory, as a real model has; codes are uniform, scales are such that activations keep their
size from layer to layer, so that logits stay finite. Nothing is read from or written to the disk.
"""

import math

import torch

from localchat.config import ModelConfig, QuantizationConfig, TensorFormat
from localchat.engine import Engine
from localchat.kernels.int4_packing import LAYOUT, VERSION
from localchat.ledger import default_formats
from localchat.model import GatedDeltaNet, Linear, Model, RMSNorm
from localchat.ops import ReferenceOps, ops_for
from localchat.pinned import host_bytes
from localchat.registry import Entry


def synthetic_model(entry: Entry, device: str, seed: int = 0, ops: ReferenceOps | None = None) -> Model:
    """A model with the shapes of `entry`, in the formats that `quantize` chooses by itself.

    `ops` is the table of operations; by default the one for `device`.
    """
    formats = default_formats(entry.config)
    quantization = QuantizationConfig(LAYOUT, VERSION, TensorFormat(4, 128), formats)
    raw = entry.config_dict() | {"quantization_config": quantization.to_dict()}
    target = torch.device(device)
    with torch.device("meta"):
        model = Model(ModelConfig.from_dict(raw), ops or ops_for(target))
    torch.manual_seed(seed)
    with torch.inference_mode():
        for module in model.modules():
            if isinstance(module, Linear):
                fill_linear(module, target)
            elif isinstance(module, RMSNorm):
                module.weight = torch.ones(module.weight.shape, device=target)
            elif isinstance(module, GatedDeltaNet):
                _fill_delta_net(module, target)
        if model.on_host:
            table = model.embed_tokens
            host = host_bytes(table.weight.nbytes, target).view(torch.int8).view_as(table.weight)
            table.weight = host.copy_(table.weight)
        model.inv_freq = model.inv_freq.to(target)
        for module in model.modules():
            if isinstance(module, Linear):
                model.ops.prepare(module)
    if target.type == "cuda":
        torch.cuda.empty_cache()  # so that what is held is the model
    return model.eval()


def made_up(vocab_size: int, count: int) -> list[int]:
    """A prompt of `count` ids."""
    return [i % vocab_size for i in range(1, count + 1)]


@torch.inference_mode()
def deepen(engine: Engine, length: int) -> None:
    """Bring a conversation to `length` tokens as if that many had been read; nothing to do where there are more.

    One chunk is read, and its keys and values are repeated behind it; recurrent states are what it left (a convolution
    may find its inputs in another order). Speed does not depend on the values, and as they are real ones logits stay
    finite. A recurrent model can be rewound to here.
    """
    start, size = len(engine.ids), engine.model.ops.prefill_chunk
    ids = made_up(engine.vocab_size, max(0, length - start))
    for _ in engine.prefill(ids[:size]):
        continue
    for first in range(start + size, length, size):
        count = min(size, length - first)
        for layer, kind in enumerate(engine.model.config.layer_types):
            if kind == "full_attention":
                for rows in engine.cache.layer(layer):  # [kv_heads, max_length, ...]
                    rows[:, first : first + count] = rows[:, start : start + count]
    engine.cache.append(len(ids[size:]))
    engine.ids += ids[size:]
    if engine.recurrent:
        engine.snapshots.take()


def fill_linear(linear: Linear, device: torch.device) -> None:
    """Uniform codes; scales that make the product of a normalised input about one, and a quarter of that for INT4."""
    if linear.bits == 4:
        n, shape = linear.rows, linear.qweight.shape  # rows that fill up are random as well: nobody looks
        linear.qweight = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
        scale = 0.25 / (4.6 * math.sqrt(8 * shape[1]))  # 4.6: standard deviation of q - 8
        linear.scales = torch.full(linear.scales.shape, scale, dtype=torch.float16, device=device)
        if linear.mins is not None:
            linear.mins = -7.5 * linear.scales
    else:
        n, k = linear.weight.shape
        linear.weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
        linear.scales = torch.full((n,), 1 / (73 * math.sqrt(k)), device=device)
    if linear.bias is not None:
        linear.bias = 0.1 * torch.randn(n, device=device)


def _fill_delta_net(mixer: GatedDeltaNet, device: torch.device) -> None:
    """A convolution that keeps its inputs' size; decays that forget within about 2 to 2,000 tokens, as trained ones do.

    exp(A_log) is uniform in 1..16 and softplus(dt_bias) logarithmic in 0.001..0.1 (Mamba's initial values, arXiv
    2312.00752).
    """
    channels, width = mixer.conv1d.weight.shape
    mixer.conv1d.weight = torch.randn(channels, width, dtype=torch.bfloat16, device=device) / math.sqrt(width)
    heads = mixer.A_log.shape[0]
    mixer.A_log = torch.empty(heads, device=device).uniform_(1, 16).log()
    step = torch.empty(heads, device=device).uniform_(math.log(0.001), math.log(0.1)).exp()
    mixer.dt_bias = step.expm1().log()  # the inverse of softplus
