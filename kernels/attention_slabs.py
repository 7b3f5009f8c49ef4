"""INT8 keys and values for many queries: dequantised a slab at a time, into memory that other steps use as well.

A program of attention_prefill (attention.py) reads all keys that its 128 rows see, and for a chunk of 2,048 tokens of a
27B there are 96 such programs a KV head. Each of them would turn the same codes into numbers; here that happens once,
and the programs read what they would read of a wide cache, at its rate.

    out [0, h, i] = keys [h, first + i] * key scale,  out [1, h, i] = values [h, first + i] * value scale

codes int8 [Hkv, S, D], scales fp32 [Hkv, S], out [2, Hkv, N, D] in fp16, at most 65,504; queries are in fp16 then, and
so are the probabilities. What fp16 rounds away is 2^-12 of a number; where codes, which are exact, meet bf16 queries,
probabilities lose 2^-9 of themselves, so this way is the more exact one. Left outside, the scales would take more
registers in attention's kernel than there are (kernels/NOTES.md). fp32 is for tests. Moves 3 bytes an element.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from localchat.kernels.checks import check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.int8_codes import exact

# Keys of a slab, where they are more, are at least so many: 134 MB for 4 heads of 256.
SLAB = 32768
# Bounds of slabs are multiples of this, so that all blocks of keys but the very last are whole.
_MULTIPLE = 128
# Below so many rows (queries of a KV head) or keys it does not pay. On an H200 a key costs 0.38 ns (1,536 bytes) and
# saves 2.4 ps a row (1,024 operations at 390 instead of 204 TFLOP/s), so 160 rows would do; elsewhere perhaps not, and
# of few keys the launch costs most.
_LEAST_ROWS = 512
_LEAST_KEYS = 1024
# Codes of keys that a program of 8 warps takes: 8 a thread, which stores them as they lie, 16 bytes.
_AT_ONCE = 2048
# Of fp16: 128 times this scale is its largest number.
_LARGEST_SCALE = 511.75
_SCALE_LIMIT = tl.constexpr(_LARGEST_SCALE)


class Slabs(NamedTuple):
    """The keys of a context that are dequantised: `length`, and flat memory of which a slab takes what it needs."""

    length: int
    memory: Tensor

    def bounds(self, kv_heads: int, head_dim: int) -> list[tuple[int, int]]:
        """(first key, key behind the last) of each slab, of nearly equal size.

        Raises:
            ValueError: the memory does not hold _MULTIPLE keys.
        """
        fit = self.memory.numel() // (2 * kv_heads * head_dim)
        if fit < min(self.length, _MULTIPLE):
            raise ValueError(f"Slabs: got memory for {fit} keys, wanted at least {min(self.length, _MULTIPLE)}")
        if fit >= self.length:
            return [(0, self.length)]
        count = triton.cdiv(self.length, fit // _MULTIPLE * _MULTIPLE)
        size = triton.cdiv(triton.cdiv(self.length, count), _MULTIPLE) * _MULTIPLE
        return [(first, min(first + size, self.length)) for first in range(0, self.length, size)]

    def dequantised(self, keys: Tensor, values: Tensor, scales: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [Hkv, N, D] of each of `bounds`; the next one takes the place of the one before."""
        kv_heads, _, head_dim = keys.shape
        for first, last in self.bounds(kv_heads, head_dim):
            shape = (2, kv_heads, last - first, head_dim)
            out = self.memory[: 2 * kv_heads * (last - first) * head_dim].view(shape)
            yield tuple(dequantize_kv(keys, values, scales, first, out))


def slabs_for(rows: int, keys: Tensor, length: int | None, scratch: Tensor) -> Slabs | None:
    """Whether, and how, `length` keys of an INT8 cache [Hkv, S, D] are dequantised for `rows` queries of each KV head.

    None: the length is not known, or it does not pay. scratch: memory that is free meanwhile, in 2 bytes an element;
    where it does not hold a slab, other memory is taken.
    """
    kv_heads, _, head_dim = keys.shape
    if length is None or rows < _LEAST_ROWS or length < _LEAST_KEYS:
        return None
    least = 2 * kv_heads * min(length, SLAB) * head_dim
    enough = scratch.numel() >= least
    memory = scratch.view(torch.float16) if enough else torch.empty(least, dtype=torch.float16, device=keys.device)
    return Slabs(length, memory)


def dequantize_kv_reference(keys: Tensor, values: Tensor, scales: Sequence[Tensor], first: int, out: Tensor) -> Tensor:
    """See `dequantize_kv`."""
    last = first + out.shape[2]
    for wide, codes, scale in zip(out, (keys, values), scales, strict=True):
        row_scales = scale[:, first:last, None]
        if out.dtype == torch.float16:
            row_scales = row_scales.clamp(max=_LARGEST_SCALE)
        wide.copy_(codes[:, first:last].float() * row_scales)
    return out


@triton.jit
def _dequantized(codes_ptr, scales_ptr, rows, offset, inside, D: tl.constexpr, HALF: tl.constexpr):
    """Rows [R, D]."""
    codes = tl.load(codes_ptr + offset, mask=inside[:, None], other=0)
    scale = tl.load(scales_ptr + rows, mask=inside, other=0.0)
    if HALF:
        scale = tl.minimum(scale, _SCALE_LIMIT)
    return exact(codes) * scale[:, None]


@triton.jit(do_not_specialize=["first", "count", "capacity"])
def _dequantize_kv_kernel(
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    out_ptr,
    first,
    count,
    capacity,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS keys of one head and their values; both are asked for before either is needed."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    inside = row < count
    rows = head * capacity + first + row
    offset = rows[:, None] * D + d[None, :]
    HALF: tl.constexpr = out_ptr.dtype.element_ty == tl.float16
    k = _dequantized(keys_ptr, key_scales_ptr, rows, offset, inside, D, HALF)
    v = _dequantized(values_ptr, value_scales_ptr, rows, offset, inside, D, HALF)
    at = (head * count + row)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, k.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(out_ptr + heads.to(tl.int64) * count * D + at, v.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def dequantize_kv(keys: Tensor, values: Tensor, scales: Sequence[Tensor], first: int, out: Tensor) -> Tensor:
    """Rows from `first` on of int8 [Hkv, S, D] with scales fp32 [Hkv, S] -> out fp16 or fp32 [2, Hkv, N, D].

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or the cache has no such rows.
    """
    check_tensor("dequantize_kv: keys", keys, (torch.int8,), (None, None, None))
    check_tensor("dequantize_kv: values", values, (torch.int8,), keys.shape)
    for scale in scales:
        check_tensor("dequantize_kv: scales", scale, (torch.float32,), keys.shape[:2])
    kv_heads, capacity, head_dim = keys.shape
    check_tensor("dequantize_kv: out", out, (torch.float16, torch.float32), (2, kv_heads, None, head_dim))
    count = out.shape[2]
    if not 0 <= first <= capacity - count:
        raise ValueError(f"dequantize_kv: got rows {first} to {first + count}, wanted some of {capacity}")
    rows = _AT_ONCE // head_dim
    grid = (triton.cdiv(count, rows), kv_heads)
    _dequantize_kv_kernel[grid](keys, values, *scales, out, first, count, capacity, D=head_dim, ROWS=rows, num_warps=8)
    return out
