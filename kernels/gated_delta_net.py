"""A gated delta net between its two projections: causal convolution, delta rule, gated norm (arXiv 2412.06464).

qkvz [T, C + V] holds q | k | v | z, each head-major, with C = 2 K + V, K = nk dk, V = nv dv; ba [T, 2 nv] holds b | a;
positions int64 [T] are consecutive. Value head i reads key head i // (nv / nk). Per token, in fp32:

    y      = SiLU(sum_j conv_weight[:, j] u_{t-3+j})       u: the C channels q | k | v
    q, k   = y_q / sqrt(sum y_q^2 + 1e-6) / sqrt(dk), y_k / sqrt(sum y_k^2 + 1e-6)
    S      = exp(-exp(A_log) softplus(a + dt_bias)) S      S: [nv, dv, dk]
    S      = S + sigmoid(b) (v - S k) k^T
    o      = S q
    output = o / sqrt(mean o^2 + eps) * norm_weight * SiLU(z)

conv_state [4, C] is a ring of the last four u: that of position p lies in row p % 4. So a token's u replaces one that
the token itself no longer needs, and whoever computes it reads nothing that another program writes meanwhile. All but
the states may be in any float dtype; the state is fp32.

Here are the references; kernels: gated_delta_net_decode.py for one token, gated_delta_net_few_tokens.py for 2 to 16,
gated_delta_net_prefill.py for many.
"""

import torch
from torch import Tensor
from torch.nn import functional

from localchat.kernels.activations import sigmoid, softplus
from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton

L2_EPS = 1e-6
CHUNK = 64  # tokens that a prefill takes at once
RING = 4  # tokens that the convolution sees, and whose inputs conv_state holds


def gated_delta_net_reference(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    conv_state: Tensor,
    state: Tensor,
) -> Tensor:
    """-> [T, V] in qkvz's dtype; conv_state [4, C] and state fp32 [nv, dv, dk] move on by T tokens."""
    q, k, v, beta, g = _before(qkvz, ba, conv_weight, A_log, dt_bias, positions, conv_state, state)
    decay, out = g.exp(), torch.empty_like(v)
    for t in range(len(v)):
        state *= decay[t, :, None, None]
        read = (state * k[t, :, None, :]).sum(-1)
        state += (beta[t, :, None] * (v[t] - read))[:, :, None] * k[t, :, None, :]
        out[t] = (state * q[t, :, None, :]).sum(-1)
    return _after(out, qkvz, norm_weight, eps)


