"""Which states of a conversation are kept, so that a model that cannot be cut back can return to an earlier turn.

A snapshot of a 27B is 155 MB, so their number is bounded. While there is room all stay. After that the newest
KEPT_NEWEST stay, and of the older ones that one goes whose loss costs least for its age: it would leave the smallest
gap between its neighbours, measured by its distance from the newest. What remains is spaced exponentially: a return
by n tokens reads again some fraction of n, however long ago it was.
"""

from localchat.cache import KVCache, Snapshot

KEPT_NEWEST = 8


class Snapshots:
    """Snapshots of `cache` in order of length, within `budget` bytes of host memory.

    Memory is taken with the first ones and used again: that of snapshots behind a cut, and of those given up.
    """

    def __init__(self, cache: KVCache, budget: int) -> None:
        self._cache = cache
        self._capacity = budget // cache.snapshot_nbytes if cache.recurrent else 0
        self._kept: list[Snapshot] = []
        self._spare: list[Snapshot] = []

    @property
    def lengths(self) -> list[int]:
        """The lengths that can be returned to."""
        return [snapshot.length for snapshot in self._kept if snapshot.valid]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return (len(self._kept) + len(self._spare)) * self._cache.snapshot_nbytes

    def take(self) -> None:
        """Keep the present state, where the budget has room for any."""
        self._sort_out()
        if self._kept and self._kept[-1].length == self._cache.length:
            return
        if not self._spare and len(self._kept) < self._capacity:
            try:
                self._kept.append(self._cache.snapshot())
                return
            except MemoryError:  # the machine has less than the budget: go on with what there is
                self._capacity = len(self._kept)
        if not self._spare and self._kept:
            self._spare.append(self._kept.pop(self._least_useful()))
        if self._spare:
            self._kept.append(self._cache.snapshot(reuse=self._spare.pop()))

    def newest(self, length: int) -> Snapshot | None:
        """The snapshot of the most tokens that are at most `length`."""
        self._sort_out()
        return next((snapshot for snapshot in reversed(self._kept) if snapshot.length <= length), None)

    def _sort_out(self) -> None:
        """Snapshots behind a cut are of a conversation that took another course."""
        self._spare += [snapshot for snapshot in self._kept if not snapshot.valid]
        self._kept = [snapshot for snapshot in self._kept if snapshot.valid]

    def _least_useful(self) -> int:
        """Which one to give up before another is taken."""
        now = self._cache.length
        lengths = [0, *(snapshot.length for snapshot in self._kept), now]
        candidates = range(1, max(1, len(self._kept) + 1 - KEPT_NEWEST) + 1)
        return min(candidates, key=lambda i: (lengths[i + 1] - lengths[i - 1]) / (now - lengths[i])) - 1
