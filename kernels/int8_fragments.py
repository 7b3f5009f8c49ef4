"""The INT8 product's piece for tensor cores: a tile of codes as fragments of an instruction (fragments.py).

A tile is 16 rows x 64 inputs, a row's codes as they lie: four to a word. Lane 4g + t of a warp holds words 4t..4t+3 of
rows g and g + 8, and the eight pairs of x that meet them, for token g: `first` has pairs 8t..8t+3 of the tile, `second`
8t+4..8t+7. One word of both rows is an A fragment, its two pairs of x the B fragment.

A code becomes fp16 by a byte of 0x64 above it, as 1024 + 128 + code, and subtracting 1152 is exact.
"""

from localchat.kernels.fragments import four, fragment, mma
from localchat.kernels.gpu import tl, triton


def _codes_ptx() -> str:
    """Codes times x, in two chains. $0-$3, $4-$7 sums; $8-$11 words of rows g, $12-$15 of g + 8; $16-$23 x; $24 is
    0x64 four times.
    """
    text = "{ .reg .b32 a0, a1, a2, a3, up, low, s, o; .reg .f32 z;\n"
    text += "mov.b32 s, 0x80808080;\nmov.b32 o, 0x64806480;\nmov.f32 z, 0f00000000;\n"
    for i in range(4):
        text += f"xor.b32 up, ${8 + i}, s;\nxor.b32 low, ${12 + i}, s;\n"
        for k in range(4):  # a byte of the word, 0x64, the next, 0x64
            text += f"prmt.b32 a{k}, {('up', 'low')[k % 2]}, $24, {('0x4140', '0x4342')[k // 2]};\n"
            text += f"sub.f16x2 a{k}, a{k}, o;\n"
        into = four(4 * (i % 2))
        text += mma(into, "{a0, a1, a2, a3}", f"{{${16 + 2 * i}, ${17 + 2 * i}}}", into if i >= 2 else "{z, z, z, z}")
    return text + "}"


_CODES = tl.constexpr(_codes_ptx())
_OPERANDS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 20))


@triton.jit
def _twin_rows(w, first, second, PARTS: tl.constexpr):
    """Eight rows of each part times x, in fp32: [PARTS, 8 rows, 8 tokens]."""
    x = tl.join(tl.reshape(first, [PARTS * 8, 4, 4]), tl.reshape(second, [PARTS * 8, 4, 4]))
    x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), [PARTS, 1, 8, 16, 2])  # two pairs a word
    pairs, w = tl.split(x), tl.reshape(w, [PARTS, 8, 1, 16])
    y = tl.zeros([PARTS, 8, 8], tl.float32)
    for i in tl.static_range(2):
        low, high = ((w << (24 - 16 * i)) >> 24).to(tl.float32), ((w << (16 - 16 * i)) >> 24).to(tl.float32)
        x_low = (pairs[i] & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x_high = ((pairs[i] >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        y += tl.sum(low * x_low + high * x_high, 3)
    return y


@triton.jit
def _high_bytes(PARTS: tl.constexpr):
    """0x64 four times, [PARTS * 8, 16], but no constant: of one, ptxas makes a copy in front of most permutations."""
    row = tl.program_id(0) * 16 + tl.arange(0, PARTS * 8)[:, None]
    return tl.broadcast_to((row >> 31) + 0x64646464, [PARTS * 8, 16])


@triton.jit
def code_product(up, low, first, second, PARTS: tl.constexpr, USE_PTX: tl.constexpr):
    """What a tile of each part gives before its scales: words and pairs [PARTS * 8, 16] -> fp32, the same shape."""
    if USE_PTX:
        inputs = [up, low, first, second, _high_bytes(PARTS)]
        one, other = tl.inline_asm_elementwise(
            _CODES, _OPERANDS, inputs, dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
        y = one + other
    else:
        y = fragment(_twin_rows(up, first, second, PARTS), _twin_rows(low, first, second, PARTS), PARTS)
    return y
