"""Which device runs the model: the NVIDIA card if there is a usable one, else the CPU.

A card that cannot run the kernels is named in one sentence, never passed over in silence: a model that should answer
at a hundred tokens a second and does at three is a fault nobody explains to the user.
"""

from subprocess import SubprocessError

from localchat.errors import UsageError, UserError

# The oldest compute capability whose arithmetic the kernels use (Ampere: bf16 products).
OLDEST = (8, 0)
_CPU_HINT = "--gpu cpu runs on the processor instead."


def choose_device(wanted: str = "auto", vram: float | None = None) -> str:
    """A torch device string: "cpu", or "cuda:N" made current. `wanted` is "auto", "cpu" or the number of a card.

    vram: the most GB (1e9 bytes) this process may take of the card.

    Raises:
        UserError: the card is too old, or its driver or Triton does not work.
        UsageError: there is no such card, or `vram` without one.
    """
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if vram is not None:
            raise UsageError("--vram limits the memory of a card, and the processor is what would run here.")
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if wanted == "auto" else int(wanted) if wanted.isdecimal() else count
    if index >= count:
        raise UsageError(f"--gpu {wanted}: torch sees {count} NVIDIA card{'' if count == 1 else 's'}.", _CPU_HINT)
    torch.cuda.set_device(index)
    _check_card(index)
    if vram is not None:
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, vram * 1e9 / total), index)
    return f"cuda:{index}"


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
