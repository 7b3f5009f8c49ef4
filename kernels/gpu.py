"""Triton, or a stand-in where it does not exist (it is for Linux): there the references run and no kernel is launched.

Kernel files take `triton` and `tl` from here, so that their references can be imported everywhere.
"""

from contextlib import suppress
from importlib import import_module
from typing import Any

__all__ = ["tl", "triton"]


class _Absent:
    """Takes any attribute and any call, which is all that defining a kernel needs."""

    def __getattr__(self, _name: str) -> "_Absent":
        return self

    def __call__(self, *_args: Any, **_options: Any) -> "_Absent":
        return self

    def __getitem__(self, _grid: Any) -> Any:
        raise RuntimeError("a Triton kernel was launched, and Triton is not installed")


triton: Any = _Absent()
tl: Any = triton
with suppress(ModuleNotFoundError):
    triton, tl = import_module("triton"), import_module("triton.language")
