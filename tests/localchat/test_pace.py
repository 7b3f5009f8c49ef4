"""The host runs ahead of a card by a limited amount of work: a card whose layers take a known time."""

from typing import Self

import pytest

from localchat.pace import AHEAD, Pace


class Card:
    """A stream on which each event comes `layer` seconds of work behind the one before; launching takes no time."""

    def __init__(self, layer: float) -> None:
        self.layer = layer
        self.now = self.end = 0.0  # when everything queued will be done
        self.most_queued = 0.0

    def event(self) -> "CardEvent":
        return CardEvent(self)


class CardEvent:
    def __init__(self, card: Card) -> None:
        self._card, self._at = card, 0.0

    def record(self) -> None:
        card = self._card
        self._at = card.end = max(card.end, card.now)

    def query(self) -> bool:
        return self._at <= self._card.now

    def synchronize(self) -> None:
        self._card.now = max(self._card.now, self._at)

    def elapsed_time(self, end_event: Self) -> float:
        return (end_event._at - self._at) * 1e3


def launch(card: Card, pace: Pace, layers: int) -> None:
    for _ in range(layers):
        card.end = max(card.end, card.now) + card.layer
        pace.mark()
        card.most_queued = max(card.most_queued, card.end - card.now)


@pytest.mark.parametrize(("tokens", "layer"), [(200, 0.0005), (2048, 0.003), (2048, 0.04), (256, 0.01), (2048, 0.5)])
def test_no_more_is_queued_than_the_limit_or_one_layer(tokens: int, layer: float) -> None:
    card = Card(layer)
    pace = Pace(tokens, card.event)
    launch(card, pace, 200)
    assert card.most_queued <= max(AHEAD, layer) + 1e-9
    if layer < AHEAD / 4:  # and the card is never idle
        assert card.most_queued > AHEAD / 2
    pace.drain()
    assert card.now == pytest.approx(card.end) == pytest.approx(200 * layer)


def test_layers_that_become_slower_are_noticed() -> None:
    """As attention does over a long prompt."""
    card = Card(0.002)
    pace = Pace(2048, card.event)
    launch(card, pace, 50)
    card.layer, card.most_queued = 0.02, 0.0
    launch(card, pace, 50)
    assert card.end - card.now <= AHEAD + 1e-9
