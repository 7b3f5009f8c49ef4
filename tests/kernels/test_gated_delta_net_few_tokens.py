"""kernels/gated_delta_net_few_tokens.py: a few tokens in one launch, against the reference and against single steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels.gated_delta_net import gated_delta_net_reference
from localchat.kernels.gated_delta_net_decode import gated_delta_net_decode
from localchat.kernels.gated_delta_net_few_tokens import MOST_TOKENS, gated_delta_net_few_tokens
from localchat.kernels.gated_delta_net_prefill import gated_delta_net_prefill
from localchat.kernels.scaled_half import UNIT

Relative = Callable[[Tensor, Tensor], float]
DeltaNet = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("nan_filled")
BOUND = 5e-5
PREFILL = 8e-4  # test_gated_delta_net_prefill.py says why


def clone(inputs: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The same arguments with states of their own."""
    return {**inputs, "conv_state": inputs["conv_state"].clone(), "state": inputs["state"].clone(), **changed}


def rows(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some of the tokens, with the states of all."""
    return {**inputs, **{name: inputs[name][start:stop] for name in ("qkvz", "ba", "positions")}}


def few(inputs: dict[str, Any], **options: Any) -> Tensor:
    """The kernel's result; the counters that it needs are zeros again."""
    arrivals = torch.zeros(16, dtype=torch.int32, device=inputs["state"].device)
    out = gated_delta_net_few_tokens(**inputs, arrivals=arrivals, **options)
    assert not arrivals.any()
    return out


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        ((2, 6), (16, 32), torch.float32),
        ((3, 3), (32, 16), torch.bfloat16),  # nothing shared: qwen3.5-0.8b, 2b
        ((2, 4), (128, 128), torch.bfloat16),  # qwen3.5-4b, 9b
        ((1, 3), (64, 256), torch.float32),
    ],
)
def test_agrees(
    device: torch.device,
    delta_net: DeltaNet,
    relative: Relative,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    inputs = delta_net(device, tokens, heads, dims, dtype)
    ours, halved, wanted = clone(inputs), clone(inputs), clone(inputs, qkvz=inputs["qkvz"].float())
    out, exact = few(ours), gated_delta_net_reference(**wanted)
    assert out.dtype == torch.float32
    assert relative(out, exact) < BOUND
    assert max(relative(*token) for token in zip(out, exact, strict=True)) < 2 * BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND
    assert torch.equal(ours["conv_state"], wanted["conv_state"])
    assert relative(few(halved, units=True).float() * UNIT, out) < 5e-4  # fp16 in the interpreter is cut off
    assert torch.equal(halved["state"], ours["state"])
    assert torch.equal(halved["conv_state"], ours["conv_state"])


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 2**31 - 2, 2**33 + 2])
def test_a_conversation_from_every_place_of_the_ring(
    device: torch.device, delta_net: DeltaNet, relative: Relative, tokens: int, start: int
) -> None:
    """A few tokens, single ones, as many again, a prefill, a few more: as if the reference had gone through it.

    What lies in the row that the first token takes is not looked at, and is not left.
    """
    sizes = (tokens, 1, 1, tokens, 21, tokens, 1)
    inputs = delta_net(device, sum(sizes), (2, 4), (16, 16))
    inputs["positions"] += start - 6
    inputs["conv_state"][start % 4] = float("nan")
    ours, wanted, first, outs = clone(inputs), clone(inputs), 0, []
    exact = gated_delta_net_reference(**wanted)
    for size in sizes:
        part, first = rows(ours, first, first + size), first + size
        if size == 1:
            outs.append(gated_delta_net_decode(**part).clone())  # a plain launch, as between steps
        elif size == 21:
            outs.append(gated_delta_net_prefill(**part))
        else:
            outs.append(few(part))
    assert relative(torch.cat(outs[:4]), exact[: 2 * tokens + 2]) < BOUND
    assert relative(torch.cat(outs), exact) < PREFILL
    assert relative(ours["state"], wanted["state"]) < PREFILL
    assert torch.equal(ours["conv_state"], wanted["conv_state"])


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 16])
def test_at_once_or_one_by_one(device: torch.device, delta_net: DeltaNet, relative: Relative, tokens: int) -> None:
    """The same states to the rounding of fp32; not to the last bit, as sums are made in another order."""
    inputs = delta_net(device, tokens, (2, 6), (32, 32), torch.bfloat16)
    together, alone = clone(inputs), clone(inputs)
    out = few(together)
    single = [gated_delta_net_decode(**rows(alone, t, t + 1)).clone() for t in range(tokens)]
    assert relative(out, torch.cat(single)) < 2e-6
    assert relative(together["state"], alone["state"]) < 2e-6
    assert torch.equal(together["conv_state"], alone["conv_state"])


