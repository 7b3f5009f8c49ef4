"""The order in which a conversion reads and writes: a matrix, or a tensor that is stored as it is, after another."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localchat.quantize.plan import Matrix, upper_size
from localchat.quantize.source import Source


@dataclass(frozen=True)
class Step:
    """What is read, and written, together. name: of the matrix, or of the tensor where `matrix` is None.

    reads: the source's tensors, by canonical name.
    """

    name: str
    matrix: Matrix | None
    reads: tuple[str, ...]

    def writes(self) -> tuple[str, ...]:
        """Every name that this step may write."""
        if self.matrix is None:
            return (self.name,)
        return tuple(f"{self.name}.{kind}" for kind in ("qweight", "weight", "scales", "mins", "bias"))


def steps_of(source: Source, matrices: Sequence[Matrix]) -> list[Step]:
    """Every tensor of the source in one step: those that are stored as they are, then the matrices in their order.

    Where a source's files come one after the other, a step's place is that of the last file that it needs.
    """
    in_matrices = {name for matrix in matrices for name in (*weights_of(matrix), *biases_of(matrix))}
    steps = [Step(name, None, (name,)) for name in source.shapes if name not in in_matrices]
    for m in matrices:
        norm = (m.norm,) if m.norm else ()
        steps.append(Step(m.name, m, (*norm, *weights_of(m), *biases_of(m))))
    if arrival := source.arrival:
        steps.sort(key=lambda step: max(map(arrival.rank, step.reads)))
    return steps


def weights_of(matrix: Matrix) -> tuple[str, ...]:
    """The parts of a matrix, by canonical name."""
    return tuple(f"{part}.weight" for part in matrix.parts)


def biases_of(matrix: Matrix) -> tuple[str, ...]:
    """The biases of these parts."""
    return tuple(f"{part}.bias" for part in matrix.parts) if matrix.bias else ()


def most_bytes(source: Source, matrix: Matrix, exact: bool) -> int:
    """The most that a matrix of this source takes in the packed folder; exact: see Recipe."""
    wide = exact and any(source.has_wide_scales(name, matrix.format) for name in weights_of(matrix))
    return upper_size(matrix, wide)


def source_bytes(source: Source, steps: Iterable[Step]) -> int:
    """What the tensors that are written in these steps take in the source."""
    norms = {step.matrix.norm for step in steps if step.matrix}  # read for a matrix, and stored in a step of their own
    return sum(source.nbytes(name) for step in steps for name in step.reads if not (step.matrix and name in norms))
