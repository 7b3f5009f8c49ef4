"""tuning.py: an unknown card is measured once, and what was measured is believed only where it holds."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localchat import store, tune_command, tuning
from localchat.kernels import cards
from localchat.kernels.cards import CLASSES, DEFAULT, TABLE, Card, Fragments, card_of, shape_class
from localchat.stopwatch import Trial
from localchat.tuning import Identity, Measured, best, keep, measure, shapes, stored

RTX = Identity("NVIDIA GeForce RTX 4090", 128, "tiles", 3, 1, "3.6.0")
SETTINGS = replace(DEFAULT, long=Fragments(8, 2, late=True), crossover=64)
FOUND = Measured(SETTINGS, "2026-12-01", 6.2, (("a", 1.5), ("b", None)))


@pytest.fixture(autouse=True)
def _nothing_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_in_use", {})


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], torch.device]:
    """card("RTX", 128): torch sees one of that name; measuring it gives FOUND."""

    def make(name: str, count: int) -> torch.device:
        properties = SimpleNamespace(name=name, multi_processor_count=count, major=8)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(tuning, "Stopwatch", lambda device: device)
        monkeypatch.setattr(tuning, "measure", lambda _card, _watch: FOUND)
        return torch.device("cuda:0")

    return make


@pytest.mark.parametrize("count", [16, 82, 128, 132, 170])
def test_each_class_is_measured_on_a_matrix_of_it(count: int) -> None:
    found = shapes(count)
    assert tuple(found) == CLASSES
    for name, (n, k) in found.items():
        assert (n % 16, k % 128) == (0, 0)
        assert shape_class(n, k, count) == name


def test_the_fastest_wins_by_more_than_noise() -> None:
    one, two, three = Fragments(4, 5), Fragments(4, 2), Fragments(8, 2)
    assert best({one: 100.0, two: 97.0, three: 98.5}, one) == two
    assert best({one: 100.0, two: 98.5, three: None}, one) == one
    assert best({one: None, two: 98.5, three: 98.4}, one) == three
    assert best({one: None, two: None}, one) == one


def test_what_is_measured_is_chosen() -> None:
    """Eight parts are best where K is long, two where there are few programs; more than 64 tokens go the other way."""

    def watch(trial: Trial) -> float | None:
        if trial.fragments == Fragments(4, 2):
            return None  # out of resources
        if trial.fragments:
            good = (8, 2) if trial.k > 16384 else (2, 5) if trial.n == 16 * 358 else (4, 5)
            return 1e-5 if trial.fragments[:2] == good else 2e-5
        return 1e-4 if trial.dense else 1e-6 * trial.tokens

    found = measure(Card(128, DEFAULT), watch)
    assert found is not None
    assert found.settings == cards.Settings(
        fewest=Fragments(4, 5, 7), few=Fragments(2, 5), tail=Fragments(4, 5, 7), many=Fragments(4, 5, 7),
        long=Fragments(8, 2, late=True), crossover=64,
    )  # fmt: skip
    times = dict(found.trials)
    assert times["long: 8 parts, batch 2; 5120 x 17408, 1 tokens"] == pytest.approx(10.0)
    assert len(found.trials) == 5 * 6 + 2 * 2
    assert [us for what, us in found.trials if "4 parts, batch 2" in what] == [None] * 5


@pytest.mark.parametrize(
    ("packed", "dense", "wanted"),
    [(1.0, 2.0, 512), (2.0, 1.0, 32), (None, 1.0, 32), (1.0, None, 512), (None, None, 32)],
)
def test_the_crossover(packed: float | None, dense: float | None, wanted: int) -> None:
    found = measure(Card(82, DEFAULT), lambda trial: 1.0 if trial.fragments else dense if trial.dense else packed)
    assert found is not None
    assert found.settings.crossover == wanted


def test_a_card_on_which_nothing_runs() -> None:
    assert measure(Card(82, DEFAULT), lambda _trial: None) is None


def test_kept_and_found_again() -> None:
    assert stored(RTX) is None
    keep(RTX, FOUND)
    assert stored(RTX) == FOUND
    assert [file.name for file in RTX.path.parent.iterdir()] == [RTX.path.name]
    assert RTX.path.parent == store.cache_dir() / "cards"


@pytest.mark.parametrize(
    "other",
    [
        {"name": "NVIDIA GeForce RTX 4090 D"}, {"multiprocessors": 64}, {"layout": "x"}, {"version": 4},
        {"revision": 99}, {"triton": "3.7.1"},
    ],
    ids=str,
)  # fmt: skip
def test_what_holds_for_another_is_not_taken(other: dict[str, Any]) -> None:
    """Both are kept, so that two environments on one machine do not measure in turns."""
    elsewhere = replace(RTX, **other)
    keep(elsewhere, FOUND)
    assert stored(RTX) is None
    keep(RTX, replace(FOUND, seconds=1.0))
    assert stored(elsewhere) == FOUND
    elsewhere.path.replace(RTX.path)  # and not by its file's name alone
    assert stored(RTX) is None


def _settings(**others: Any) -> dict[str, Any]:
    return {"settings": json.loads(json.dumps(asdict(FOUND.settings))) | others}


@pytest.mark.parametrize(
    "change",
    [
        {"settings": None}, {"settings": {}}, _settings(few=[3, 5]), _settings(many=4), _settings(many=[4, 5, 6]),
        _settings(tail=["4", "2"]), _settings(crossover=2000), _settings(crossover="32"), _settings(crossover=None),
        {"date": "yesterday"}, {"date": 3}, {"seconds": "long"}, {"trials": 7}, {"trials": [1]}, {"identity": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_file_is_measured_again(change: dict[str, Any], said: list[str]) -> None:
    keep(RTX, FOUND)
    document = json.loads(RTX.path.read_text())
    RTX.path.write_text(json.dumps(document | change))
    assert stored(RTX) is None
    assert tuning._settled(RTX, lambda: FOUND, said.append) == FOUND
    assert stored(RTX) == FOUND


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_document(content: bytes) -> None:
    keep(RTX, FOUND)
    RTX.path.write_bytes(content)
    assert stored(RTX) is None


def test_numbers_keep_their_types() -> None:
    """4.0 equals 4, and is no number of warps."""
    keep(RTX, FOUND)
    text = RTX.path.read_text().replace('"crossover": 64', '"crossover": 64.0')
    RTX.path.write_text(text)
    found = stored(RTX)
    assert found is not None
    assert type(found.settings.crossover) is int


def test_measured_once_and_said_once(said: list[str]) -> None:
    runs: list[int] = []

    def measure_now() -> Measured:
        runs.append(1)
        return FOUND

    for _ in range(3):
        assert tuning._settled(RTX, measure_now, said.append) == FOUND
    assert len(runs) == len(said) == 1
    assert said[0].startswith("measuring NVIDIA GeForce RTX 4090, once")


def test_a_second_process_waits_for_the_first(said: list[str]) -> None:
    began, end, runs = threading.Event(), threading.Event(), []

    def slowly() -> Measured:
        runs.append(1)
        began.set()
        end.wait(20)
        return FOUND

    found: list[Measured | None] = []
    others: list[str] = []

    def second_say(text: str) -> None:
        others.append(text)
        end.set()

    first = threading.Thread(target=lambda: found.append(tuning._settled(RTX, slowly, said.append)))
    second = threading.Thread(target=lambda: found.append(tuning._settled(RTX, slowly, second_say)))
    first.start()
    assert began.wait(20)
    second.start()
    for thread in (first, second):
        thread.join(20)
    assert (found, runs) == ([FOUND, FOUND], [1])
    assert others == ["another localchat is measuring NVIDIA GeForce RTX 4090: waiting for it"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Measuring at each start would be worse than not to measure."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALCHAT_CACHE", str(tmp_path / "file"))
    assert tuning._settled(RTX, lambda: pytest.fail("was measured"), said.append) is None
    assert said == []


def test_a_full_card(said: list[str]) -> None:
    def full() -> Measured:
        raise torch.OutOfMemoryError("no room")

    assert tuning._settled(RTX, full, said.append) is None
    assert len(said) == 2
    assert stored(RTX) is None


def test_a_measurement_that_is_broken_off_leaves_nothing(said: list[str]) -> None:
    def interrupted() -> Measured:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning._settled(RTX, interrupted, said.append)
    assert stored(RTX) is None
    assert tuning._settled(RTX, lambda: FOUND, said.append) == FOUND


def test_the_processor_and_a_known_card_are_never_measured(
    card: Callable[[str, int], torch.device], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = card("NVIDIA H200", 132)
    monkeypatch.setattr(tuning, "stored", lambda _identity: pytest.fail("looked into the cache"))
    for name in ("cpu", "cuda:0"):
        tuning.settle(name, said.append)
    tuning.adopt(device)
    assert card_of(device) is TABLE["NVIDIA H200"]
    assert said == []


def test_an_unknown_card(card: Callable[[str, int], torch.device], said: list[str]) -> None:
    """The first start measures, the next ones take it; what only reads never measures."""
    device = card("NVIDIA GeForce RTX 4090", 128)
    tuning.adopt(device)
    assert card_of(device) == Card(128, cards.OLDER)
    assert tuning.origin(device) == ""
    tuning.settle("cuda:0", said.append)
    assert card_of(device).settings == FOUND.settings
    cards._in_use.clear()  # another process
    tuning.adopt(torch.device("cuda"))
    assert card_of(device).settings == FOUND.settings
    assert tuning.origin(device).startswith("measured 2026-12-01 in 6 s, kept in ")
    assert len(said) == 1


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA H200"])
def test_tune_prints_candidates_and_an_entry(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    identity = replace(RTX, name=name, multiprocessors=132)
    assert tune_command.report(identity, FOUND, as_json=False) == 0
    out, err = capsys.readouterr()
    first, second, empty, entry = out.splitlines()
    assert (first.split(), second.split(), empty) == (["a", "1.5", "us"], ["b", "does", "not", "run"], "")
    made = eval(f"{{{entry}}}", {"Card": Card, "Settings": cards.Settings, "Fragments": Fragments})  # noqa: S307
    assert made == {name: Card(132, FOUND.settings, "measured 2026-12-01 with localchat doctor --tune")}
    kept = name not in TABLE
    assert (stored(identity) == FOUND) == kept
    assert ("nothing is kept" in err) != kept


def test_tune_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_command.report(RTX, FOUND, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["identity"]["name"] == RTX.name
    assert said["settings"]["long"] == [8, 2, 8, True]
    assert said["in_table"] is False


def test_tune_without_a_card(command: Callable[..., Any]) -> None:
    done = command("doctor", "--tune")
    assert done.returncode == 1
    assert done.stderr == b"localchat: error: --tune measures an NVIDIA card, and none is here.\n"
