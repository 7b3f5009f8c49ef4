"""The packed weight format: its only definition. Everything that writes or reads packed weights imports this file.

A matrix W [N, K] (outputs, inputs; row-major like torch's Linear) is stored in one of two formats.

INT4 with group scales, for every matrix of a block. K is cut into groups of G = 32, 64 or 128 inputs; each weight is
a code q in 0..15:

    symmetric      w = scale * (q - 8)
    scale + min    w = scale * q + min

    qweight  int32 [N', K/8]    eight codes a word, see below; N' is N rounded up to 16
    scales   fp16  [N'/16, K/G, 16]  fp32 for a tensor whose scales leave fp16's range
    mins     fp16  [N'/16, K/G, 16]  only with scale + min; the dtype of scales

    A group of G inputs is G/2 pairs of neighbours and G/8 words. Word c of the group holds the pairs c, c + G/8,
    c + 2 G/8, c + 3 G/8; the p-th of them lies at bits 4p (its even input) and 16+4p (its odd one). So
    `(word >> 4p) & 0x000F000F` is a pair of neighbouring inputs in the two halves of a register, one logical operation
    away from two fp16 numbers, and neighbouring words meet neighbouring pairs of x: both are read as they lie.

    Words lie in tiles of 16 rows x 16 words (128 inputs, 1 KB), one after the other along K and then down the rows; in
    a tile, row by row. So a warp reads a tile in one piece, as the fragments of a tensor core's instruction. The last
    tile of 16 rows is narrower where K/8 is no multiple of 16 (its rows are K/8 mod 16 words then), and where N is none
    there are rows of zeros. Rows of several matrices can only be put above each other as codes, before `pack`, unless
    each has a multiple of 16. kernels/int4_address.py says this to kernels.

    Scales and minima of a tile lie together as well, for the rows 0, 8, 1, 9, ... 7, 15 of its 16: the two that a lane
    of a fragment has are neighbours. `pack_scales` takes them from [N, K/G] to there. Everything up to `pack`, and
    `dequantize`, has them by row.

INT8 rows, for the embedding, lm_head, exceptions, and matrices whose K is no multiple of 32:

    weight   int8  [N, K]       codes -127..127,  w = scale * code
    scales   fp32  [N]

The group size of a tensor follows from its shapes; symmetric is the absence of `mins`.
"""

import torch
from torch import Tensor

LAYOUT = "tiles"
VERSION = 3
GROUP_SIZES = (32, 64, 128)
TILE_ROWS = 16
_TILE_WORDS = 16


def group_size_for(k: int, wanted: int) -> int | None:
    """The largest group size not above `wanted` that divides K, or None where none does (such a matrix is INT8)."""
    return max((g for g in GROUP_SIZES if g <= wanted and k % g == 0), default=None)


