"""Where the packed words of an INT4 matrix lie, for kernels: the tiles of kernels/int4_packing.py."""

from localchat.kernels.gpu import tl, triton


@triton.jit
def tile_offset(block, tile, row, word, words_k, WHOLE: tl.constexpr):
    """Where a word lies: of row `row` in block `block` of 16 rows, the word `word` of tile `tile`.

    words_k: K/8. WHOLE: K is a multiple of 128, so that no tile is narrower.
    """
    if WHOLE:
        width = 16
    else:
        width = tl.minimum(words_k - tile * 16, 16)
    return block.to(tl.int64) * (16 * words_k) + (tile * 256 + row * width + word)


@triton.jit
def scale_offset(n, group, groups):
    """Where the scale, and the minimum, of row n and a group lies; groups: K / G."""
    row = n % 16
    return (n // 16).to(tl.int64) * (groups * 16) + (group * 16 + row % 8 * 2 + row // 8)
