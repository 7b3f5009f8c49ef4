"""A model run layer by layer over a text: one layer's weights in memory at a time, whatever the model's size.

What is kept is the residual stream of every window of the text. Everything is computed in fp32 by the references (on a
card with TF32 products, whose operands have the 10 bits of mantissa that fp16 has), so one code serves any device. On
a CPU windows go to a pool of workers with one thread each (threads.py says why), and come back in their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.config import ModelConfig
from localchat.kernels.gated_delta_net import gated_delta_net_chunked
from localchat.kernels.int4_packing import dequantize, dequantize_rows, unpack_scales
from localchat.model import Block, Linear
from localchat.ops import ReferenceOps
from localchat.quantize.plan import Recipe, plan
from localchat.quantize.source import Source
from localchat.rope import inverse_frequencies
from localchat.shards import Shards

WINDOW = 1024  # tokens that see each other
# Residual streams larger than this in fp32 are kept in bf16.
_MOST_BYTES = 3_000_000_000


class _ReachedError(Exception):
    """The forward has come to the product that is waited for: its input."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


class LayerOps(ReferenceOps):
    """The references, with delta nets in chunks. `wanted`: the matrix at which a forward ends, see `Stream.inputs`."""

    wanted: Linear | None = None

    def product(self, x: Tensor, linear: Linear) -> Tensor:
        if linear is self.wanted:
            raise _ReachedError(x)
        return super().product(x, linear)

    def delta_rule(self, tokens: int) -> Callable[..., Tensor]:
        return gated_delta_net_chunked


class Stream:
    """The residual stream of a text on its way through the layers: one [T, H] for each of its windows."""

    def __init__(self, config: ModelConfig, embedded: Sequence[Tensor], device: str | torch.device) -> None:
        """embedded: the rows of the embedding for each window, floating."""
        size = sum(x.numel() for x in embedded) * 4
        dtype = torch.float32 if size <= _MOST_BYTES else torch.bfloat16
        self.device = torch.device(device)
        self.hidden = [x.to(self.device, dtype) for x in embedded]
        self._config = replace(config, quantization=None)
        self._inv_freq = inverse_frequencies(config.rope, config.rotary_dim).to(self.device)

    def inputs(self, block: Block, linear: Linear, pool: Executor | None = None) -> Iterator[Tensor]:
        """What `linear`, a matrix of `block`, is multiplied with: fp32 [T, K] for each window.

        The stream stands before the mixer for its matrices, and behind it for those of the MLP (see `mix`).
        """
        half = self._mlp if linear in (block.mlp.gate_up_proj, block.mlp.down_proj) else self._mixer

        def up_to_it(x: Tensor) -> Tensor:
            try:
                return half(block, x)
            except _ReachedError as reached:
                return reached.inputs.float()

        ops = _ops(block)
        ops.wanted = linear
        try:
            yield from self._each(up_to_it, pool)
        finally:
            ops.wanted = None

    def mix(self, block: Block, pool: Executor | None = None) -> None:
        """Move behind the block's mixer."""
        for i, x in enumerate(self._each(lambda x: self._mixer(block, x), pool)):
            self.hidden[i] = x.to(self.hidden[i].dtype)

    def feed_forward(self, block: Block, pool: Executor | None = None) -> None:
        """Move behind the block's MLP, which is the block's end."""
        for i, x in enumerate(self._each(lambda x: self._mlp(block, x), pool)):
            self.hidden[i] = x.to(self.hidden[i].dtype)

    def _each(self, step: Callable[[Tensor], Tensor], pool: Executor | None) -> Iterable[Tensor]:
        """`step` of every window, in order; a card has one after the other."""
        return map(step, self.hidden) if pool is None or self.device.type != "cpu" else pool.map(step, self.hidden)

    def _mixer(self, block: Block, x: Tensor) -> Tensor:
        alone = replace(self._config, num_hidden_layers=1, layer_types=(block.kind,))
        cache = KVCache(alone, len(x), dtype=torch.float32, device=self.device).layer(0)
        positions = torch.arange(len(x), device=self.device)
        rope = block.mlp.ops.rotary(positions, self._inv_freq, self._config.rope.attention_factor)
        mixer = block.self_attn if block.kind == "full_attention" else block.linear_attn
        mixed: Tensor = mixer(x.float(), block.input_layernorm, rope, cache, block.post_attention_layernorm)
        return mixed

    def _mlp(self, block: Block, x: Tensor) -> Tensor:
        result: Tensor = block.mlp(x.float(), block.post_attention_layernorm, None)
        return result


