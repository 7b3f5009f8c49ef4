"""The non-linearities that several kernels share, on fp32 values. No exponential in them ever overflows."""

from localchat.kernels.gpu import tl, triton


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log1p(e), e = e^-|x|.

    log1p(e) = 2 atanh(e / (2 + e)), a short series (error 2e-8): the card's logarithm is absolute to 2e-7 near 1, and
    a decay of 1 - 1e-6 counts over a long context.
    """
    small = tl.exp(-tl.abs(x))
    s = small / (2.0 + small)
    s2 = s * s
    series = 1 + s2 * (1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * (1 / 9 + s2 * (1 / 11 + s2 / 13)))))
    return tl.maximum(x, 0.0) + 2.0 * s * series
