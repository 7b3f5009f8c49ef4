"""The random folder is one that loads."""

import subprocess
import sys
from pathlib import Path

from localchat.checkpoint import load_model
from localchat.ops import ReferenceOps

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_random_packed.py"


def test_it_loads_and_is_not_overwritten(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "smollm2-135m", tmp_path / "packed"]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "smollm2-135m's shapes" in first.stdout
    model = load_model(tmp_path / "packed", ops=ReferenceOps())
    assert model.config.num_hidden_layers == 30
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "exists already" in again.stderr
