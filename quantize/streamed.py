"""A checkpoint of the hub as a conversion's source while its files are still on their way.

The files come in their order and a step is taken when the last file that it needs is here; a file goes when no later
step needs it. What is written is the same whichever files were here already.
"""

from collections.abc import Collection, Sequence

from localchat.quantize.hf import HFSource, open_hf
from localchat.quantize.source import Arrival
from localchat.shard_feed import AHEAD
from localchat.streamed_shards import StreamedShards


class _Stream(Arrival):
    """See `Arrival`: the files that a feed brings, by the tensors of a source."""

    def __init__(self, source: HFSource, shards: StreamedShards) -> None:
        self._feed = shards.feed
        self._files = {name: {path.name for path in source.files_of(name)} for name in source.shapes}
        self._place = {file: i for i, file in enumerate(self._feed.files)}

    def rank(self, name: str) -> int:
        """See Arrival.rank."""
        return max(self._ranks(name))

    def most_bytes(self, steps: Sequence[Collection[str]]) -> int:
        """See Arrival.most_bytes: those still needed, and those that the feed may fetch ahead of the reading."""
        ranks = [{rank for name in names for rank in self._ranks(name)} for names in steps]
        last_step = {rank: i for i, found in enumerate(ranks) for rank in found}
        most = 0
        for i in range(len(ranks)):
            reading = max(ranks[min(i + 1, len(ranks) - 1)])  # one step ahead; they are in the files' order
            here = [rank for rank, last in last_step.items() if last >= i - 1 and rank <= reading + AHEAD]
            most = max(most, sum(self._feed.size(self._feed.files[rank]) for rank in here))
        return most

    def keep(self, names: Collection[str]) -> None:
        """See Arrival.keep."""
        self._feed.keep({file for name in names for file in self._files[name]})

    def arrived_bytes(self) -> int:
        """See Arrival.arrived_bytes."""
        return self._feed.arrived_bytes()

    def stop(self) -> None:
        """See Arrival.stop."""
        self._feed.close()

    def _ranks(self, name: str) -> list[int]:
        """The places of the files that hold a tensor, or what a quantised one is made of."""
        return [self._place[file] for file in self._files[name]]


def open_streamed(shards: StreamedShards) -> HFSource:
    """Open a model whose weight files are on their way.

    Raises:
        BadCheckpoint, UserError: see open_hf.
    """
    source = open_hf(shards.texts, shards)
    source.arrival = _Stream(source, shards)
    return source
