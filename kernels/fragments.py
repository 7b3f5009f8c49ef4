"""Products by tensor cores fed from registers: what those of INT4 and of INT8 codes share.

mma.m16n8k16 multiplies 16 rows x 16 inputs with 16 inputs x 8 tokens and adds to fp32 sums (PTX ISA, "Matrix fragments
for mma.m16n8k16"). The sums of lane 4g + t are, as element r, of row g + 8 (r >= 2) and token 2t + (r & 1).

A tensor [PARTS * 8, 16] (sizePerThread [1, 4], threadsPerWarp [8, 4]) is that for PARTS warps, and inline PTX with
pack = 4 is an instruction for a warp. Triton gives this layout to what it loads in 16 bytes a lane; that it stays so is
tested (tests/kernels/test_compile.py).
"""

from localchat.kernels.gpu import tl, triton

# 16 bytes a lane. Such loads keep their order among each other; weights are read once, so no cache close to the
# processor keeps them.
LOAD_WORDS = tl.constexpr("ld.relaxed.cta.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")


def mma(into: str, a: str, b: str, plus: str) -> str:
    """The instruction's text; operands as `four` writes them."""
    return f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {into}, {a}, {b}, {plus};\n"


def four(first: int) -> str:
    """Operands `first` to `first` + 3 of the text."""
    return "{" + ", ".join(f"${first + i}" for i in range(4)) + "}"


@triton.jit
def fragment(upper, lower, PARTS: tl.constexpr):
    """Rows g and rows g + 8 of a product, each [PARTS, 8 rows, 8 tokens] -> as the accumulator has them."""
    upper, lower = tl.reshape(upper, [PARTS, 8, 4, 2]), tl.reshape(lower, [PARTS, 8, 4, 2])
    return tl.reshape(tl.permute(tl.join(upper, lower), (0, 1, 2, 4, 3)), [PARTS * 8, 16])


@triton.jit
def row_sums(acc, PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """Sums [PARTS * 8, 16] with the parts and the columns of a token together: [16 rows, TOKENS]."""
    acc = tl.permute(tl.reshape(acc, [PARTS, 8, 4, 2, 2]), (0, 3, 1, 2, 4))  # [part, row // 8, row % 8, column]
    y = tl.sum(tl.reshape(acc, [PARTS, 128]), 0)
    return tl.sum(tl.reshape(y, [16, 8 // TOKENS, TOKENS]), 1)
