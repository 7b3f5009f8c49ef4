"""What `localchat quantize --report` prints: how far a packed model is from its source, and what it will be like here.

Quality is computed by quantize/report.py, layer by layer, so that any model fits beside its source. The speed is an
upper limit: the bytes that a token reads at the rate at which this machine reads memory.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localchat.prepare import say, size_text

if TYPE_CHECKING:
    from localchat.quantize.report import Quality


@dataclass(frozen=True)
class Report:
    """size: bytes of the files; bits_per_weight: of all of them; largest_context: tokens, 0 where it does not fit here.

    most_tokens_per_second: see the module.
    """

    quality: "Quality"
    size: int
    bits_per_weight: float
    bytes_per_token: int
    most_tokens_per_second: float
    largest_context: int
    device: str


def windows_of(source: Path, text: Path | None) -> list[list[int]]:
    """The text of a report as the source's ids. text: a file, None for the shipped one.

    Raises:
        BadCheckpoint: the model has no tokenizer that can be read, or another model's.
        UserError: the text cannot be read, or is too short.
    """
    from localchat.quantize.calibration_text import check_ids, report_windows
    from localchat.quantize.convert import open_source

    with open_source(source) as opened:
        windows = report_windows(opened.files(), text)
        check_ids(opened, windows)
    return windows


def report(source: Path, folder: Path, windows: list[list[int]]) -> Report:
    """Compare the packed model in `folder` with the source it was made from, over `windows_of` a text.

    Raises:
        BadCheckpoint: one of them cannot be read.
    """
    import torch

    from localchat.bench import bytes_per_token
    from localchat.config import load_config
    from localchat.doctor import memory_bandwidth
    from localchat.ledger import ledger_of_folder
    from localchat.memory_table import memory_of
    from localchat.model import Model
    from localchat.ops import ReferenceOps
    from localchat.quantize.convert import open_source
    from localchat.quantize.report import compare_folder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open_source(source) as opened:
        say(f"comparing with the source over {sum(map(len, windows)):,} tokens")
        quality = compare_folder(opened, folder, windows, device)
        weights = sum(math.prod(shape) for shape in opened.shapes.values())
    memory = memory_of()
    table = ledger_of_folder(folder, 1, memory.kind)
    with torch.device("meta"):
        per_token = bytes_per_token(Model(load_config(folder), ReferenceOps()))
    return Report(
        quality,
        table.weights,
        8 * table.weights / weights,
        per_token,
        memory_bandwidth() / per_token,
        table.largest_context(memory.available),
        memory.name,
    )


def print_report(found: Report, *, as_json: bool) -> None:
    """On stdout; as JSON, which has no word for them, NaN and infinity are null."""
    if as_json:
        print(json.dumps(_finite(asdict(found)), indent=2, allow_nan=False))
        return
    quality = found.quality
    change = quality.perplexity / quality.source_perplexity - 1
    per_token = size_text(found.bytes_per_token)
    rows = [
        ("size", f"{size_text(found.size)}, {found.bits_per_weight:.2f} bits per weight"),
        ("KL divergence", f"{quality.kl:.5f} (1 % of the positions above {quality.kl_99:.4f})"),
        ("same top token", f"{quality.agreement:.1%} of {quality.tokens:,} positions"),
        ("perplexity", f"{quality.perplexity:.3f}, the source's {quality.source_perplexity:.3f} ({change:+.2%})"),
        (
            "speed",
            f"at most {found.most_tokens_per_second:,.0f} tok/s here ({per_token} a token)",
        ),
        ("context", f"{found.largest_context:,} tokens fit into {found.device}"),
    ]
    for name, value in rows:
        print(f"{name:<18} {value}")
    print(f"\n{'matrices':<26} {'mean error':>10} {'worst':>8}")
    for kind, (mean, worst, where) in errors_by_kind(quality.errors).items():
        print(f"{kind:<26} {mean:>10.2%} {worst:>8.2%}  {where}")


def _finite(value: object) -> object:
    """The content of a JSON document without NaN and infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def errors_by_kind(errors: dict[str, float]) -> dict[str, tuple[float, float, str]]:
    """Matrix -> error as kind -> (mean, worst, name of the worst); a kind is a name without its layer."""
    kinds: dict[str, dict[str, float]] = {}
    for name, error in errors.items():
        kind = name.split(".", 2)[2] if name.startswith("layers.") else name
        kinds.setdefault(kind, {})[name] = error
    return {
        kind: (sum(found.values()) / len(found), max(found.values()), max(found, key=lambda name: found[name]))
        for kind, found in kinds.items()
    }
