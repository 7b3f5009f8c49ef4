"""Choosing the next token from one row of logits.

In this order: repetition penalty over every id in the context, presence penalty over the ids of this reply,
temperature, top-k, top-p (over what top-k left), min-p (against the most likely token), then one draw. The draw is
the Gumbel maximum: argmax(logit + g) with g = -log(-log u) follows softmax(logits), needs no normalisation and no
sorted order. u is a hash of (seed, position, token id) and of nothing else, so a reply is reproducible whatever
produced the logits, and rolling back some tokens rolls back their randomness too.

logits fp32 [V]; seen uint8 [V]: bit 0 the id is in the context, bit 1 it belongs to this reply.
Sources: repetition penalty arXiv 1909.05858; top-p arXiv 1904.09751; min-p arXiv 2407.01082; the hash's rounds are
the 32-bit mixer "lowbias32" of C. Wellons' hash-prospector.
"""

import torch
from torch import Tensor

SEEN_IN_CONTEXT, SEEN_IN_REPLY = 1, 2
_MASK = 0xFFFFFFFF
# Candidates looked at first when only top-p cuts: nearly always they hold its mass, and a full sort costs 3 ms.
_FIRST_CANDIDATES = 256


def _mix(h: Tensor) -> Tensor:
    """One 32-bit mixing round on int64 tensors that hold unsigned 32-bit values."""
    h = (h ^ (h >> 16)) * 0x7FEB352D & _MASK
    h = (h ^ (h >> 15)) * 0x846CA68B & _MASK
    return h ^ (h >> 16)


def gumbel_noise(ids: Tensor, seed: int, position: int) -> Tensor:
    """g for each token id, fp32, a function of (seed, position, id) alone; seed is taken modulo 2^64."""
    key = torch.tensor(position & _MASK, dtype=torch.int64, device=ids.device)
    key = _mix(_mix(key) ^ (seed & _MASK))
    key = _mix(key ^ (seed >> 32 & _MASK))
    h = _mix(_mix(ids ^ key) + key & _MASK)
    u = ((h >> 9).float() + 0.5) * 2.0**-23  # 23 bits: 0 < u < 1 holds in fp32
    return -torch.log(-torch.log(u))


def sample_reference(
    logits: Tensor,
    seen: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    seed: int,
    position: int,
) -> Tensor:
    """-> id int64 []. temperature 0 is the argmax after penalties; top_k 0, top_p 1 and min_p 0 cut nothing."""
    logits = _penalise(logits, seen, repetition_penalty, presence_penalty)
    if temperature == 0:
        return logits.argmax()
    values, ids = _candidates(logits / temperature, top_k, top_p)
    if min_p > 0:
        values = values.masked_fill(values < values.max() + torch.log(torch.tensor(min_p)), float("-inf"))
    return ids[(values + gumbel_noise(ids, seed, position)).argmax()]


def _penalise(logits: Tensor, seen: Tensor, repetition: float, presence: float) -> Tensor:
    if repetition != 1:
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen & SEEN_IN_CONTEXT > 0, penalised, logits)
    if presence != 0:
        logits = logits - presence * (seen & SEEN_IN_REPLY > 0)
    return logits


def _candidates(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Values and ids that survive top-k and top-p; the most likely one always does."""
    vocab = logits.shape[-1]
    if top_k <= 0 and top_p >= 1:
        return logits, torch.arange(vocab, device=logits.device)
    count = min(top_k, vocab) if top_k > 0 else min(_FIRST_CANDIDATES, vocab)
    values, ids = logits.topk(count)
    if top_p >= 1:
        return values, ids
    total = logits.logsumexp(-1) if top_k <= 0 else values.logsumexp(-1)
    mass = (values - total).exp().cumsum(-1)
    if top_k <= 0 and float(mass[-1]) < top_p and count < vocab:
        values, ids = logits.sort(descending=True)
        mass = (values - total).exp().cumsum(-1)
    before = mass - (values - total).exp()  # a token stays while the mass before it is short of top_p
    keep = max(1, int((before < top_p).sum()))
    return values[:keep], ids[:keep]
