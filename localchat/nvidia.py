"""What nvidia-smi says of the cards and of who uses them. It need not be there, and any field of its may be missing."""

import csv
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_SECONDS = 10.0  # a driver in trouble answers late or never
_MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """One card; sizes in bytes, None where nvidia-smi does not say."""

    index: int
    uuid: str
    name: str
    driver: str
    total: int | None
    used: int | None


@dataclass(frozen=True)
class Process:
    """A program that computes on a card; in a container its id may be another's, or be absent from the list."""

    card: str  # the card's uuid
    pid: int
    name: str
    used: int | None


@dataclass(frozen=True)
class Report:
    """The answer; `problem` says in a few words why there is none."""

    cards: tuple[Card, ...] = ()
    processes: tuple[Process, ...] = ()
    problem: str = ""


def ask() -> Report:
    """Ask nvidia-smi; never raises."""
    try:
        cards = tuple(
            Card(int(index), uuid, name, driver, _size(total), _size(used))
            for index, uuid, name, driver, total, used in _rows(
                "--query-gpu=index,uuid,name,driver_version,memory.total,memory.used", columns=6
            )
            if index.isdecimal()
        )
        processes = tuple(
            Process(card, int(pid), name, _size(used))
            for card, pid, name, used in _rows("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", columns=4)
            if pid.isdecimal()
        )
    except FileNotFoundError:
        return Report(problem="there is no nvidia-smi")
    except subprocess.TimeoutExpired:
        return Report(problem=f"nvidia-smi has not answered within {_SECONDS:.0f} s")
    except subprocess.CalledProcessError as error:
        said = " ".join(str(error.stdout or error.stderr or "").split())
        return Report(problem=f"nvidia-smi failed: {said[:200] or f'exit code {error.returncode}'}")
    except OSError as error:
        return Report(problem=f"nvidia-smi cannot be run: {error.strerror}")
    return Report(cards, processes)


def _rows(query: str, columns: int) -> Iterator[list[str]]:
    """The lines of one query that have as many fields as were asked for."""
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        check=True,
    )
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        if len(row) == columns:
            yield [field.strip() for field in row]


def _size(text: str) -> int | None:
    """MiB as bytes; "[N/A]" and its like are None."""
    return int(text) * _MIB if text.isdecimal() else None
