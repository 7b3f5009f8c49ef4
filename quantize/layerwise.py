"""A model run layer by layer over a text: one layer's weights in memory at a time, whatever the model's size.

What is kept is the residual stream of every window of the text. Everything is computed in fp32 by the references (on a
card with TF32 products, whose operands have the 10 bits of mantissa that fp16 has), so one code serves any device. On
a CPU windows go to a pool of workers with one thread each (threads.py says why), and come back in their order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.config import ModelConfig
from localchat.kernels.gated_delta_net import gated_delta_net_chunked
from localchat.kernels.int4_packing import dequantize, dequantize_rows
from localchat.model import Block, GatedDeltaNet, Linear
from localchat.ops import ReferenceOps
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

    def gated_delta_net(self, qkvz: Tensor, ba: Tensor, mixer: GatedDeltaNet, cache: tuple[Tensor, Tensor]) -> Tensor:
        weights = (mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight)
        return gated_delta_net_chunked(qkvz, ba, *weights, mixer.norm.eps, *cache)


class Stream:
    """The residual stream of a text on its way through the layers: one [T, H] for each of its windows."""

    def __init__(
        self,
        config: ModelConfig,
        embedded: Sequence[Tensor],
        device: str | torch.device,
        pool: Executor | None = None,
    ) -> None:
        """embedded: the rows of the embedding for each window, floating. pool: workers that share the windows."""
        size = sum(x.numel() for x in embedded) * 4
        dtype = torch.float32 if size <= _MOST_BYTES else torch.bfloat16
        self.device = torch.device(device)
        self.hidden = [x.to(self.device, dtype) for x in embedded]
        self._map = map if pool is None else pool.map
        self._config = replace(config, quantization=None)
        self._inv_freq = inverse_frequencies(config.rope, config.rotary_dim).to(self.device)

    def inputs(self, block: Block, linear: Linear) -> Iterator[Tensor]:
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
            yield from self._map(up_to_it, self.hidden)
        finally:
            ops.wanted = None

    def mix(self, block: Block) -> None:
        """Move behind the block's mixer."""
        self._move(lambda x: self._mixer(block, x))

    def feed_forward(self, block: Block) -> None:
        """Move behind the block's MLP, which is the block's end."""
        self._move(lambda x: self._mlp(block, x))

    def _move(self, step: Callable[[Tensor], Tensor]) -> None:
        moved: Iterable[Tensor] = self._map(step, self.hidden)
        for i, x in enumerate(moved):
            self.hidden[i] = x.to(self.hidden[i].dtype)

    def _mixer(self, block: Block, x: Tensor) -> Tensor:
        alone = replace(self._config, num_hidden_layers=1, layer_types=(block.kind,))
        cache = KVCache(alone, len(x), dtype=torch.float32, device=self.device).layer(0)
        positions = torch.arange(len(x), device=self.device)
        rope = block.mlp.ops.rotary(positions, self._inv_freq, self._config.rope.attention_factor)
        mixer = block.self_attn if block.kind == "full_attention" else block.linear_attn
        mixed: Tensor = mixer(x.float(), block.input_layernorm, rope, cache)
        return mixed

    def _mlp(self, block: Block, x: Tensor) -> Tensor:
        result: Tensor = block.mlp(x.float(), block.post_attention_layernorm)
        return result


def load_block(config: ModelConfig, index: int, device: str | torch.device, tensor: Callable[[str], Tensor]) -> Block:
    """Layer `index` with dense fp32 matrices on `device`.

    tensor: the (dense) tensor of a name as in a packed folder's model, such as "layers.0.mlp.down_proj.weight".
    """
    name = f"layers.{index}"
    with torch.device("meta"):
        block = Block(replace(config, quantization=None), name, config.layer_types[index], LayerOps())
    stored = {key: tensor(f"{name}.{key}").to(device=device, dtype=torch.float32) for key in block.state_dict()}
    block.load_state_dict(stored, assign=True)
    return block


def dense_tensor(shards: Shards, name: str, device: str | torch.device) -> Tensor:
    """A tensor of a packed folder by its dense name: matrices are dequantised to fp32.

    Raises:
        BadCheckpoint: it is not there, or cannot be read.
    """
    stem, _, kind = name.rpartition(".")
    names = shards.names
    if kind == "weight" and f"{stem}.qweight" in names:
        mins = shards.get(f"{stem}.mins").to(device) if f"{stem}.mins" in names else None
        return dequantize(shards.get(f"{stem}.qweight").to(device), shards.get(f"{stem}.scales").to(device), mins)
    if kind == "weight" and f"{stem}.scales" in names:
        return dequantize_rows(shards.get(name).to(device), shards.get(f"{stem}.scales").to(device))
    return shards.get(name).to(device)


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
