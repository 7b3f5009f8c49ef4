"""How long a conversion will take: arithmetic on samples of random weights, and the source's first matrices read."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from localchat.config import TensorFormat
from localchat.quantize.pack_matrix import pack_matrix
from localchat.quantize.plan import Matrix, Recipe
from localchat.quantize.read_ahead import Loaded
from localchat.quantize.source import Source
from localchat.quantize.steps import Step, weights_of

# Weights of a sample: so many that a card's launches, or a processor's threads, do not count.
_SAMPLE = {"cpu": 1 << 20, "cuda": 1 << 26}
_READ = 256 << 20  # bytes of the source that are read to see how fast it is


def time_line(matrices: Sequence[Matrix], recipe: Recipe, source: Source | None) -> str:
    """The estimate as a line for a person. source: see dry_run.plan_lines.

    Raises:
        BadCheckpoint, UserError: of a calibrated one, see calibration_text.calibration_windows.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if recipe.method == "gptq":
        from localchat.quantize.calibration_time import calibration_seconds, calibration_tokens  # kernels

        tokens = calibration_tokens(recipe, source)
        calibrating = calibration_seconds(matrices, tokens, device)
        arithmetic = _arithmetic_seconds(matrices, replace(recipe, search=False), device)
        parts = f"{arithmetic:.0f} s of arithmetic and {calibrating:.0f} s of calibration with {tokens:,} tokens"
    else:
        calibrating, arithmetic = 0.0, _arithmetic_seconds(matrices, recipe, device)
        parts = f"{arithmetic:.0f} s of arithmetic"
    if source is None:
        return f"about {parts} on {device} (measured on samples), beside reading and writing"
    reading = _reading_seconds(source)
    return (
        f"about {max(arithmetic + calibrating, reading):.0f} s on {device}: {parts}, beside it {reading:.0f} s of "
        "reading (measured on samples; the writing is not)"
    )


def _arithmetic_seconds(matrices: Sequence[Matrix], recipe: Recipe, device: str) -> float:
    """The matrices' weights, at the speed of a sample of random ones of each format and width."""
    total, rates = 0.0, dict[tuple[TensorFormat, int], float]()
    for m in matrices:
        n, k = m.shape
        kind = (m.format, k)
        if kind not in rates:
            rows = max(1, min(n, _SAMPLE[device] // k))
            sample = replace(m, parts=("sample",), shape=(rows, k), bias=False, norm="")
            _pack_random(sample, recipe, device)  # the first time of anything takes longer
            start = time.perf_counter()
            _pack_random(sample, recipe, device)
            rates[kind] = (time.perf_counter() - start) / (rows * k)
        total += rates[kind] * n * k
    return total


def _pack_random(matrix: Matrix, recipe: Recipe, device: str) -> None:
    weight = torch.randn(matrix.shape, device=device).to(torch.bfloat16)
    (name,) = weights_of(matrix)
    loaded = Loaded(Step(matrix.name, matrix, (name,)), {name: weight}, {name: None})
    for tensor in pack_matrix(matrix, loaded, recipe).values():
        tensor.view(-1)[:1].cpu()  # wait for it


def _reading_seconds(source: Source) -> float:
    """The source's bytes, at the speed of its first matrices."""
    start, read = time.perf_counter(), 0
    for name in source.shapes:
        if len(source.shapes[name]) == 2 and source.nbytes(name) <= _READ:
            if source.codes(name) is None:
                source.read(name)
            read += source.nbytes(name)
            if read >= _READ:
                break
    total = sum(map(source.nbytes, source.shapes))
    return (time.perf_counter() - start) * total / max(read, 1)
