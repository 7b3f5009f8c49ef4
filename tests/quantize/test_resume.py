"""Conversions that are killed, and go on: byte for byte what an undisturbed one gives."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localchat.config import load_config
from localchat.errors import BadCheckpoint, UserError
from localchat.quantize import journal
from localchat.quantize.convert import Recipe, convert
from localchat.quantize.journal import Journal
from localchat.quantize.plan import plan
from localchat.quantize.writer import Entry

Make = Callable[..., Any]
RECIPE = Recipe(group_size=32, symmetric=False, max_shard_size=12_000)
ROOT = Path(__file__).parents[2]

# Converts sys.argv[1] into sys.argv[2], calibrated with the text sys.argv[3] if there is one, in a child of its own for
# every line of stdin, and prints how each ended. Forked, because importing torch anew takes longer than the conversion.
_CHILDREN = """
import os, signal, sys, time
from pathlib import Path
from localchat.quantize import convert as room, target, writer
from localchat.quantize.journal import Journal

def kill_at(owner, name, count):
    function, calls = getattr(owner, name), []
    def dying(*arguments, **options):
        calls.append(0)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    setattr(owner, name, dying)

owners = {"path": Path, "convert": room, "writer": writer, "journal": Journal}
for line in sys.stdin:
    seconds, owner, name, count = line.split()
    pid = os.fork()
    if not pid:
        if owner in owners:
            kill_at(owners[owner], name, int(count))
        text = {"method": "gptq", "calibration": Path(sys.argv[3])} if sys.argv[3:] else {}
        recipe = room.Recipe(group_size=32, symmetric=False, max_shard_size=12_000, **text)
        list(room.convert(Path(sys.argv[1]), Path(sys.argv[2]), recipe, resume=True, overwrite=True))
        os._exit(0)
    end = time.monotonic() + float(seconds)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.001)
    if not ended[0]:
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(ended[1]), flush=True)
"""
TO_THE_END = "100 - - 0"


class Children:
    """The process above: `run` one line of it."""

    def __init__(self, source: Path, out: Path, *text: Path) -> None:
        words = [sys.executable, "-c", _CHILDREN, *map(str, (source, out, *text))]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, line: str) -> int:
        assert self.process.stdin and self.process.stdout
        print(line, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=60)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def undisturbed(source: Path, out: Path, recipe: Recipe = RECIPE) -> dict[str, bytes]:
    for _ in convert(source, out, recipe):
        continue
    return content(out)


def test_killed_at_random_moments(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf(num_hidden_layers=10, hidden_size=128, intermediate_size=256)
    before = content(source)
    wanted = undisturbed(source, tmp_path / "wanted")
    assert len(wanted) > 10
    chance, kills = random.Random(), 0
    seed = chance.randrange(1 << 30)
    print("seed", seed)  # shown with a failure
    chance.seed(seed)
    with Children(source, tmp_path / "timed") as children:
        children.run("0 - - 0")  # the imports
        start = time.monotonic()
        assert children.run(TO_THE_END) == 0
        seconds = time.monotonic() - start
    with Children(source, tmp_path / "out") as children:
        for _ in range(20):
            code = children.run(f"{chance.uniform(0, 0.35) * seconds} - - 0")
            kills += code == -signal.SIGKILL
            if code == 0:
                break
        else:
            assert children.run(TO_THE_END) == 0
    assert kills >= 2
    assert content(tmp_path / "out") == wanted
    assert content(source) == before
    assert not (tmp_path / "out.partial").exists()


# What dies at the n-th call of what: between any two of a conversion's last actions.
POINTS = [
    *(f"100 journal add {n}" for n in (1, 2, 8)),
    *(f"100 path rename {n}" for n in (1, 2, 5)),  # of shards, when all of them are complete
    "100 writer write_file 1",  # the index
    *(f"100 convert write_file {n}" for n in (1, 3)),  # the tokenizer; config.json
    "100 journal remove 1",
    "100 convert move_into_place 1",
]


def test_killed_at_every_kind_of_moment(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf(num_hidden_layers=3)
    wanted = undisturbed(source, tmp_path / "wanted")
    with Children(source, tmp_path / "out") as children:
        for point in POINTS:
            assert children.run(point) == -signal.SIGKILL, point
            assert not (tmp_path / "out").exists(), point
            assert children.run(TO_THE_END) == 0
            assert content(tmp_path / "out") == wanted, point
            shutil.rmtree(tmp_path / "out")


def test_killed_again_and_again(make_hf: Make, tmp_path: Path) -> None:
    """Each run goes one shard's rename further than the one before, without a complete one between them."""
    source = make_hf(num_hidden_layers=3)
    wanted = undisturbed(source, tmp_path / "wanted")
    with Children(source, tmp_path / "out") as children:
        assert [children.run(point) for point in POINTS] == [-signal.SIGKILL] * len(POINTS)
        assert children.run(TO_THE_END) == 0
    assert content(tmp_path / "out") == wanted


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_a_calibrated_one_killed_again_and_again(talker: Make, tmp_path: Path, arch: str) -> None:
    """After every three steps, so at each place inside a layer: between matrices with one input, and between halves."""
    source, text = talker(arch, num_hidden_layers=3)
    wanted = undisturbed(source, tmp_path / "wanted", replace(RECIPE, method="gptq", calibration=text))
    steps, kills = len(plan(load_config(source), RECIPE)), 0
    with Children(source, tmp_path / "out", text) as children:
        while (code := children.run("100 journal add 4")) == -signal.SIGKILL:
            kills += 1
    assert code == 0
    assert kills > steps / 3
    assert content(tmp_path / "out") == wanted


