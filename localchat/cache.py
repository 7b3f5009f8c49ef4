"""The memory of one conversation: what every layer keeps of the tokens it has seen.

A cache has a `length`, can be cut back (`truncate`), and can return to an earlier state (`snapshot`, `restore`).
Turn reuse, undo and retry stand on these four and on nothing else. Attention keeps keys and values, a row for each
token, and can be cut anywhere. A gated delta net keeps a state of fixed size that every token changes for good: it
cannot be cut, so its snapshots are copies.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from localchat.config import ModelConfig
from localchat.pinned import host_bytes

_ALIGNMENT = 64  # bytes, where one tensor begins behind another in one piece of memory


@dataclass(eq=False)
class Snapshot:
    """A state to return to: a length, and copies of the recurrent states in host memory.

    Keys and values are append-only, so of them the length is all that is stored.
    """

    length: int
    states: tuple[Tensor, ...] = ()
    valid: bool = True


class KVCache:
    """Preallocated keys and values of the attention layers, and the states of the gated delta net layers.

    keys, values: [attention layers, kv_heads, max_length, head_dim], in `dtype` or, if `int8`, as codes, with `scales`
    fp32 [attention layers, kv_heads, max_length] of each (kernels/rope_kv_write.py); () without `int8`. recurrent: the
    convolution's last inputs [linear layers, kernel, C] in `dtype`, that of position p in row p % kernel, and the
    states fp32 [linear layers, value heads, value dim, key dim]; () where all layers are attention. Memory is taken
    once and stays where it is.

    `length` tokens are valid. A forward writes behind them and changes the states in place; `begin` comes before it
    and `append` after it. In between the states belong to no length.
    """

    def __init__(
        self, config: ModelConfig, max_length: int, *, dtype: torch.dtype, device: torch.device, int8: bool = False
    ) -> None:
        linear = config.layer_types.count("linear_attention")
        attention = len(config.layer_types) - linear
        shape = (attention, config.num_key_value_heads, max_length, config.head_dim)
        self.keys, self.values = (
            torch.empty(shape, dtype=torch.int8 if int8 else dtype, device=device) for _ in range(2)
        )
        self.scales = tuple(torch.empty(shape[:3], dtype=torch.float32, device=device) for _ in range(2 * int8))
        self.recurrent = _zero_states(config, linear, dtype, device) if linear else ()
        attention_layers = iter(zip(*self.rows, strict=True))
        linear_layers = iter(zip(*self.recurrent, strict=True))
        self._layers: list[tuple[Tensor, ...]] = [
            next(linear_layers if kind == "linear_attention" else attention_layers) for kind in config.layer_types
        ]
        self.max_length = max_length
        self.length = 0
        self._whole = True  # the recurrent states are those of `length` tokens
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()

    @property
    def int8(self) -> bool:
        """Whether keys and values are kept as INT8."""
        return bool(self.scales)

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """All that is kept of each token: [attention layers, kv_heads, max_length, ...]."""
        return self.keys, self.values, *self.scales

    @property
    def nbytes(self) -> int:
        """Bytes reserved for keys, values and states."""
        return self.kv_nbytes + self.snapshot_nbytes

    @property
    def kv_nbytes(self) -> int:
        """Bytes reserved for keys and values, with their scales."""
        return sum(rows.nbytes for rows in self.rows)

    @property
    def snapshot_nbytes(self) -> int:
        """Bytes of host memory that one snapshot takes: 0 where all layers are attention."""
        return sum(state.nbytes for state in self.recurrent)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """What one layer keeps.

        Of attention: keys and values [kv_heads, max_length, head_dim], and if INT8 the scales of both [kv_heads,
        max_length]. Of a gated delta net: the convolution's last inputs [kernel, C] and the state fp32 [value heads,
        value dim, key dim].
        """
        return self._layers[index]

    def is_at(self, length: int) -> bool:
        """Whether this is the state after exactly `length` tokens."""
        return self._whole and self.length == length

    def begin(self) -> None:
        """Declare that a forward is about to change the states."""
        self._whole = False

    def append(self, tokens: int) -> None:
        """Declare `tokens` more rows valid, after every layer has written them.

        Raises:
            ValueError: the cache has no room for them.
        """
        if self.length + tokens > self.max_length:
            raise ValueError(f"KVCache.append: got {self.length} + {tokens} tokens, wanted at most {self.max_length}")
        self.length += tokens
        self._whole = True

    def truncate(self, length: int) -> None:
        """Forget everything behind the first `length` tokens; snapshots taken behind them become invalid.

        With recurrent layers the only lengths to go to without a snapshot are 0 and the present one.

        Raises:
            ValueError: length is negative, beyond the current one, or one that a recurrent state cannot be cut to.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache.truncate: got length {length}, wanted 0..{self.length}")
        if self.is_at(length):
            return
        if self.recurrent:
            if length:
                now = self.length if self._whole else "a step that was broken off"
                raise ValueError(
                    f"KVCache.truncate: got length {length}, wanted 0 or a restore: the states are at {now}"
                )
            self._whole = False
            for state in self.recurrent:
                state.zero_()
        self._shorten(length)

    @torch.inference_mode()
    def snapshot(self, reuse: Snapshot | None = None) -> Snapshot:
        """The current state, to `restore` later. Costs nothing where all layers are attention.

        `reuse`: a snapshot that is given up for it, whose memory the new one takes.

        Raises:
            ValueError: a forward was begun and did not end.
            MemoryError: the host has no memory for the copy.
        """
        if self.recurrent and not self._whole:
            raise ValueError("KVCache.snapshot: got the states of a step that was broken off, wanted whole ones")
        states = _host_like(self.recurrent) if reuse is None else reuse.states
        if reuse is not None:
            reuse.valid, reuse.states = False, ()
        for copy, state in zip(states, self.recurrent, strict=True):
            copy.copy_(state, non_blocking=True)  # in the order of the stream, as whatever reads or changes it later
        snapshot = Snapshot(self.length, states)
        self._snapshots.add(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Return to the state of `snapshot`; the states stay at their addresses.

        Raises:
            ValueError: the cache was cut below the snapshot since it was taken.
        """
        if not snapshot.valid:
            raise ValueError(f"KVCache.restore: the cache was cut below the snapshot's length {snapshot.length}")
        self._whole = False
        for state, copy in zip(self.recurrent, snapshot.states, strict=True):
            state.copy_(copy, non_blocking=True)
        self._shorten(snapshot.length)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Forwards may run inside that are not meant to count: afterwards the states are what they were.

        Rows of attention behind `length` are not brought back.
        """
        before = [state.clone() for state in self.recurrent]
        length = self.length
        self.begin()
        try:
            yield
        finally:
            for state, copy in zip(self.recurrent, before, strict=True):
                state.copy_(copy)
            self._shorten(length)

    def _shorten(self, length: int) -> None:
        self.length = length
        self._whole = True
        for snapshot in self._snapshots:
            snapshot.valid &= snapshot.length <= length


def _zero_states(config: ModelConfig, layers: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The states of `layers` gated delta net layers before the first token; the one place that knows their layout."""
    convolution = (layers, config.linear_conv_kernel_dim, config.conv_channels)
    state = (layers, config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
    return (
        torch.zeros(convolution, dtype=dtype, device=device),
        torch.zeros(state, dtype=torch.float32, device=device),
    )


def _host_like(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Uninitialised host memory of these shapes and dtypes, in one piece."""
    if not tensors:
        return ()
    sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors]
    parts = torch.split(host_bytes(sum(sizes), tensors[0].device), sizes)
    return tuple(part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True))
