"""Converts a checkpoint to a packed folder, three matrices in memory at most: read, converted, written.

The plan comes first: which tensors are fused (q, k, v into qkv_proj; gate, up into gate_up_proj; ...: one product
instead of several), and how each matrix is stored. Then the tensors stream from the source through `scales` into the
`writer`: while the arithmetic is at work on one step, the next one is read and the last one is written. A calibrated
conversion is no different, except that a text runs on through each matrix as it is stored before the next one is
measured (calibrate.py); what an earlier run has written is read back for that. The folder is written beside its final
place and renamed when it is complete and was read back, with config.json last, so that an unfinished one can never be
taken for a model; its journal says what is done, for a run that goes on with it.
"""

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from localchat import __version__
from localchat.config import ModelConfig, TensorFormat
from localchat.errors import UsageError, UserError
from localchat.kernels.int4_packing import LAYOUT, VERSION
from localchat.quantize.journal import Done, Journal
from localchat.quantize.pack_matrix import Measure, pack_matrix
from localchat.quantize.placement import exceptions_for
from localchat.quantize.plan import Matrix, Recipe, check_recipe, kept_by, packed_config, plan
from localchat.quantize.read_ahead import Loaded, ReadAhead
from localchat.quantize.source import Source, check, has_mtp
from localchat.quantize.steps import Step, most_bytes, source_bytes, steps_of
from localchat.quantize.target import DOWNLOADS, check_target, move_into_place, partial_folder
from localchat.quantize.threads import worker_pool
from localchat.quantize.writer import ShardWriter, write_file
from localchat.transfer import check_disk_space

if TYPE_CHECKING:
    from localchat.quantize.calibrate import Calibration

__all__ = ["Progress", "Recipe", "convert", "default_recipe", "open_source"]

# Below this width a model loses too much with groups of 128 and no min.
_SMALL = 2048
# Room for norms, tokenizer and config.
_SMALL_FILES = 64 << 20
_PATIENCE = 0.5  # seconds between two records while a download is waited for


@dataclass(frozen=True)
class Progress:
    """A matrix has been written: its name, and the bytes of the source converted so far and in all.

    arrived_bytes: of a source that is downloaded meanwhile, how much of it is here; then records also come while
    there is nothing to convert.
    """

    tensor: str
    done_bytes: int
    total_bytes: int
    arrived_bytes: int = 0


def open_source(path: Path) -> Source:
    """Open a model folder or a .gguf file.

    Raises:
        BadCheckpoint: it is damaged, incomplete or of an unknown kind.
        UserError: there is nothing at `path`, or a part of a model, or several models.
    """
    if path.is_dir():
        from localchat.quantize.hf import open_hf

        found = sorted(path.glob("*.gguf"))
        if found and not (path / "config.json").exists():
            raise UserError(
                f"{path}: holds .gguf files and no model folder's; give the path of one, such as {found[0]}."
            )
        return open_hf(path)
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: is a part of a model; give the folder that it is in.")
    if path.is_file():
        from localchat.quantize.gguf import open_gguf

        return open_gguf(path)
    raise UserError(f"{path}: there is no such model folder or .gguf file.")


def default_recipe(source: Source | Path) -> Recipe:
    """Groups of 128 without min; groups of 32 with min for small models; what a 4-bit source has, which keeps it."""
    with ExitStack() as stack:
        opened = source if isinstance(source, Source) else stack.enter_context(open_source(source))
        return _default(opened.model_config, opened.kept_format)


def recipe_for(config: ModelConfig) -> Recipe:
    """The same, of a checkpoint of which nothing else is here yet."""
    return _default(config, kept_by(config))


def _default(config: ModelConfig, kept: TensorFormat | None) -> Recipe:
    if kept is not None:
        return Recipe(kept.group_size, kept.symmetric)
    return Recipe(group_size=32, symmetric=False) if config.hidden_size < _SMALL else Recipe()


