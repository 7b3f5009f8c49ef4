"""Launch settings for a card that kernels/cards.py does not know: measured once, in seconds, and kept in the cache.

    <cache>/cards/<name>-<hash>.json        what was measured; the hash names everything that a measurement holds for:
    <cache>/cards/<name>-<hash>.json.lock   card, packed format, kernels, Triton. The driver is none of it.

`settle` is for the commands that run a model: it measures where nothing is kept, so at the first start and never again.
`adopt` only takes what is kept; every table of operations for a card begins with it. What lies there damaged is
measured again. Who measures holds the lock, so that a second process waits and takes what the first has found.
"""

import datetime
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

from localchat import store
from localchat.errors import UserError
from localchat.kernels.cards import CLASSES, LONG, REVISION, Card, Fragments, Settings, card_of, use
from localchat.kernels.int4_packing import LAYOUT, VERSION
from localchat.stopwatch import Stopwatch, Trial

CANDIDATES = (
    Fragments(4, 5, body=7), Fragments(4, 3, body=7), Fragments(4, 2), Fragments(8, 3, late=True),
    Fragments(8, 2, late=True), Fragments(2, 5),
)  # fmt: skip
_LEAST = 32  # tokens that the packed product always serves
CROSSINGS = (64, 128, 256, 512)  # and up to which it may be the better one
# What another launch than the default has to gain, or it is noise.
_GAIN = 0.02
_HIDDEN = 5120
Watch = Callable[[Trial], float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Identity:
    """What a measurement holds for."""

    name: str
    multiprocessors: int
    layout: str
    version: int
    revision: int
    triton: str

    @property
    def path(self) -> Path:
        """Where it is kept."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:60] or "card"
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:10]
        return store.cache_dir() / "cards" / f"{slug}-{digest}.json"


@dataclass(frozen=True)
class Measured:
    """Settings, the day and the seconds that it took to find them, and every trial: what it was and its time in us."""

    settings: Settings
    date: str
    seconds: float
    trials: tuple[tuple[str, float | None], ...]

    def card(self, identity: Identity) -> Card:
        """As the kernels take it."""
        origin = f"measured {self.date} in {self.seconds:.0f} s, kept in {identity.path}"
        return Card(identity.multiprocessors, self.settings, origin)


def settle(device: str, say: Callable[[str], None]) -> None:
    """See to it that a card is launched by settings that were measured on one like it. Nothing to do elsewhere."""
    where = torch.device(device)
    if where.type != "cuda" or card_of(where).origin:
        return
    identity = identity_of(where)
    found = _settled(identity, lambda: measure(card_of(where), Stopwatch(where)), say)
    torch.cuda.empty_cache()
    if found:
        use(where, found.card(identity))


def adopt(device: torch.device) -> None:
    """Take what an earlier `settle` has kept for this card, if it did."""
    where = torch.device(device.type, torch.cuda.current_device()) if device.index is None else device
    if not card_of(where).origin:
        identity = identity_of(where)
        if found := stored(identity):
            use(where, found.card(identity))


def origin(device: torch.device) -> str:
    """Where the settings of a card, with its index, come from; "" where nobody has measured them."""
    adopt(device)
    return card_of(device).origin


def identity_of(device: torch.device) -> Identity:
    """What a measurement on `device`, made now, would hold for."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    count = properties.multi_processor_count
    return Identity(properties.name, count, LAYOUT, VERSION, REVISION, str(triton.__version__))


def _settled(
    identity: Identity, measure_now: Callable[[], Measured | None], say: Callable[[str], None]
) -> Measured | None:
    """What is kept, or else what `measure_now` finds, which is kept; None: measuring is not possible here."""
    if found := stored(identity):
        return found
    try:
        identity.path.parent.mkdir(parents=True, exist_ok=True)
        if store.is_locked(identity.path):
            say(f"another localchat is measuring {identity.name}: waiting for it")
        with store.locked(identity.path):
            return stored(identity) or _measured_and_kept(identity, measure_now, say)
    except (OSError, UserError):  # a cache that cannot be written: measuring would come again at each start
        return None


def _measured_and_kept(
    identity: Identity, measure_now: Callable[[], Measured | None], say: Callable[[str], None]
) -> Measured | None:
    say(f"measuring {identity.name}, once: how its kernels are launched best (some ten seconds)")
    try:
        found = measure_now()
    except torch.OutOfMemoryError:
        say("the card is too full to measure anything: its kernels are launched as on others")
        return None
    if found:
        keep(identity, found)
    return found


def measure(card: Card, watch: Watch) -> Measured | None:
    """Try the candidates against what the card has now; None where not one could be timed."""
    start = time.perf_counter()
    trials: list[tuple[str, float | None]] = []

    def seconds(what: str, trial: Trial) -> float | None:
        taken = watch(trial)
        trials.append((f"{what} {trial.n} x {trial.k}, {trial.tokens} tokens", None if taken is None else 1e6 * taken))
        return taken

    launches = {}
    for name, (n, k) in shapes(card.multiprocessors).items():
        times = {
            fragments: seconds(f"{name}: {fragments.parts} parts, batch {fragments.batch};", Trial(n, k, 1, fragments))
            for fragments in CANDIDATES
        }
        launches[name] = best(times, getattr(card.settings, name))
    if all(taken is None for _, taken in trials):
        return None
    n, k = shapes(card.multiprocessors)["many"]
    crossover = _LEAST
    for tokens in CROSSINGS:
        packed = seconds("crossover: packed;", Trial(n, k, tokens))
        dense = seconds("crossover: dequantised;", Trial(n, k, tokens, dense=True))
        if packed is None or (dense is not None and dense < packed):
            break
        crossover = tokens
    settings = Settings(**launches, crossover=crossover)
    return Measured(settings, datetime.date.today().isoformat(), time.perf_counter() - start, tuple(trials))


def shapes(multiprocessors: int) -> dict[str, tuple[int, int]]:
    """A matrix [n, k] of each class, of the size that large models have."""
    by_programs = {"fewest": 2.4, "few": 2.8, "tail": 3.5, "many": 8.0}
    found = {name: (16 * int(count * multiprocessors), _HIDDEN) for name, count in by_programs.items()}
    return found | {"long": (_HIDDEN, LONG + 1024)}


def best(times: Mapping[Fragments, float | None], default: Fragments) -> Fragments:
    """The fastest, or the default where that gains next to nothing; who could not run has None."""
    able = {fragments: taken for fragments, taken in times.items() if taken is not None}
    if not able:
        return default
    fastest = min(able, key=lambda fragments: able[fragments])
    return default if default in able and able[default] * (1 - _GAIN) < able[fastest] else fastest


def stored(identity: Identity) -> Measured | None:
    """What is kept for exactly this; None where there is nothing, or nothing that makes sense."""
    try:
        document = json.loads(identity.path.read_text(encoding="utf-8"))
        if document["identity"] != asdict(identity):
            return None
        settings = document["settings"]
        launches = {name: _one_of(CANDIDATES, tuple(settings[name])) for name in CLASSES}
        crossover = _one_of((_LEAST, *CROSSINGS), settings["crossover"])
        trials = tuple((str(what), None if us is None else float(us)) for what, us in document["trials"])
        seconds, date = float(document["seconds"]), datetime.date.fromisoformat(document["date"])
        return Measured(Settings(**launches, crossover=crossover), date.isoformat(), seconds, trials)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None


def _one_of(choices: Sequence[T], value: object) -> T:
    """The choice that equals `value`, of JSON's types.

    Raises:
        ValueError: there is none.
    """
    return choices[choices.index(value)]  # type: ignore[arg-type]


def keep(identity: Identity, measured: Measured) -> None:
    """Write it, whole or not at all.

    Raises:
        OSError: the cache cannot be written.
    """
    document = {"identity": asdict(identity), **asdict(measured)}
    identity.path.parent.mkdir(parents=True, exist_ok=True)
    partial = identity.path.with_name(f"{identity.path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(identity.path)
    finally:
        partial.unlink(missing_ok=True)
