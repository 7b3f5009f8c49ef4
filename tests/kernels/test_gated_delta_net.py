"""kernels/gated_delta_net*.py: the reference against other formulations, one token's kernel against the reference."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

from localchat.kernels.gated_delta_net import gated_delta_net_chunked, gated_delta_net_reference
from localchat.kernels.gated_delta_net_decode import StepProduct, gated_delta_net_decode
from localchat.kernels.scaled_half import Squares, scaled_half_reference

Relative = Callable[[Tensor, Tensor], float]
DeltaNet = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("nan_filled")
BOUND = 5e-5


def clone(inputs: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The same arguments with states of their own."""
    return {**inputs, "conv_state": inputs["conv_state"].clone(), "state": inputs["state"].clone(), **changed}


def past(inputs: dict[str, Any]) -> Tensor:
    """The inputs of the three tokens before, [3, C], oldest first."""
    first = int(inputs["positions"][0])
    return torch.stack([inputs["conv_state"][position % 4] for position in range(first - 3, first)])


def rows(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some of the tokens, with the states of all."""
    return {**inputs, **{name: inputs[name][start:stop] for name in ("qkvz", "ba", "positions")}}


def parts(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """What the delta rule is given, in fp64: q and k (before their norms) [T, nk, dk], v and z [T, nv, dv], beta, g."""
    wide = {name: t.double() for name, t in inputs.items() if isinstance(t, Tensor)}
    (value_heads, value_dim, key_dim), channels = wide["state"].shape, wide["conv_weight"].shape[0]
    u = torch.cat((past(inputs).double(), wide["qkvz"][:, :channels]))
    y = F.conv1d(u.t()[None], wide["conv_weight"][:, None], groups=channels)[0].t()
    y = y / (1 + torch.exp(-y))
    values = value_heads * value_dim
    keys = (channels - values) // 2
    q, k, v = y.split((keys, keys, values), -1)
    b, a = wide["ba"].chunk(2, -1)
    return {
        "q": q.unflatten(-1, (-1, key_dim)),
        "k": k.unflatten(-1, (-1, key_dim)),
        "v": v.unflatten(-1, (-1, value_dim)),
        "z": wide["qkvz"][:, channels:].unflatten(-1, (-1, value_dim)),
        "beta": 1 / (1 + torch.exp(-b)),
        "g": -wide["A_log"].exp() * torch.log1p(torch.exp(a + wide["dt_bias"])),
    }


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """o, z [T, nv, dv] -> [T, nv * dv]."""
    return (F.rms_norm(o, o.shape[-1:], weight.to(o.dtype), eps) * z / (1 + torch.exp(-z))).flatten(1)


def chunk_formula(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One head, one chunk, its tokens solved for together: q, k [T, dk], v [T, dv], beta, g [T] -> o, state."""
    total = g.cumsum(0)
    decay = (total[:, None] - total[None, :]).tril().exp().tril()
    a = (beta[:, None] * (k @ k.t()) * decay).tril(-1)
    right = beta[:, None] * torch.cat((v, total.exp()[:, None] * k), -1)
    u, w = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True).split((v.shape[1], k.shape[1]), -1)
    x = u - w @ state
    o = total.exp()[:, None] * (q @ state) + ((q @ k.t()) * decay) @ x
    return o, total[-1].exp() * state + ((total[-1] - total).exp()[:, None] * k).t() @ x


