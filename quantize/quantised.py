"""Matrices that another tool has quantised, found among the tensors of a folder by their names.

A matrix X is quantised if X.qweight, X.weight_packed or a scale of X.weight is there; config.json only says by which
rules it is read. So a checkpoint may hold both kinds, as Qwen3.5's GPTQ does, whose attention is bf16.
"""

from collections.abc import Collection, Iterable, Mapping
from math import prod

from torch import Tensor

from localchat.config import TensorFormat
from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign
from localchat.kernels.int4_packing import GROUP_SIZES, group_size_for
from localchat.quantize import awq, compressed_tensors, fp8, gptq_format
from localchat.quantize.codes import Codes
from localchat.quantize.parts import Parts
from localchat.shards import Shards

_INTEGERS = {"gptq": gptq_format, "awq": awq, "compressed-tensors": compressed_tensors}
_KINDS = {kind for layout in (*_INTEGERS.values(), fp8) for kind in layout.KINDS} - {"weight"}
# What is said of activations and of the cache, which are not quantised here.
IGNORED = (*(f".{x}_scale" for x in ("input", "output", "activation", "q", "k", "v")), ".input_zero_point")


class QuantisedMatrix:
    """One matrix [N, K] behind several tensors. name: its canonical name without ".weight", for messages.

    stored: the names of these tensors. Of shards that are still to come only headers are read before `codes`: layout
    then trusts config.json for the order of the inputs and for zero points in the middle, and `codes` does not.
    """

    def __init__(self, name: str, stored: Mapping[str, str], shards: Shards, foreign: Foreign) -> None:
        self.stored = tuple(stored.values())
        self._parts = Parts(name, stored, shards, foreign)
        self._rules = None if "weight" in stored else _INTEGERS.get(foreign.tool)
        known = Parts(name, stored, shards, foreign, headers_only=True) if shards.arriving else self._parts
        self.layout = self._rules.layout(known) if self._rules else None
        self.shape = self.layout.shape if self.layout else fp8.shape(self._parts)
        self.nbytes = self._parts.nbytes

    def codes(self) -> Codes | None:
        """The whole numbers and their scales; None of FP8.

        Raises:
            BadCheckpoint: a tensor is missing, or of another shape or dtype, or there is a bias that is not zero.
        """
        self._check_bias()
        return self._rules.decode(self._parts) if self._rules else None

    def weight(self) -> Tensor:
        """W, fp32.

        Raises:
            BadCheckpoint: see `codes`.
        """
        codes = self.codes()
        return fp8.decode(self._parts) if codes is None else codes.values()

    def has_wide_scales(self, format_: TensorFormat) -> bool:
        """Whether keeping its levels in this format may take scales of fp32: they are, or have zero points."""
        if self.layout is None or format_.bits != 4 or not self.layout.is_kept(format_.group_size, format_.symmetric):
            return False
        return not (self.layout.symmetric or format_.symmetric) or self._parts.has_wide_scales

    def _check_bias(self) -> None:
        """A bias of zeros may stand beside a matrix that has none; leaving out another would give wrong answers."""
        if "bias" in self._parts and bool(self._parts.floats("bias", (self.shape[0],)).any()):
            raise BadCheckpoint(f"{self._parts.name}.bias is unexpected in a model of this config, and is not zero.")


def kept_format(matrices: Iterable[QuantisedMatrix]) -> TensorFormat | None:
    """The format in which most of the matrices keep their levels, among equals the one with fewest scales; or None."""
    layouts = [m.layout for m in matrices if m.layout is not None]
    symmetric = all(layout.symmetric for layout in layouts if layout.bits == 4)
    counts = {size: sum(layout.is_kept(size, symmetric) for layout in layouts) for size in GROUP_SIZES}
    scales = {
        size: sum(prod(layout.shape) // (group_size_for(layout.shape[1], size) or 1) for layout in layouts)
        for size in GROUP_SIZES
    }
    best = max(GROUP_SIZES, key=lambda size: (counts[size], -scales[size], -size))
    return TensorFormat(4, best, symmetric) if counts[best] else None


def what_is_lost(matrices: Collection[QuantisedMatrix], group_size: int, symmetric: bool) -> str:
    """What packing them so does to them, as a clause; "" where there are none."""
    lost = [m for m in matrices if m.layout is None or not m.layout.is_kept(group_size, symmetric)]
    if not matrices:
        return ""
    if not lost:
        return "its 4-bit codes and scales are kept, nothing is rounded again"
    layout = lost[0].layout
    how = "to FP8" if layout is None else f"to {layout.bits} bits"
    if layout is not None and layout.bits == 4:
        in_a_row = bool((layout.group_of.diff() >= 0).all())
        wanted = f"groups of {group_size}{', symmetric' if symmetric else ''}"
        how = f"in other groups than {wanted}" if in_a_row else "with act-order; its groups do not fit ours"
    part = "it is" if len(lost) == len(matrices) else f"{len(lost)} of its {len(matrices)} quantised matrices are"
    return f"it was quantised {how}, so {part} rounded a second time"


def by_matrix(names: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Canonical name -> stored name, as (quantised matrix -> kind -> stored name, the others)."""
    matrices: dict[str, dict[str, str]] = {}
    for name, stored in names.items():
        stem, _, kind = name.rpartition(".")
        if kind in _KINDS:
            matrices.setdefault(stem, {})[kind] = stored
    plain = {}
    for name, stored in names.items():
        stem, _, kind = name.rpartition(".")
        if stem in matrices and kind == "weight":
            matrices[stem][kind] = stored
        elif kind not in _KINDS:
            plain[name] = stored
    return matrices, plain
