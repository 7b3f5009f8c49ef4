"""The stored tensors of one matrix that another tool has quantised, checked as they are taken; their packed words."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign
from localchat.shards import Shards

_FLOATS = ("F16", "BF16", "F32")
_INTEGERS = ("I32", "I64")
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "F8_E4M3": 1, "I8": 1}


class Parts:
    """Tensors by their kind ("qweight", "scales", ...). name: the matrix, for messages; stored: kind -> full name.

    headers_only: no tensor is to be read; which inputs share a group is what `foreign` says.
    """

    def __init__(
        self, name: str, stored: Mapping[str, str], shards: Shards, foreign: Foreign, *, headers_only: bool = False
    ) -> None:
        self.name = name
        self.foreign = foreign
        self._stored = stored
        self._shards = shards
        self.headers_only = headers_only

    def __contains__(self, kind: str) -> bool:
        return kind in self._stored

    @property
    def nbytes(self) -> int:
        """Bytes of all of them in the files."""
        return sum(_BYTES.get(self.dtype(kind), 1) * prod(self.shape(kind)) for kind in self._stored)

    @property
    def has_wide_scales(self) -> bool:
        """Whether a tensor of scales is fp32."""
        return any("scale" in kind and self.dtype(kind) == "F32" for kind in self._stored)

    def shape(self, kind: str) -> tuple[int, ...]:
        """From the file's header alone.

        Raises:
            BadCheckpoint: there is no such tensor.
        """
        if kind not in self._stored:
            raise BadCheckpoint(f"{self.name}.{kind} is missing, so the checkpoint is incomplete.")
        return self._shards.shape(self._stored[kind])

    def matrix_shape(self, kind: str) -> tuple[int, int]:
        """The same of a tensor that has two dimensions.

        Raises:
            BadCheckpoint: it has more or fewer.
        """
        shape = self.shape(kind)
        if len(shape) != 2:
            raise BadCheckpoint(f"{self.name}.{kind} has the shape {list(shape)}, wanted two dimensions.")
        return shape[0], shape[1]

    def dtype(self, kind: str) -> str:
        """As safetensors spells it."""
        return self._shards.dtype(self._stored[kind])

    def floats(self, kind: str, *shapes: tuple[int, ...]) -> Tensor:
        """A tensor of scales, of one of `shapes`."""
        return self._get(kind, shapes, _FLOATS)

    def integers(self, kind: str, *shapes: tuple[int, ...]) -> Tensor:
        """A tensor of packed words or indices, of one of `shapes`."""
        return self._get(kind, shapes, _INTEGERS)

    def tensor(self, kind: str, dtype: str, *shapes: tuple[int, ...]) -> Tensor:
        """A tensor of this dtype (as safetensors spells it) and one of `shapes`.

        Raises:
            BadCheckpoint: it is missing, or of another dtype or shape.
        """
        return self._get(kind, shapes, (dtype,))

    def _get(self, kind: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> Tensor:
        got = self.shape(kind)
        if got not in shapes or self.dtype(kind) not in dtypes:
            wanted = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
            raise BadCheckpoint(f"{self.name}.{kind} is {self.dtype(kind)} {list(got)}, wanted {wanted}.")
        return self._shards.read(self._stored[kind])

    def group_of(self, k: int, groups: int, group_size: int, kind: str | None = None) -> Tensor:
        """Which group each of k inputs is in, int64 [K]: by the tensor `kind` where there is one, else in a row.

        Raises:
            BadCheckpoint: there are more inputs than groups, an index of a group that is none, or no `kind` where
                the inputs were sorted.
        """
        if kind is not None and kind not in self and self.foreign.act_order and groups > 1:
            raise BadCheckpoint(
                f"{self.name}.{kind} is missing, and config.json says act-order, so nothing tells the inputs' groups."
            )
        if self.headers_only and self.foreign.act_order:
            return torch.arange(k) % groups  # any order but that of neighbours
        if kind is not None and kind in self and not self.headers_only:
            given = self.integers(kind, (k,)).long()
            if not bool((given < 0).all()):  # compressed-tensors' word for "in a row"
                if int(given.min()) < 0 or int(given.max()) >= groups:
                    raise BadCheckpoint(f"{self.name}.{kind} names groups that are not among {groups}.")
                return given
        size = group_size or k
        if -(-k // size) != groups:
            raise BadCheckpoint(f"{self.name} has {groups} groups of scales, wanted {-(-k // size)} of {size} inputs.")
        return torch.arange(k) // size


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 [R, W] -> uint8 [R, 32 W / bits], the lowest bits of a word first; bits 4 or 8, a little-endian machine."""
    rows, columns = words.shape
    packed = words.to(torch.int32).flatten().view(torch.uint8).view(rows, 4 * columns)
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