def with_placement(source: Source | Path | ModelConfig, recipe: Recipe) -> Recipe:
    """`recipe` with the exceptions that are known for the model's architecture."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_source(source)) if isinstance(source, Path) else source
        config = opened.model_config if isinstance(opened, Source) else opened
        return replace(recipe, placement=exceptions_for(config, recipe.symmetric))


def what_is_lost(source: Source | Path, recipe: Recipe) -> str:
    """What `recipe` does to a checkpoint that is quantised already, as a clause; else ""."""
    with ExitStack() as stack:
        opened = source if isinstance(source, Source) else stack.enter_context(open_source(source))
        return opened.what_is_lost(recipe.group_size, recipe.symmetric)


def convert(
    source: Source | Path,
    out: Path,
    recipe: Recipe,
    *,
    overwrite: bool = False,
    resume: bool = False,
    source_id: str = "",
    revision: str = "",
    device: str | None = None,
) -> Iterator[Progress]:
    """Pack `source` into the new folder `out`, which is complete when the iteration ends.

    source: a model folder, a .gguf file, or an open Source (which stays open). overwrite: replace `out`, if it is a
    packed folder. resume: go on with what an earlier conversion has left, which gives the same bytes, and leave what
    this one has done for the next. source_id, revision: where it came from, for the record. device: for the
    arithmetic; a CUDA card if there is one. Without `resume`, on any error, or if the generator is closed early,
    nothing of `out` is left (and an old one stays).

    Raises:
        BadCheckpoint: the source is damaged or would be computed wrongly; a tensor holds NaN or infinity.
        UserError: `out` exists, is the source, or there is not enough room; what was begun was something else.
        UsageError: the recipe has no meaning, or not for a source that is still on its way.
    """
    path = Path(source.name) if isinstance(source, Source) else source
    check_recipe(recipe)
    check_target(path, out, overwrite)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        opened = source if isinstance(source, Source) else stack.enter_context(open_source(source))
        check(opened)
        if recipe.method == "gptq" and opened.arrival is not None:
            raise UsageError(f"{opened.name}: gptq runs a text through the whole model, which is not here yet.")
        matrices = plan(opened.model_config, recipe, mtp=has_mtp(opened))
        files = opened.files()
        stack.enter_context(_disk_errors(out))
        partial = stack.enter_context(partial_folder(out, resume=resume))
        conversion = _Conversion(opened, matrices, recipe, partial, device)
        yield from conversion.run(resume, f"{source_id} {revision}".strip())
        for name, content in files.items():
            write_file(partial / name, content)
        config = packed_config(opened, matrices, recipe, source_id, revision)
        write_file(partial / "config.json", (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
        shutil.rmtree(partial / DOWNLOADS, ignore_errors=True)
        Journal(partial).remove()
        move_into_place(partial, out)


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """A full disk or a folder without write permission as one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error}).") from error


