"""The INT8 product for up to 8 tokens: every way of launching it, and who takes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels import int8_matmul as module
from localchat.kernels.int8_matmul import MANY_ROWS, NARROW, few_tokens_options, int8_matmul, int8_matmul_reference
from localchat.kernels.scaled_half import UNIT, Squares

BOUND = 5e-4
Relative = Callable[[Tensor, Tensor], float]
Launch = tuple[tuple[int, int], int, int]


def make(n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes, the smallest and the largest among them, and scales."""
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
    return codes, 0.001 * (1 + torch.rand(n, device=device))


LAUNCHES: list[Launch] = [
    # N: multiples of 16 or odd. K: a multiple of all warps' tiles, of no tile, less than they take; one batch, several
    # with a rest or without, loops.
    (module.FRAGMENTS, 137, 1024),
    (module.FRAGMENTS, 132, 1424),
    ((4, 4), 137, 576),
    ((4, 4), 144, 896),
    ((4, 5), 133, 5120),
    ((8, 2), 160, 1424),
    ((2, 3), 129, 1408),
    ((1, 3), 130, 2128),
    ((1, 1), 129, 2176),
    ((2, 4), 137, 2816),
    ((4, 4), 200, 64),
]


@pytest.mark.parametrize(
    ("launch", "tokens"),
    [*((launch, t) for launch in LAUNCHES for t in (1, 8)), *((LAUNCHES[0], t) for t in (2, 3, 4, 5, 6, 7))],
    ids=str,
)
def test_every_launch(device: torch.device, relative: Relative, launch: Launch, tokens: int) -> None:
    """Bias, residual and row scales are in y, and nothing is written behind it."""
    settings, n, k = launch
    stored = make(n, k, device)
    x, row_scale = torch.randn(tokens, k, device=device).half(), 2.0 ** torch.arange(tokens, device=device)
    bias, residual = torch.randn(n, device=device), torch.randn(tokens, n, device=device)
    wanted = int8_matmul_reference(x.float() * row_scale[:, None], *stored, bias) + residual
    memory = torch.full((tokens * n + 64,), float("nan"), device=device)
    out = memory[: tokens * n].view(tokens, n)
    int8_matmul(x, row_scale, *stored, bias, residual, out=out, settings=settings)
    for token in range(tokens):  # by itself: the last one's scale is 128
        assert relative(out[token], wanted[token]) < BOUND
    assert bool(memory[tokens * n :].isnan().all())


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_squares_in_place_of_row_scales(device: torch.device, relative: Relative, tokens: int) -> None:
    stored, parts = make(150, 640, device), torch.rand(tokens, 40, device=device)
    x, squares = torch.randn(tokens, 640, device=device).half(), Squares(parts, 0.5)
    factors = UNIT / (parts.sum(1, keepdim=True) / 640 + 0.5).sqrt()
    out = int8_matmul(x, squares, *stored, settings=module.FRAGMENTS)
    assert relative(out, int8_matmul_reference(x.float() * factors, *stored)) < BOUND


@pytest.mark.parametrize("code", [-128, -1, 0, 1, 127])
def test_extreme_codes_and_inputs_are_exact(device: torch.device, code: int) -> None:
    """Sums of equal products of powers of two do not round; 512 is the largest input that scaled half gives."""
    codes = torch.full((144, 256), code, dtype=torch.int8, device=device)
    x, one = torch.full((2, 256), 512.0, device=device).half(), torch.ones(2, device=device)
    out = int8_matmul(x, one, codes, torch.ones(144, device=device))
    assert torch.equal(out, torch.full_like(out, code * 512.0 * 256))


@pytest.mark.parametrize("tokens", [1, 2])
def test_every_code_meets_its_input(device: torch.device, tokens: int) -> None:
    """One input at a time: the row of the matrix comes out, whatever the order in which words are taken."""
    codes = make(144, 192, device)[0]
    one = torch.ones(tokens, device=device)
    for at in (0, 1, 2, 3, 4, 15, 16, 63, 64, 130, 191):
        x = torch.zeros(tokens, 192, device=device).half()
        x[-1, at] = 1
        out = int8_matmul(x, one, codes, torch.ones(144, device=device), settings=module.FRAGMENTS)
        assert torch.equal(out[-1], codes[:, at].float())


def test_who_takes_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 to 8 tokens of a wide matrix, but for rows of which some do not begin at 16 bytes; one only where told to."""

    class Taken(Exception):
        pass

    class Kernel:
        def __getitem__(self, _grid: tuple[int, ...]) -> None:
            raise Taken

    class Nothing:
        def __getitem__(self, _grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: None

    monkeypatch.setattr(module, "_int8_gemv_kernel", Nothing())
    monkeypatch.setattr(module, "int8_few_tokens_kernel", Kernel())
    for tokens, n, k, settings, taken in (
        (1, NARROW + 1, 64, None, False),
        (1, NARROW + 1, 64, (4, 2), True),
        (2, NARROW + 1, 64, None, True),
        (8, NARROW + 1, 64, None, True),
        (9, NARROW + 1, 64, None, False),
        (1, NARROW, 64, None, False),
        (8, NARROW, 64, None, False),
        (1, MANY_ROWS - 1, 16, None, False),
        (1, MANY_ROWS, 16, None, True),
        (1, NARROW + 1, 72, None, False),
        (2, NARROW + 1, 72, None, False),
    ):
        x, one = torch.zeros(tokens, k, dtype=torch.float16, device=device), torch.ones(tokens, device=device)
        try:
            int8_matmul(x, one, *make(n, k, device), settings=settings)
            took = False
        except Taken:
            took = True
        assert took == taken, (tokens, n, k, settings)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize("k", [16, 64, 576, 896, 1424, 5120, 8192, 27648])
def test_all_steps_are_taken_once(parts: int, batch: int, k: int) -> None:
    options = few_tokens_options(1, k, (parts, batch))
    steps = -(-k // (64 * parts))
    looped = (steps - options["LAST"]) / options["COUNT"]
    assert looped == int(looped) >= 0
    assert options["LOOP"] == (looped > 0)
    most = options["COUNT"] + options["BATCH"] - 1 if looped else module.WHOLE
    assert options["BATCH"] <= options["LAST"] <= most
    assert options["COUNT"] % options["BATCH"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [module.FRAGMENTS, (4, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [1024, 1424, 27648])
def test_the_inline_ptx_and_its_twin_agree(
    card: torch.device, relative: Relative, settings: tuple[int, int], tokens: int, k: int
) -> None:
    """And two runs give the same bits."""
    stored = make(1000, k, card)
    x, one = torch.randn(tokens, k, device=card).half(), torch.ones(tokens, device=card)
    ptx, again, twin = (int8_matmul(x, one, *stored, settings=settings, use_ptx=use) for use in (True, True, False))
    assert relative(ptx, twin) < BOUND
    assert torch.equal(ptx, again)
