"""INT8 codes as fp32 by integer instructions, inside kernels: cards convert integers at a quarter of their rate."""

from localchat.kernels.gpu import tl, triton


@triton.jit
def exact(codes):
    """int8 -> fp32. From 2^23 on fp32 counts in ones: the last byte of such a number holds code + 128."""
    number = ((codes.to(tl.int32) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True)
    return number - 8388736.0
