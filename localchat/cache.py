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
    """Preallocated keys and values: [layers, kv_heads, max_length, head_dim] each.

    Memory is taken once. `length` tokens are valid; a forward writes behind them and then calls `append`.
    """

    def __init__(self, config: ModelConfig, max_length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, config.num_key_value_heads, max_length, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.max_length = max_length
        self.length = 0
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [kv_heads, max_length, head_dim]."""
        return self.keys[index], self.values[index]

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
            ValueError: length is negative or beyond the current one.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache.truncate: got length {length}, wanted 0..{self.length}")
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
