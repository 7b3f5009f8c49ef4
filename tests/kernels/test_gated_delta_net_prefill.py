"""kernels/gated_delta_net_prefill.py: many tokens at once against the reference, which takes them one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.kernels.gated_delta_net import gated_delta_net_reference
from localchat.kernels.gated_delta_net_decode import gated_delta_net_decode
from localchat.kernels.gated_delta_net_prefill import gated_delta_net_prefill
from localchat.kernels.scaled_half import UNIT

Relative = Callable[[Tensor, Tensor], float]
DeltaNet = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("nan_filled")
# The operands of the products have 11 bits, each rounding of which is an error of 2e-4; there are seven in a chain.
BOUND = 8e-4
# Where keys repeat and nothing decays, the state is what a long sum leaves over: still within that of a bf16 output.
HARD = 2.5e-3


def clone(inputs: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The same arguments with states of their own."""
    return {**inputs, "conv_state": inputs["conv_state"].clone(), "state": inputs["state"].clone(), **changed}


def rows(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some of the tokens, with the states of all."""
    return {**inputs, **{name: inputs[name][start:stop] for name in ("qkvz", "ba", "positions")}}


@pytest.mark.parametrize(
    ("tokens", "heads", "dims", "dtype"),
    [
        (1, (1, 2), (16, 16), torch.float32),
        (2, (1, 2), (16, 32), torch.float32),  # of the convolution's past two rows stay
        (3, (2, 2), (32, 16), torch.bfloat16),
        (63, (1, 1), (16, 16), torch.bfloat16),
        (64, (2, 6), (16, 32), torch.float32),
        (130, (1, 2), (16, 64), torch.float32),  # three chunks, two parts of the state
        (200, (1, 3), (128, 128), torch.bfloat16),  # a key head of qwen3.5-27b
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
    ours, wanted, rounded = clone(inputs), clone(inputs, qkvz=inputs["qkvz"].float()), clone(inputs)
    out, exact = gated_delta_net_prefill(**ours), gated_delta_net_reference(**wanted)
    assert out.dtype == torch.float32
    assert relative(out, exact) < BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND
    assert torch.equal(ours["conv_state"], wanted["conv_state"])
    in_bf16 = gated_delta_net_prefill(**rounded, dtype=torch.bfloat16)
    assert bool(((in_bf16.float() - out).abs() <= 1.01 * 2.0**-8 * out.abs()).all())  # rounded once
    assert relative(in_bf16, exact) < BOUND + 2**-8  # what bf16 rounds off, at the most
    assert torch.equal(rounded["state"], ours["state"])
    in_fp16 = gated_delta_net_prefill(**clone(inputs), dtype=torch.float16)
    assert relative(in_fp16.float() * UNIT, out) < 1e-3  # the interpreter cuts bits off


def test_columns_of_wider_products(device: torch.device, delta_net: DeltaNet, relative: Relative) -> None:
    inputs = delta_net(device, 40)
    ours, wanted = clone(inputs), clone(inputs)
    for name in ("qkvz", "ba"):
        ours[name] = torch.cat((inputs[name], torch.full_like(inputs[name], float("nan"))), 1)[
            :, : inputs[name].shape[1]
        ]
    assert relative(gated_delta_net_prefill(**ours), gated_delta_net_reference(**wanted)) < BOUND


def test_a_conversation(device: torch.device, delta_net: DeltaNet, relative: Relative) -> None:
    """Prefill, a few tokens, another prefill, a few more: as if the reference had gone through all of it."""
    inputs = delta_net(device, 110)
    ours, wanted = clone(inputs), clone(inputs)
    exact = gated_delta_net_reference(**wanted)
    outs, start = [], 0
    for stop in (70, 71, 72, 73, 75, 108, 109, 110):
        if stop - start > 1:
            outs.append(gated_delta_net_prefill(**rows(ours, start, stop)))
        else:
            outs.append(gated_delta_net_decode(**rows(ours, start, stop)).clone())  # a plain launch, as between steps
        start = stop
    assert relative(torch.cat(outs), exact) < BOUND
    assert relative(outs[-1], exact[-1:]) < BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND
    assert torch.equal(ours["conv_state"], wanted["conv_state"])


def test_chunks_are_the_whole_bit_for_bit(device: torch.device, delta_net: DeltaNet) -> None:
    """Of a convolution whose terms cancel, too, where another order of its sum would show."""
    inputs = delta_net(device, 640, (1, 2), (16, 16))
    inputs["qkvz"][:, : inputs["conv_weight"].shape[0]] += 100
    inputs["conv_state"] += 100
    inputs["conv_weight"].copy_(torch.tensor([0.77, -1.13, 0.91, -0.54]))
    whole, parts = clone(inputs), clone(inputs)
    out = gated_delta_net_prefill(**whole)
    for start in range(0, 640, 64):
        assert torch.equal(gated_delta_net_prefill(**rows(parts, start, start + 64)), out[start : start + 64])
    assert torch.equal(parts["state"], whole["state"])


@pytest.mark.parametrize("values", [1e-6, 1e5])
@pytest.mark.parametrize("case", ["same keys", "wild gates", "first state", "one loud token"])
def test_hard_inputs(device: torch.device, delta_net: DeltaNet, relative: Relative, case: str, values: float) -> None:
    """A power series of the triangle would overflow on repeated keys, quotients of decays on wild gates; fp16 ends at
    65,504 and has no precision below 1e-5."""
    inputs = delta_net(device, 150, (1, 2), (32, 32))
    conv, ba = inputs["conv_weight"], inputs["ba"]
    conv[64:128] *= values  # the channels of v
    inputs["state"] *= values
    inputs["eps"] *= values**2  # the norm hides nothing of it, and does not blow up what the gates have shut
    if case == "same keys":
        inputs["qkvz"][:, :64] = inputs["qkvz"][0, :64]
        inputs["conv_state"][:, :64] = inputs["qkvz"][0, :64]
        ba[:, :2] = 20.0  # beta is 1
        inputs["A_log"] -= 9
    elif case == "wild gates":
        ba *= 60
    elif case == "first state":
        inputs["state"] *= 1e3
    else:
        inputs["qkvz"][70, 64:128] *= 1e3
    ours, wanted = clone(inputs), clone(inputs)
    out, exact = gated_delta_net_prefill(**ours), gated_delta_net_reference(**wanted)
    assert relative(out, exact) < HARD
    assert relative(ours["state"], wanted["state"]) < HARD


def test_slow_decays_behind_wild_ones(device: torch.device, delta_net: DeltaNet, relative: Relative) -> None:
    """What lies between two tokens counts, not what a chunk's sums up to them round off: here 2e-3 of 30,000."""
    inputs = delta_net(device, 64, (1, 2), (32, 32))
    inputs["A_log"].fill_(0.0)
    inputs["dt_bias"].fill_(0.0)
    inputs["ba"][:, :2] = -2.0  # steps are small: what is seen came from many tokens
    inputs["ba"][:40, 2:] = 777.0 + torch.rand(40, 2, device=device)
    inputs["ba"][40:, 2:] = -3.0
    inputs["qkvz"][40:, :32] = inputs["qkvz"][40, :32]
    ours, wanted = clone(inputs), clone(inputs)
    out, exact = gated_delta_net_prefill(**ours), gated_delta_net_reference(**wanted)
    assert relative(out[40:], exact[40:]) < BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 300, 2048])
