"""What fits into the memory there is: how long a context, in which form keys and values are kept, or what would help.

Keys and values are bf16 on a card (fp32 on a processor) where the context that is wanted fits so, and INT8 where it
does not, unless somebody has chosen. Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from localchat import ledger, registry
from localchat.counted import counted
from localchat.errors import DoesNotFit, UsageError
from localchat.ledger import Ledger
from localchat.memory_table import Memory
from localchat.prepare import size_text
from localchat.stats import memory_used

_MOST_FIXES = 3
_WIDE = {"cpu": "fp32", "cuda": "bf16"}
# How fewer tokens are named, in the flags of each command.
_SHORTER = {"run": "--ctx {} fits", "bench": "{} tokens in all fit (-p, -n, --prompt, --depth)"}


@dataclass(frozen=True)
class Fit:
    """A context in tokens, and whether keys and values are INT8. `notice`: what is to be said of a choice, or ""."""

    context: int
    int8_kv: bool
    notice: str = ""

    def form(self, kind: str) -> str:
        """How keys and values are kept on a "cpu" or "cuda": "int8", or the wide form there."""
        return "int8" if self.int8_kv else _WIDE[kind]


def fit(
    ledger_with: Callable[[bool], Ledger],
    memory: Memory,
    wanted: int | None = None,
    kv_cache: str | None = None,
    command: str = "run",
    on_cpu: Callable[[bool], Ledger] | None = None,
) -> Fit:
    """The context that was asked for, or ledger.DEFAULT_CONTEXT within the model's limit and the memory.

    ledger_with: whether keys and values are INT8 -> the model's ledger, at any context. kv_cache: "bf16", "int8", or
    None where nobody chose. command: "run" or "bench", in whose words a fix is named. on_cpu: the same as
    ledger_with for the processor, which is offered only where it is given and holds the model.

    Raises:
        UsageError: a longer context was asked for than the model was trained for.
        DoesNotFit: memory does not hold the model with this context. The hint has up to three fixes.
    """
    limit = ledger_with(False).max_context
    if wanted is not None and wanted > limit:
        raise UsageError(f"--ctx {wanted:,} is more than the {limit:,} tokens that this model was made for.")
    largest = {int8: ledger_with(int8).largest_context(memory.available) for int8 in _forms(kv_cache)}
    goal = wanted or min(limit, ledger.DEFAULT_CONTEXT[memory.kind])
    for int8, most in largest.items():
        if most >= goal:
            return Fit(goal, int8, _notice(memory, goal, largest) if int8 else "")
    most = max(largest.values())
    if wanted is None and most:
        int8 = largest.get(True) == most > largest.get(False, 0)
        return Fit(most, int8, _notice(memory, most, largest) if int8 else "")
    fixes = fixes_for(ledger_with, memory, wanted, kv_cache, command, on_cpu)
    raise DoesNotFit(
        f"the model and a context of {counted(wanted or 1, 'token')} do not fit into "
        f"{size_text(memory.available)} of memory.",
        "; ".join(fixes) + "." if fixes else "take a smaller model (`localchat list`).",
    )


def fixes_for(
    ledger_with: Callable[[bool], Ledger],
    memory: Memory,
    wanted: int | None = None,
    kv_cache: str | None = None,
    command: str = "run",
    on_cpu: Callable[[bool], Ledger] | None = None,
) -> list[str]:
    """The cheapest ways out for a model that does not fit with `wanted` tokens (None: with any), at most three."""
    fixes = []
    int8, goal = kv_cache != "bf16", wanted or 1
    table = ledger_with(int8)
    most, most_int8 = (each.largest_context(memory.available) for each in (table, ledger_with(True)))
    if most < goal <= most_int8:
        fixes.append("--kv-cache int8 fits")
    if most:
        fixes.append(_SHORTER[command].format(most))
    if memory.others > ledger.CUDA_CONTEXT:
        fixes.append(f"other programs hold {size_text(memory.others)} of the card: close them")
    smaller = largest_model(memory.available, goal, memory.kind) if most_int8 < goal else None
    if smaller:
        fixes.append(f"`localchat {command} {smaller}` fits")
    if memory.kind == "cuda":
        if on_cpu and on_cpu(int8).largest_context(memory_used()[1]) >= goal:
            fixes.append("--gpu cpu takes the machine's memory")
        needed = table.total + (goal - table.context) * table.kv_bytes_per_token
        fixes.append(f"a card with {_enough(needed)} free holds it")
    return fixes[:_MOST_FIXES]


def largest_model(available: int, context: int, kind: str) -> str | None:
    """The name of the registry's largest model that fits into `available` bytes with `context` tokens, or None."""
    able = (entry for entry in registry.MODELS.values() if context <= entry.max_position_embeddings)
    sizes = {entry.alias: ledger.ledger(entry.config, context, kind, int8_kv=True).total for entry in able}
    return max((alias for alias, size in sizes.items() if size <= available), key=sizes.__getitem__, default=None)


def _enough(needed: int) -> str:
    """Bytes as text, rounded up: what it says is not less than what is needed."""
    step = 10**8 if needed >= 10**9 else 10**6  # the last digit of size_text
    return size_text(-(-needed // step) * step)


def _forms(kv_cache: str | None) -> tuple[bool, ...]:
    """Which forms may be taken, the wider one first; True is INT8."""
    return {None: (False, True), "bf16": (False,), "int8": (True,)}[kv_cache]


def _notice(memory: Memory, context: int, largest: dict[bool, int]) -> str:
    """Said where INT8 was chosen for somebody; nothing of what they chose themselves."""
    if False not in largest:
        return ""
    instead = f"; --kv-cache bf16 has room for {largest[False]:,}" if largest[False] else ""
    room = f"a context of {counted(context, 'token')} does not fit in {_WIDE[memory.kind]}"
    return f"keys and values are kept as INT8: {room}{instead}"
