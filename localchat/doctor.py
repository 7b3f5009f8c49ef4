"""`localchat doctor`: whether a model can run on this machine, and what to do where something is in its way.

Every check yields findings and none may end the others: what it raises becomes a finding. `bad` means that `run` would
fail here, `warn` that it would go slowly or lacks something; both say what to do.
"""

import contextlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from localchat import __version__, nvidia, store
from localchat.device import NEWER_TORCH, cards_seen, unseen_card
from localchat.prepare import size_text
from localchat.text_safety import one_line
from localchat.transfer import free_space

OK, WARN, BAD = "ok", "warn", "bad"
_HUB_SECONDS = 5.0
_LITTLE_DISK = 2_000_000_000  # bytes: less than most models
_DRIVER = Path("/proc/driver/nvidia/version")
_NETWORK = "look at the network, HF_ENDPOINT and the proxy's variables; what is on this machine runs without the hub"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, "ok", "warn" or "bad", what was found, and what to do where it is not well."""

    name: str
    status: str
    text: str
    fix: str = ""


def print_findings(*, as_json: bool) -> int:
    """Look at everything and print it, each line as soon as it is known: 0 where a model can run here, else 1."""
    found = []
    show = None if as_json else _printer()
    for finding in findings():
        found.append(finding)
        if show:
            show(finding)
    can_run = all(finding.status != BAD for finding in found)
    if as_json:
        print(json.dumps({"can_run": can_run, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        print(f"\n{'a model can run here' if can_run else 'no model can run here before what is bad is mended'}")
    return 0 if can_run else 1


def findings() -> Iterator[Finding]:
    """The findings of all checks, in the order in which a person would look."""
    report = nvidia.ask()
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("localchat", _program),
        ("torch", _torch),
        ("driver", lambda: _driver(report)),
        ("card", lambda: _cards(report)),
        ("triton", _triton),
        ("kernels", _kernels),
        ("settings", _settings),
        ("bandwidth", _bandwidth),
        ("memory", _memory),
        ("disk", _disk),
        ("hub", _hub),
        ("models", _models),
    ]
    torch_works = True
    for name, check in checks:
        if not torch_works and name in ("card", "triton", "kernels", "settings", "bandwidth", "models"):
            continue
        for finding in _guarded(name, check):
            torch_works = torch_works and (name, finding.status) != ("torch", BAD)
            yield finding


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The check's findings; what it raises is one more."""
    try:
        for finding in check():
            yield Finding(finding.name, finding.status, one_line(finding.text), one_line(finding.fix))
    except Exception as error:  # noqa: BLE001 - a broken machine is what this command is for
        status = BAD if name == "kernels" else WARN  # what cannot run here cannot run in `run`
        yield Finding(name, status, f"the look at it failed: {type(error).__name__}: {one_line(str(error))[:300]}")


def _program() -> Iterator[Finding]:
    where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("localchat", OK, f"{__version__}, {where}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", BAD, f"cannot be imported: {error}", "`pip install --force-reinstall torch`")
        return
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the processor only"
    yield Finding("torch", OK, f"{torch.__version__}, {build}")


def _driver(report: nvidia.Report) -> Iterator[Finding]:
    if report.cards:
        yield Finding("driver", OK, f"NVIDIA {report.cards[0].driver}")
    elif _DRIVER.exists():
        version = _DRIVER.read_text(errors="replace").partition("\n")[0]
        yield Finding("driver", WARN, f"{version}, but {report.problem or 'nvidia-smi lists no card'}", "reboot")
    else:
        yield Finding("driver", OK, f"none of NVIDIA's ({report.problem or 'nvidia-smi lists no card'})")


def _cards(report: nvidia.Report) -> Iterator[Finding]:
    """Every card that torch sees, and who uses it; or why it sees none."""
    seen, reason = cards_seen()
    for index in range(seen):
        yield from _card(index, report)
    if seen:
        return
    if not report.cards:
        fix = "if this machine has a card, install NVIDIA's driver (https://www.nvidia.com/drivers)"
        yield Finding("card", WARN, "none: models run on the processor, small ones at a good speed", fix)
    else:
        yield Finding("card", WARN, *unseen_card(report.cards[0].name, reason))


