"""From the loaded parts of one matrix to the tensors that are stored: codes, scales, mins, bias."""

from concurrent.futures import Executor
from contextlib import nullcontext

import torch
from torch import Tensor

from localchat.config import TensorFormat
from localchat.kernels.int4_packing import pack, pack_scales
from localchat.quantize.codes import Codes
from localchat.quantize.plan import Matrix, Recipe
from localchat.quantize.read_ahead import Loaded
from localchat.quantize.scales import quantize_int4, quantize_int8_rows
from localchat.quantize.source import Grid
from localchat.quantize.steps import biases_of, weights_of
from localchat.quantize.threads import worker_pool


def pack_matrix(matrix: Matrix, loaded: Loaded, recipe: Recipe) -> dict[str, Tensor]:
    """The tensors of one matrix as stored, by name; the loaded ones are used up.

    recipe: says whether better scales than plain rounding's are looked for, and whether levels are kept exactly.
    """
    on_card = any(tensor.is_cuda for tensor in loaded.all_tensors())
    with nullcontext() if on_card else worker_pool() as pool:  # blocks of rows side by side would fill a card's memory
        return _packed(matrix, loaded, recipe, pool)


def _packed(matrix: Matrix, loaded: Loaded, recipe: Recipe, pool: Executor | None) -> dict[str, Tensor]:
    energy = loaded.tensors.pop(matrix.norm).float().square() if matrix.norm else None
    parts = [_part(name, matrix.format, loaded, energy, recipe, pool) for name in weights_of(matrix)]
    stored = {}
    for kind in list(parts[0]):
        stacked = _stack([part.pop(kind) for part in parts], matrix.alternate)
        if kind == "codes":  # words of rows that are no multiple of a tile's could not be stacked
            stored[f"{matrix.name}.qweight"] = pack(stacked, matrix.format.group_size)
        else:
            stored[f"{matrix.name}.{kind}"] = pack_scales(stacked) if matrix.format.bits == 4 else stacked
        del stacked
    if matrix.bias:
        biases = [loaded.tensors.pop(name) for name in biases_of(matrix)]
        stored[f"{matrix.name}.bias"] = _stack(biases, matrix.alternate)
    return stored


def _part(
    name: str, format_: TensorFormat, loaded: Loaded, energy: Tensor | None, recipe: Recipe, pool: Executor | None
) -> dict[str, Tensor]:
    """One matrix of the source: its own codes where they fit, else rounded."""
    codes = loaded.codes.pop(name, None)
    if codes is None:
        return _rounded(loaded.tensors.pop(name), format_, energy, recipe.search, loaded.grids[name], pool)
    return _kept(codes, format_, recipe.exact) or _rounded(codes.values(), format_, energy, recipe.search, None, pool)


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
    codes, scales, mins = quantize_int4(w, format_.group_size, format_.symmetric, energy, search, grid, pool)
    tensors = {"codes": codes, "scales": scales}
    return tensors if mins is None else {**tensors, "mins": mins}


def _stack(parts: list[Tensor], alternate: bool) -> Tensor:
    """Parts above each other, or their rows in turn, in the widest of their dtypes."""
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    same = [part.to(dtype) for part in parts]
    return torch.stack(same, 1).flatten(0, 1) if alternate else torch.cat(same)
