"""scripts/bench_kernels: every call that is timed runs, on memory of its own, and says rightly what it moves."""

import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from localchat.cuda_ops import Summed
from localchat.model import Model, RMSNorm
from localchat.registry import Entry
from localchat.synthetic import synthetic_model

Script = Callable[[str], ModuleType]


@pytest.fixture
def bench_kernels(script: Script) -> ModuleType:
    """With lengths for the interpreter."""
    module = script("bench_kernels")
    module.CONTEXTS, module.FEW, module.MANY = (20,), (1, 2, 16), (40,)
    return module


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if result is None or isinstance(result, float | RMSNorm):
        return []
    parts = result if isinstance(result, list | tuple) else vars(result).values()
    return [tensor for part in parts for tensor in tensors(part)]


def run_first(calls: Sequence[Callable[[], Any]]) -> float:
    """A timer: a call gives finite numbers."""
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(calls[-1]()))
    return 1e-5 * len(calls)


def test_every_case_runs_and_is_a_line(bench_kernels: ModuleType, interpreted: Model) -> None:
    with torch.inference_mode():
        cases = bench_kernels.Cases(interpreted)
        made = [*cases.operations((20,)), *cases.products((1, 2, 16)), *cases.small(),
                *cases.prefill((40,), ((40, 60),), 70)]  # fmt: skip
        rows = [bench_kernels.row_of(case, run_first) for case in made]
    names = {row["name"] for row in rows if row["group"] == "operation"}
    products = {"qkv", "o", "in_proj", "out", "gate_up", "down"}
    assert names == products | {"embedding", "attention", "gated delta net", "norm + lm_head", "sampling greedy",
                                "sampling top-k, top-p"}  # fmt: skip
    assert {row["name"] for row in rows if row["group"] == "prefill"} == products | {"attention", "gated delta net"}
    assert len([row for row in rows if row["group"] == "product"]) == 7 * 3
    assert {row["name"] for row in rows if row["group"] == "small"} == {"rms_norm", "swiglu", "rotary"}
    for row in json.loads(json.dumps(rows)):
        assert row["us"] > 0
        assert row["nbytes"] > 0
        assert (
            row["peer_us"] is not None or row["group"] != "prefill" or row["name"] in ("attention", "gated delta net")
        )
        line = bench_kernels.line_of(row, 4e12, 8e14)
        assert row["name"] in line
        assert ("GB/s" in line or "TFLOP/s" in line) == (row["in_memory"])


def test_what_a_call_moves_and_computes(bench_kernels: ModuleType, interpreted: Model) -> None:
    with torch.inference_mode():
        cases = bench_kernels.Cases(interpreted)
        operations = list(cases.operations((1000,)))
    by_name = {case.name: case for case in operations if case.tokens == 1}
    few = {case.tokens: case for case in operations if case.tokens > 1}
    gate_up = by_name["gate_up"]
    assert gate_up.nbytes == 64 * 32 // 2 + 64 * 4  # codes; scale and minimum of each row
    assert gate_up.flops == 2 * 64 * 32
    assert by_name["attention"].nbytes == 2 * 1000 * 16 * 2  # one head of bf16 keys and values
    assert by_name["attention"].flops == 4 * 2 * 16 * 1000
    assert by_name["gated delta net"].nbytes == 2 * 2 * 16 * 16 * 4 + 2 * 2 * (32 + 4)  # steps and decays: INT8 rows
    assert few.keys() == {8, 16}
    assert few[8].flops == 8 * by_name["gated delta net"].flops  # one after the other
    assert few[8].nbytes == by_name["gated delta net"].nbytes + 8 * (96 * 4 + 32 * 2)  # in fp32, out fp16
    assert len({call.args[5][1].data_ptr() for call in few[16].calls}) == len(few[16].calls) == 64
    assert all(isinstance(call.args[0], Summed) for call in few[8].calls)  # as in a step
    assert by_name["norm + lm_head"].nbytes == 64 * 32 + 64 * 4


def test_the_calls_of_a_case_are_on_different_memory(bench_kernels: ModuleType, interpreted: Model) -> None:
    with torch.inference_mode():
        cases = bench_kernels.Cases(interpreted)
        case = next(case for case in cases.operations((20,)) if case.name == "down")
        attention = next(cases.attention_case("operation", 1, 20))
    assert len({call.args[1].qweight.data_ptr() for call in case.calls}) == 2
    assert len({call.args[4][0].data_ptr() for call in attention.calls}) == len(attention.calls) == 64


def test_whole_steps_are_rows_too(bench_kernels: ModuleType, tiny_entry: Entry) -> None:
    bench_kernels.STEP_CONTEXT = 10
    decode, prefill = bench_kernels.steps(synthetic_model(tiny_entry, "cpu"), tokens=3, repeats=1)
    assert (decode["name"], decode["tokens"], decode["context"]) == ("decode", 1, 10)
    assert (prefill["name"], prefill["tokens"]) == ("prefill", 40)
    assert min(decode["us"], prefill["us"], decode["nbytes"], prefill["flops"]) > 0


def test_a_forward_of_several_tokens_is_a_row(bench_kernels: ModuleType, interpreted: Model) -> None:
    bench_kernels.STEP_CONTEXT = 10
    with torch.inference_mode():
        rows = list(bench_kernels.forwards(interpreted, (1, 3), run_first))
    assert [(row["name"], row["tokens"], row["context"]) for row in rows] == [("forward", 1, 10), ("forward", 3, 10)]
    assert rows[0]["nbytes"] == rows[1]["nbytes"] > 0
    assert rows[1]["flops"] > 2 * rows[0]["flops"]


def test_without_a_card_it_says_so(script: Script, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module = script("bench_kernels")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for model, wanted in (("qwen3.5-27b", "is timed on a CUDA card"), ("nothing", "is no name of the registry")):
        monkeypatch.setattr("sys.argv", ["bench_kernels", model])
        with pytest.raises(SystemExit):
            module.main()
        assert wanted in capsys.readouterr().err