def _card(index: int, report: nvidia.Report) -> Iterator[Finding]:
    import torch

    from localchat.ledger import CUDA_CONTEXT

    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    yield Finding("card", OK, f"{index}: {name}, compute capability {major}.{minor}, {size_text(total)}")
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    users = [p for p in report.processes if uuid and p.card.endswith(uuid) and p.pid != os.getpid()]
    names = ", ".join(f"{Path(p.name).name} (process {p.pid}) {size_text(p.used or 0)}" for p in users)
    others = max(0, total - free - CUDA_CONTEXT)
    unnamed = f"{size_text(others)} by processes that are not listed" if others > CUDA_CONTEXT else "by nobody else"
    much = others > total // 10
    yield Finding(
        "VRAM",
        WARN if much else OK,
        f"{size_text(free)} of {size_text(total)} free; used {'by ' + names if names else unnamed}",
        "close what else uses the card" if much else "",
    )


def _triton() -> Iterator[Finding]:
    import torch

    try:
        import triton
    except ImportError as error:
        needed = torch.cuda.is_available()
        fix = "`pip install triton`" if needed else "nothing: only a card needs it"
        yield Finding("triton", BAD if needed else OK, f"is not installed ({error})", fix if needed else "")
        return
    text, folder = "", os.environ.get("TRITON_CACHE_DIR")
    if folder:
        kept = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        text = f"; {size_text(kept)} of compiled kernels in {folder}"
    yield Finding("triton", OK, f"{triton.__version__}{text}")


