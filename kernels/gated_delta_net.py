"""A gated delta net between its two projections: causal convolution, delta rule, gated norm (arXiv 2412.06464).

qkvz [T, C + V] holds q | k | v | z, each head-major, with C = 2 K + V, K = nk dk, V = nv dv; ba [T, 2 nv] holds b | a.
Value head i reads key head i // (nv / nk). Per token, in fp32:

    y      = SiLU(sum_j conv_weight[:, j] u_{t-3+j})       u: the C channels q | k | v
    q, k   = y_q / sqrt(sum y_q^2 + 1e-6) / sqrt(dk), y_k / sqrt(sum y_k^2 + 1e-6)
    S      = exp(-exp(A_log) softplus(a + dt_bias)) S      S: [nv, dk, dv]
    S      = S + k (sigmoid(b) (v - S^T k))^T
    o      = S^T q
    output = o / sqrt(mean o^2 + eps) * norm_weight * SiLU(z)
"""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

_L2_EPS = 1e-6


def gated_delta_net_reference(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
) -> Tensor:
    """-> [T, V] in qkvz's dtype; conv_state [C, 3] (oldest first) and state fp32 [nv, dk, dv] move on by T tokens."""
    tokens, channels = qkvz.shape[0], conv_weight.shape[0]
    value_heads, key_dim, value_dim = state.shape
    values = value_heads * value_dim
    keys = (channels - values) // 2
    repeats = value_heads * key_dim // keys

    inputs = torch.cat((conv_state.t().float(), qkvz[:, :channels].float()))  # [3 + T, C]
    conv_state.copy_(inputs[-conv_state.shape[1] :].t())
    y = silu((inputs.unfold(0, conv_weight.shape[1], 1) * conv_weight.float()).sum(-1))
    q, k = (_normalised(part.view(tokens, -1, key_dim)) for part in (y[:, :keys], y[:, keys : 2 * keys]))
    q, k = (q * key_dim**-0.5).repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    v = y[:, 2 * keys :].view(tokens, value_heads, value_dim)

    b, a = ba.float().chunk(2, dim=-1)
    beta, decay = b.sigmoid(), (-A_log.float().exp() * softplus(a + dt_bias.float())).exp()
    out = torch.empty(tokens, value_heads, value_dim, device=qkvz.device)
    for t in range(tokens):
        state *= decay[t, :, None, None]
        read = (state * k[t, :, :, None]).sum(1)
        state += k[t, :, :, None] * (beta[t, :, None] * (v[t] - read))[:, None]
        out[t] = (state * q[t, :, :, None]).sum(1)

    z = qkvz[:, channels:].float().view(tokens, value_heads, value_dim)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    return (normed * silu(z)).view(tokens, values).to(qkvz.dtype)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
