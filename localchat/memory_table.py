"""The memory ledger as people read it: a table, with what was measured beside what was computed once a model is loaded.

Before that it answers whether a model would fit: into this machine's card, a card of a given size, or the memory of the
processor. `where` says which rows live in the host's memory beside the card's.
"""

import io
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from localchat.ledger import CUDA_CONTEXT, Ledger, row_of
from localchat.prepare import size_text
from localchat.stats import memory_used

if TYPE_CHECKING:
    from localchat.engine import Engine

_RUNTIME = "Python and torch"


@dataclass(frozen=True)
class Memory:
    """The memory that a model goes into, in bytes. `others` is what other programs hold of it, `cap` what we may take.

    device: a torch device; name: what it is called in the table.
    """

    device: str
    name: str
    total: int
    others: int = 0
    cap: int | None = None

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def available(self) -> int:
        """Bytes that this program can have."""
        free = self.total - self.others
        return free if self.cap is None else min(free, self.cap)


@dataclass(frozen=True)
class Measured:
    """Bytes by the name of the ledger's row, and of all together; rows that cannot be measured are absent."""

    total: int
    rows: Mapping[str, int] = field(default_factory=dict)


def memory_of(gpu: str = "auto", vram: float | None = None, *, vram_asked: bool = True) -> Memory:
    """What `run` would use with these flags; with `vram` (GB) and no card, a card of that size.

    vram_asked: by a flag, as choose_device takes it.

    Raises:
        UserError: the card cannot be used, or there is none of that name.
    """
    asked = vram is not None and vram_asked
    if gpu == "auto" and not _may_have_card():
        if vram is not None and asked:
            return Memory("cuda", f"a card of {vram:g} GB", int(vram * 1e9))
        gpu = "cpu"
    if gpu == "cpu" and not asked:
        return Memory("cpu", "this machine", memory_used()[1])
    from localchat.device import choose_device

    return memory_on(choose_device(gpu, vram, vram_asked=vram_asked), vram)


def memory_on(device: str, vram: float | None = None) -> Memory:
    """The memory of a device that was chosen, before a model is loaded into it."""
    used, total = memory_used(device)
    if device == "cpu":
        return Memory(device, "this machine", total)
    import torch

    cap = None if vram is None else int(vram * 1e9)
    return Memory(device, torch.cuda.get_device_name(device), total, max(0, used - CUDA_CONTEXT), cap)


def measure(engine: "Engine", memory: Memory, before: int) -> Measured:
    """What a loaded model takes now. `before`: the bytes in use just before it was loaded, of card or process."""
    import torch

    rows: dict[str, int] = {}
    for name, tensor in _tensors(engine):
        rows[name] = rows.get(name, 0) + tensor
    weights = sum(rows.values())
    cache = engine.cache
    rows["KV cache"] = cache.kv_nbytes
    rows["recurrent state"] = cache.snapshot_nbytes
    rows["snapshots"] = engine.snapshots.nbytes
    used = memory_used(memory.device)[0]
    if memory.kind == "cpu":
        return Measured(used, rows | {_RUNTIME: before})
    if engine.model.on_host:
        weights -= rows.get("embedding", 0)
    peak = torch.cuda.max_memory_allocated(memory.device)
    rows["workspace"] = max(0, peak - weights - cache.nbytes)
    return Measured(used - before + CUDA_CONTEXT, rows)


def table_rows(table: Ledger, memory: Memory, measured: Measured | None = None) -> list[tuple[str, str, str, str]]:
    """(what, where, computed, measured) of every line, "" where there is nothing to say."""
    on_card = memory.kind == "cuda"
    found = measured.rows if measured else {}

    def line(name: str, computed: int | None, got: int | None, *, host: bool = False) -> tuple[str, str, str, str]:
        where = ("host" if host else "card") if on_card else ""
        return name, where, "" if computed is None else size_text(computed), "" if got is None else size_text(got)

    lines = []
    for row in table.rows:
        name = row.name if row.in_total or row.on_host else f"({row.name})"  # taken where there is room
        lines.append(line(name, row.nbytes, found.get(row.name.partition(",")[0]), host=row.on_host))
    if _RUNTIME in found:
        lines.append(line(_RUNTIME, None, found[_RUNTIME]))
    lines.append(line("total", table.total, measured.total if measured else None))
    if on_card:
        lines.append(line("other programs", memory.others, None))
    if memory.cap is not None:
        lines.append(line("--vram", memory.cap, None))
    lines.append((f"memory of {memory.name}", "", size_text(memory.total), ""))
    left = memory.available - table.total
    lines.append(("left" if left >= 0 else "missing", "", size_text(abs(left)), ""))
    largest = table.largest_context(memory.available)
    lines.append(("largest context that fits", "", f"{largest:,} tokens" if largest else "none", ""))
    return lines


def table_text(
    table: Ledger, memory: Memory, measured: Measured | None = None, *, for_terminal: bool | None = None
) -> str:
    """The table: drawn by rich where stdout is a terminal (or `for_terminal` says so), else in plain columns."""
    lines = [("", "where", "computed", "measured"), *table_rows(table, memory, measured)]
    columns = [i for i in range(4) if any(line[i] for line in lines[1:])]
    cells = [[line[i] for i in columns] for line in lines]
    if for_terminal if for_terminal is not None else sys.stdout.isatty():
        return _drawn(cells)
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(_plain(line, widths) for line in cells)


def _plain(cells: list[str], widths: list[int]) -> str:
    """The first column to the left, the others to the right."""
    first, *rest = (
        f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((first, *rest)).rstrip()


def _drawn(cells: list[list[str]]) -> str:
    """A rich table without colours; a line before the sums and one before what there is."""
    from rich.box import ASCII, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    utf8 = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")
    drawn = Table(box=SIMPLE_HEAD if utf8 else ASCII, show_edge=not utf8, pad_edge=False)
    for i, title in enumerate(cells[0]):
        drawn.add_column(title, justify="right" if i else "left", no_wrap=i > 0)
    for line, following in zip(cells[1:], [*cells[2:], ["total"]], strict=True):
        drawn.add_row(*map(Text, line), end_section=following[0] == "total" or line[0] == "total")
    out = io.StringIO()
    Console(file=out, width=min(shutil.get_terminal_size().columns, 100), color_system=None).print(drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def _tensors(engine: "Engine") -> list[tuple[str, int]]:
    """(the ledger's row, bytes) of each tensor of the loaded model, those repacked for the processor included."""
    from localchat.model import Linear

    named = dict(engine.model.state_dict())
    for name, module in engine.model.named_modules():
        if isinstance(module, Linear):
            repacked = {
                "qweight": module.cpu_qweight,
                "scales": module.cpu_scales_zeros,
                "cpu.scales": module.cpu_scales,
            }
            named |= {f"{name}.{part}": tensor for part, tensor in repacked.items() if tensor is not None}
    return [
        (row_of(name, tensor.dim(), "I8" if str(tensor.dtype) == "torch.int8" else ""), tensor.nbytes)
        for name, tensor in named.items()
        if tensor.numel()
    ]


def _may_have_card() -> bool:
    """Whether it is worth the time to import torch and ask it for a card."""
    places = ("/proc/driver/nvidia/version", "/dev/dxg")  # the second: Linux inside Windows
    return any(Path(place).exists() for place in places) or shutil.which("nvidia-smi") is not None
