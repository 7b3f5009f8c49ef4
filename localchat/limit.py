"""How near decoding comes to what the card's memory allows: every token reads the weights, and its context, once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localchat.model import Model

_MEASURED_BYTES = 256_000_000  # enough to miss every card's cache, little enough for a card that is nearly full


@dataclass(frozen=True)
class CardLimit:
    """`bandwidth` in bytes per second; a token reads `weights` bytes, and `per_position` for each token before it."""

    bandwidth: float
    weights: int
    per_position: int

    def share(self, rate: float, context: int) -> float:
        """Which part of the limit `rate` tokens per second are, behind `context` tokens."""
        return rate * (self.weights + context * self.per_position) / self.bandwidth


def card_limit(model: "Model", *, int8_kv: bool = False) -> CardLimit | None:
    """The limit of the card that holds `model`; None on a processor, and where nobody knows it.

    int8_kv: its keys and values are kept as INT8.
    """
    if model.device.type != "cuda":
        return None
    import torch

    from localchat.bench import bytes_per_token
    from localchat.kernels.read_bandwidth import read_bandwidth, sheet_bandwidth
    from localchat.ledger import kv_bytes_per_token, state_bytes

    bandwidth = sheet_bandwidth(torch.cuda.get_device_name(model.device))
    if bandwidth is None:
        try:
            bandwidth = read_bandwidth(_MEASURED_BYTES)
        except torch.OutOfMemoryError:
            return None
    states = 2 * state_bytes(model.config, "cuda")  # read and written
    per_position = kv_bytes_per_token(model.config, "cuda", int8_kv=int8_kv)
    return CardLimit(bandwidth, bytes_per_token(model) + states, per_position)
