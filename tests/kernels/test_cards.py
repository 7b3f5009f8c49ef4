"""kernels/cards.py: which settings a card gets."""

from types import SimpleNamespace

import pytest
import torch

from localchat.kernels import cards
from localchat.kernels.cards import DEFAULT, OLDER, TABLE, Card, Fragments, card_of, shape_class, use


@pytest.fixture(autouse=True)
def _nothing_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_in_use", {})


@pytest.mark.parametrize(
    "n", [16, 48, 1024, 5120, 5280, 5281, 5296, 6336, 6337, 6352, 7168, 8447, 8448, 8463, 8464, 34816, 248320]
)
@pytest.mark.parametrize("k", [96, 5120, 16383, 16384, 27648])
def test_the_h200_is_launched_as_it_was_measured(n: int, k: int) -> None:
    """As the rule said that came out of the measurements of kernels/NOTES.md."""
    programs = n // 16
    if k >= 16384 or 3 * 132 < programs <= 4 * 132:
        wanted = Fragments(4, 2, 8, False)
    elif programs <= 2.5 * 132:
        wanted = Fragments(8, 3, 8, True)
    else:
        wanted = Fragments(4, 5 if programs <= 3 * 132 else 3, 7, False)
    assert TABLE["NVIDIA H200"].fragments(n, k) == wanted
    assert card_of(torch.device("cpu")).fragments(n, k) == wanted
    assert TABLE["NVIDIA H200"].settings.crossover == 512


def test_classes_of_shapes() -> None:
    shapes = [
        (205 * 16, 5120),
        (206 * 16, 5120),
        (3 * 16 * 82, 5120),
        (3 * 16 * 82 + 16, 5120),
        (4 * 16 * 82, 5120),
        (4 * 16 * 82 + 16, 5120),
        (16, 16384),
    ]
    assert [shape_class(n, k, 82) for n, k in shapes] == ["fewest", "few", "few", "tail", "tail", "many", "long"]


def card(monkeypatch: pytest.MonkeyPatch, name: str, multiprocessors: int, major: int = 9) -> Card:
    properties = SimpleNamespace(name=name, multi_processor_count=multiprocessors, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    return card_of(torch.device("cuda:0"))


def test_a_card_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert card(monkeypatch, "NVIDIA H200", 132) is TABLE["NVIDIA H200"]


def test_an_unknown_card_or_a_part_of_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count, major, wanted in (
        ("NVIDIA GeForce RTX 4090", 128, 8, OLDER), ("NVIDIA GeForce RTX 5090", 170, 12, DEFAULT),
        ("NVIDIA H200", 16, 9, DEFAULT),
    ):  # fmt: skip
        monkeypatch.setattr(cards, "_in_use", {})
        assert card(monkeypatch, name, count, major) == Card(count, wanted)


def test_what_was_measured_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    card(monkeypatch, "NVIDIA GeForce RTX 4090", 128)
    measured = Card(128, DEFAULT, "measured here")
    use(device, measured)
    assert card_of(device) is measured
