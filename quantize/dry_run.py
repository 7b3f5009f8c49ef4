"""What a conversion would do, without doing it: each matrix with its bits and bytes, the sum, and an estimated time."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

from localchat.config import ModelConfig, TensorFormat
from localchat.quantize.plan import Matrix, Recipe, check_recipe, kept_by, plan, upper_size
from localchat.quantize.source import Source, check, expected_shapes, has_mtp, mtp_shapes
from localchat.quantize.steps import biases_of, most_bytes, weights_of
from localchat.quantize.time_estimate import time_line
from localchat.transfer import free_space


def plan_lines(config: ModelConfig, recipe: Recipe, source: Source | None, folder: Path) -> Iterator[str]:
    """The plan as lines for a person.

    source: the checkpoint, or None where only its config is here (then bf16 is supposed). folder: where the packed
    folder would be made; only its free space is looked at.

    Raises:
        BadCheckpoint: the source is incomplete, or has no tokenizer to calibrate with.
        UsageError: the recipe has no meaning.
        UserError: the text to calibrate with cannot be read, or is too short.
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
    if kept != TensorFormat(4, recipe.group_size, recipe.symmetric):
        yield time_line(matrices, recipe, source)
        return
    calibrated = "; matrices that are not 4 bit yet are calibrated on top" if recipe.method == "gptq" else ""
    yield time_line(matrices, replace(recipe, search=False, method="rtn"), source) + calibrated  # levels are kept


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
