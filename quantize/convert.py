"""Converts a checkpoint to a packed folder, one tensor in memory at a time.

The plan comes first: which tensors are fused (q, k, v into qkv_proj; gate, up into gate_up_proj; ...: one product
instead of several), and how each matrix is stored. Then the tensors stream from the source through `scales` into the
`writer`. The folder is written beside its final place and renamed when it is complete, with config.json last, so that
an unfinished one can never be taken for a model.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from localchat.config import TensorFormat
from localchat.errors import BadCheckpoint, UserError
from localchat.kernels.int4_packing import pack
from localchat.quantize.calibrate import calibration_of
from localchat.quantize.gptq import quantize_gptq
from localchat.quantize.placement import exceptions_for
from localchat.quantize.plan import Matrix, Recipe, check_recipe, packed_config, plan, upper_size
from localchat.quantize.scales import is_exact, quantize_int4, quantize_int8_rows
from localchat.quantize.source import Grid, Source, check, has_mtp
from localchat.quantize.target import check_target, move_into_place, partial_folder
from localchat.quantize.threads import worker_pool
from localchat.quantize.writer import ShardWriter, write_file
from localchat.transfer import check_disk_space

__all__ = ["Progress", "Recipe", "convert", "default_recipe", "open_source"]

# Below this width a model loses too much with groups of 128 and no min.
_SMALL = 2048
# Room for norms, tokenizer and config.
_SMALL_FILES = 64 << 20


@dataclass(frozen=True)
class Progress:
    """One tensor has been written: its name, and bytes of the source read so far and in all."""

    tensor: str
    done_bytes: int
    total_bytes: int


def open_source(path: Path) -> Source:
    """Open a model folder or a .gguf file.

    Raises:
        BadCheckpoint: it is damaged, incomplete or of an unknown kind.
        UserError: there is nothing at `path`.
    """
    if path.is_dir():
        from localchat.quantize.hf import open_hf

        return open_hf(path)
    if path.is_file():
        from localchat.quantize.gguf import open_gguf

        return open_gguf(path)
    raise UserError(f"{path}: there is no such model folder or .gguf file.")


def default_recipe(source: Source | Path) -> Recipe:
    """Groups of 128 without min; groups of 32 with min for small models and for what is such a grid already."""
    with ExitStack() as stack:
        opened = source if isinstance(source, Source) else stack.enter_context(open_source(source))
        fine = opened.model_config.hidden_size < _SMALL or opened.coarse_grid
    return Recipe(group_size=32, symmetric=False) if fine else Recipe()


def with_placement(source: Source | Path, recipe: Recipe) -> Recipe:
    """`recipe` with the exceptions that are known for the model's architecture."""
    with ExitStack() as stack:
        opened = source if isinstance(source, Source) else stack.enter_context(open_source(source))
        return replace(recipe, placement=exceptions_for(opened.model_config, recipe.symmetric))


