"""How many instructions of each kind a compiled kernel executes, read from what nvdisasm says of it.

A kernel that walks over weights is a piece of code, a loop, and a piece of code. How often the loop runs is not in the
code, but follows from what a warp has to load: words that are read once are loaded with a hint not to be kept (NA, no
allocation in L1, or EF, evicted first), and nothing else is.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "tensor": r"[HIQ]MMA",
    "load": r"LD[GS]|LDSM|LDC",
    "convert": r"I2F|F2I|F2F|MUFU",
    "float": r"F(FMA|MUL|ADD)$|H(FMA2|MUL2|ADD2)",
    "integer": r"LOP3|SHF|IADD|PRMT|LEA|SEL|FSEL|[IUV]*MNMX|[IF]SETP|SGXT|BMSK|PLOP3|POPC|VI",
}
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)([^;]*)")
_LABEL = re.compile(r"(\.L_x_\d+):")
_HINT = re.compile(r"LDG\..*\b(NA|EF)\b")


@dataclass(frozen=True)
class Counts:
    """Warp instructions by kind ("all": every one), and the bytes of weights that they load."""

    kinds: Counter[str]
    weight_bytes: int

    @staticmethod
    def of(instructions: list[str]) -> "Counts":
        """Of a piece of code that runs once."""
        kinds = Counter(_kind(text.split(".")[0]) for text in instructions)
        kinds["all"] = len(instructions)
        return Counts(kinds, 32 * sum(map(_lane_bytes, instructions)))


@dataclass(frozen=True)
class Code:
    """What runs once and what the loop over weights runs each time; without such a loop that is empty."""

    once: Counts
    loop: Counts

    def executed(self, weight_bytes: float) -> Counter[str]:
        """Instructions of a warp that loads so many bytes of weights, the loop's last turn counted in full.

        Raises:
            ValueError: it would take a loop, and there is none.
        """
        left = weight_bytes - self.once.weight_bytes
        if left > 0 and not self.loop.weight_bytes:
            raise ValueError(f"sass: {left:.0f} of {weight_bytes:.0f} bytes are loaded by no loop")
        turns = max(0, -int(-left // self.loop.weight_bytes)) if self.loop.weight_bytes else 0
        total = Counter(self.once.kinds)
        for kind, count in self.loop.kinds.items():
            total[kind] += turns * count
        return total


def code_of(text: str) -> Code:
    """The disassembly of one kernel."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := _LABEL.search(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.search(line):
            if found[1].split(".")[0] == "BRA" and (target := re.search(r"\.L_x_\d+", found[2])):
                jumps.append((len(instructions), target[0]))
            instructions.append(found[1])
    loops = [(labels[target], at + 1) for at, target in jumps if labels.get(target, at) < at]
    loading = [(a, b) for a, b in loops if any(map(_lane_bytes, instructions[a:b]))]
    first, end = min(loading, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    outside = [text for text in instructions[:first] + instructions[end:] if text != "NOP"]  # those fill up the end
    return Code(Counts.of(outside), Counts.of(instructions[first:end]))


def disassembled(cubin: bytes) -> str:
    """By the nvdisasm that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, name)), "other")


def _lane_bytes(instruction: str) -> int:
    """Bytes of weights that a lane loads."""
    if not _HINT.match(instruction):
        return 0
    return 16 if ".128" in instruction else 8 if ".64" in instruction else 4
