"""Choosing the next token from one row of logits.

In this order: repetition penalty over every id in the context, presence penalty over the ids of this reply,
temperature, top-k, top-p (over what top-k left), min-p (against the most likely token), then one draw. The draw is
the Gumbel maximum: argmax(logit + g) with g = -log(-log u) follows softmax(logits), needs no normalisation and no
sorted order. u is a hash of (seed, position, token id) and of nothing else, so a reply is reproducible whatever
produced the logits, and rolling back some tokens rolls back their randomness too.

logits fp32 [V]; seen uint8 [V]: bit 0 the id is in the context, bit 1 it belongs to this reply.
Sources: repetition penalty arXiv 1909.05858; top-p arXiv 1904.09751; min-p arXiv 2407.01082; the hash's rounds are
the 32-bit mixer "lowbias32" of C. Wellons' hash-prospector.

On the device every setting is read from memory (`sampling_settings`), so one CUDA graph serves all of them. `sample`
is eight launches, none of which sorts:

    adjust, coarse | top-k: middle, fine | top-p: middle, fine | draw, choose

A logit's key is its distance to the maximum in fixed point, 31 bits: 2^-26 is one step, and 32 or more is too far, for
the noise spans -2.9 .. 16.7 and such a token holds e^-32 of the best one's mass. Top-k and top-p are two searches for
the key at which a running sum (of tokens; of exp(-distance), scaled by 2^40) reaches what is wanted: a histogram over
the key's leading 11 bits, then over the next 10 bits within the bin that was hit, then over the last 10. Sums are
integers, so neither the order of the atomics nor the grid shows in the result. Launches of a search that is switched
off do nothing. Equal keys at a boundary are all kept, where the reference keeps as many as fit.

Moves 5 V bytes in and 4 V out, and 4 V for each launch that works, out of the L2 cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous

SEEN_IN_CONTEXT, SEEN_IN_REPLY = 1, 2
_MASK = 0xFFFFFFFF
# Candidates looked at first when only top-p cuts: nearly always they hold its mass, and a full sort costs 3 ms.
_FIRST_CANDIDATES = 256

# Ids of one program and its warps: 122 programs for 248,320 ids, so one wave on a large card.
_BLOCK, _WARPS = 2048, 8
# Bins of a key's three digits, and the histograms: counts, masses of the coarse digit, then of both finer ones, then
# the masses of top-p's own two finer digits. Offsets in int64 elements.
_COARSE, _FINE = tl.constexpr(2048), tl.constexpr(1024)
_K_MIDDLE, _K_LAST, _P_MIDDLE, _P_LAST = tl.constexpr(4096), tl.constexpr(6144), tl.constexpr(8192), tl.constexpr(9216)
_HISTOGRAMS = tl.constexpr(10240)
_FAR = tl.constexpr(32.0)
_KEY_SCALE, _MASS_SCALE = tl.constexpr(2.0**26), tl.constexpr(2.0**40)
# Where the settings lie in their two tensors.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE = (tl.constexpr(i) for i in range(5))
_TOP_K, _SEED = tl.constexpr(0), tl.constexpr(1)
_LARGEST = tl.constexpr(1e38)  # the difference of two is finite
_NO_ID = tl.constexpr(2**31 - 1)


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


@triton.jit
def _mix_bits(h):
    """`_mix` on uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _noise(ids, seed, position):
    """`gumbel_noise`. tl.log is accurate to an ulp (libdevice's), which u near 1, the winners, needs."""
    key = (ids * 0 + position).to(tl.uint32)  # as wide as ids: the interpreter warns of an overflow in a single number
    key = _mix_bits(_mix_bits(key) ^ seed.to(tl.uint32))
    key = _mix_bits(key ^ (seed >> 32).to(tl.uint32))
    h = _mix_bits(_mix_bits(ids.to(tl.uint32) ^ key) + key)
    u = ((h >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(u))


@triton.jit
def _best_logit(maxima, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    blocks = tl.arange(0, BLOCKS)
    return tl.max(tl.load(maxima + blocks, mask=blocks < tl.cdiv(vocab, BLOCK), other=-float("inf")), 0)


@triton.jit
def _keys(adjusted, maxima, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """For this program's ids: distance to the maximum, its key, and whether it is near enough to have one."""
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(adjusted + ids, mask=ids < vocab, other=-float("inf"))
    distance = _best_logit(maxima, vocab, BLOCK, BLOCKS) - logits
    near = distance < _FAR
    distance = tl.where(near, distance, 0.0)
    return distance, (distance * _KEY_SCALE).to(tl.int32), near


@triton.jit
def _mass(distance):
    return (tl.exp(-distance) * _MASS_SCALE).to(tl.int64)


@triton.jit
def _search(histogram, wanted, BINS: tl.constexpr):
    """The first bin at which the running sum reaches `wanted`, or BINS."""
    short = tl.cumsum(tl.load(histogram + tl.arange(0, BINS)), 0) < wanted
    return tl.sum(short.to(tl.int32), 0)


@triton.jit
def _sum_before(histogram, end, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    return tl.sum(tl.where(bins < end, tl.load(histogram + bins), 0), 0)


@triton.jit
def _adjust_kernel(
    logits,
    seen,
    settings_f,
    adjusted,
    maxima,
    histograms,
    vocab,
    BLOCK: tl.constexpr,
    HISTOGRAM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Penalties and temperature, the largest logit of each block; clears the histograms of the step before."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    program = tl.program_id(0)
    for start in range(program * HISTOGRAM_BLOCK, _HISTOGRAMS, tl.num_programs(0) * HISTOGRAM_BLOCK):
        tl.store(histograms + start + tl.arange(0, HISTOGRAM_BLOCK), tl.zeros((HISTOGRAM_BLOCK,), tl.int64))
    ids = program * BLOCK + tl.arange(0, BLOCK)
    mask = ids < vocab
    x = tl.load(logits + ids, mask=mask, other=0.0)
    bits = tl.load(seen + ids, mask=mask, other=0)
    repetition = tl.load(settings_f + _REPETITION)
    x = tl.where((bits & 1) != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = tl.where((bits & 2) != 0, x - tl.load(settings_f + _PRESENCE), x)
    temperature = tl.load(settings_f + _TEMPERATURE)
    if temperature > 0:
        x = tl.div_rn(x, temperature)
    # A NaN is never drawn and infinities become finite: whatever the logits are, the id that is chosen exists.
    x = tl.where(mask & (x > -_LARGEST), tl.minimum(x, _LARGEST), -_LARGEST)
    tl.store(adjusted + ids, x, mask=mask)
    tl.store(maxima + program, tl.max(x, 0))


@triton.jit
def _coarse_kernel(
    adjusted,
    maxima,
    histograms,
    settings_f,
    settings_i,
    vocab,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Histograms of the coarse digit: what top-k counts and what top-p adds up."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    by_count = tl.load(settings_i + _TOP_K) > 0
    by_mass = tl.load(settings_f + _TOP_P) < 1
    if (tl.load(settings_f + _TEMPERATURE) > 0) & (by_count | by_mass):
        distance, key, near = _keys(adjusted, maxima, vocab, BLOCK, BLOCKS)
        to = histograms + (key >> 20)
        if by_count:
            tl.atomic_add(to, tl.full((BLOCK,), 1, tl.int64), mask=near, sem="relaxed")
        if by_mass:
            tl.atomic_add(to + _COARSE, _mass(distance), mask=near, sem="relaxed")


@triton.jit
def _top_k_middle_kernel(
    adjusted,
    maxima,
    histograms,
    state,
    settings_f,
    settings_i,
    vocab,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finds the coarse digit of top-k's boundary, histograms of the middle digit within it. state[0:3]: the digit,
    how many tokens are still wanted behind those before it, the mass before it."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    top_k = tl.load(settings_i + _TOP_K)
    if (tl.load(settings_f + _TEMPERATURE) > 0) & (top_k > 0):
        digit = _search(histograms, top_k, _COARSE)
        if tl.program_id(0) == 0:
            tl.store(state, digit.to(tl.int64))
            tl.store(state + 1, top_k - _sum_before(histograms, digit, _COARSE))
            tl.store(state + 2, _sum_before(histograms + _COARSE, digit, _COARSE))
        distance, key, near = _keys(adjusted, maxima, vocab, BLOCK, BLOCKS)
        to, inside = histograms + _K_MIDDLE + ((key >> 10) & 1023), near & ((key >> 20) == digit)
        tl.atomic_add(to, tl.full((BLOCK,), 1, tl.int64), mask=inside, sem="relaxed")
        tl.atomic_add(to + _FINE, _mass(distance), mask=inside, sem="relaxed")


@triton.jit
def _top_k_last_kernel(
    adjusted,
    maxima,
    histograms,
    state,
    settings_f,
    settings_i,
    vocab,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same one digit further. state[3:6]: both digits, tokens still wanted, the mass before."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    if (tl.load(settings_f + _TEMPERATURE) > 0) & (tl.load(settings_i + _TOP_K) > 0):
        wanted = tl.load(state + 1)
        middle = histograms + _K_MIDDLE
        digit = _search(middle, wanted, _FINE)
        digits = tl.load(state) * _FINE + digit
        if tl.program_id(0) == 0:
            tl.store(state + 3, digits)
            tl.store(state + 4, wanted - _sum_before(middle, digit, _FINE))
            tl.store(state + 5, tl.load(state + 2) + _sum_before(middle + _FINE, digit, _FINE))
        distance, key, near = _keys(adjusted, maxima, vocab, BLOCK, BLOCKS)
        to, inside = histograms + _K_LAST + (key & 1023), near & ((key >> 10) == digits)
        tl.atomic_add(to, tl.full((BLOCK,), 1, tl.int64), mask=inside, sem="relaxed")
        tl.atomic_add(to + _FINE, _mass(distance), mask=inside, sem="relaxed")


@triton.jit
def _top_p_middle_kernel(
    adjusted,
    maxima,
    histograms,
    state,
    settings_f,
    settings_i,
    vocab,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The mass that top-k left, the coarse digit of top-p's boundary, masses of the middle digit within it (what top-k
    dropped lies behind the boundary and does no harm). state[6:8]: the digit, the mass still wanted."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    top_p = tl.load(settings_f + _TOP_P)
    if (tl.load(settings_f + _TEMPERATURE) > 0) & (top_p < 1):
        coarse = histograms + _COARSE
        kept = _sum_before(coarse, _COARSE, _COARSE)
        if tl.load(settings_i + _TOP_K) > 0:
            last = histograms + _K_LAST
            place = _search(last, tl.load(state + 4), _FINE)
            kept = tl.load(state + 5) + _sum_before(last + _FINE, place + 1, _FINE)
        wanted = (kept.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        digit = _search(coarse, wanted, _COARSE)
        if tl.program_id(0) == 0:
            tl.store(state + 6, digit.to(tl.int64))
            tl.store(state + 7, wanted - _sum_before(coarse, digit, _COARSE))
        distance, key, near = _keys(adjusted, maxima, vocab, BLOCK, BLOCKS)
        to, inside = histograms + _P_MIDDLE + ((key >> 10) & 1023), near & ((key >> 20) == digit)
        tl.atomic_add(to, _mass(distance), mask=inside, sem="relaxed")


@triton.jit
def _top_p_last_kernel(
    adjusted, maxima, histograms, state, settings_f, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    """The same one digit further. state[8:10]: both digits, the mass still wanted."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    if (tl.load(settings_f + _TEMPERATURE) > 0) & (tl.load(settings_f + _TOP_P) < 1):
        wanted = tl.load(state + 7)
        middle = histograms + _P_MIDDLE
        digit = _search(middle, wanted, _FINE)
        digits = tl.load(state + 6) * _FINE + digit
        if tl.program_id(0) == 0:
            tl.store(state + 8, digits)
            tl.store(state + 9, wanted - _sum_before(middle, digit, _FINE))
        distance, key, near = _keys(adjusted, maxima, vocab, BLOCK, BLOCKS)
        inside = near & ((key >> 10) == digits)
        tl.atomic_add(histograms + _P_LAST + (key & 1023), _mass(distance), mask=inside, sem="relaxed")


@triton.jit
def _draw_kernel(
    adjusted,
    maxima,
    histograms,
    state,
    settings_f,
    settings_i,
    positions,
    scores,
    winners,
    vocab,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The last digit of the boundary, min-p, noise; each block's best score and the lowest id that has it."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    _, key, keep = _keys(adjusted, maxima, vocab, BLOCK, BLOCKS)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(adjusted + ids, mask=ids < vocab, other=-float("inf"))
    if tl.load(settings_f + _TEMPERATURE) > 0:
        if tl.load(settings_f + _TOP_P) < 1:  # top-p's boundary is never behind top-k's
            keep = keep & (key <= tl.load(state + 8) * _FINE + _search(histograms + _P_LAST, tl.load(state + 9), _FINE))
        elif tl.load(settings_i + _TOP_K) > 0:
            keep = keep & (key <= tl.load(state + 3) * _FINE + _search(histograms + _K_LAST, tl.load(state + 4), _FINE))
        min_p = tl.load(settings_f + _MIN_P)
        if min_p > 0:
            keep = keep & (score >= _best_logit(maxima, vocab, BLOCK, BLOCKS) + tl.log(min_p))
        score += _noise(ids, tl.load(settings_i + _SEED), tl.load(positions))
    score = tl.where(keep, score, -float("inf"))
    best = tl.max(score, 0)
    tl.store(scores + tl.program_id(0), best)
    tl.store(winners + tl.program_id(0), tl.min(tl.where(score == best, ids, _NO_ID), 0))


@triton.jit
def _choose_kernel(scores, winners, out, vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """The best of the blocks' best, the lowest id in a tie."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < tl.cdiv(vocab, BLOCK)
    score = tl.load(scores + blocks, mask=mask, other=-float("inf"))
    ids = tl.load(winners + blocks, mask=mask, other=_NO_ID)
    tl.store(out, tl.min(tl.where(score == tl.max(score, 0), ids, _NO_ID), 0).to(tl.int64))


@triton.jit
def _mark_seen_kernel(token, seen, BITS: tl.constexpr):
    at = seen + tl.load(token)
    tl.store(at, tl.load(at) | BITS)


@dataclass(frozen=True)
class SamplingScratch:
    """What `sample` keeps between its launches. Every step writes before it reads: nothing here needs a first value."""

    adjusted: Tensor  # fp32 [V]
    maxima: Tensor  # fp32 [blocks]
    scores: Tensor  # fp32 [blocks]
    winners: Tensor  # int32 [blocks]
    histograms: Tensor  # int64 [_HISTOGRAMS]
    state: Tensor  # int64 [10]


def sampling_scratch(vocab_size: int, device: torch.device | str) -> SamplingScratch:
    """Memory for `sample` over `vocab_size` candidates: 4 bytes for each, and 80 KB."""
    blocks = triton.cdiv(vocab_size, _BLOCK)
    return SamplingScratch(
        adjusted=torch.empty(vocab_size, dtype=torch.float32, device=device),
        maxima=torch.empty(blocks, dtype=torch.float32, device=device),
        scores=torch.empty(blocks, dtype=torch.float32, device=device),
        winners=torch.empty(blocks, dtype=torch.int32, device=device),
        histograms=torch.empty(_HISTOGRAMS.value, dtype=torch.int64, device=device),
        state=torch.empty(10, dtype=torch.int64, device=device),
    )


def sampling_settings(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """The settings as `sample` reads them: fp32 [8] and int64 [4], on the CPU; copy them into the device's two."""
    floats, integers = torch.zeros(8), torch.zeros(4, dtype=torch.int64)
    floats[:5] = torch.tensor([temperature, top_p, min_p, repetition_penalty, presence_penalty])
    integers[0] = min(top_k, 2**62)
    integers[1] = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits, signed
    return floats, integers


def sample(
    logits: Tensor,
    seen: Tensor,
    settings_f: Tensor,
    settings_i: Tensor,
    positions: Tensor,
    out: Tensor,
    scratch: SamplingScratch,
) -> Tensor:
    """Writes the id of the token at `positions` int64 [1] into `out` int64 [1] and returns it.

    logits fp32 [>= V] or [1, >= V], seen uint8 [V]: the first V ids are candidates. settings_f fp32 [8] and settings_i
    int64 [4] as `sampling_settings` lays them out. Nothing is read on the host: capture it once, change the tensors.
    """
    vocab = seen.numel()
    if logits.numel() != logits.shape[-1] or logits.numel() < vocab or logits.dtype != torch.float32:
        raise ValueError(f"sample: got logits {logits.dtype} {list(logits.shape)}, wanted float32 [1, {vocab} or more]")
    if scratch.adjusted.numel() != vocab:
        raise ValueError(f"sample: got scratch for {scratch.adjusted.numel()} ids, wanted {vocab}")
    for name, tensor, dtype, size in (
        ("seen", seen, torch.uint8, vocab),
        ("settings_f", settings_f, torch.float32, 8),
        ("settings_i", settings_i, torch.int64, 4),
        ("positions", positions, torch.int64, 1),
        ("out", out, torch.int64, 1),
    ):
        if tensor.dtype != dtype or tensor.numel() != size or not tensor.is_contiguous():
            raise ValueError(
                f"sample: got {name} {tensor.dtype} {list(tensor.shape)}, wanted contiguous {dtype} [{size}]"
            )
    if logits.stride(-1) != 1:
        raise ValueError(f"sample: got logits with stride {logits.stride(-1)}, wanted 1")
    blocks = triton.cdiv(vocab, _BLOCK)
    together = pdl_options(logits)
    grid = (blocks,)
    sizes = {"BLOCK": _BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "num_warps": _WARPS, **together}
    adjusted, maxima, histograms, state = scratch.adjusted, scratch.maxima, scratch.histograms, scratch.state
    search = (adjusted, maxima, histograms, state, settings_f, settings_i)
    _adjust_kernel[grid](
        *(logits, seen, settings_f, adjusted, maxima, histograms, vocab),
        BLOCK=_BLOCK,
        HISTOGRAM_BLOCK=1024,
        num_warps=_WARPS,
        **together,
        enable_fp_fusion=False,  # a product and a difference are rounded one after the other, as in the reference
    )
    _coarse_kernel[grid](adjusted, maxima, histograms, settings_f, settings_i, vocab, **sizes)
    _top_k_middle_kernel[grid](*search, vocab, **sizes)
    _top_k_last_kernel[grid](*search, vocab, **sizes)
    _top_p_middle_kernel[grid](*search, vocab, **sizes)
    _top_p_last_kernel[grid](adjusted, maxima, histograms, state, settings_f, vocab, **sizes)
    _draw_kernel[grid](*search, positions, scratch.scores, scratch.winners, vocab, **sizes)
    _choose_kernel[(1,)](scratch.scores, scratch.winners, out, vocab, **{**sizes, "num_warps": 1})
    return out


def mark_seen(token: Tensor, seen: Tensor) -> None:
    """seen uint8 [V] at token int64 [1], an id below V: it is in the context now, and in this reply."""
    if token.dtype != torch.int64 or token.numel() != 1 or seen.dtype != torch.uint8:
        raise ValueError(f"mark_seen: got {token.dtype} {list(token.shape)}, {seen.dtype}, wanted int64 [1], uint8")
    _mark_seen_kernel[(1,)](token, seen, BITS=SEEN_IN_CONTEXT | SEEN_IN_REPLY, num_warps=1)