def padded_rows(n: int) -> int:
    """Rows that the codes of a matrix with `n` rows take: whole tiles."""
    return -(-n // TILE_ROWS) * TILE_ROWS


def pack(codes: Tensor, group_size: int) -> Tensor:
    """Codes 0..15, any integer dtype [N, K] -> qweight int32 [N', K/8] for groups of `group_size`.

    Raises:
        ValueError: K is no multiple of group_size, that is no multiple of 8, or a code lies outside 0..15.
    """
    n, k = codes.shape
    if group_size % 8 or k % group_size:
        raise ValueError(f"pack: got K = {k} in groups of {group_size}, wanted a multiple, of a multiple of 8")
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise ValueError(f"pack: got codes {int(codes.min())}..{int(codes.max())}, wanted 0..15")
    parts = codes.view(n, k // group_size, 4, group_size // 8, 2)  # [N, group, p, c, even or odd]
    words = torch.zeros(n, k // group_size, group_size // 8, dtype=torch.int32, device=codes.device)
    for p in range(4):
        words |= parts[:, :, p, :, 0].to(torch.int32) << 4 * p
        words |= parts[:, :, p, :, 1].to(torch.int32) << 16 + 4 * p
    return _to_tiles(words.view(n, k // 8))


def unpack(qweight: Tensor, group_size: int, n: int) -> Tensor:
    """qweight int32 [N', K/8] of a matrix with n rows, in groups of `group_size` -> codes uint8 [N, K].

    Raises:
        ValueError: qweight is not a two-dimensional int32 tensor of whole groups and so many rows.
    """
    whole = qweight.dim() == 2 and qweight.shape[0] == padded_rows(n) and qweight.shape[1] * 8 % group_size == 0
    if qweight.dtype != torch.int32 or not whole:
        raise ValueError(
            f"unpack: got {qweight.dtype} {list(qweight.shape)}, wanted int32 [{padded_rows(n)}, K/8] for {n} rows in "
            f"groups of {group_size}"
        )
    groups = qweight.shape[1] * 8 // group_size
    words = _from_tiles(qweight)[:n].view(n, groups, group_size // 8)
    codes = torch.empty(n, groups, 4, group_size // 8, 2, dtype=torch.uint8, device=qweight.device)
    for p in range(4):
        codes[:, :, p, :, 0] = (words >> 4 * p) & 15
        codes[:, :, p, :, 1] = (words >> 16 + 4 * p) & 15
    return codes.view(n, groups * group_size)


def dequantize(qweight: Tensor, scales: Tensor, mins: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """qweight as stored, scales and mins by row -> W [N, K] in `dtype`, computed in fp32.

    Raises:
        ValueError: the shapes of qweight, scales and mins do not belong together.
    """
    n, groups, k = scales.shape[0], scales.shape[-1], qweight.shape[1] * 8
    fits = qweight.shape[0] == padded_rows(n) and scales.shape == (n, groups) and k % groups == 0
    if not fits or (mins is not None and mins.shape != scales.shape):
        raise ValueError(
            f"dequantize: got qweight {list(qweight.shape)}, scales {list(scales.shape)}, "
            f"mins {None if mins is None else list(mins.shape)}, wanted [N rounded up to 16, K/8], [N, K/G], [N, K/G]"
        )
    codes = unpack(qweight, k // groups, n).view(n, groups, k // groups).float()
    scale = scales.float().unsqueeze(-1)
    weight = scale * (codes - 8) if mins is None else scale * codes + mins.float().unsqueeze(-1)
    return weight.view(n, k).to(dtype)


def pack_scales(scales: Tensor) -> Tensor:
    """Scales or minima by row [N, K/G] -> as stored [N'/16, K/G, 16]; zeros for the rows that fill up."""
    n, groups = scales.shape
    blocks = torch.nn.functional.pad(scales, (0, 0, 0, padded_rows(n) - n)).view(-1, 2, TILE_ROWS // 2, groups)
    return blocks.permute(0, 3, 2, 1).reshape(-1, groups, TILE_ROWS)


def unpack_scales(stored: Tensor, n: int) -> Tensor:
    """Scales or minima as stored [N'/16, K/G, 16] -> by row [n, K/G]."""
    blocks, groups, _ = stored.shape
    rows = stored.view(blocks, groups, TILE_ROWS // 2, 2).permute(0, 3, 2, 1)
    return rows.reshape(blocks * TILE_ROWS, groups)[:n]


def dequantize_rows(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """INT8 rows as stored, int8 [N, K] and fp32 [N] -> W [N, K] in `dtype`, computed in fp32."""
    return (weight.float() * scales.float().unsqueeze(-1)).to(dtype)


def _to_tiles(words: Tensor) -> Tensor:
    """int32 [N, K/8], rows one after the other -> [N', K/8] in tiles."""
    n, width = words.shape
    blocks = torch.nn.functional.pad(words, (0, 0, 0, padded_rows(n) - n)).view(-1, TILE_ROWS, width)
    tiles = [tile.flatten(1) for tile in blocks.split(_TILE_WORDS, dim=2)]
    return torch.cat(tiles, dim=1).view(-1, width)


def _from_tiles(qweight: Tensor) -> Tensor:
    """The other way round; the rows of zeros stay."""
    rows, width = qweight.shape
    blocks = qweight.view(rows // TILE_ROWS, TILE_ROWS * width).split(TILE_ROWS * _TILE_WORDS, dim=1)
    tiles = [block.view(rows // TILE_ROWS, TILE_ROWS, -1) for block in blocks]
    return torch.cat(tiles, dim=2).view(rows, width)
