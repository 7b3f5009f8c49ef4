"""Calibrated rounding of a whole checkpoint (`--method gptq`), one layer of weights in memory at a time.

A text runs through the model layer by layer (layerwise.py). Before a matrix is rounded (gptq.py) the inputs it gets
from this text are measured, and they are those of the packed model: every matrix before it is already as it will be
stored. So a layer also makes good for what the layers before it have lost.

A layer takes five passes over the text, each of a part of it: what goes into q, k, v - into the output projection -
(the mixer with both as stored) - into gate, up - into down - (the MLP as stored). Matrices with the same input share
one measurement.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.kernels.int4_packing import dequantize, dequantize_rows
from localchat.model import Block, Linear
from localchat.quantize.gptq import hessian_of
from localchat.quantize.layerwise import Stream, load_block
from localchat.quantize.plan import Matrix
from localchat.quantize.source import Source


class Calibration:
    """The text on its way through the model that is being packed.

    For the matrices of the plan, in its order: `hessian` before one is rounded, `settle` with what is stored of it.
    Only `settle` for those that an earlier run has stored.
    """

    def __init__(
        self,
        source: Source,
        matrices: Sequence[Matrix],
        windows: Sequence[Sequence[int]],
        device: str | torch.device,
        pool: Executor | None = None,
    ) -> None:
        """windows: the ids of the text, in pieces that start from nothing. pool: workers that share the work.

        Raises:
            BadCheckpoint: an id has no row in the embedding.
        """
        self._source, self._device = source, torch.device(device)
        self._config = source.model_config
        self._parts = {f"{m.name}.{kind}": m.parts for m in matrices for kind in ("weight", "bias")}
        self._layer = -1
        self._block: Block | None = None
        self._mixed = False  # the stream is behind the mixer of the present layer
        self._known: tuple[str, Tensor] | None = None  # the last measurement, by the norm in front of it
        table = source.read("embed_tokens.weight")
        highest = max(max(window) for window in windows)
        if highest >= len(table):
            raise BadCheckpoint(f"{source.name}: its tokenizer gives the id {highest}, its embedding has {len(table)}.")
        self._stream = Stream(self._config, [table[list(window)] for window in windows], device, pool)

    def covers(self, matrix: Matrix) -> bool:
        """Whether the text runs through this matrix: those of the layers, and not embedding, head and mtp."""
        return matrix.name.startswith("layers.")

    def hessian(self, matrix: Matrix) -> Tensor:
        """The mean of x x^T over its inputs, fp32 [K, K].

        Raises:
            BadCheckpoint: the activations are not finite.
        """
        block = self._go_to(matrix)
        if matrix.norm and self._known is not None and self._known[0] == matrix.norm:
            return self._known[1]
        found = hessian_of(self._stream.inputs(block, self._linear(matrix)))
        if not bool(torch.isfinite(found.diagonal()).all()):
            raise BadCheckpoint(
                f"{self._source.name}: the inputs of {matrix.name} are not finite, so the checkpoint is damaged."
            )
        self._known = (matrix.norm, found)
        return found

    def dense(self, matrix: Matrix) -> Tensor:
        """The matrix of the source, its parts stacked, fp32 [N, K] on the device."""
        self._go_to(matrix)
        return self._linear(matrix).weight

    def settle(self, matrix: Matrix, stored: Mapping[str, Tensor]) -> None:
        """From now on the text runs through `matrix` as it is stored: kind -> tensor of the packed format."""
        if not self.covers(matrix):
            return
        self._go_to(matrix)
        linear = self._linear(matrix)
        linear.weight = dense(stored).to(device=self._device, dtype=torch.float32)

    def _go_to(self, matrix: Matrix) -> Block:
        """The block of `matrix`, with the stream in front of the half that it is in."""
        _, number, half, _ = matrix.name.split(".")
        if int(number) != self._layer:
            self._finish_layer()
            self._layer = int(number)
            self._block = load_block(self._config, self._layer, self._device, self._tensor)
            self._mixed, self._known = False, None
        block = self._block
        if block is None:
            raise ValueError(f"Calibration: got {matrix.name} in no layer")
        if half == "mlp" and not self._mixed:
            self._stream.mix(block)
            self._mixed = True
        return block

    def _finish_layer(self) -> None:
        if self._block is not None:
            self._stream.feed_forward(self._block)
            self._block = None

    def _linear(self, matrix: Matrix) -> Linear:
        if self._block is None:
            raise ValueError(f"Calibration: got {matrix.name} in no layer")
        found = self._block.get_submodule(matrix.name.split(".", 2)[2])
        if not isinstance(found, Linear):
            raise TypeError(f"{matrix.name} is a {type(found).__name__}, wanted a Linear")
        return found

    def _tensor(self, name: str) -> Tensor:
        """A tensor of the dense model: parts of matrices are stacked."""
        stem, _, kind = name.rpartition(".")
        parts = self._parts.get(name)
        if parts is None:
            return self._source.read(name)
        return torch.cat([self._source.read(f"{part}.{kind}").to(self._device, torch.float32) for part in parts])


def dense(stored: Mapping[str, Tensor]) -> Tensor:
    """The tensors of one matrix, by kind -> W [N, K] in floating point."""
    if "qweight" in stored:
        return dequantize(stored["qweight"], stored["scales"], stored.get("mins"))
    if "scales" in stored:
        return dequantize_rows(stored["weight"], stored["scales"])
    return stored["weight"]
