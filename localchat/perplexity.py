"""Perplexity of a model over a text: exp of the mean negative log likelihood of each next token.

The text is cut into windows that do not overlap and start from nothing (no BOS); the first token of a window is
context only. Logits are taken for a few rows at a time, so memory does not grow with window * vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.model import Model

_ROWS = 128


@torch.inference_mode()
def perplexity(model: Model, ids: Sequence[int], window: int = 1024, *, int8_kv: bool = False) -> float:
    """ids of the whole text -> perplexity. `int8_kv` keeps keys and values as INT8.

    Raises:
        ValueError: there is no token to predict.
    """
    if len(ids) < 2 or window < 2:
        raise ValueError(f"perplexity: got {len(ids)} ids in windows of {window}, wanted at least 2")
    total, count = 0.0, 0
    for start in range(0, len(ids), window):
        chunk = torch.tensor(ids[start : start + window], device=model.device)
        dtype, device = model.ops.cache_dtype, model.device
        cache = KVCache(model.config, len(chunk), dtype=dtype, device=device, int8=int8_kv)
        hidden = model(chunk, torch.arange(len(chunk), device=model.device), cache)
        for row in range(0, len(chunk) - 1, _ROWS):
            total += _negative_log_likelihood(model, hidden[row : row + _ROWS], chunk[row + 1 : row + 1 + _ROWS])
        count += len(chunk) - 1
    return math.exp(total / count)


def _negative_log_likelihood(model: Model, hidden: Tensor, targets: Tensor) -> float:
    logits = model.logits(hidden[: len(targets)]).float()
    return float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
