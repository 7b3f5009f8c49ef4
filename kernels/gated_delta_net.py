"""A gated delta net between its two projections: causal convolution, delta rule, gated norm (arXiv 2412.06464).

qkvz [T, C + V] holds q | k | v | z, each head-major, with C = 2 K + V, K = nk dk, V = nv dv; ba [T, 2 nv] holds b | a.
Value head i reads key head i // (nv / nk). Per token, in fp32:

    y      = SiLU(sum_j conv_weight[:, j] u_{t-3+j})       u: the C channels q | k | v
    q, k   = y_q / sqrt(sum y_q^2 + 1e-6) / sqrt(dk), y_k / sqrt(sum y_k^2 + 1e-6)
    S      = exp(-exp(A_log) softplus(a + dt_bias)) S      S: [nv, dk, dv]
    S      = S + k (sigmoid(b) (v - S^T k))^T
    o      = S^T q
    output = o / sqrt(mean o^2 + eps) * norm_weight * SiLU(z)

conv_state [C, 3] holds the last three u of the tokens before, oldest first. All but the states may be in any float
dtype; the state is fp32.

The kernel here is for one token: one launch, one program per value head, which has the whole of its head's state in
flight at once (64 KB, 64 elements a thread), so that even 48 programs keep a card's memory busy and the
norm at the end needs no other program. It moves the state once in and once out, which is 6.3 MB a layer of the 27B.
Many tokens: gated_delta_net_prefill.py.
"""

import torch
from torch import Tensor
from torch.nn import functional

from localchat.kernels.activations import sigmoid, silu, softplus
from localchat.kernels.checks import FLOATS, check_tensor
from localchat.kernels.gpu import tl, triton
from localchat.kernels.pdl import let_next_start, pdl_options, wait_for_previous
from localchat.kernels.scaled_half import in_units

L2_EPS = 1e-6
CHUNK = 64  # tokens that a prefill takes at once


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
    q, k, v, beta, g = _before(qkvz, ba, conv_weight, A_log, dt_bias, conv_state, state)
    decay, out = g.exp(), torch.empty_like(v)
    for t in range(len(v)):
        state *= decay[t, :, None, None]
        read = (state * k[t, :, :, None]).sum(1)
        state += k[t, :, :, None] * (beta[t, :, None] * (v[t] - read))[:, None]
        out[t] = (state * q[t, :, :, None]).sum(1)
    return _after(out, qkvz, norm_weight, eps)


