"""Asking for memory before anybody reads it: a piece of it on its way into the L2 cache, and no register to hold it.

Between two products of a decode step memory is idle for some microseconds: the last programs of one write their sums,
those of the next wait for them, having asked for as many weights as their registers hold. One instruction of compute
capability 9.0 and newer asks for more. It returns nothing and changes nothing but time; elsewhere it does not exist.
"""

from localchat.kernels.gpu import tl, triton

# One thread of the program asks. $1: where, a multiple of 16; $2: how many bytes, a multiple of 16, nothing where 0.
_ASK = tl.constexpr("""{
.reg .pred one, some;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 one, thread, 0;
setp.ne.and.u32 some, $2, 0, one;
@some cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}""")


@triton.jit
def ask_for(ptr, count, ALLOWED: tl.constexpr):
    """`count` bytes from `ptr` on, by one instruction of a program; both multiples of 16."""
    if ALLOWED:
        tl.inline_asm_elementwise(_ASK, "=r,l,r", [ptr.to(tl.int64), count], dtype=tl.int32, is_pure=False, pack=1)
