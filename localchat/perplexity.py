"""Perplexity of a model over a text: exp of the mean negative log likelihood of each next token.

The text is cut into windows that do not overlap and start from nothing (no BOS); the first token of a window is
context only. A window is read in the chunks of a prefill. Logits exist for a few rows at a time, and what is made of
them for a slice of the vocabulary, so beside the cache no memory grows with the window, nor with window * vocabulary.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from localchat.cache import KVCache
from localchat.model import Model

_LOGITS = 1 << 24  # at once, in all rows: 64 MB in fp32
_ROWS = 256  # and no more than these
_SLICE = 1 << 15  # ids of the vocabulary whose exponentials are taken at once


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
        for losses in window_losses(model, chunk, int8_kv=int8_kv):
            total += float(losses.sum(dtype=torch.float64))
            count += len(losses)
    return math.exp(total / count)


def window_losses(model: Model, ids: Tensor, *, int8_kv: bool = False) -> Iterator[Tensor]:
    """ids int64 [T] from an empty cache -> negative log likelihoods of ids 1..T-1, fp32, a few at a time."""
    cache = KVCache(model.config, len(ids), dtype=model.ops.cache_dtype, device=model.device, int8=int8_kv)
    for start in range(0, len(ids) - 1, model.ops.prefill_chunk):
        end = min(start + model.ops.prefill_chunk, len(ids) - 1)
        hidden = model(ids[start:end], torch.arange(start, end, device=ids.device), cache, end)
        cache.append(end - start)
        row = start
        for logits in logits_in_parts(model, hidden):
            yield next_token_losses(logits, ids[row + 1 : row + 1 + len(logits)])
            row += len(logits)


def logits_in_parts(model: Model, hidden: Tensor) -> Iterator[Tensor]:
    """hidden [T, H] as the model's forward returned them -> fp32 [t, V] of a few rows after the other."""
    rows = max(1, min(_ROWS, _LOGITS // model.config.vocab_size))
    for row in range(0, len(hidden), rows):
        yield model.logits(hidden[row : row + rows])


def next_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """logits fp32 [t, V], targets int64 [t] -> -log softmax(logits)[target], fp32 [t]."""
    peak = logits.amax(-1, keepdim=True)
    mass = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for start in range(0, logits.shape[-1], _SLICE):
        mass += (logits[:, start : start + _SLICE] - peak).exp_().sum(-1)
    return (mass.log() + (peak - logits.gather(-1, targets[:, None]))[:, 0]).float()