def test_agrees_at_the_real_size(card: torch.device, delta_net: DeltaNet, relative: Relative, tokens: int) -> None:
    """Qwen3.5-27B."""
    inputs = delta_net(card, tokens, (16, 48), (128, 128), torch.bfloat16)
    ours, again, wanted = clone(inputs), clone(inputs), clone(inputs, qkvz=inputs["qkvz"].float())
    out, exact = gated_delta_net_prefill(**ours), gated_delta_net_reference(**wanted)
    assert relative(out, exact) < BOUND
    assert relative(ours["state"], wanted["state"]) < BOUND
    assert torch.equal(ours["conv_state"], wanted["conv_state"])
    assert torch.equal(out, gated_delta_net_prefill(**again))
    assert torch.equal(ours["state"], again["state"])


def test_refusals(delta_net: DeltaNet) -> None:
    inputs = delta_net(torch.device("cpu"), 3)
    with pytest.raises(ValueError, match=r"gated_delta_net_prefill: got dtype torch\.float64"):
        gated_delta_net_prefill(**inputs, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"gated_delta_net_prefill: ba: got float32 \[2, 12\]"):
        gated_delta_net_prefill(**{**inputs, "ba": inputs["ba"][:2]})
    with pytest.raises(ValueError, match=r"gated_delta_net_prefill: qkvz: got .*not contiguous"):
        gated_delta_net_prefill(**{**inputs, "qkvz": torch.zeros(3, 896)[:, ::2]})
    with pytest.raises(ValueError, match=r"gated_delta_net_prefill: positions: got int64 \[2\], wanted .* \[3\]"):
        gated_delta_net_prefill(**{**inputs, "positions": inputs["positions"][:2]})
