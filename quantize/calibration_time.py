"""How long the calibration of a conversion will take, added up from samples.

Measured are a column of each kind of matrix, and two rates of products: in fp32, and as the text runs (layerwise.py).
For T tokens of text and W [N, K] there are, beside K columns,

    N K^2 flops of what is fed back behind the blocks, and 4/3 K^3 to factorise H
    2 T K^2 for H, and twice 2 T N K: on the way to the next matrix, and once more with both as they are stored

Attention and the delta net's rule are left out: little in large models, up to half of it in small ones.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from localchat.config import TensorFormat
from localchat.quantize.calibration_text import SHIPPED, calibration_windows
from localchat.quantize.gptq import ROWS, quantize_gptq
from localchat.quantize.layerwise import fast_products
from localchat.quantize.plan import Matrix, Recipe
from localchat.quantize.source import Source

_COLUMNS = 256  # of a matrix that are solved
_SIDE = {"cpu": 512, "cuda": 4096}  # of two square matrices, whose product is a sample
_BYTES_PER_TOKEN = 4  # of a text, where no tokenizer is here


def calibration_tokens(recipe: Recipe, source: Source | None) -> int:
    """Of the text that is run. source: None where only its config is here; then it is a guess.

    Raises:
        BadCheckpoint, UserError: see calibration_text.calibration_windows.
    """
    if source is not None:
        return sum(map(len, calibration_windows(source.files(), recipe.calibration, recipe.calibration_tokens)))
    return min(recipe.calibration_tokens, (recipe.calibration or SHIPPED).stat().st_size // _BYTES_PER_TOKEN)


def calibration_seconds(matrices: Sequence[Matrix], tokens: int, device: str) -> float:
    """To measure and to solve the matrices of the layers that are rounded to 4 bits."""
    covered = [m for m in matrices if m.format.bits == 4 and m.name.startswith("layers.")]
    columns = {kind: _column_seconds(*kind, device) for kind in dict.fromkeys((m.format, m.shape[0]) for m in covered)}
    slow, fast = _flop_seconds(device, nullcontext), _flop_seconds(device, fast_products)
    workers = torch.get_num_threads() if device == "cpu" else 1
    total = 0.0
    for m in covered:
        n, k = m.shape
        blocks = -(-n // ROWS) if device == "cpu" else 1
        flops = slow * (n * k**2 + 4 / 3 * k**3) + fast * (2 * tokens * k**2 + 4 * tokens * n * k)
        total += columns[m.format, n] * k * -(-blocks // workers) + flops / workers
    return total


def _column_seconds(form: TensorFormat, n: int, device: str) -> float:
    """Of one column of n rows (on a CPU: of a block of them), without what is fed back behind its block."""
    w = torch.randn(min(n, ROWS) if device == "cpu" else n, _COLUMNS, device=device)
    hessian = torch.eye(_COLUMNS, device=device)
    return _seconds(lambda: quantize_gptq(w, hessian, form.group_size, form.symmetric)[0], device) / _COLUMNS


def _flop_seconds(device: str, how: Callable[[], AbstractContextManager[None]]) -> float:
    """Of a multiplication or an addition in a large product."""
    side = _SIDE[device]
    x = torch.randn(side, side, device=device)
    with how():
        return _seconds(lambda: x @ x, device) / (2 * side**3)


def _seconds(work: Callable[[], Tensor], device: str) -> float:
    """How long `work` takes the second time, since the first time of anything takes longer; on one thread of a CPU."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        work().view(-1)[:1].cpu()
        start = time.perf_counter()
        work().view(-1)[:1].cpu()  # wait for it
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)
