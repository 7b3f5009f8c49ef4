"""How far the host may run ahead of a card while a prompt is read: Ctrl-C waits for what is queued.

Launches return at once, so without a limit every chunk of a long prompt is queued within milliseconds of the first.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

AHEAD = 0.05  # seconds of queued work; Ctrl-C shall take effect within 0.2
# Until layers have been timed, one is taken for so many seconds a token: a 27B on a small card, behind a long context.
_GUESS = 4e-5
_RECENT = 8  # layers: of a hybrid's two kinds the slower one is among them


class Event(Protocol):
    """What is needed of torch.cuda.Event(enable_timing=True)."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Self) -> float: ...


class Pace:
    """For forwards of up to `tokens` tokens. `new_event` makes an event of the card's stream."""

    def __init__(self, tokens: int, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._queued: deque[Event] = deque()  # marks that the card has not come to, as far as we know; oldest first
        self._seconds: deque[float] = deque([tokens * _GUESS], maxlen=_RECENT)  # of a layer
        self._guessed = True
        self._reached = new_event()
        self._reached.record()

    def mark(self) -> None:
        """To be called when a layer has been launched. Waits while more than AHEAD is queued."""
        event = self._new_event()
        event.record()
        self._queued.append(event)
        while self._queued and (self._queued[0].query() or len(self._queued) * max(self._seconds) > AHEAD):
            self._pass_one()

    def drain(self) -> None:
        """Wait for all that was marked."""
        while self._queued:
            self._pass_one()

    def _pass_one(self) -> None:
        event = self._queued.popleft()
        event.synchronize()
        if self._guessed:
            self._seconds.clear()
            self._guessed = False
        self._seconds.append(self._reached.elapsed_time(event) / 1e3)
        self._reached = event
