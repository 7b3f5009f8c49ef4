"""INT8 codes as fp32 by integer instructions, inside kernels: cards convert integers at a quarter of their rate."""

from localchat.kernels.gpu import tl, triton


@triton.jit
def exact(codes):
    """int8 -> fp32. From 2^23 on fp32 counts in ones: the last byte of such a number holds code + 128."""
    number = ((codes.to(tl.int32) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True)
    return number - 8388736.0


# $2: four codes; $0, $1: the same as pairs of fp16. fp16 counts in ones from 1024 on: 0x64 before a byte is 1024 + it.
_FOUR_TO_HALF = tl.constexpr(
    "{ .reg .b32 x, a, b;\nxor.b32 x, $2, 0x80808080;\nmov.b32 b, 0x64806480;\n"
    + "".join(
        f"prmt.b32 a, x, 0x64646464, {selector};\nsub.f16x2 ${pair}, a, b;\n"
        for pair, selector in ((0, "0x4140"), (1, "0x4342"))
    )
    + "}"
)


@triton.jit
def exact_half(codes):
    """int8 -> fp16, where it lies.

    Impure, so that it stays there: Triton moves a cast, and pure assembly, behind a change of layout, which then takes
    the codes through shared memory byte by byte (measured in instructions: NOTES.md).
    """
    return tl.inline_asm_elementwise(_FOUR_TO_HALF, "=r,=r,r", [codes], dtype=tl.float16, is_pure=False, pack=4)