def gated_delta_net_chunked(
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
    """The same for many tokens with torch's matrix products, CHUNK tokens at a time: for a CPU.

    The formulas stand in gated_delta_net_prefill.py. With U and W the solutions of (I + A) U = beta v and
    (I + A) W = beta e^G k, what a chunk adds to the state is X = U - W S0.
    """
    tokens, (value_heads, key_dim, value_dim) = qkvz.shape[0], state.shape
    *heads, beta, g = _before(qkvz, ba, conv_weight, A_log, dt_bias, conv_state, state)
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
        x = u[c] - w[c] @ state
        out[c] = grown[c] * (q[c] @ state) + seen[c] @ x
        state *= grown[c, :, -1:]
        state += left[c].transpose(-1, -2) @ x
    return _after(out.transpose(1, 2).reshape(-1, value_heads, value_dim)[:tokens], qkvz, norm_weight, eps)


def _before(
    qkvz: Tensor, ba: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, conv_state: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the recurrence takes, fp32: q, k [T, nv, dk], v [T, nv, dv], beta and the logarithm of the decay [T, nv].

    conv_state moves on.
    """
    tokens, channels = qkvz.shape[0], conv_weight.shape[0]
    value_heads, key_dim, value_dim = state.shape
    keys = (channels - value_heads * value_dim) // 2
    repeats = value_heads * key_dim // keys

    inputs = torch.cat((conv_state.t().float(), qkvz[:, :channels].float()))  # [3 + T, C]
    conv_state.copy_(inputs[-conv_state.shape[1] :].t())
    y = functional.silu((inputs.unfold(0, conv_weight.shape[1], 1) * conv_weight.float()).sum(-1))
    q, k = (_normalised(part.view(tokens, -1, key_dim)) for part in (y[:, :keys], y[:, keys : 2 * keys]))
    q, k = (q * key_dim**-0.5).repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1)
    b, a = ba.float().chunk(2, dim=-1)
    g = -A_log.float().exp() * functional.softplus(a + dt_bias.float())
    return q, k, y[:, 2 * keys :].view(tokens, value_heads, value_dim), b.sigmoid(), g


def _after(out: Tensor, qkvz: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The gated norm of what was read, fp32 [T, nv, dv] -> [T, V] in qkvz's dtype."""
    z = qkvz[:, -out[0].numel() :].float().view_as(out)
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    return (normed * functional.silu(z)).flatten(1).to(qkvz.dtype)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


@triton.jit
def _conv_step(qkvz_ptr, weight_ptr, conv_state_ptr, channel):
    """SiLU of the convolution at these channels."""
    past = conv_state_ptr + channel * 3
    weight = weight_ptr + channel * 4
    y = tl.load(past).to(tl.float32) * tl.load(weight).to(tl.float32)
    y += tl.load(past + 1).to(tl.float32) * tl.load(weight + 1).to(tl.float32)
    y += tl.load(past + 2).to(tl.float32) * tl.load(weight + 2).to(tl.float32)
    y += tl.load(qkvz_ptr + channel).to(tl.float32) * tl.load(weight + 3).to(tl.float32)
    return silu(y)


@triton.jit
def _move_on(qkvz_ptr, conv_state_ptr, channel):
    """The past of these channels, one token later."""
    past = conv_state_ptr + channel * 3
    second, third = tl.load(past + 1), tl.load(past + 2)
    newest = tl.load(qkvz_ptr + channel).to(tl.float32).to(conv_state_ptr.dtype.element_ty)
    tl.debug_barrier()  # several warps hold the same channels: all have read before one writes
    tl.store(past, second)
    tl.store(past + 1, third)
    tl.store(past + 2, newest)


@triton.jit
def step_and_decay(ba_ptr, A_log_ptr, dt_bias_ptr, head, heads, mask):
    """beta and the logarithm of the decay, fp32, of a value head at each of the rows `ba_ptr` (0 where masked)."""
    b = tl.load(ba_ptr + head, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(ba_ptr + heads + head, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    g = -rate * softplus(a + tl.load(dt_bias_ptr + head).to(tl.float32))
    return tl.where(mask, sigmoid(b), 0.0), tl.where(mask, g, 0.0)


@triton.jit
def _decode_kernel(
    qkvz_ptr,
    ba_ptr,
    conv_weight_ptr,
    A_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    conv_state_ptr,
    state_ptr,
    arrivals_ptr,
    out_ptr,
    KEY_HEADS,
    eps,
    L2_EPS: tl.constexpr,
    REPEATS: tl.constexpr,
    UNITS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    head, heads = tl.program_id(0), tl.num_programs(0)
    key_head = head // REPEATS
    i, j = tl.arange(0, DK), tl.arange(0, DV)
    # The state first: it is nearly all of the bytes, and only the step before has written to it.
    cells = state_ptr + head.to(tl.int64) * DK * DV + i[:, None] * DV + j[None, :]
    state = tl.load(cells)
    wait_for_previous(PDL)

    q_channel = key_head * DK + i
    k_channel = (KEY_HEADS + key_head) * DK + i
    v_channel = 2 * KEY_HEADS * DK + head * DV + j
    q = _conv_step(qkvz_ptr, conv_weight_ptr, conv_state_ptr, q_channel)
    k = _conv_step(qkvz_ptr, conv_weight_ptr, conv_state_ptr, k_channel)
    v = _conv_step(qkvz_ptr, conv_weight_ptr, conv_state_ptr, v_channel)
    q = q / tl.sqrt_rn(tl.sum(q * q, 0) + L2_EPS) * (1.0 / tl.sqrt_rn(DK * 1.0))
    k = k / tl.sqrt_rn(tl.sum(k * k, 0) + L2_EPS)
    arrived = 0
    if REPEATS > 1:  # asked here, where it waits together with the state
        tl.debug_barrier()  # all warps have read the past
        arrived = tl.atomic_add(arrivals_ptr + key_head, 1)

    beta, g = step_and_decay(ba_ptr, A_log_ptr, dt_bias_ptr, head, heads, True)
    decay = tl.exp(g)
    error = beta * (v - decay * tl.sum(state * k[:, None], 0))
    out = decay * tl.sum(state * q[:, None], 0) + tl.sum(q * k, 0) * error  # of the new state, without waiting for it
    tl.store(cells, decay * state + k[:, None] * error[None, :])

    gate = silu(tl.load(qkvz_ptr + v_channel + heads * DV).to(tl.float32))
    rms = 1.0 / tl.sqrt_rn(tl.sum(out * out, 0) / DV + eps)
    out = out * rms * tl.load(norm_ptr + j).to(tl.float32) * gate
    if UNITS:
        out = in_units(out)
    tl.store(out_ptr + head * DV + j, out)

    # The past moves on. v's is this program's own; q's and k's is read by the programs of all value heads of the key
    # head, so the last of them to have read it writes it.
    _move_on(qkvz_ptr, conv_state_ptr, v_channel)
    if arrived == REPEATS - 1:
        _move_on(qkvz_ptr, conv_state_ptr, q_channel)
        _move_on(qkvz_ptr, conv_state_ptr, k_channel)
        if REPEATS > 1:
            tl.store(arrivals_ptr + key_head, 0)


def gated_delta_net_decode(
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_state: Tensor,
    state: Tensor,
    *,
    arrivals: Tensor,
    units: bool = False,
) -> Tensor:
    """One token: qkvz [1, C + V], ba [1, 2 nv] -> fp32 [1, V]; both states move on in place.

    units: fp16 and divided by UNIT instead (kernels/scaled_half.py), as the product behind it takes it.

    arrivals int32, at least one per key head: zeros that the launch needs and leaves as zeros. Launches of one stream
    share it. The result depends on the inputs alone, bit for bit. Between two calls on one state lies a plain launch
    (kernels/pdl.py): the state is read before the wait.

    Raises:
        ValueError: a dtype or shape is another, a tensor is not contiguous, or there is more than one token.
    """
    key_heads, repeats = check_gated_delta_net(
        "gated_delta_net_decode", qkvz, ba, conv_weight, A_log, dt_bias, norm_weight, conv_state, state
    )
    if qkvz.shape[0] != 1:
        raise ValueError(f"gated_delta_net_decode: got {qkvz.shape[0]} tokens, wanted 1")
    check_tensor("gated_delta_net_decode: arrivals", arrivals, (torch.int32,), (None,))
    if arrivals.shape[0] < key_heads:
        raise ValueError(f"gated_delta_net_decode: got {arrivals.shape[0]} arrivals, wanted one per key head")
    value_heads, key_dim, value_dim = state.shape
    out = torch.empty(1, value_heads * value_dim, dtype=torch.float16 if units else torch.float32, device=qkvz.device)
    _decode_kernel[(value_heads,)](
        qkvz,
        ba,
        conv_weight,
        A_log,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        arrivals,
        out,
        key_heads,
        eps,
        L2_EPS=L2_EPS,
        REPEATS=repeats,
        UNITS=units,
        DK=key_dim,
        DV=value_dim,
        num_warps=decode_warps(key_dim, value_dim),
        **pdl_options(qkvz),
    )
    return out


def decode_warps(key_dim: int, value_dim: int) -> int:
    """Warps of a program: 64 elements of the state a thread. With 32 it spills on sm_120."""
    return max(1, min(8, key_dim * value_dim // 2048))


def check_gated_delta_net(
    what: str,
    qkvz: Tensor,
    ba: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
) -> tuple[int, int]:
    """Key heads, and value heads per key head.

    Raises:
        ValueError: a dtype or shape is another, or a tensor is not contiguous.
    """
    check_tensor(f"{what}: state", state, (torch.float32,), (None, None, None))
    (value_heads, key_dim, value_dim), channels = state.shape, conv_weight.shape[0]
    values = value_heads * value_dim
    key_heads = (channels - values) // (2 * key_dim)
    sizes_fit = all(16 <= d <= 256 and d & (d - 1) == 0 for d in (key_dim, value_dim))
    if not sizes_fit or key_heads < 1 or 2 * key_heads * key_dim + values != channels or value_heads % key_heads:
        raise ValueError(
            f"{what}: got state {list(state.shape)} and {channels} channels, wanted 2 nk dk + nv dv channels, nv a "
            "multiple of nk, dk and dv powers of two from 16 to 256"
        )
    check_tensor(f"{what}: qkvz", qkvz, FLOATS, (None, channels + values), rows_apart=True)
    check_tensor(f"{what}: ba", ba, FLOATS, (qkvz.shape[0], 2 * value_heads), rows_apart=True)
    check_tensor(f"{what}: conv_weight", conv_weight, FLOATS, (channels, 4))
    check_tensor(f"{what}: A_log", A_log, FLOATS, (value_heads,))
    check_tensor(f"{what}: dt_bias", dt_bias, FLOATS, (value_heads,))
    check_tensor(f"{what}: norm_weight", norm_weight, FLOATS, (value_dim,))
    check_tensor(f"{what}: conv_state", conv_state, FLOATS, (channels, 3))
    return key_heads, value_heads // key_heads