def convert(
    source: Source | Path,
    out: Path,
    recipe: Recipe,
    *,
    overwrite: bool = False,
    source_id: str = "",
    revision: str = "",
    device: str | None = None,
) -> Iterator[Progress]:
    """Pack `source` into the new folder `out`, which is complete when the iteration ends.

    source: a model folder, a .gguf file, or an open Source (which stays open). overwrite: replace `out`, if it is a
    packed folder. source_id, revision: where it came from, for the record. device: for the arithmetic; a CUDA card if
    there is one. On any error, or if the generator is closed early, nothing of `out` is left (and an old one stays).

    Raises:
        BadCheckpoint: the source is damaged or would be computed wrongly; a tensor holds NaN or infinity.
        UserError: `out` exists, is the source, or there is not enough room.
        UsageError: the recipe has no meaning.
    """
    path = Path(source.name) if isinstance(source, Source) else source
    check_recipe(recipe)
    check_target(path, out, overwrite)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        opened = source if isinstance(source, Source) else stack.enter_context(open_source(source))
        check(opened)
        matrices = plan(opened.model_config, recipe, mtp=has_mtp(opened))
        files = opened.files()
        check_disk_space(out.parent, sum(upper_size(m) for m in matrices) + _SMALL_FILES)
        stack.enter_context(_disk_errors(out))
        partial = stack.enter_context(partial_folder(out))
        yield from _write_tensors(opened, matrices, recipe, partial, device)
        for name, content in files.items():
            write_file(partial / name, content)
        config = packed_config(opened, matrices, recipe, source_id, revision)
        write_file(partial / "config.json", (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
        move_into_place(partial, out)


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """A full disk or a folder without write permission as one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}).") from error


def _write_tensors(
    source: Source, matrices: list[Matrix], recipe: Recipe, folder: Path, device: str
) -> Iterator[Progress]:
    """Every matrix and norm, in order; the last step makes the shards final."""
    by_part = {part for m in matrices for p in m.parts for part in (f"{p}.weight", f"{p}.bias")}
    plain = [name for name in source.shapes if name not in by_part]
    names = [f"{m.name}.{kind}" for m in matrices for kind in ("qweight", "weight", "scales", "mins", "bias")] + plain
    total = sum(source.nbytes(name) for name in source.shapes)
    done = 0
    calibration = calibration_of(source, recipe, device)
    with ShardWriter(folder, names, recipe.max_shard_size) as writer:
        for name in plain:
            writer.add(name, read_finite(source, name))
            done += source.nbytes(name)
        for matrix in matrices:
            with worker_pool() as pool:
                measured = matrix.format.bits == 4 and calibration is not None and calibration.covers(matrix)
                hessian = calibration.hessian(matrix, pool) if calibration is not None and measured else None
                stored = {}
                for kind, tensor in _pack_matrix(source, matrix, recipe.search, device, pool, hessian):
                    writer.add(f"{matrix.name}.{kind}", tensor)
                    if calibration is not None:
                        stored[kind] = tensor
                    del tensor
                if calibration is not None:
                    calibration.settle(matrix, stored, pool)
            done += sum(source.nbytes(f"{p}.{x}") for p in matrix.parts for x in _kinds(matrix))
            yield Progress(matrix.name, done, total)
        writer.finish()


def _kinds(matrix: Matrix) -> tuple[str, ...]:
    return ("weight", "bias") if matrix.bias else ("weight",)


def _pack_matrix(
    source: Source, matrix: Matrix, search: bool, device: str, pool: Executor, hessian: Tensor | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one matrix as stored: (kind, tensor) with the kinds of the packed format."""
    energy = read_finite(source, matrix.norm).float().square() if matrix.norm else None
    parts = []
    for names in _taken_at_once(source, matrix, hessian):
        w = _stack([read_finite(source, name) for name in names]).to(device)
        grid = source.grid(names[0]) if len(names) == 1 else None
        parts.append(_pack_part(w, matrix.format, energy, search, grid, pool, hessian))
        del w
    for kind in list(parts[0]):
        if kind == "codes":  # words of rows that are no multiple of a tile's could not be stacked
            yield "qweight", pack(_stack([part.pop(kind) for part in parts]), matrix.format.group_size)
        else:
            yield kind, _stack([part.pop(kind) for part in parts])
    if matrix.bias:
        yield "bias", _stack([read_finite(source, f"{part}.bias") for part in matrix.parts])


def _taken_at_once(source: Source, matrix: Matrix, hessian: Tensor | None) -> list[list[str]]:
    """The weights of a matrix, those together that are rounded together.

    Error feedback goes through the columns one by one, which takes as long for many rows as for few.
    """
    names = [f"{part}.weight" for part in matrix.parts]
    if hessian is None or any(source.grid(name) is not None for name in names):
        return [[name] for name in names]
    return [names]


def _pack_part(
    w: Tensor,
    format_: TensorFormat,
    energy: Tensor | None,
    search: bool,
    grid: Grid | None,
    pool: Executor,
    hessian: Tensor | None,
) -> dict[str, Tensor]:
    if format_.bits == 16:
        return {"weight": w}
    if format_.bits == 8:
        codes, scales = quantize_int8_rows(w, pool)
        return {"weight": codes, "scales": scales}
    group_size, symmetric = format_.group_size, format_.symmetric
    if hessian is None:
        found = quantize_int4(w, group_size, symmetric, energy, search, grid, pool)
    else:
        found = _on_its_grid(w, group_size, symmetric, grid) or quantize_gptq(w, hessian, group_size, symmetric, pool)
    codes, scales, mins = found
    tensors = {"codes": codes, "scales": scales}
    return tensors if mins is None else {**tensors, "mins": mins}


def _on_its_grid(
    w: Tensor, group_size: int, symmetric: bool, grid: Grid | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """A 4-bit source's weights on the levels that they lie on, if our format has these: nothing is lost there."""
    if grid is None:
        return None
    found = quantize_int4(w, group_size, symmetric, search=False, grid=grid)
    return found if is_exact(w, *found) else None


def _stack(parts: list[Tensor]) -> Tensor:
    """Parts above each other, in the widest of their dtypes."""
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return torch.cat([part.to(dtype) for part in parts])


def read_finite(source: Source, name: str) -> Tensor:
    """The tensor `name`.

    Raises:
        BadCheckpoint: it holds NaN or infinity, so that no scale of it would have a meaning.
    """
    tensor = source.read(name)
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise BadCheckpoint(f"{source.name}: {name} holds NaN or infinite values, so the checkpoint is damaged.")
    return tensor
