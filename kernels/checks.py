"""What a kernel's wrapper asks of its tensors before a launch: a kernel reads whatever lies at the address."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(what: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]) -> None:
    """`tensor` has one of `dtypes`, lies contiguously, and has `shape`, where None is any size.

    Raises:
        ValueError: it does not; the message starts with `what`, says what came and what was wanted.
    """
    fits = tensor.dim() == len(shape) and all(w is None or g == w for g, w in zip(tensor.shape, shape, strict=True))
    if not fits or tensor.dtype not in dtypes or not tensor.is_contiguous():
        got = f"{_name(tensor.dtype)} {list(tensor.shape)}{'' if tensor.is_contiguous() else ' (not contiguous)'}"
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{what}: got {got}, wanted contiguous {'|'.join(map(_name, dtypes))} [{sizes}]")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
