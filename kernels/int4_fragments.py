"""Pieces of the INT4 product for tensor cores: a tile of packed words as fragments of an instruction.

A tile of the packed format is eight of mma.m16n8k16 (see fragments.py), without a shuffle: lane 4g + t of a warp holds
words 4t..4t+3 of rows g and g + 8, and for each nibble position p the pairs of x that meet them, for token g. Two words
of both rows and one p are an A fragment, their pairs of x its B fragment; which input is which does not matter, as both
sides agree. Every piece has a twin in plain Triton, which the interpreter runs.

A nibble becomes fp16 by one logical operation, as 1024 + q at even positions and 1024 + 16 q at odd ones. Raw, these
are multiplied; the sums of even and of odd positions are apart, the odd ones count a 16th, and both start at what is
too much: x times a constant. Scaled, each becomes s * q + m in fp16 first.
"""

from localchat.kernels.fragments import four, fragment, mma
from localchat.kernels.gpu import tl, triton


def _x(first: int, p: int, i: int) -> str:
    """The B fragment of words i and i + 1 and nibble position p; the pairs of x are operands from `first` on."""
    return f"{{${first + 4 * p + i}, ${first + 4 * p + i + 1}}}"


def _shifted(first: int, i: int) -> str:
    """Words i and i + 1 of both rows, without their lower two nibbles: t0..t3. The words are operands from `first`."""
    return "".join(f"shr.u32 t{k}, {word}, 8;\n" for k, word in enumerate(_both_rows(first, i)))


def _both_rows(first: int, i: int) -> list[str]:
    return [f"${first + at}" for at in (i, 4 + i, i + 1, 5 + i)]


def _nibbles(first: int, i: int, p: int) -> str:
    """1024 + code (times 16 where p is odd) of words i and i + 1 and both rows, after `_shifted`: a0..a3."""
    words = _both_rows(first, i) if p < 2 else ["t0", "t1", "t2", "t3"]
    mask = "0x00f000f0" if p % 2 else "0x000f000f"
    return "".join(f"lop3.b32 a{k}, {word}, {mask}, 0x64006400, 0xea;\n" for k, word in enumerate(words))


def _sums_ptx(even: str, odd: str) -> str:
    """Two constants times the x of even and of odd nibble positions. $0-$3, $4-$7 sums; $8-$23 x."""
    text = f"{{ .reg .b32 c0, c1; .reg .f32 z;\nmov.b32 c0, {even};\nmov.b32 c1, {odd};\nmov.f32 z, 0f00000000;\n"
    for i in (0, 2):
        for p in range(4):
            into, c = four(4 * (p % 2)), f"c{p % 2}"
            text += mma(into, f"{{{c}, {c}, {c}, {c}}}", _x(8, p, i), into if i or p >= 2 else "{z, z, z, z}")
    return text + "}"


def _raw_ptx() -> str:
    """Raw codes times x. $0-$3, $4-$7 sums of even, of odd positions; $8-$15 words, $16-$31 x, $32-$39 their start."""
    text = "{ .reg .b32 a0, a1, a2, a3, t0, t1, t2, t3;\n"
    for i in (0, 2):
        text += _shifted(8, i)
        for p in range(4):
            into = four(4 * (p % 2))
            start = into if i or p >= 2 else four(32 + 4 * (p % 2))
            text += _nibbles(8, i, p) + mma(into, "{a0, a1, a2, a3}", _x(16, p, i), start)
    return text + "}"