def test_the_reference_is_the_chunk_formula(delta_net: DeltaNet, relative: Relative) -> None:
    torch.manual_seed(0)
    inputs = delta_net(torch.device("cpu"), 21)
    p = parts(inputs)
    q, k = (p[name] * torch.rsqrt(p[name].square().sum(-1, keepdim=True) + 1e-6) for name in "qk")
    heads = [
        chunk_formula(
            q[:, h // 3] / 4, k[:, h // 3], p["v"][:, h], p["beta"][:, h], p["g"][:, h], inputs["state"][h].t().double()
        )
        for h in range(6)
    ]
    wanted = gated_norm(torch.stack([o for o, _ in heads], 1), p["z"], inputs["norm_weight"], 1e-6)
    moved = clone(inputs)
    assert relative(gated_delta_net_reference(**moved), wanted) < 1e-6
    assert relative(moved["state"], torch.stack([state.t() for _, state in heads])) < 1e-6
    for position, row in zip(inputs["positions"][-4:], inputs["qkvz"][-4:], strict=True):
        assert torch.equal(moved["conv_state"][position % 4], row[: inputs["conv_weight"].shape[0]])


@pytest.mark.parametrize("rule", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("heads", [(2, 6), (3, 3)])
def test_the_reference_is_that_of_transformers(
    delta_net: DeltaNet, relative: Relative, rule: str, heads: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    inputs = delta_net(torch.device("cpu"), 70, heads)
    p = {name: t.float() for name, t in parts(inputs).items()}
    o, state = getattr(modeling_qwen3_5, rule)(
        *(p[name].repeat_interleave(heads[1] // heads[0], 1)[None] for name in "qk"),
        p["v"][None],
        g=p["g"][None],
        beta=p["beta"][None],
        initial_state=inputs["state"].transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    moved = clone(inputs)
    out = gated_delta_net_reference(**moved)
    assert relative(out, gated_norm(o[0], p["z"], inputs["norm_weight"], 1e-6)) < 2e-6
    assert relative(moved["state"], state[0].transpose(1, 2)) < 2e-6


def test_the_reference_in_pieces_is_the_same(delta_net: DeltaNet, relative: Relative) -> None:
    """Pieces of one, two and more tokens: the convolution's past is three tokens, whoever brought them."""
    torch.manual_seed(0)
    inputs = delta_net(torch.device("cpu"), 12)
    whole, pieces = clone(inputs), clone(inputs)
    wanted = gated_delta_net_reference(**whole)
    borders = (0, 1, 3, 4, 9, 12)
    out = torch.cat([gated_delta_net_reference(**rows(pieces, *border)) for border in pairwise(borders)])
    assert relative(out, wanted) < 1e-6
    assert relative(pieces["state"], whole["state"]) < 1e-6
    assert torch.equal(pieces["conv_state"], whole["conv_state"])


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("heads", [(2, 6), (3, 3)])
def test_the_chunked_form_is_the_reference(
    delta_net: DeltaNet, relative: Relative, tokens: int, heads: tuple[int, int]
) -> None:
    inputs = delta_net(torch.device("cpu"), tokens, heads)
    ours, wanted = clone(inputs), clone(inputs)
    assert relative(gated_delta_net_chunked(**ours), gated_delta_net_reference(**wanted)) < 5e-6
    assert relative(ours["state"], wanted["state"]) < 5e-6
    assert torch.equal(ours["conv_state"], wanted["conv_state"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((2, 6), (16, 32)),
        ((3, 3), (32, 16)),  # nothing shared: qwen3.5-0.8b, 2b
        ((2, 4), (128, 128)),  # qwen3.5-4b, 9b
        ((1, 3), (64, 256)),
    ],
)
def test_decode_agrees_over_several_steps(
    device: torch.device,
    delta_net: DeltaNet,
    relative: Relative,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    inputs = delta_net(device, 5, heads, dims, dtype)
    ours, wanted = clone(inputs), clone(inputs)
    wanted["qkvz"] = wanted["qkvz"].float()
    for t in range(5):
        out = gated_delta_net_decode(**rows(ours, t, t + 1))
        assert out.dtype == torch.float32
        assert relative(out, gated_delta_net_reference(**rows(wanted, t, t + 1))) < BOUND
        assert relative(ours["state"], wanted["state"]) < BOUND
        assert torch.equal(ours["conv_state"], wanted["conv_state"])


def product(device: torch.device, rows: int, columns: int, squares: bool) -> tuple[StepProduct, Tensor]:
    """A random one, and the b and a [1, rows] that it gives, in fp64."""
    x = torch.randn(1, columns, device=device)
    weight = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=device)
    scales = torch.rand(rows, device=device) / (73 * columns**0.5)
    half, factors = x.half(), Squares(torch.rand(1, columns // 16, device=device), 1e-3)
    row_scale = factors.row_scale(columns)
    if not squares:  # x is large; b and a are not, or steps and decays would all be 0
        (half, row_scale), scales = scaled_half_reference(1e3 * x), scales / 1e3
    exact = (half.double() @ weight.double().t()) * scales.double() * row_scale.double()
    return StepProduct(half, factors if squares else row_scale, weight, scales), exact


@pytest.mark.parametrize("columns", [64, 1024, 2560, 1616])
@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("heads", [(1, 3), (2, 2)])
def test_steps_and_decays_from_their_product(
    device: torch.device,
    delta_net: DeltaNet,
    relative: Relative,
    columns: int,
    squares: bool,
    heads: tuple[int, int],
) -> None:
    """Columns in one part, in several, and with a rest; 160 sums of squares are more than one load."""
    inputs = delta_net(device, 1, heads, (16, 16))
    inputs["ba"], exact = product(device, 2 * heads[1], columns, squares)
    ours, wanted = clone(inputs), clone(inputs, ba=exact.float())
    out = gated_delta_net_decode(**ours)
    assert relative(out, gated_delta_net_reference(**wanted)) < BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND
    assert torch.equal(ours["conv_state"], wanted["conv_state"])


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 2**31 - 1, 2**33 + 2])
def test_the_ring_at_every_place(device: torch.device, delta_net: DeltaNet, relative: Relative, position: int) -> None:
    """What lies in the row that the token takes is not looked at."""
    inputs = delta_net(device, 1, (1, 2), (16, 16))
    inputs["positions"] += position - 6
    inputs["conv_state"][position % 4] = float("nan")
    ours, wanted = clone(inputs), clone(inputs)
    assert relative(gated_delta_net_decode(**ours), gated_delta_net_reference(**wanted)) < BOUND
    assert torch.equal(ours["conv_state"], wanted["conv_state"])
    assert bool(ours["conv_state"].isfinite().all())


@pytest.mark.parametrize("magnitude", [1e-4, 1e5])
def test_decode_of_extreme_inputs(
    device: torch.device, delta_net: DeltaNet, relative: Relative, magnitude: float
) -> None:
    """Gates that are fully open or shut, decays of 0 and of 1, values of 1e5 and of 1e-4."""
    inputs = delta_net(device, 1)
    inputs["qkvz"] *= magnitude
    inputs["ba"] = torch.tensor([[1e3, -1e3, 0, 1, -1, 80, 1e3, -1e3, -30, 90, 0, -1e5]], device=device)
    ours, wanted = clone(inputs), clone(inputs)
    out = gated_delta_net_decode(**ours)
    assert relative(out, gated_delta_net_reference(**wanted)) < BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND


def test_a_slow_decay_is_not_lost(device: torch.device, delta_net: DeltaNet, relative: Relative) -> None:
    """A decay of 1 - 3e-4 that comes from the softplus of -12, 200 times, with nothing new to learn."""
    inputs = delta_net(device, 1, (1, 1), (16, 16))
    for name, value in (("qkvz", 0.0), ("conv_state", 0.0), ("ba", 0.0), ("A_log", 4.0), ("dt_bias", -12.0)):
        inputs[name].fill_(value)
    ours = clone(inputs)
    for _ in range(200):
        gated_delta_net_decode(**ours)
        ours["positions"] += 1  # a plain launch, so that the next call finds what this one leaves
    rate = torch.tensor(4.0, dtype=torch.float64).exp() * torch.tensor(-12.0, dtype=torch.float64).exp().log1p()
    assert relative(ours["state"], inputs["state"].cpu().double() * torch.exp(-200 * rate)) < 2e-5


@pytest.mark.gpu
def test_decode_at_the_real_size_is_the_same_each_time(
    card: torch.device, delta_net: DeltaNet, relative: Relative
) -> None:
    """Qwen3.5-27B; three programs share a key head's past, in whatever order they come."""
    inputs = delta_net(card, 1, (16, 48), (128, 128), torch.bfloat16)
    inputs["qkvz"] = inputs["qkvz"].float()
    inputs["ba"], exact = product(card, 96, 5120, squares=True)
    first, wanted = clone(inputs), clone(inputs, ba=exact.float())
    out = gated_delta_net_decode(**first)
    assert relative(out, gated_delta_net_reference(**wanted)) < BOUND
    for _ in range(100):
        again = clone(inputs)
        assert torch.equal(gated_delta_net_decode(**again), out)
        assert torch.equal(again["state"], first["state"])
        assert torch.equal(again["conv_state"], wanted["conv_state"])


def test_refusals(delta_net: DeltaNet) -> None:
    inputs = delta_net(torch.device("cpu"), 1)

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=match):
            gated_delta_net_decode(**{**inputs, **changed})

    refused(r"got state \[5, 32, 16\] and 256 channels", state=inputs["state"][:5].contiguous())
    refused(r"got state \[6, 32, 24\]", state=torch.zeros(6, 32, 24))
    refused("state: got bfloat16", state=inputs["state"].bfloat16())
    refused(r"qkvz: got float32 \[1, 447\], wanted .* \[any, 448\]", qkvz=inputs["qkvz"][:, 1:].contiguous())
    refused(r"ba: got float32 \[1, 6\]", ba=inputs["ba"][:, :6].contiguous())
    refused(r"conv_weight: got float32 \[256, 3\]", conv_weight=torch.zeros(256, 3))
    refused(r"positions: got int32 \[1\]", positions=inputs["positions"].int())
    refused(r"conv_state: got float32 \[256, 4\]", conv_state=torch.zeros(256, 4))
    refused("got 2 tokens, wanted 1", qkvz=torch.zeros(2, 448), ba=torch.zeros(2, 12), positions=torch.arange(2))
    steps, _ = product(torch.device("cpu"), 12, 64, squares=True)
    refused(r"x: got float32 \[1, 64\]", ba=steps._replace(x=torch.zeros(1, 64)))
    refused(r"weight: got int8 \[10, 64\], wanted .* \[12, 64\]", ba=steps._replace(weight=steps.weight[:10]))
    refused(r"scales: got float32 \[10\]", ba=steps._replace(scales=steps.scales[:10]))
    refused(r"factors: got float32 \[2\]", ba=steps._replace(factors=torch.ones(2)))
    refused(r"squares: got float32 \[2, 4\]", ba=steps._replace(factors=Squares(torch.ones(2, 4), 1e-6)))
