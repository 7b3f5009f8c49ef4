"""Without Triton the references still import and run."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
import torch
from localchat.kernels.rms_norm import rms_norm, rms_norm_reference
from localchat.ops import CpuOps
import localchat.engine, localchat.cuda_ops
CpuOps()
assert rms_norm_reference(torch.ones(1, 8), torch.ones(8), 0.0).sum() == 8
try:
    rms_norm(torch.ones(1, 8), torch.ones(8), 0.0, half=True)
except (RuntimeError, TypeError):
    print("ok")
"""


def test_references_do_not_need_triton() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr
