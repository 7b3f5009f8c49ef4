"""How kernels are launched on which card: what was measured on it, by the name that torch gives it.

The best launch of the INT4 product depends on how the programs of a matrix (one for 16 rows) meet the
multiprocessors of a card, of which three or four programs find room on each. So it is kept for five classes of shapes:

    fewest  two and a half programs a multiprocessor, or less
    few     all programs find room at once, three a multiprocessor
    tail    three a multiprocessor would leave a few programs for later
    many    very many programs
    long    K is long: a program loads for a long time, whatever their number

A card that the table does not know is launched by `default_for` its generation, with its own multiprocessors, until
somebody who has measured it says `use` (localchat/tuning.py does, once a card).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

LONG = 16384  # K from which on a matrix is of the class "long"
CLASSES = ("fewest", "few", "tail", "many", "long")
# What stored measurements are measurements of: raise it where kernels, or the meaning of a setting, change so much that
# a choice made before means nothing.
REVISION = 4


class Fragments(NamedTuple):
    """int4_few_tokens: warps of a program, and tiles that a warp asks for at once.

    body: tiles of a warp in the loop's body at the most: fewer take fewer registers. late: the next kernel may start
    when what this one reads is there, not as soon as all of its programs have started (kernels/pdl.py).
    """

    parts: int
    batch: int
    body: int = 8
    late: bool = False


@dataclass(frozen=True)
class Settings:
    """The launch of int4_few_tokens for each of CLASSES.

    crossover: tokens of a step above which matrices are dequantised for the library's dense product.
    """

    fewest: Fragments
    few: Fragments
    tail: Fragments
    many: Fragments
    long: Fragments
    crossover: int


@dataclass(frozen=True)
class Card:
    """A card's settings, and where they come from: "" is nowhere, they are a default."""

    multiprocessors: int
    settings: Settings
    origin: str = ""

    def fragments(self, n: int, k: int) -> Fragments:
        """How the product with a matrix [n, k] is launched."""
        found: Fragments = getattr(self.settings, shape_class(n, k, self.multiprocessors))
        return found

    def ends_slowly(self, n: int) -> bool:
        """Whether the product with a matrix of n rows has more programs than find room at once (kernels/early.py)."""
        return n // 16 > 4 * self.multiprocessors


DEFAULT = Settings(
    fewest=Fragments(8, 3, late=True), few=Fragments(4, 5, body=7), tail=Fragments(4, 2),
    many=Fragments(4, 3, body=7), long=Fragments(4, 2), crossover=512,
)  # fmt: skip
# Before 9.0 nothing holds loads in batches where they are asked for (int4_few_tokens.py), and with five of them some
# shapes leave 8 bytes on the stack (Triton 3.6, sm_86 and 89).
OLDER = replace(DEFAULT, fewest=Fragments(4, 2), few=Fragments(4, 2), many=Fragments(4, 2))
# `localchat doctor --tune` prints what a line is made from.
TABLE = {
    "NVIDIA H200": Card(132, DEFAULT, "measured 2026-11-30 and 2026-12-01, in whole steps (kernels/NOTES.md)"),
}
_in_use: dict[torch.device, Card] = {}


def shape_class(n: int, k: int, multiprocessors: int) -> str:
    """Which of CLASSES a matrix [n, k] is of."""
    if k >= LONG:
        return "long"
    programs = n // 16
    if 2 * programs <= 5 * multiprocessors:
        return "fewest"
    if programs <= 3 * multiprocessors:
        return "few"
    return "tail" if programs <= 4 * multiprocessors else "many"


def card_of(device: torch.device) -> Card:
    """The settings for `device`; where that is no card, because kernels are interpreted, the H200's."""
    found = _in_use.get(device)
    if found is None:
        found = _in_use[device] = _by_name(device) if device.type == "cuda" else TABLE["NVIDIA H200"]
    return found


def use(device: torch.device, card: Card) -> None:
    """From now on `device`, with its index, is launched so; graphs that are captured already stay as they are."""
    _in_use[device] = card


def default_for(major: int) -> Settings:
    """For a card of compute capability `major`.x that nobody has measured."""
    return DEFAULT if major >= 9 else OLDER


def _by_name(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    known = TABLE.get(properties.name)
    count = properties.multi_processor_count
    return known if known and known.multiprocessors == count else Card(count, default_for(properties.major))
