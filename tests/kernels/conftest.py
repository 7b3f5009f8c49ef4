"""Where a kernel's test runs, and outputs that show what was never written.

A test that takes `device` runs twice: through Triton's interpreter on the CPU, and, with `-m gpu`, on a card. Triton
decides in the moment a kernel is defined, so one process does one or the other (tests/conftest.py sets it).
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True, scope="session")
def _interpreter_rounds() -> None:
    """Casts from fp32 to bf16 round to nearest even, as on a card; Triton's interpreter cuts the bits off."""
    from triton.runtime import interpreter  # not earlier: TRITON_INTERPRET has to be set before Triton's import

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name == "fp32" and target.name == "bf16":
            bits = np.ascontiguousarray(values).view(np.uint32)
            up = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            up &= np.uint32(0xFFFF0000)  # of a zero no bits are left, or it would become a tiny number
            values = np.where(np.isfinite(bits.view(np.float32)), up, bits).view(np.float32)
        return convert(values, source, target, mode)

    interpreter._convert_float = rounded


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """cpu: the interpreter. cuda: the card, or a skip that says why not."""
    if request.param == "cuda":
        return _card_or_skip()
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for the card in this process (-m gpu)")
    torch.manual_seed(0)
    return torch.device("cpu")


@pytest.fixture
def card() -> torch.device:
    """For tests that are only for a card (mark them gpu)."""
    return _card_or_skip()


def _card_or_skip() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process (TRITON_INTERPRET=1): run with -m gpu")
    torch.manual_seed(0)
    return torch.device("cuda")


@pytest.fixture
def nan_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and torch.empty_like return NaN (or the largest integer), so that an unwritten lane shows."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

        return empty

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture(scope="session")
def relative() -> Callable[[Tensor, Tensor], float]:
    """||out - wanted|| / ||wanted||, in fp64; NaN where the output has one."""

    def error(out: Tensor, wanted: Tensor) -> float:
        a, b = out.detach().cpu().double(), wanted.detach().cpu().double()
        assert a.shape == b.shape
        return float((a - b).norm() / b.norm())

    return error


@pytest.fixture(scope="session")
def delta_net() -> Callable[..., dict[str, Any]]:
    """Random arguments of a gated delta net's kernels, by name; nothing in them is as it is initialised."""

    def make(
        device: torch.device,
        tokens: int,
        heads: tuple[int, int] = (2, 6),
        dims: tuple[int, int] = (16, 32),
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Any]:
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        values = value_heads * value_dim
        channels = 2 * key_heads * key_dim + values

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        return {
            "qkvz": normal(tokens, channels + values).to(dtype),
            "ba": normal(tokens, 2 * value_heads).to(dtype),
            "conv_weight": normal(channels, 4).to(dtype),
            "A_log": normal(value_heads) - 1,
            "dt_bias": normal(value_heads),
            "norm_weight": normal(value_dim).to(dtype),
            "eps": 1e-6,
            "positions": torch.arange(6, 6 + tokens, device=device),
            "conv_state": normal(4, channels).to(dtype),
            "state": normal(value_heads, value_dim, key_dim) / 4,
        }

    return make
