"""Reading what the kernel in front still writes: a value says itself whether it is there.

A kernel of more programs than find room at once ends slowly. While its last ones work, those of the next kernel take
the places that others have left (kernels/pdl.py), and would wait, although most of what they read has long been
written. A kernel that reads early begins with that, and waits for the kernel in front only before its last part:

    fill    A kernel further in front fills the tensor with UNWRITTEN, behind its own wait, like all that it writes.
    write   The kernel in front lets the next one start only behind its own wait (`Fragments.late`). So when a reader
            starts, whoever filled the tensor has ended.
    read    What is UNWRITTEN is asked for again, past the multiprocessor's own cache, until it is there.

That cache holds nothing from before the filling, which is what hardware does and nobody promises: there, programs have
run since that waited (of the kernel in front, which has more of them than find room at once, and of those before it),
and a wait drops what the cache holds. Loads past it from the first one on cost 1.5 % of a step.

Nothing else is read before the wait, and nothing is written, so overwriting keeps the order of pdl.py. UNWRITTEN is two
fp16 with all bits set, a NaN that arithmetic never gives (its own is 0x7fff), and SwiGLU stores none at all.
"""

from torch import Tensor

from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import pdl_options

UNWRITTEN = -1  # an int32 of two fp16
FILLED = tl.constexpr(1024)  # int32 that a program fills at once
_UNWRITTEN = tl.constexpr(UNWRITTEN)
_GAP = 64  # bytes between the four pieces of x that a lane needs: groups of 128 (int4_packing.py)


def _there_ptx() -> str:
    """$0-$15 are $16-$31, or what lies at $32 and three gaps further on once no half of it is UNWRITTEN.

    All lanes of a warp stay together, as an instruction for tensor cores follows.
    """
    check = "max.u16x2 most, $0, $1;\n" + "".join(f"max.u16x2 most, most, ${i};\n" for i in range(2, 16))
    check += "setp.ge.u32 missing, most, 0xffff0000;\nand.b32 low, most, 0xffff;\n"
    check += "setp.eq.or.u32 missing, low, 0xffff, missing;\nvote.sync.any.pred any, missing, 0xffffffff;\n"
    text = "{ .reg .pred missing, any; .reg .b32 most, low;\n"
    text += "".join(f"mov.b32 ${i}, ${i + 16};\n" for i in range(16)) + check + "@!any bra THERE;\nAGAIN:\n"
    for piece in range(4):
        words = ", ".join(f"${4 * piece + i}" for i in range(4))
        text += f"@missing ld.relaxed.gpu.global.v4.b32 {{{words}}}, [$32 + {_GAP * piece}];\n"
    return text + check + "@any bra AGAIN;\nTHERE:\n}"


_THERE = tl.constexpr(_there_ptx())
_THERE_OPERANDS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 16 + ["l"] * 4))
_FOUR = tl.constexpr((tl.int32,) * 4)


def can_read_early(tensor: Tensor) -> bool:
    """Whether kernels on its device start before the one in front has ended; else there is nothing to gain."""
    return bool(pdl_options(tensor)["PDL"])


@triton.jit
def read_early(x):
    """int32 at x [.., 16], x + 16, x + 32 and x + 48, once they are written. A lane must have 4 neighbours."""
    first, second, third, fourth = tl.load(x), tl.load(x + 16), tl.load(x + 32), tl.load(x + 48)
    return tl.inline_asm_elementwise(
        _THERE,
        _THERE_OPERANDS,
        [first, second, third, fourth, x.to(tl.int64)],
        dtype=_FOUR,
        is_pure=True,  # reading again changes nothing, and only so Triton chooses the layout that lanes need
        pack=4,
    )


@triton.jit
def fill_unwritten(ptr, words):
    """The programs of a launch fill so many int32, behind their wait."""
    for first in range(tl.program_id(0) * FILLED, words, tl.num_programs(0) * FILLED):
        at = first + tl.arange(0, FILLED)
        tl.store(ptr + at, _UNWRITTEN, mask=at < words)