def test_another_text_is_not_gone_on_with(talker: Make, noise: Make, tmp_path: Path) -> None:
    source, text = talker("llama")
    recipe = replace(RECIPE, method="gptq", calibration=text)
    running = convert(source, tmp_path / "out", recipe, resume=True)
    for _ in range(3):
        next(running)
    running.close()  # type: ignore[attr-defined]
    noise(text, seed=1)
    with pytest.raises(UserError, match="was begun with another calibration text"):
        list(convert(source, tmp_path / "out", recipe, resume=True))


def test_a_calibration_that_is_over_runs_no_text(talker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the head is left to do, which is not calibrated."""
    source, text = talker("llama")
    recipe = replace(RECIPE, method="gptq", calibration=text)
    wanted = undisturbed(source, tmp_path / "wanted", recipe)
    running = convert(source, tmp_path / "out", recipe, resume=True)
    while next(running).tensor != "layers.1.mlp.down_proj":
        continue
    running.close()  # type: ignore[attr-defined]
    monkeypatch.setattr("localchat.quantize.layerwise.Stream.mix", lambda *_: pytest.fail("the text ran"))
    list(convert(source, tmp_path / "out", recipe, resume=True))
    assert content(tmp_path / "out") == wanted


def test_killed_between_the_two_renames_of_an_overwrite(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf(num_hidden_layers=1)
    wanted = undisturbed(source, tmp_path / "out")
    shards = sum(name.startswith("model-") for name in wanted)
    with Children(source, tmp_path / "out") as children:
        assert children.run(f"100 path rename {shards + 2}") == -signal.SIGKILL
        assert {p.name for p in tmp_path.iterdir()} == {"source", "out.old", "out.partial"}
        assert children.run(TO_THE_END) == 0
    assert content(tmp_path / "out") == wanted
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}


def begun(source: Path, out: Path, steps: int, **options: Any) -> Path:
    """A conversion that was closed after some matrices; the folder that it has left."""
    running = convert(source, out, RECIPE, resume=True, **options)
    for _ in range(steps):
        next(running)
    running.close()  # type: ignore[attr-defined]
    return out.with_name(out.name + ".partial")


def recorded(folder: Path) -> list[str]:
    lines = (folder / journal.NAME).read_text().splitlines()
    return [json.loads(line)["step"] for line in lines[1:]]


def test_what_is_done_is_not_done_again(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf(num_hidden_layers=3)
    wanted = undisturbed(source, tmp_path / "wanted")
    partial = begun(source, tmp_path / "out", 7)
    done = recorded(partial)
    assert "layers.1.self_attn.qkv_proj" in done
    steps = list(convert(source, tmp_path / "out", RECIPE, resume=True))
    assert not {step.tensor for step in steps} & set(done)
    assert steps[0].done_bytes > steps[-1].total_bytes / 3
    assert content(tmp_path / "out") == wanted


@pytest.mark.parametrize("shard", [1, 3])
def test_damaged_bytes_are_made_again(make_hf: Make, tmp_path: Path, shard: int) -> None:
    """As a power failure leaves them: the journal knows of tensors that never came to the disk."""
    source = make_hf(num_hidden_layers=3)
    wanted = undisturbed(source, tmp_path / "wanted")
    partial = begun(source, tmp_path / "out", 9)
    path, done = partial / f"shard-{shard:05d}", recorded(partial)
    damaged = bytearray(path.read_bytes())
    damaged[-40:] = bytes(40)
    path.write_bytes(damaged)
    steps = list(convert(source, tmp_path / "out", RECIPE, resume=True))
    assert content(tmp_path / "out") == wanted
    assert steps[0].tensor in done
    assert steps[0].tensor != "embed_tokens"  # what lies before the damage is kept


@pytest.mark.parametrize("lost", ["all", "a shard", "the journal", "half a line", "zeros behind it"])
def test_lost_pieces(make_hf: Make, tmp_path: Path, lost: str) -> None:
    source = make_hf(num_hidden_layers=3)
    wanted = undisturbed(source, tmp_path / "wanted")
    partial = begun(source, tmp_path / "out", 9)
    book = partial / journal.NAME
    if lost == "all":
        shutil.rmtree(partial)
    elif lost == "a shard":
        (partial / "shard-00002").unlink()
    elif lost == "the journal":
        book.unlink()
    elif lost == "half a line":
        book.write_bytes(book.read_bytes()[:-30])
    else:
        book.write_bytes(book.read_bytes()[:-30] + bytes(30) + b"\n")
    for _ in convert(source, tmp_path / "out", RECIPE, resume=True):
        continue
    assert content(tmp_path / "out") == wanted


def test_shards_that_have_their_names_already_are_kept(make_hf: Make, tmp_path: Path) -> None:
    """As a kill in the middle of the last renames leaves them."""
    source = make_hf(num_hidden_layers=3)
    wanted = undisturbed(source, tmp_path / "wanted")
    partial = begun(source, tmp_path / "out", 13)
    for number in (1, 2):
        (partial / f"shard-{number:05d}").rename(partial / f"model-{number:05d}-of-00009.safetensors")
    done = recorded(partial)
    steps = list(convert(source, tmp_path / "out", RECIPE, resume=True))
    assert not {step.tensor for step in steps} & set(done)
    assert content(tmp_path / "out") == wanted


@pytest.mark.parametrize("what", ["recipe", "source", "checkpoint"])
def test_another_conversion_is_not_continued(make_hf: Make, tmp_path: Path, what: str) -> None:
    source = make_hf()
    partial = begun(source, tmp_path / "out", 2, revision="r1")
    before = content(partial)
    options: dict[str, Any] = {"revision": "r1", "recipe": RECIPE}
    if what == "recipe":
        options["recipe"] = Recipe(group_size=64, max_shard_size=12_000)
    elif what == "source":
        options["revision"] = "r2"
    else:
        source = make_hf(name="other", rms_norm_eps=1e-6)
    with pytest.raises(UserError, match=rf"was begun with another {what} .*cannot be continued") as caught:
        list(convert(source, tmp_path / "out", resume=True, **options))
    assert str(partial) in caught.value.hint
    assert content(partial) == before


def test_without_resume_it_is_begun_anew(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf()
    partial = begun(source, tmp_path / "out", 2)
    assert "embed_tokens" in recorded(partial)
    steps = list(convert(source, tmp_path / "out", RECIPE))
    assert steps[0].tensor == "embed_tokens"


def test_a_damaged_source_leaves_nothing_even_so(make_hf: Make, tmp_path: Path) -> None:
    def change(weights: dict[str, Any]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"].view(-1)[-1] = float("nan")

    with pytest.raises(BadCheckpoint, match="NaN"):
        list(convert(make_hf(change=change), tmp_path / "out", RECIPE, resume=True))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_space_that_is_used_already_is_not_asked_for(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("localchat.quantize.convert.check_disk_space", lambda _, wanted: asked.append(wanted))
    source = make_hf()
    partial = begun(source, tmp_path / "out", 3)
    lines = [json.loads(line) for line in (partial / journal.NAME).read_text().splitlines()[1:]]
    written = sum(entry["end"] - entry["start"] for line in lines for entry in line["entries"])
    list(convert(source, tmp_path / "out", RECIPE, resume=True))
    assert asked[0] - asked[1] == written > 0


def test_a_journal_that_was_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not begun"):
        Journal(tmp_path).add("x", [Entry("x", 1, "F32", (1,), 0, 4, 0)])


def test_the_command_goes_on_after_a_kill(make_hf: Make, tmp_path: Path) -> None:
    """`localchat quantize --resume` itself, killed once it has begun to write."""
    source = make_hf(num_hidden_layers=40, hidden_size=256, intermediate_size=512)
    words = [sys.executable, "-m", "localchat", "quantize", str(source), "--max-shard-size", "500KB", "-o"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    book = tmp_path / "out.partial" / journal.NAME
    with subprocess.Popen([*words, str(tmp_path / "out"), "--resume"], env=environment) as process:
        end = time.monotonic() + 100
        while not (book.is_file() and len(book.read_bytes().splitlines()) > 100) and time.monotonic() < end:
            time.sleep(0.001)
        process.kill()
    assert book.is_file()
    for out, flags in (("out", ["--resume"]), ("wanted", [])):
        done = subprocess.run(
            [*words, str(tmp_path / out), *flags], env=environment, capture_output=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
    assert content(tmp_path / "out") == content(tmp_path / "wanted")