class Weights(ABC):
    """The dense tensors of a model by the names of model.py, one at a time: "layers.0.mlp.gate_up_proj.weight"."""

    config: ModelConfig

    @abstractmethod
    def tensor(self, name: str, device: str | torch.device) -> Tensor:
        """One tensor, floating.

        Raises:
            BadCheckpoint: it is not there, or cannot be read.
        """

    @abstractmethod
    def rows(self, name: str, rows: slice, device: str | torch.device) -> Tensor:
        """Some rows of embed_tokens.weight or lm_head.weight, which are never INT4; fp32."""

    def block(self, index: int, device: str | torch.device) -> Block:
        """Layer `index` with fp32 tensors on `device`, for a `Stream`."""
        name = f"layers.{index}"
        with torch.device("meta"):
            block = Block(replace(self.config, quantization=None), name, self.config.layer_types[index], LayerOps())
        tensors = {key: self.tensor(f"{name}.{key}", device).float() for key in block.state_dict()}
        block.load_state_dict(tensors, assign=True)
        return block

    def stream(self, windows: Sequence[Sequence[int]], device: str | torch.device) -> Stream:
        """A text in front of the first layer. windows: its ids, in pieces that start from nothing."""
        table = self.tensor("embed_tokens.weight", "cpu")
        return Stream(self.config, [table[list(window)] for window in windows], device)


class SourceWeights(Weights):
    """The tensors of a checkpoint, parts of a matrix stacked."""

    def __init__(self, source: Source) -> None:
        self.config = source.model_config
        self._source = source
        self._matrices = {m.name: m for m in plan(self.config, Recipe())}

    def tensor(self, name: str, device: str | torch.device) -> Tensor:
        stem, _, kind = name.rpartition(".")
        matrix = self._matrices.get(stem)
        if matrix is None or len(matrix.parts) == 1:
            return self._source.read(name).to(device)
        return matrix.stacked([self._source.read(f"{part}.{kind}").to(device, torch.float32) for part in matrix.parts])

    def rows(self, name: str, rows: slice, device: str | torch.device) -> Tensor:
        return self._source.read(name)[rows].to(device, torch.float32)


class PackedWeights(Weights):
    """The tensors of a packed folder, dequantised."""

    def __init__(self, config: ModelConfig, shards: Shards) -> None:
        self.config = config
        self._shards = shards
        self._height = {m.name: m.shape[0] for m in plan(config, Recipe())}

    def tensor(self, name: str, device: str | torch.device) -> Tensor:
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" not in self._shards.names:
            return self._shards.get(name).to(device)
        kinds = [kind for kind in ("qweight", "weight", "scales", "mins") if f"{stem}.{kind}" in self._shards.names]
        stored = {kind: self._shards.get(f"{stem}.{kind}").to(device) for kind in kinds}
        return dense(stored, self._height[stem]).float()

    def rows(self, name: str, rows: slice, device: str | torch.device) -> Tensor:
        weight, scales = self._shards.get(name)[rows].to(device), f"{name.removesuffix('.weight')}.scales"
        if scales not in self._shards.names:
            return weight.float()
        return dequantize_rows(weight, self._shards.get(scales)[rows].to(device))


def dense(stored: Mapping[str, Tensor], n: int) -> Tensor:
    """The tensors of one matrix of n rows in the packed format, by kind -> W [N, K], floating."""
    if "qweight" in stored:
        mins = stored.get("mins")
        return dequantize(
            stored["qweight"],
            unpack_scales(stored["scales"], n),
            None if mins is None else unpack_scales(mins, n),
        )
    if "scales" in stored:
        return dequantize_rows(stored["weight"], stored["scales"])
    return stored["weight"]


@contextmanager
def fast_products() -> Iterator[None]:
    """TF32 on a card; torch's setting returns."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _ops(block: Block) -> LayerOps:
    ops = block.mlp.ops
    if not isinstance(ops, LayerOps):
        raise TypeError(f"got a block with {type(ops).__name__}, wanted one from load_block")
    return ops
