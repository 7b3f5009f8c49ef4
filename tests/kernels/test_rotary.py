"""kernels/rotary.py: the kernel against fp64 and against localchat/rope.py."""

import pytest
import torch

from localchat.kernels.rotary import rotary_table, rotary_table_reference
from localchat.rope import rotary

pytestmark = pytest.mark.usefixtures("nan_filled")


@pytest.mark.parametrize("half_dim", [32, 64, 13])
@pytest.mark.parametrize("factor", [1.0, 1.2079])
def test_agrees(device: torch.device, half_dim: int, factor: float) -> None:
    positions = torch.tensor([0, 1, 2, 3, 1000, 32_767, 131_072, 262_142, 262_143], device=device)
    inv_freq = 1e6 ** (-torch.arange(half_dim, device=device) / half_dim)
    cos, sin = rotary_table(positions, inv_freq, factor)
    angles = (positions.float()[:, None] * inv_freq).double()  # the fp32 angle is the definition
    exact_cos, exact_sin = angles.cos() * factor, angles.sin() * factor
    assert float((cos - torch.cat((exact_cos, exact_cos), -1)).abs().max()) < 3e-7
    assert float((sin - torch.cat((-exact_sin, exact_sin), -1)).abs().max()) < 3e-7


def test_reference_is_the_models() -> None:
    positions, inv_freq = torch.arange(5), torch.rand(8)
    rope = rotary(positions, inv_freq, 1.5)
    cos, sin = rotary_table_reference(positions, inv_freq, 1.5)
    assert torch.equal(cos, rope.cos)
    assert torch.equal(sin, rope.sin)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="rotary_table: positions: got int32"):
        rotary_table(torch.arange(3, dtype=torch.int32), torch.rand(4), 1.0)
    with pytest.raises(ValueError, match="rotary_table: inv_freq: got float64"):
        rotary_table(torch.arange(3), torch.rand(4).double(), 1.0)
