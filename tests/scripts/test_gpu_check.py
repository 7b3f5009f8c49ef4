"""scripts/gpu_check: it knows every test that needs a card, and such a machine needs few packages to collect them."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# Those of a machine with a card may be missing: a terminal's, and what reads and writes .gguf files.
_WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gguf", "prompt_toolkit", "pyte", "pexpect"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def places(script: Callable[[str], ModuleType]) -> list[Path]:
    """Files and folders, from the root."""
    return [Path(place) for place in script("gpu_check").PLACES]


def marked() -> list[Path]:
    """The test files in whose code the mark stands: pytest.mark.gpu, of a test or of all of them."""

    def is_mark(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "gpu" and ast.unparse(node) == "pytest.mark.gpu"

    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path.relative_to(ROOT) for path in files if any(map(is_mark, ast.walk(ast.parse(path.read_text()))))]


def test_no_file_with_such_tests_is_forgotten(places: list[Path]) -> None:
    found = marked()
    assert Path("tests/quantize/test_gpu.py") in found
    assert [file for file in found if not any(place in (file, *file.parents) for place in places)] == []


def test_all_are_collected_where_packages_are_missing(places: list[Path], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", *map(str, places)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert {str(file) for file in marked()} <= collected
