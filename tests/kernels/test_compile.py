"""Every kernel compiles for cards that are not here, keeps its values in registers and fits in shared memory.

The cases and the compiling are in compile_cases.py, run once in a process without TRITON_INTERPRET.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("compile_cases.py")
# Shared memory of one program: 163 KB on an A100, 227 on an H100 and H200, 99 on the consumer cards.
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}


def _registry() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_cases", SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = [f"{case.name} sm_{arch}" for case in _registry().cases() for arch in case.archs]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What compile_cases.py prints."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    run = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    compiled: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return compiled


def test_the_names_are_unique() -> None:
    assert len(CASES) == len(set(CASES))


def test_a_register_that_nothing_has_written_is_found() -> None:
    """Lines of a kernel that read outside its shared memory, and of one that was right."""
    wrong = """
        /*0740*/                   UMOV UR13, URZ ;
        /*0750*/                   UIADD3 UR12, UP0, UR14, 0x20, URZ ;
        /*0760*/               @P0 HGMMA.64x16x16.F32 R24, gdesc[UR12].tnspB, R24 ;"""
    right = """
        /*0740*/                   ULDC.64 UR12, c[0x0][0x220] ;
        /*0750*/                   UMOV UR14, UR13 ;
        /*0758*/                   UMOV UR15, 0x40000040 ;
        /*0760*/                   HGMMA.64x16x16.F32 R24, gdesc[UR12].tnspB, R24, gsb0 ;"""
    registers = """
        /*0740*/                   UMOV UR14, URZ ;
        /*0750*/                   UMOV UR15, 0x40000040 ;
        /*0760*/                   HGMMA.64x16x16.F32 R24, R32, gdesc[UR12].tnspB, R24, gsb0 ;"""
    unwritten = _registry().unwritten
    assert [line.split()[0] for line in unwritten(wrong)] == ["UIADD3", "HGMMA.64x16x16.F32"]
    assert unwritten(right) == unwritten(registers) == []


@pytest.mark.parametrize("case", CASES)
def test_compiles(report: dict[str, dict[str, Any]], case: str) -> None:
    usage = report[case]
    assert "error" not in usage, usage["error"]
    assert usage["shared"] <= SHARED_KB[int(case.rsplit("sm_")[-1])] * 1024
    assert usage["stack"] == usage["local"] == 0
    assert not usage["unwritten"], usage["unwritten"]
    assert not usage["specialized"], usage["specialized"]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("int4_few_tokens", "int8_few_tokens"))])
def test_fragments_lie_as_the_instruction_takes_them(report: dict[str, dict[str, Any]], case: str) -> None:
    """The right answer depends on it, and Triton promises it nowhere: lane 4g + t has columns 4t..4t+3 of row g.

    Its words come 16 bytes at a time, or a warp's loads would not be whole tiles.
    """
    (layout,) = report[case]["fragments"]
    parts = int(case.split(" parts")[0].rsplit(maxsplit=1)[-1])
    blocked = f"sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [{parts}, 1], order = [1, 0]"
    warps = [[8 << i, 0] for i in range(parts.bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    assert layout in (
        f"#ttg.blocked<{{{blocked}}}>",
        f"#ttg.linear<{{register = [[0, 1], [0, 2]], lane = {lanes}, warp = {warps}, block = []}}>",
    )
    assert report[case]["word_loads"]  # those of the inline PTX have this layout as well, the others are as wide
    assert all(".v4.b32" in load for load in report[case]["word_loads"]), report[case]["word_loads"]


@pytest.mark.parametrize("case", [case for case in _registry().cases() if 90 in case.archs], ids=lambda case: case.name)
def test_where_the_next_kernel_may_start(report: dict[str, dict[str, Any]], case: Any) -> None:
    """First of all, or behind the wait where that was measured to be better (kernels/pdl.py)."""
    given = case.constexprs
    late = (given.get("LATE") and not given.get("EARLY")) or case.kernel.startswith("gated_delta_net_decode.")
    found = report[f"{case.name} sm_90"]["dependent"]
    assert found in ([], ["wait", "launch_dependents"] if late else ["launch_dependents", "wait"])
    assert found or not late


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("dequantize_int4")])
def test_dequantised_weights_stay_in_their_lanes(report: dict[str, dict[str, Any]], case: str) -> None:
    """Words come and weights go 16 bytes a lane, by no way through shared memory: Triton has to see that they do."""
    usage = report[case]
    assert usage["shared"] == 0
    assert usage["word_loads"] and all(".v4.b32" in load for load in usage["word_loads"]), usage["word_loads"]
    assert usage["stores"] == ["st.global.v4.b32"]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("gated_delta_net_decode")])
def test_a_delta_net_s_state_stays_where_it_was_loaded(report: dict[str, dict[str, Any]], case: str) -> None:
    """Triton chooses how it lies in the threads; 64 KB through shared memory would say that it changed its mind."""
    assert report[case]["shared"] <= 4096
