"""The memory of one conversation: what every layer keeps of the tokens it has seen.

A cache has a `length`, can be cut back (`truncate`), and can return to an earlier state (`snapshot`, `restore`).
Turn reuse, undo and retry stand on these four and on nothing else. Attention keeps keys and values and can be cut
anywhere; a recurrent layer cannot be cut and will copy its state into the snapshot instead.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from localchat.config import ModelConfig


@dataclass(eq=False)
class Snapshot:
    """A state to return to. Keys and values are append-only, so a length is all that is stored."""

    length: int
    valid: bool = True


class KVCache:
    """Preallocated keys and values of the attention layers: [layers, kv_heads, max_length, head_dim] each.

    Memory is taken once. `length` tokens are valid; a forward writes behind them and then calls `append`. A gated delta
    net layer has a recurrent state instead: the last inputs of its convolution [layers, C, 3], oldest first, and a
    matrix per value head, fp32 [layers, nv, dk, dv].
    """

    def __init__(self, config: ModelConfig, max_length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        kinds = config.layer_types
        self._places = [(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]
        shape = (kinds.count("full_attention"), config.num_key_value_heads, max_length, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        linear, past = kinds.count("linear_attention"), max(0, config.linear_conv_kernel_dim - 1)
        heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
        self.conv_states = torch.zeros(linear, config.conv_channels, past, dtype=dtype, device=device)
        self.states = torch.zeros(linear, *heads, dtype=torch.float32, device=device)
        self.max_length = max_length
        self.length = 0
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys, values and recurrent states."""
        return self.keys.nbytes + self.values.nbytes + self.conv_states.nbytes + self.states.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention layer, [kv_heads, max_length, head_dim]; of a gated delta net its
        convolution's state [C, 3] and its recurrent state fp32 [nv, dk, dv].
        """
        kind, place = self._places[index]
        if kind == "linear_attention":
            return self.conv_states[place], self.states[place]
        return self.keys[place], self.values[place]

    def append(self, tokens: int) -> None:
        """Declare `tokens` more rows valid, after every layer has written them.

        Raises:
            ValueError: the cache has no room for them.
        """
        if self.length + tokens > self.max_length:
            raise ValueError(f"KVCache.append: got {self.length} + {tokens} tokens, wanted at most {self.max_length}")
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget everything behind the first `length` tokens; snapshots taken behind them become invalid.

        Raises:
            ValueError: length is negative or beyond the current one, or neither and there are recurrent states.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache.truncate: got length {length}, wanted 0..{self.length}")
        if self.states.shape[0] and length not in (0, self.length):
            raise ValueError(f"KVCache.truncate: got length {length}, but a recurrent state cannot be cut")
        if length == 0:
            self.conv_states.zero_()
            self.states.zero_()
        self.length = length
        for snapshot in self._snapshots:
            snapshot.valid &= snapshot.length <= length

    def snapshot(self) -> Snapshot:
        """The current state, to `restore` later. Costs nothing."""
        snapshot = Snapshot(self.length)
        self._snapshots.add(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Return to the state of `snapshot`.

        Raises:
            ValueError: the cache was cut below the snapshot since it was taken.
        """
        if not snapshot.valid:
            raise ValueError(f"KVCache.restore: the cache was cut below the snapshot's length {snapshot.length}")
        self.truncate(snapshot.length)