def gated_delta_net_chunked(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    conv_state: Tensor,
    state: Tensor,
) -> Tensor:
    """The same for many tokens with torch's matrix products, CHUNK tokens at a time: for a CPU.

    The formulas stand in gated_delta_net_prefill.py. With U and W the solutions of (I + A) U = beta v and
    (I + A) W = beta e^G k, what a chunk adds to the state is X = U - W S0^T.
    """
    tokens, (value_heads, value_dim, key_dim) = qkvz.shape[0], state.shape
    *heads, beta, g = _before(qkvz, ba, conv_weight, A_log, dt_bias, positions, conv_state, state)
    chunks = -(-tokens // CHUNK)

    def in_chunks(x: Tensor) -> Tensor:  # [T, nv, ...] -> [chunks, nv, CHUNK, ...], zeros behind the end
        x = torch.cat((x, x.new_zeros(chunks * CHUNK - tokens, *x.shape[1:])))
        return x.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2)

    q, k, v = map(in_chunks, heads)
    beta, total = in_chunks(beta).unsqueeze(-1), in_chunks(g).cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=state.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~later, float("-inf")).exp()
    a = (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    grown = total.exp().unsqueeze(-1)
    right = torch.cat((beta * v, beta * grown * k), dim=-1)
    solved = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    u, w = solved.split((value_dim, key_dim), dim=-1)
    seen = (q @ k.transpose(-1, -2)) * decay
    left = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    out = torch.empty_like(v)
    for c in range(chunks):
        x = u[c] - w[c] @ state.transpose(-1, -2)
        out[c] = grown[c] * (q[c] @ state.transpose(-1, -2)) + seen[c] @ x
        state *= grown[c, :, -1:]
        state += x.transpose(-1, -2) @ left[c]
    return _after(out.transpose(1, 2).reshape(-1, value_heads, value_dim)[:tokens], qkvz, norm_weight, eps)


def _before(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    positions: Tensor,
    conv_state: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the recurrence takes, fp32: q, k [T, nv, dk], v [T, nv, dv], beta and the logarithm of the decay [T, nv].

    conv_state moves on.
    """
    tokens, channels = qkvz.shape[0], conv_weight.shape[0]
    value_heads, value_dim, key_dim = state.shape
    keys = (channels - value_heads * value_dim) // 2
    repeats = value_heads * key_dim // keys

    past = conv_state[(positions[:1] + torch.arange(1, RING, device=positions.device)) % RING]  # oldest first
    inputs = torch.cat((past.float(), qkvz[:, :channels].float()))  # [3 + T, C]
    _write_ring(qkvz, positions, conv_state)
    y = functional.silu((inputs.unfold(0, conv_weight.shape[1], 1) * conv_weight.float()).sum(-1))
    q, k = (_normalised(part.view(tokens, -1, key_dim)) for part in (y[:, :keys], y[:, keys : 2 * keys]))
    q, k = (q * key_dim**-0.5).repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    b, a = ba.float().chunk(2, dim=-1)
    g = -A_log.float().exp() * functional.softplus(a + dt_bias.float())
    return q, k, y[:, 2 * keys :].view(tokens, value_heads, value_dim), b.sigmoid(), g


def _write_ring(qkvz: Tensor, positions: Tensor, conv_state: Tensor) -> None:
    """conv_state [4, C] has the inputs of the last of these tokens in it."""
    recent = qkvz[-RING:, : conv_state.shape[1]].to(conv_state.dtype)
    conv_state.index_copy_(0, positions[-RING:] % RING, recent)


def _after(out: Tensor, qkvz: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The gated norm of what was read, fp32 [T, nv, dv] -> [T, V] in qkvz's dtype."""
    z = qkvz[:, -out[0].numel() :].float().view_as(out)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    return (normed * functional.silu(z)).flatten(1).to(qkvz.dtype)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


@triton.jit
def step_and_decay(b, a, A_log, dt_bias):
    """beta and the logarithm of the decay of value heads, fp32 of fp32."""
    return sigmoid(b), -tl.exp(A_log) * softplus(a + dt_bias)


def check_gated_delta_net(
    what: str,
    qkvz: Tensor,
    ba: Tensor | None,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    conv_state: Tensor,
    state: Tensor,
) -> tuple[int, int]:
    """Key heads, and value heads per key head. ba: None where it is not there yet.

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    check_tensor(f"{what}: state", state, (torch.float32,), (None, None, None))
    (value_heads, value_dim, key_dim), channels = state.shape, conv_weight.shape[0]
    values = value_heads * value_dim
    key_heads = (channels - values) // (2 * key_dim)
    sizes_fit = all(16 <= d <= 256 and d & (d - 1) == 0 for d in (key_dim, value_dim))
    if not sizes_fit or key_heads < 1 or 2 * key_heads * key_dim + values != channels or value_heads % key_heads:
        raise ValueError(
            f"{what}: got state {list(state.shape)} and {channels} channels, wanted 2 nk dk + nv dv channels, nv a "
            "multiple of nk, dk and dv powers of two from 16 to 256"
        )
    check_tensor(f"{what}: qkvz", qkvz, FLOATS, (None, channels + values), rows_apart=True)
    if ba is not None:
        check_tensor(f"{what}: ba", ba, FLOATS, (qkvz.shape[0], 2 * value_heads), rows_apart=True)
    check_tensor(f"{what}: conv_weight", conv_weight, FLOATS, (channels, RING))
    check_tensor(f"{what}: A_log", A_log, FLOATS, (value_heads,))
    check_tensor(f"{what}: dt_bias", dt_bias, FLOATS, (value_heads,))
    check_tensor(f"{what}: norm_weight", norm_weight, FLOATS, (value_dim,))
    check_tensor(f"{what}: positions", positions, (torch.int64,), (qkvz.shape[0],))
    check_tensor(f"{what}: conv_state", conv_state, FLOATS, (RING, channels))
    return key_heads, value_heads // key_heads
