"""Which device runs the model: the NVIDIA card if there is a usable one, else the CPU.

A card that cannot run the kernels, or that torch does not see, is named in one sentence, never passed over in silence:
a model that should answer at a hundred tokens a second and does at three is a fault nobody explains to the user.
"""

import re
import warnings
from collections.abc import Callable
from subprocess import SubprocessError

from localchat import nvidia
from localchat.errors import UsageError, UserError
from localchat.ledger import CUDA_CONTEXT
from localchat.text_safety import one_line

# The oldest compute capability whose arithmetic the kernels use (Ampere: bf16 products).
OLDEST = (8, 0)
NEWER_TORCH = "`pip install --upgrade torch` (https://pytorch.org/get-started names the build for a driver)"
_CPU_HINT = "--gpu cpu runs on the processor instead."


def choose_device(
    wanted: str = "auto",
    vram: float | None = None,
    *,
    vram_asked: bool = True,
    say: Callable[[str], None] = lambda notice: None,
) -> str:
    """A torch device string: "cpu", or "cuda:N" made current.

    wanted: "auto", "cpu", the number of a card, or its UUID as `nvidia-smi -L` prints it (the start is enough).

    vram: the most GB (1e9 bytes) this process may take of the card, the driver's part included. vram_asked: by a
    flag; a limit from the environment or the config file is no fault where the processor runs, and limits nothing.

    say: is told of a card that torch does not see, where the processor is taken for that reason.

    Raises:
        UserError: the card is too old, or its driver or Triton does not work.
        UsageError: there is no such card, or `vram` was asked for without one.
    """
    import torch

    count, reason = (0, "") if wanted == "cpu" else cards_seen()
    if wanted == "cpu" or (wanted == "auto" and not count):
        hidden = nvidia.ask().cards if wanted == "auto" else ()
        unseen = f"{unseen_card(hidden[0].name, reason)[0]}; `localchat doctor` says what helps" if hidden else ""
        if vram is not None and vram_asked:
            raise UsageError("--vram limits the memory of a card, and the processor is what would run here.", unseen)
        if unseen:
            say(f"the processor is used: {unseen}")
        return "cpu"
    index = _index(wanted, count)
    if index >= count:
        cards = f"torch sees {count} NVIDIA card{'' if count == 1 else 's'}"
        raise UsageError(f"--gpu {one_line(wanted)}: {cards}, and none is called so.", _cards_hint(count))
    torch.cuda.set_device(index)
    _check_card(index)
    if vram is not None:
        total = torch.cuda.get_device_properties(index).total_memory
        tensors = max(0.0, vram * 1e9 - CUDA_CONTEXT)  # what torch's allocator does not count is the context
        torch.cuda.set_per_process_memory_fraction(min(1.0, tensors / total), index)
    return f"cuda:{index}"


def cards_seen() -> tuple[int, str]:
    """How many cards torch sees, and what it says where it has a reason to see none."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, str(said[0].message) if said else ""


def unseen_card(name: str, reason: str) -> tuple[str, str]:
    """Of a card that is there and that torch does not see: a sentence, and what to do. `reason`: torch's, or ""."""
    import torch

    if not torch.version.cuda:
        return f"{name} is there, but torch is for the processor only", f"install a torch for CUDA: {NEWER_TORCH}"
    reason = reason or "no reason given; CUDA_VISIBLE_DEVICES may hide it"
    return f"{name} is there, but torch does not see it: {reason}", f"update the driver, or torch: {NEWER_TORCH}"


def _index(wanted: str, count: int) -> int:
    """The number of the card that is meant, `count` where there is none.

    Raises:
        UsageError: the start of a UUID fits several cards.
    """
    if wanted == "auto":
        return 0
    if re.fullmatch(r"[0-9]{1,9}", wanted):
        return int(wanted)
    start = _bare(wanted)
    found = [index for index, uuid in enumerate(_uuids(count)) if start and uuid.startswith(start)]
    if len(found) > 1:
        raise UsageError(f"--gpu {one_line(wanted)} is the start of {len(found)} cards' UUIDs.", _cards_hint(count))
    return found[0] if found else count


def _uuids(count: int) -> list[str]:
    import torch

    return [_bare(str(torch.cuda.get_device_properties(index).uuid)) for index in range(count)]


def _bare(uuid: str) -> str:
    """A UUID without "GPU-" before it: nvidia-smi writes it, torch does not."""
    return re.sub("^(gpu|mig)-", "", uuid.lower())


def _cards_hint(count: int) -> str:
    if not count:
        return _CPU_HINT
    return f"there are {', '.join(f'{i} (GPU-{uuid})' for i, uuid in enumerate(_uuids(count)))}; {_CPU_HINT}"


def _check_card(index: int) -> None:
    """Ask the card for its capability, and Triton for the smallest kernel."""
    import torch
    from triton.compiler import CompilationError

    from localchat.kernels.advance import advance

    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        got, wanted = (".".join(map(str, c)) for c in (capability, OLDEST))
        raise UserError(f"{name} has compute capability {got}, and the kernels need {wanted} or newer.", _CPU_HINT)
    try:
        advance(*(torch.zeros(1, dtype=torch.int64, device=f"cuda:{index}") for _ in range(4)))
        torch.cuda.synchronize(index)
    except (RuntimeError, CompilationError, OSError, SubprocessError) as error:  # the last: the C compiler's
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{name} is there, but Triton cannot compile for it ({reason}).", _CPU_HINT) from error
