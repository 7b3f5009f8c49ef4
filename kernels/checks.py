"""What a kernel's wrapper asks of its tensors before a launch: a kernel reads whatever lies at the address."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    what: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None], *, rows_apart: bool = False
) -> None:
    """`tensor` has one of `dtypes`, lies contiguously, and has `shape`, where None is any size.

    rows_apart: columns of a wider matrix will do, of which only each row is contiguous.

    Raises:
        ValueError: it does not; the message starts with `what`, says what came and what was wanted.
    """
    fits = tensor.dim() == len(shape) and all(w is None or g == w for g, w in zip(tensor.shape, shape, strict=True))
    lies = tensor.is_contiguous() or (rows_apart and tensor.dim() == 2 and tensor.stride(1) == 1)
    if not fits or tensor.dtype not in dtypes or not lies:
        got = f"{_name(tensor.dtype)} {list(tensor.shape)}{'' if lies else ' (not contiguous)'}"
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{what}: got {got}, wanted contiguous {'|'.join(map(_name, dtypes))} [{sizes}]")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
