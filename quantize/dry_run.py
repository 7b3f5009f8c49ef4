"""What a conversion would do, without doing it: each matrix with its bits and bytes, the sum, and an estimated time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from localchat.config import ModelConfig, TensorFormat
from localchat.quantize.pack_matrix import pack_matrix
from localchat.quantize.plan import Matrix, Recipe, check_recipe, kept_by, plan, upper_size
from localchat.quantize.read_ahead import Loaded
from localchat.quantize.source import Source, check, expected_shapes, has_mtp, mtp_shapes
from localchat.quantize.steps import Step, biases_of, most_bytes, weights_of
from localchat.transfer import free_space

# Weights of a sample: so many that a card's launches, or a processor's threads, do not count.
_SAMPLE = {"cpu": 1 << 20, "cuda": 1 << 26}
_READ = 256 << 20  # bytes of the source that are read to see how fast it is


def plan_lines(config: ModelConfig, recipe: Recipe, source: Source | None, folder: Path) -> Iterator[str]:
    """The plan as lines for a person.

    source: the checkpoint, or None where only its config is here (then bf16 is supposed). folder: where the packed
    folder would be made; only its free space is looked at.

    Raises:
        BadCheckpoint: the source is incomplete.
        UsageError: the recipe has no meaning.
    """
    check_recipe(recipe)
    if source is not None:
        check(source)
    mtp = has_mtp(source) if source is not None else bool(mtp_shapes(config))
    matrices = plan(config, recipe, mtp=mtp)
    shapes = source.shapes if source is not None else expected_shapes(config) | mtp_shapes(config)
    width = max(len(m.name) for m in matrices)
    sizes = [_size(m, source, config, recipe.exact) for m in matrices]
    for m, size in zip(matrices, sizes, strict=True):
        n, k = m.shape
        yield f"{m.name:{width}}  {format_text(m.format):18} {n:>7} x {k:<6} {size / 1e6:10,.2f} MB"
    in_matrices = {name for m in matrices for name in (*weights_of(m), *biases_of(m))}
    others = [name for name in shapes if name not in in_matrices]
    rest = sum(source.nbytes(name) if source is not None else 2 * prod(shapes[name]) for name in others)
    yield f"{f'{len(others)} other tensors':{width}}  {'as they are':18} {'':16} {rest / 1e6:10,.2f} MB"
    total = rest + sum(sizes)
    weights = sum(prod(shape) for shape in shapes.values())
    yield (
        f"total {total / 1e9:.2f} GB, {8 * total / weights:.2f} bits per weight; "
        f"{free_space(folder) / 1e9:.1f} GB are free in {folder}"
    )
    kept = kept_by(config) if source is None else source.kept_format
    if kept == TensorFormat(4, recipe.group_size, recipe.symmetric):
        recipe = replace(recipe, search=False)  # nothing is searched where levels are kept
    calibrated = "; the calibration comes on top, and is not in this" if recipe.method == "gptq" else ""
    yield _time_line(matrices, recipe, source) + calibrated


def format_text(form: TensorFormat) -> str:
    """ "INT4 g128", "INT4 g32 + min", "INT8 rows" or "unquantised"."""
    if form.bits == 4:
        return f"INT4 g{form.group_size}{'' if form.symmetric else ' + min'}"
    return "INT8 rows" if form.bits == 8 else "unquantised"


def _size(matrix: Matrix, source: Source | None, config: ModelConfig, exact: bool) -> int:
    """Bytes of a matrix and its bias in the packed folder."""
    stored = biases_of(matrix) + (weights_of(matrix) if matrix.format.bits == 16 else ())
    if source is not None:
        own = sum(_unquantised_bytes(source, name) for name in stored)
        return own + (most_bytes(source, matrix, exact) if matrix.format.bits < 16 else 0)
    own = 2 * matrix.shape[0] * (matrix.bias + (matrix.shape[1] if matrix.format.bits == 16 else 0))
    return own + (upper_size(matrix, exact and _is_wide(matrix, config)) if matrix.format.bits < 16 else 0)


def _unquantised_bytes(source: Source, name: str) -> int:
    """Of a tensor that is stored as it is; one that was quantised is fp32 then."""
    count, nbytes = prod(source.shapes[name]), source.nbytes(name)
    return nbytes if nbytes >= 2 * count else 4 * count


def _is_wide(matrix: Matrix, config: ModelConfig) -> bool:
    """Whether scales that keep the levels of a checkpoint of this config are fp32: a scale times a zero point."""
    kept, form = kept_by(config), matrix.format
    if kept is None or kept.symmetric or form.symmetric or form.bits != 4 or not matrix.name.startswith("layers."):
        return False
    return kept.group_size % form.group_size == 0


def _time_line(matrices: Sequence[Matrix], recipe: Recipe, source: Source | None) -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arithmetic = _arithmetic_seconds(matrices, recipe, device)
    if source is None:
        return f"about {arithmetic:.0f} s of arithmetic on {device} (measured on samples), beside reading and writing"
    reading = _reading_seconds(source)
    return (
        f"about {max(arithmetic, reading):.0f} s on {device}: {arithmetic:.0f} s of arithmetic, beside it "
        f"{reading:.0f} s of reading (measured on samples; the writing is not)"
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