def _scaled_ptx(has_min: bool) -> str:
    """Weights in fp16 times x, in two chains. $0-$3, $4-$7 sums; $8-$15 words, $16-$31 x; then pairs of the scale of
    the upper row ($32; $33 is the same), of the lower ($34), and so of the minimum.
    """
    # Code (minus 8): 1024 (+ 8) from the even ones, a 16th minus 64 (+ 8) of the odd ones.
    even, odd = ("0x64006400", "0xd400d400") if has_min else ("0x64086408", "0xd480d480")
    text = "{ .reg .b32 a0, a1, a2, a3, t0, t1, t2, t3, e, o, f; .reg .f32 z;\n"
    text += f"mov.b32 e, {even};\nmov.b32 o, {odd};\nmov.b32 f, 0x2c002c00;\nmov.f32 z, 0f00000000;\n"
    for i in (0, 2):
        text += _shifted(8, i)
        for p in range(4):
            text += _nibbles(8, i, p)
            for k in range(4):
                a, scale, least = f"a{k}", f"${32 + 2 * (k % 2)}", f"${36 + 2 * (k % 2)}"
                text += f"fma.rn.f16x2 {a}, {a}, f, o;\n" if p % 2 else f"sub.f16x2 {a}, {a}, e;\n"
                text += f"fma.rn.f16x2 {a}, {a}, {scale}, {least};\n" if has_min else f"mul.f16x2 {a}, {a}, {scale};\n"
            into = four(4 * (i // 2))
            start = into if p else "{z, z, z, z}"
            text += mma(into, "{a0, a1, a2, a3}", _x(16, p, i), start)
    return text + "}"


def _operands(*inputs: str) -> str:
    return ",".join(["=&f"] * 8 + [kind[0] for kind in inputs for _ in range(int(kind[1:]))])


# fp16 pairs: -(1024 + 8) and -16 (64 + 8); ones.
_MINUS = tl.constexpr(_sums_ptx("0xe408e408", "0xe480e480"))
_ONES = tl.constexpr(_sums_ptx("0x3c003c00", "0x3c003c00"))
_RAW = tl.constexpr(_raw_ptx())
_SCALED = tl.constexpr(_scaled_ptx(False))
_SCALED_MIN = tl.constexpr(_scaled_ptx(True))
_SUMS_OPERANDS = tl.constexpr(_operands("r16"))
_RAW_OPERANDS = tl.constexpr(_operands("r8", "r16", "f8"))
_SCALED_OPERANDS = tl.constexpr(_operands("r8", "r16", "r4"))
_SCALED_MIN_OPERANDS = tl.constexpr(_operands("r8", "r16", "r8"))


@triton.jit
def _twin_dot(w, factor, offset, x, p: tl.constexpr, PARTS: tl.constexpr):
    """(code * factor + offset) of nibble position p times x, over a tile: [PARTS, 8 rows, 8 tokens], in fp32."""
    w, x = tl.reshape(w, [PARTS, 8, 1, 16]), tl.reshape(x, [PARTS, 1, 8, 16])
    x_low = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    x_high = ((x >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    low = ((w >> (4 * p)) & 15).to(tl.float32) * factor + offset
    high = ((w >> (16 + 4 * p)) & 15).to(tl.float32) * factor + offset
    return tl.sum(low * x_low + high * x_high, 3)


@triton.jit
def sums_of_x(x0, x1, x2, x3, HAS_MIN: tl.constexpr, PARTS: tl.constexpr, USE_PTX: tl.constexpr):
    """Where the raw sums of even and of odd positions start, and the sum of x (with a minimum)."""
    if USE_PTX:
        text: tl.constexpr = _ONES if HAS_MIN else _MINUS
        even, odd = tl.inline_asm_elementwise(
            text, _SUMS_OPERANDS, [x0, x1, x2, x3], dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )
    else:
        zero = tl.zeros_like(x0)
        even = _twin_dot(zero, 0.0, 1.0, x0, 0, PARTS) + _twin_dot(zero, 0.0, 1.0, x2, 2, PARTS)
        odd = _twin_dot(zero, 0.0, 1.0, x1, 1, PARTS) + _twin_dot(zero, 0.0, 1.0, x3, 3, PARTS)
        even, odd = fragment(even, even, PARTS), fragment(odd, odd, PARTS)
        if not HAS_MIN:
            even, odd = even * -1032, odd * -1152
    total = even + odd
    if HAS_MIN:
        even, odd = even * -1024, odd * -1024
    return even, odd, total


@triton.jit
def raw_product(w_up, w_low, x0, x1, x2, x3, even, odd, PARTS: tl.constexpr, USE_PTX: tl.constexpr):
    """What a tile gives before its scale: even positions plus a 16th of the odd ones."""
    if USE_PTX:
        even, odd = tl.inline_asm_elementwise(
            _RAW,
            _RAW_OPERANDS,
            [w_up, w_low, x0, x1, x2, x3, even, odd],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        up = _twin_dot(w_up, 1.0, 1024.0, x0, 0, PARTS) + _twin_dot(w_up, 1.0, 1024.0, x2, 2, PARTS)
        low = _twin_dot(w_low, 1.0, 1024.0, x0, 0, PARTS) + _twin_dot(w_low, 1.0, 1024.0, x2, 2, PARTS)
        even += fragment(up, low, PARTS)
        up = _twin_dot(w_up, 16.0, 1024.0, x1, 1, PARTS) + _twin_dot(w_up, 16.0, 1024.0, x3, 3, PARTS)
        low = _twin_dot(w_low, 16.0, 1024.0, x1, 1, PARTS) + _twin_dot(w_low, 16.0, 1024.0, x3, 3, PARTS)
        odd += fragment(up, low, PARTS)
    return odd * 0.0625 + even


@triton.jit
def _twin_rows(w, s, m, x0, x1, x2, x3, HAS_MIN: tl.constexpr, PARTS: tl.constexpr):
    """Eight rows of the scaled form."""
    s = tl.reshape(s.to(tl.float32), [PARTS, 8, 1, 16])
    if HAS_MIN:
        m = tl.reshape(m.to(tl.float32), [PARTS, 8, 1, 16])
    else:
        m = s * -8
    y = _twin_dot(w, s, m, x0, 0, PARTS) + _twin_dot(w, s, m, x1, 1, PARTS)
    return y + _twin_dot(w, s, m, x2, 2, PARTS) + _twin_dot(w, s, m, x3, 3, PARTS)


@triton.jit
def scaled_product(
    w_up, w_low, s_up, s_low, m_up, m_low, x0, x1, x2, x3,
    HAS_MIN: tl.constexpr, PARTS: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """What a tile gives, its weights scaled before the product."""
    if not USE_PTX:
        up = _twin_rows(w_up, s_up, m_up, x0, x1, x2, x3, HAS_MIN, PARTS)
        low = _twin_rows(w_low, s_low, m_low, x0, x1, x2, x3, HAS_MIN, PARTS)
        return fragment(up, low, PARTS)
    if HAS_MIN:
        first, second = tl.inline_asm_elementwise(
            _SCALED_MIN,
            _SCALED_MIN_OPERANDS,
            [w_up, w_low, x0, x1, x2, x3, s_up, s_low, m_up, m_low],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        first, second = tl.inline_asm_elementwise(
            _SCALED,
            _SCALED_OPERANDS,
            [w_up, w_low, x0, x1, x2, x3, s_up, s_low],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    return first + second
