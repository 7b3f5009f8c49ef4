"""From the loaded parts of one matrix to the tensors that are stored: codes, scales, mins, bias."""

from concurrent.futures import Executor
from contextlib import nullcontext

import torch
from torch import Tensor

from localchat.config import TensorFormat
from localchat.kernels.int4_packing import pack
from localchat.quantize.plan import Matrix
from localchat.quantize.read_ahead import Loaded
from localchat.quantize.scales import quantize_int4, quantize_int8_rows
from localchat.quantize.source import Grid
from localchat.quantize.steps import biases_of, weights_of
from localchat.quantize.threads import worker_pool


def pack_matrix(matrix: Matrix, loaded: Loaded, search: bool) -> dict[str, Tensor]:
    """The tensors of one matrix as stored, by name; the loaded ones are used up.

    search: look for better scales than plain rounding's.
    """
    on_card = any(tensor.is_cuda for tensor in loaded.tensors.values())
    with nullcontext() if on_card else worker_pool() as pool:  # blocks of rows side by side would fill a card's memory
        return _packed(matrix, loaded, search, pool)


def _packed(matrix: Matrix, loaded: Loaded, search: bool, pool: Executor | None) -> dict[str, Tensor]:
    norm = loaded.tensors.pop(matrix.norm).float().square() if matrix.norm else None
    parts = []
    for name in weights_of(matrix):
        w = loaded.tensors.pop(name)
        parts.append(_pack_part(w, matrix.format, norm, search, loaded.grids[name], pool))
        del w
    stored = {}
    for kind in list(parts[0]):
        if kind == "codes":  # words of rows that are no multiple of a tile's could not be stacked
            codes = _stack([part.pop(kind) for part in parts])
            stored[f"{matrix.name}.qweight"] = pack(codes, matrix.format.group_size)
            del codes
        else:
            stored[f"{matrix.name}.{kind}"] = _stack([part.pop(kind) for part in parts])
    if matrix.bias:
        stored[f"{matrix.name}.bias"] = _stack([loaded.tensors.pop(name) for name in biases_of(matrix)])
    return stored


def _pack_part(
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


def _stack(parts: list[Tensor]) -> Tensor:
    """Parts above each other, in the widest of their dtypes."""
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return torch.cat([part.to(dtype) for part in parts])