def _kernels() -> Iterator[Finding]:
    """On a card: compile and run a small kernel. On the processor: an INT4 product against its reference."""
    import torch

    from localchat.device import choose_device
    from localchat.errors import UserError

    start = time.perf_counter()
    try:
        device = choose_device()
    except UserError as error:
        compiler = "C compiler" in str(error) or "Python.h" in str(error)
        tools = "install a C compiler and Python's headers (Debian, Ubuntu: apt install build-essential python3-dev)"
        yield Finding("kernels", BAD, str(error), tools if compiler else f"{error.hint} {NEWER_TORCH}.")
        return
    if device != "cpu":
        yield Finding("kernels", OK, f"a small kernel was compiled and run in {time.perf_counter() - start:.1f} s")
        return
    error_size = _processor_error()
    good = error_size < 0.02  # bf16 products
    found = (
        f"the processor's INT4 product ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    )
    text = f"{found} {'agrees with' if good else f'is {error_size:.0%} off'} its reference"
    yield Finding("kernels", OK if good else BAD, text, "" if good else NEWER_TORCH)


def _settings() -> Iterator[Finding]:
    """Of each card: where the way in which its kernels are launched comes from."""
    import torch

    from localchat import tuning

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        origin = tuning.origin(torch.device("cuda", index))
        unmeasured = "not measured on this card yet: the first `run` does it, in some ten seconds"
        yield Finding("settings", OK, f"{index}: {origin or unmeasured}")


def _processor_error() -> float:
    """Relative error of torch's packed INT4 kernel over a small matrix."""
    import torch

    from localchat.config import TensorFormat
    from localchat.kernels.int4_matmul import int4_matmul_reference
    from localchat.model import Linear
    from localchat.ops import CpuOps

    generator = torch.Generator().manual_seed(0)
    linear, ops = Linear(64, 128, TensorFormat(4, 32)), CpuOps()
    words = torch.randint(-(2**31), 2**31, linear.qweight.shape, generator=generator)
    linear.qweight = words.to(torch.int32)
    linear.scales = torch.rand(linear.scales.shape, generator=generator).half()
    linear.mins = None
    x = torch.randn(3, 128, generator=generator)
    wanted = int4_matmul_reference(x, linear.qweight, linear.scales, linear.mins, None)
    ops.prepare(linear)
    return float((ops.product(x, linear) - wanted).norm() / wanted.norm())


def _bandwidth() -> Iterator[Finding]:
    """What decoding is bound by: how fast weights can be read."""
    import torch

    rate = memory_bandwidth()
    if torch.cuda.is_available():
        from localchat.kernels.read_bandwidth import sheet_bandwidth

        sheet = sheet_bandwidth(torch.cuda.get_device_name())
        share = f", {rate / sheet:.0%} of its data sheet" if sheet else ""
        slow = sheet is not None and rate < 0.7 * sheet
        fix = "does another program use the card, is it hot, or its power limited (nvidia-smi -q -d PERFORMANCE)?"
        yield Finding("bandwidth", WARN if slow else OK, f"the card reads {rate / 1e9:,.0f} GB/s{share}", fix * slow)
        return
    yield Finding("bandwidth", OK, f"the processor reads {rate / 1e9:.0f} GB/s from memory")


def memory_bandwidth() -> float:
    """Bytes per second that the card, or without one the processor, reads from its memory; measured."""
    import torch

    if torch.cuda.is_available():
        from localchat.kernels.read_bandwidth import read_bandwidth

        free, _ = torch.cuda.mem_get_info()
        return read_bandwidth(min(4_000_000_000, free // 2))
    x = torch.ones(1 << 26)  # 256 MB, more than any cache of a desk's processor
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        x.sum()
        rates.append(x.nbytes / (time.perf_counter() - start))
    return sorted(rates)[len(rates) // 2]


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = available_memory()
    text = f"{size_text(total)}" + (f", {size_text(available)} of it available" if available is not None else "")
    little = available is not None and available < 1_000_000_000
    yield Finding("memory", WARN if little else OK, text, "close other programs" if little else "")


def available_memory() -> int | None:
    """Bytes of the machine's memory that a program can have without others being swapped out; None: not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _disk() -> Iterator[Finding]:
    """Room in both caches: this program's, and the hub's."""
    from huggingface_hub import constants

    for what, folder, variable in (
        ("packed models", store.cache_dir(), "LOCALCHAT_CACHE"),
        ("downloads", Path(constants.HF_HUB_CACHE), "HF_HOME"),
    ):
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        text = f"{size_text(free_space(folder))} free for {what} in {folder}"
        if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
            yield Finding("disk", BAD, f"{folder} cannot be written", f"set {variable} to a folder of yours")
        elif free_space(folder) < _LITTLE_DISK:
            yield Finding("disk", WARN, text, f"make room, or set {variable} to a folder on another disk")
        else:
            yield Finding("disk", OK, text)


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        fix = "unset HF_HUB_OFFLINE to download models"
        yield Finding("hub", WARN, "HF_HUB_OFFLINE is set: only models that are here can run", fix)
        return
    answers: list[Finding] = []
    # A thread, for a name server that does not answer keeps no time limit.
    thread = threading.Thread(target=lambda: answers.append(_hub_answer()), daemon=True)
    thread.start()
    thread.join(2 * _HUB_SECONDS)
    yield answers[0] if answers else Finding("hub", WARN, f"{constants.ENDPOINT} does not answer", _NETWORK)


def _hub_answer() -> Finding:
    """Ask for a public list, or where there is a token for whom it belongs to."""
    from huggingface_hub import constants, errors, get_token
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    http: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    signed_in = get_token() is not None
    page = "/api/whoami-v2" if signed_in else "/api/models?limit=1"
    try:
        start = time.perf_counter()
        answer = get_session().get(constants.ENDPOINT + page, headers=build_hf_headers(), timeout=_HUB_SECONDS)
        answer_seconds = time.perf_counter() - start
        if answer.status_code == 401 and signed_in:
            fix = f"make a token at {constants.ENDPOINT}/settings/tokens, or unset HF_TOKEN: public models need none"
            return Finding("hub", WARN, f"{constants.ENDPOINT} does not accept your token", fix)
        answer.raise_for_status()
        answer.json()
    except (http, OSError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        return Finding("hub", WARN, f"{constants.ENDPOINT} cannot be reached ({reason})", _NETWORK)
    except (ValueError, TypeError, KeyError, AttributeError):  # a log-in page, another program
        return Finding("hub", WARN, f"{constants.ENDPOINT} does not answer as a model hub does", _NETWORK)
    who = ", with your token" if signed_in else ", without a token"
    return Finding("hub", OK, f"{constants.ENDPOINT} answers in {answer_seconds:.1f} s{who}")


def _models() -> Iterator[Finding]:
    import torch

    from localchat.fitting import largest_model
    from localchat.stats import memory_used

    here = len(store.listing())
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    used, total = memory_used(kind)
    largest = largest_model(total - used if kind == "cuda" else total, 8192, kind)
    packed = f"{here} packed here" if here else "none here yet; `localchat run smollm2-135m` gets a small one"
    yield Finding("models", OK, f"{packed}; the largest of `localchat list` that fits in memory: {largest or 'none'}")


def _printer() -> Callable[[Finding], None]:
    """A function that prints one finding, in colour on a terminal that has it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    colours = {OK: "green", WARN: "yellow", BAD: "bold red"}

    def show(finding: Finding) -> None:
        line = Text(f"{finding.status:<5}", style=colours[finding.status])
        line.append(f"{finding.name:<11}", style="bold").append(finding.text, style="default")
        console.print(line, soft_wrap=True)
        if finding.fix:
            console.print(Text(f"{'':<16}fix: {finding.fix}"), soft_wrap=True)
        sys.stdout.flush()

    return show
