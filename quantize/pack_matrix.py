"""From the loaded parts of one matrix to the tensors that are stored: codes, scales, mins, bias."""

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext

from torch import Tensor

from localchat.config import TensorFormat
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.quantize.codes import Codes
from localchat.quantize.gptq import quantize_gptq
from localchat.quantize.plan import Matrix, Recipe
from localchat.quantize.read_ahead import Loaded
from localchat.quantize.scales import is_exact, quantize_int4, quantize_int8_rows
from localchat.quantize.source import Grid
from localchat.quantize.steps import biases_of, weights_of
from localchat.quantize.threads import worker_pool

# With workers, or none on a card: the mean of x x^T over a matrix's inputs, fp32 [K, K] (gptq.py).
Measure = Callable[[Executor | None], Tensor]


def pack_matrix(matrix: Matrix, loaded: Loaded, recipe: Recipe, measure: Measure | None = None) -> dict[str, Tensor]:
    """The tensors of one matrix as stored, by name; the loaded ones are used up.

    recipe: says whether better scales than plain rounding's are looked for, and whether levels are kept exactly.
    measure: of a matrix that is calibrated; it is called if there is anything to be rounded.
    """
    on_card = any(tensor.is_cuda for tensor in loaded.all_tensors())
    with nullcontext() if on_card else worker_pool() as pool:  # blocks of rows side by side would fill a card's memory
        return _packed(matrix, loaded, recipe, pool, measure)


def _packed(
    matrix: Matrix, loaded: Loaded, recipe: Recipe, pool: Executor | None, measure: Measure | None
) -> dict[str, Tensor]:
    energy = loaded.tensors.pop(matrix.norm).float().square() if matrix.norm else None
    if measure is None:
        parts = [_part(name, matrix.format, loaded, energy, recipe, pool) for name in weights_of(matrix)]
    else:
        parts = _calibrated(matrix, loaded, recipe, pool, measure)
    stored = {}
    for kind in list(parts[0]):
        stacked = matrix.stacked([part.pop(kind) for part in parts])
        if kind == "codes":  # words of rows that are no multiple of a tile's could not be stacked
            stored[f"{matrix.name}.qweight"] = pack(stacked, matrix.format.group_size)
        else:
            stored[f"{matrix.name}.{kind}"] = pack_scales(stacked) if matrix.format.bits == 4 else stacked
        del stacked
    if matrix.bias:
        stored[f"{matrix.name}.bias"] = matrix.stacked([loaded.tensors.pop(name) for name in biases_of(matrix)])
    return stored


def _part(
    name: str, format_: TensorFormat, loaded: Loaded, energy: Tensor | None, recipe: Recipe, pool: Executor | None
) -> dict[str, Tensor]:
    """One matrix of the source: its own codes where they fit, else rounded."""
    codes = loaded.codes.pop(name, None)
    if codes is None:
        return _rounded(loaded.tensors.pop(name), format_, energy, recipe.search, loaded.grids[name], pool)
    return _kept(codes, format_, recipe.exact) or _rounded(codes.values(), format_, energy, recipe.search, None, pool)


def _calibrated(
    matrix: Matrix, loaded: Loaded, recipe: Recipe, pool: Executor | None, measure: Measure
) -> list[dict[str, Tensor]]:
    """The parts, or what they are together, rounded with error feedback where their own levels cannot be kept.

    It goes through the columns one by one, which takes as long for many rows as for few.
    """
    names, form = weights_of(matrix), matrix.format
    kept = [_on_its_levels(name, form, loaded, recipe.exact, pool) for name in names]
    left = [name for name, found in zip(names, kept, strict=True) if found is None]
    hessian = measure(pool) if left else None

    def rounded(w: Tensor) -> dict[str, Tensor]:
        if hessian is None:
            raise ValueError(f"{matrix.name}: is rounded, and was not measured")
        return _named(*quantize_gptq(w, hessian, form.group_size, form.symmetric, pool))

    if len(left) == len(names):
        return [rounded(matrix.stacked([_values(name, loaded) for name in names]))]
    return [rounded(_values(name, loaded)) if found is None else found for name, found in zip(names, kept, strict=True)]


def _on_its_levels(
    name: str, format_: TensorFormat, loaded: Loaded, exact: bool, pool: Executor | None
) -> dict[str, Tensor] | None:
    """A 4-bit source's weights on the levels that they lie on, if our format has these: nothing is lost there."""
    if name in loaded.codes:
        return _kept(loaded.codes[name], format_, exact)
    grid, w = loaded.grids[name], loaded.tensors[name]
    if grid is None:
        return None
    found = quantize_int4(w, format_.group_size, format_.symmetric, search=False, grid=grid, pool=pool)
    return _named(*found) if is_exact(w, *found) else None


def _values(name: str, loaded: Loaded) -> Tensor:
    """The weights of one matrix of the source; they are used up."""
    return loaded.codes.pop(name).values() if name in loaded.codes else loaded.tensors.pop(name)


def _kept(codes: Codes, format_: TensorFormat, exact: bool) -> dict[str, Tensor] | None:
    return codes.repacked(format_.group_size, format_.symmetric, exact) if format_.bits == 4 else None


def _rounded(
    w: Tensor, format_: TensorFormat, energy: Tensor | None, search: bool, grid: Grid | None, pool: Executor | None
) -> dict[str, Tensor]:
    if format_.bits == 16:
        return {"weight": w}
    if format_.bits == 8:
        codes, scales = quantize_int8_rows(w, pool)
        return {"weight": codes, "scales": scales}
    return _named(*quantize_int4(w, format_.group_size, format_.symmetric, energy, search, grid, pool))


def _named(codes: Tensor, scales: Tensor, mins: Tensor | None) -> dict[str, Tensor]:
    tensors = {"codes": codes, "scales": scales}
    return tensors if mins is None else {**tensors, "mins": mins}