def test_a_gap_between_rows_is_not_read(device: torch.device, delta_net: DeltaNet, relative: Relative) -> None:
    """Columns of wider products."""
    inputs = delta_net(device, 11)
    ours, wanted = clone(inputs), clone(inputs)
    for name in ("qkvz", "ba"):
        wide = torch.cat((inputs[name], torch.full_like(inputs[name], float("nan"))), 1)
        ours[name] = wide[:, : inputs[name].shape[1]]
    assert relative(few(ours), gated_delta_net_reference(**wanted)) < BOUND
    assert torch.equal(ours["conv_state"], wanted["conv_state"])


@pytest.mark.parametrize("magnitude", [1e-4, 1e5])
def test_extreme_inputs(device: torch.device, delta_net: DeltaNet, relative: Relative, magnitude: float) -> None:
    """Gates that are fully open or shut, decays of 0 and of 1, values of 1e5 and of 1e-4."""
    inputs = delta_net(device, 7)
    inputs["qkvz"] *= magnitude
    extremes = torch.tensor([1e3, -1e3, 0, 1, -1, 80, 1e3, -1e3, -30, 90, 0, -1e5], device=device)
    inputs["ba"] = torch.stack([extremes.roll(5 * t) for t in range(7)])
    ours, wanted = clone(inputs), clone(inputs)
    assert relative(few(ours), gated_delta_net_reference(**wanted)) < BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 3, 8, 16])
def test_the_real_size_is_the_same_each_time(
    card: torch.device, delta_net: DeltaNet, relative: Relative, tokens: int
) -> None:
    """Qwen3.5-27B; three programs share a key head's past and one of them, whoever comes last, changes it."""
    inputs = delta_net(card, tokens, (16, 48), (128, 128), torch.bfloat16)
    inputs["qkvz"] = inputs["qkvz"].float()
    first, wanted = clone(inputs), clone(inputs)
    out, exact = few(first), gated_delta_net_reference(**wanted)
    assert relative(out, exact) < BOUND
    assert relative(first["state"], wanted["state"]) < BOUND
    assert torch.equal(first["conv_state"], wanted["conv_state"])
    for _ in range(200):
        again = clone(inputs)
        assert torch.equal(few(again), out)
        assert torch.equal(again["state"], first["state"])
        assert torch.equal(again["conv_state"], first["conv_state"])


def test_refusals(delta_net: DeltaNet) -> None:
    inputs = delta_net(torch.device("cpu"), 3)
    inputs["arrivals"] = torch.zeros(2, dtype=torch.int32)

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match="gated_delta_net_few_tokens: " + match):
            gated_delta_net_few_tokens(**{**inputs, **changed})

    many = delta_net(torch.device("cpu"), MOST_TOKENS + 1)
    refused("got 17 tokens, wanted 1 to 16", **{name: many[name] for name in ("qkvz", "ba", "positions")})
    refused(r"ba: got float32 \[2, 12\], wanted .* \[3, 12\]", ba=inputs["ba"][:2])
    refused("got 1 arrivals, wanted one per key head", arrivals=torch.zeros(1, dtype=torch.int32))
    refused(r"arrivals: got int64 \[2\]", arrivals=torch.zeros(2, dtype=torch.int64))