class _Conversion:
    """The steps of one conversion on their way into the folder."""

    def __init__(self, source: Source, matrices: list[Matrix], recipe: Recipe, folder: Path, device: str) -> None:
        self._source = source
        self._recipe = recipe
        self._folder = folder
        self._device = torch.device(device)
        self._steps = steps_of(source, matrices)
        self._room = sum(most_bytes(source, m, recipe.exact) for m in matrices) + _SMALL_FILES
        self._total = sum(map(source.nbytes, source.shapes))
        self._done = 0
        self._calibration: Calibration | None = None

    def run(self, resume: bool, origin: str) -> Iterator[Progress]:
        """Every step, in order; the last thing makes the shards final. origin: id and revision of the source."""
        names = [name for step in self._steps for name in step.writes()]
        with ExitStack() as stack:
            writer = stack.enter_context(ShardWriter(self._folder, names, self._recipe.max_shard_size))
            journal = stack.enter_context(Journal(self._folder))
            self._calibration = self._calibrating()
            identity = self._identity(origin)
            done = self._take_up(writer, journal.read(identity)) if resume else []
            self._check_room(done)
            journal.begin(identity, done)
            self._settle_again(writer, done)
            yield from self._go_on(writer, journal, self._steps[len(done) :])
            writer.finish()

    def _calibrating(self) -> "Calibration | None":
        if self._recipe.method != "gptq":
            return None
        from localchat.quantize.calibrate import calibration_of  # the model and its kernels

        return calibration_of(self._source, self._recipe, str(self._device))

    def _take_up(self, writer: ShardWriter, recorded: Sequence[Done]) -> list[Done]:
        """The steps, from the first on, that an earlier run has written and that are still as it wrote them."""
        entries = [entry for done in recorded for entry in done.entries]
        left, kept = writer.intact(entries), list[Done]()
        for step, done in zip(self._steps, recorded, strict=False):
            left -= len(done.entries)
            if left < 0 or step.name != done.step:
                break
            kept.append(done)
        writer.restore([entry for done in kept for entry in done.entries])
        self._done = source_bytes(self._source, self._steps[: len(kept)])
        return kept

    def _settle_again(self, writer: ShardWriter, done: Sequence[Done]) -> None:
        """Bring the calibration to where it was behind these steps."""
        left = [step.matrix for step in self._steps[len(done) :] if step.matrix]
        if not any(self._measure(matrix) for matrix in left):
            return
        for step, record in zip(self._steps, done, strict=False):
            if step.matrix:
                stored = {entry.name: writer.read(entry).to(self._device) for entry in record.entries}
                self._settle(step.matrix, stored)

    def _check_room(self, done: Sequence[Done]) -> None:
        here = sum(entry.end - entry.start for step in done for entry in step.entries)
        wanted = self._room - here
        if arrival := self._source.arrival:
            downloaded = sum(file.stat().st_size for file in self._folder.glob(f"{DOWNLOADS}/*"))
            wanted += max(0, arrival.most_bytes([step.reads for step in self._steps[len(done) :]]) - downloaded)
        check_disk_space(self._folder, wanted)

    def _go_on(self, writer: ShardWriter, journal: Journal, steps: Sequence[Step]) -> Iterator[Progress]:
        """Read, convert and write these steps, all three at once."""

        def write(step: Step, tensors: dict[str, Tensor], ready: torch.cuda.Event | None) -> None:
            journal.add(step.name, [writer.add(name, tensors.pop(name), ready) for name in list(tensors)])

        if not steps:
            return
        self._keep(steps)
        with ThreadPoolExecutor(1, thread_name_prefix="write behind") as behind:
            written: deque[tuple[int, Future[None]]] = deque()
            with ReadAhead(self._source, steps, self._device) as ahead:
                for i, future in enumerate(ahead):
                    yield from self._waiting(future)
                    tensors = self._converted(future.result())
                    del future  # its tensors are not needed any more
                    written.append((i, behind.submit(write, steps[i], tensors, self._ready())))
                    del tensors
                    if len(written) > 1:  # one is written while the next one is converted
                        yield from self._written(steps, *written.popleft())
                yield from self._written(steps, *written.popleft())

    def _waiting(self, future: "Future[Loaded]") -> Iterator[Progress]:
        """Records of what arrives, until the future is there."""
        while self._source.arrival and not wait_for([future], timeout=_PATIENCE).done:
            yield self._progress("")

    def _written(self, steps: Sequence[Step], i: int, future: "Future[None]") -> Iterator[Progress]:
        """Wait until a step is written."""
        future.result()
        self._keep(steps[i + 1 :])
        self._done += source_bytes(self._source, [steps[i]])
        if steps[i].matrix or i + 1 == len(steps):
            yield self._progress(steps[i].name)

    def _progress(self, name: str) -> Progress:
        arrival = self._source.arrival
        return Progress(name, self._done, self._total, arrival.arrived_bytes() if arrival else 0)

    def _keep(self, steps: Sequence[Step]) -> None:
        if self._source.arrival:
            self._source.arrival.keep({name for step in steps for name in step.reads})

    def _converted(self, loaded: Loaded) -> dict[str, Tensor]:
        """The tensors of one step as they are stored."""
        matrix = loaded.step.matrix
        if matrix is None:
            return loaded.tensors
        if self._device.type == "cuda":
            for tensor in loaded.all_tensors():
                if tensor.is_cuda:  # another stream's memory, which this one is going to read
                    tensor.record_stream(torch.cuda.current_stream(self._device))
        stored = pack_matrix(matrix, loaded, self._recipe, self._measure(matrix))
        self._settle(matrix, stored)
        return stored

    def _measure(self, matrix: Matrix) -> Measure | None:
        """What measures the inputs of a matrix, if it is one that is calibrated."""
        calibration = self._calibration
        if calibration is None or matrix.format.bits != 4 or not calibration.covers(matrix):
            return None
        return lambda pool: calibration.hessian(matrix, pool)

    def _settle(self, matrix: Matrix, stored: Mapping[str, Tensor]) -> None:
        """Have the text run through a matrix as it is stored, by the tensors' names."""
        if self._calibration is not None:
            with worker_pool() as pool:
                kinds = {name.rpartition(".")[2]: tensor for name, tensor in stored.items()}
                self._calibration.settle(matrix, kinds, pool)

    def _ready(self) -> torch.cuda.Event | None:
        """When the card has done what was asked of it up to now."""
        if self._device.type != "cuda":
            return None
        ready: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return ready

    def _identity(self, origin: str) -> dict[str, Any]:
        """What must be the same for a conversion to be continued with the same bytes."""
        order = [[step.name, step.reads, step.matrix and repr(step.matrix.format)] for step in self._steps]
        on_card = self._device.type == "cuda"
        text = {} if self._calibration is None else {"calibration text": self._calibration.digest()}
        return {
            "source": origin,
            "checkpoint": self._source.digest(),
            "recipe": repr(self._recipe),
            **text,
            "plan": hashlib.sha256(json.dumps(order).encode()).hexdigest(),
            "format": f"{LAYOUT} version {VERSION}",
            "program": f"localchat {__version__}, torch {torch.__version__}",
            "device": torch.cuda.get_device_name(self._device) if on_card else "cpu",
        }
