"""Calibrated rounding of a whole checkpoint (`--method gptq`), one layer of weights in memory at a time.

A text runs through the model layer by layer (layerwise.py). Before a matrix is rounded (gptq.py) the inputs it gets
from this text are measured, and they are those of the packed model: every matrix before it is already as it will be
stored. So a layer also makes good for what the layers before it have lost.

A layer takes five passes over the text, each of a part of it: what goes into q, k, v - into the output projection -
(the mixer with both as stored) - into gate, up - into down - (the MLP as stored). Matrices with the same input share
one measurement. A matrix that is kept as it is, to the last bit (of a 4-bit source), is not measured.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.model import Block, Linear
from localchat.quantize.calibration_text import calibration_windows, check_ids
from localchat.quantize.gptq import hessian_of
from localchat.quantize.layerwise import SourceWeights, Stream, dense, fast_products
from localchat.quantize.plan import Matrix, Recipe
from localchat.quantize.source import Source


class Calibration:
    """The text on its way through the model that is being packed.

    For the matrices of the plan, in its order: `hessian` before one is rounded, `settle` with what is stored of it.
    Only `settle` for those that an earlier run has stored.
    """

    def __init__(self, source: Source, windows: Sequence[Sequence[int]], device: str | torch.device) -> None:
        """windows: the ids of the text, in pieces that start from nothing.

        Raises:
            BadCheckpoint: an id has no row in the embedding.
        """
        self._name, self._device = source.name, torch.device(device)
        self._weights, self._config = SourceWeights(source), source.model_config
        self._layer = -1
        self._block: Block | None = None
        self._mixed = False  # the stream is behind the mixer of the present layer
        self._known: tuple[str, Tensor] | None = None  # the last measurement, by the norm in front of it
        check_ids(source, windows)
        self._stream = self._weights.stream(windows, device)
        self._windows = windows

    def digest(self) -> str:
        """A sha256 (hex) over the ids of the text."""
        return hashlib.sha256(json.dumps([list(window) for window in self._windows]).encode()).hexdigest()

    def covers(self, matrix: Matrix) -> bool:
        """Whether the text runs through this matrix: those of the layers, and not embedding, head and mtp."""
        return matrix.name.startswith("layers.")

    def hessian(self, matrix: Matrix, pool: Executor | None = None) -> Tensor:
        """The mean of x x^T over its inputs, fp32 [K, K]. pool: workers that share the windows, on a CPU.

        Raises:
            BadCheckpoint: the activations are not finite.
        """
        block = self._go_to(matrix, pool)
        if matrix.norm and self._known is not None and self._known[0] == matrix.norm:
            return self._known[1]
        self._known = None
        with fast_products():
            found = hessian_of(self._stream.inputs(block, self._linear(matrix), pool))
        if not bool(torch.isfinite(found.diagonal()).all()):
            raise BadCheckpoint(
                f"{self._name}: the inputs of {matrix.name} are not finite, so the checkpoint is damaged."
            )
        self._known = (matrix.norm, found)
        return found

    def settle(self, matrix: Matrix, stored: Mapping[str, Tensor], pool: Executor | None = None) -> None:
        """From now on the text runs through `matrix` as it is stored: kind -> tensor of the packed format."""
        if matrix.name == "embed_tokens":
            rows = [({kind: t[list(window)] for kind, t in stored.items()}, len(window)) for window in self._windows]
            self._stream = Stream(self._config, [dense(*part) for part in rows], self._device)
        if not self.covers(matrix):
            return
        self._go_to(matrix, pool)
        linear = self._linear(matrix)
        linear.weight = dense(stored, matrix.shape[0]).to(device=self._device, dtype=torch.float32)

    def _go_to(self, matrix: Matrix, pool: Executor | None) -> Block:
        """The block of `matrix`, with the stream in front of the half that it is in."""
        _, number, half, _ = matrix.name.split(".")
        if int(number) != self._layer:
            self._finish_layer(pool)
            self._layer = int(number)
            self._block = self._weights.block(self._layer, self._device)
            self._mixed, self._known = False, None
        block = self._block
        if block is None:
            raise ValueError(f"Calibration: got {matrix.name} in no layer")
        if half == "mlp" and not self._mixed:
            with fast_products():
                self._stream.mix(block, pool)
            self._mixed = True
        return block

    def _finish_layer(self, pool: Executor | None) -> None:
        if self._block is not None:
            with fast_products():
                self._stream.feed_forward(self._block, pool)
            self._block = None

    def _linear(self, matrix: Matrix) -> Linear:
        if self._block is None:
            raise ValueError(f"Calibration: got {matrix.name} in no layer")
        found = self._block.get_submodule(matrix.name.split(".", 2)[2])
        if not isinstance(found, Linear):
            raise TypeError(f"{matrix.name} is a {type(found).__name__}, wanted a Linear")
        return found


def calibration_of(source: Source, recipe: Recipe, device: str) -> Calibration:
    """The calibration that `recipe`, whose method is "gptq", asks for.

    Raises:
        BadCheckpoint: the source has no tokenizer, or one that does not fit its embedding.
        UserError: the text cannot be read, or is too short.
    """
    windows = calibration_windows(source.files(), recipe.calibration, recipe.calibration_tokens)
    return Calibration(source, windows, device)
