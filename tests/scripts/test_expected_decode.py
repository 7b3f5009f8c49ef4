"""scripts/expected_decode: what it counts, what it takes for the limit, and that it sees every launch of a step."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]
SCRIPTS = Path(__file__).parents[2] / "scripts"
# Two loads before a loop of one load, two tensor instructions and its own jump; a loop that loads nothing; padding.
CODE = """
        /*0000*/                   LDG.E.NA.128.STRONG.SM R4, [R2.64] ;
        /*0010*/                   LDG.E.EF.64 R8, [R2.64+0x200] ;
        /*0020*/               @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   LDG.E.NA.128.STRONG.SM R4, desc[UR16][R2.64] &req={1} ?trans1;
        /*0040*/                   LDG.E.128 R12, [R6.64] ;
        /*0050*/                   LOP3.LUT R4, R4, 0xf000f, R9, 0xea, !PT ;
        /*0060*/                   HMMA.16816.F32 R88, R12, R44, R88 ;
        /*0070*/                   HMMA.16816.F32 R88, R12, R44, R88 ;
        /*0080*/                   BRA.U !UP0, `(.L_x_1) ?trans6;
.L_x_0:
.L_x_2:
        /*0090*/                   FADD R3, R3, R88 ;
        /*00a0*/               @P1 BRA `(.L_x_2) ;
        /*00b0*/                   I2F.S8 R3, R3 ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   BRA `(.L_x_3);
        /*00e0*/                   NOP;
"""


def test_instructions_are_counted_by_what_a_warp_loads(script: Script) -> None:
    sass = script("sass.py")
    code = sass.code_of(CODE)
    assert (code.once.weight_bytes, code.loop.weight_bytes) == (512 + 256, 512)
    assert (code.once.kinds["all"], code.loop.kinds["all"]) == (8, 6)
    assert +code.executed(768) == {"load": 2, "other": 4, "float": 1, "convert": 1, "all": 8}
    thrice = code.executed(768 + 3 * 512)
    assert thrice == {"load": 8, "other": 7, "float": 1, "convert": 1, "all": 26, "tensor": 6, "integer": 3}
    assert code.executed(768 + 2 * 512 + 1) == thrice  # the last turn loads less, and is one
    with pytest.raises(ValueError, match="no loop"):
        sass.code_of(CODE.replace(".NA", "")).executed(1000)


def test_the_slowest_is_the_limit(script: Script) -> None:
    """A product's time is that of one bound; keys and values and boundaries come on top."""
    script("sass.py")
    script("launches.py")
    expected = script("expected_decode")
    sheet = expected.Sheet(89, 100, 1e9, 0, 256)
    assert sheet.rates() == {"all": 4e11, "integer": 2e11, "convert": 5e10, "tensor": 1.25e10}
    seconds = expected.bounds({"all": 4_000_000, "integer": 3_000_000, "tensor": 10}, 1_000_000, sheet, 1e12)
    assert seconds == pytest.approx({"bytes": 1e-6, "all": 1e-5, "integer": 1.5e-5, "convert": 0, "tensor": 8e-10})
    slow = expected.Product("a", 10, 1_000_000, 1, {}, seconds)
    fast = expected.Product("b", 3, 1_000_000, 1, {}, seconds | {"bytes": 1e-4})
    assert (slow.bound, fast.bound) == ("integer", "bytes")
    step = expected.Step([slow, fast], 7e-5, 20, 2e-6)
    assert step.seconds == pytest.approx(10 * 1.5e-5 + 3 * 1e-4 + 7e-5 + 20 * 2e-6)
    assert step.at("bytes") == pytest.approx(10 * 1e-6 + 3 * 1e-4)


PROGRAM = """
import collections, json, sys
sys.path[:0] = [sys.argv[1]]
from launches import step_launches
from localchat.bench import bytes_per_token
from localchat.kernels.cards import TABLE, Card, DEFAULT
from localchat.registry import MODELS
entry = MODELS["qwen3.5-27b"]
model, cache, launches = step_launches(entry, TABLE["NVIDIA H200"], 1024)
products = [launch for launch in launches if launch.matrix]
print(json.dumps({
    "bytes": [sum(launch.nbytes for launch in products), bytes_per_token(model)],
    "names": collections.Counter(launch.matrix for launch in products),
    "first": launches[0].name, "last": launches[-1].name,
    "layers": [list(entry.layer_types).count(kind) for kind in ("linear_attention", "full_attention")],
    "batches": sorted({(l.columns, l.arguments["BATCH"]) for l in products if "BATCH" in l.arguments}),
}))
"""


def compiling(*words: str) -> subprocess.CompletedProcess[str]:
    """Python without the interpreter for kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_step_is_recorded_whole() -> None:
    """Every matrix is read once, as the benchmark counts its bytes, and launched as the H200's settings say."""
    done = compiling("-c", PROGRAM, str(SCRIPTS))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["bytes"][0] == said["bytes"][1] > 14e9 - 0.4e9
    linear, full = said["layers"]
    both = {"in_proj_qkvz": linear, "in_proj_ba": linear, "out_proj": linear, "qkv_proj": full, "o_proj": full}
    assert said["names"] == both | {"gate_up_proj": linear + full, "down_proj": linear + full, "lm_head": 1}
    assert (said["first"], said["last"]) == ("_mark_seen_kernel", "_advance_kernel")
    assert said["batches"] == [[5120, 2], [5120, 3], [6144, 3], [17408, 2]]


FORWARD = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from launches import forward_launches
from localchat.kernels.cards import TABLE
from localchat.registry import MODELS
seen = {tokens: forward_launches(MODELS["qwen3.5-27b"], TABLE["NVIDIA H200"], 1024, tokens) for tokens in (2, 8, 16)}
print(json.dumps({t: [[launch.name for launch in launches], sorted(names)] for t, (launches, names) in seen.items()}))
"""


def test_a_forward_of_a_few_tokens_is_its_kernels() -> None:
    """Six launches a delta net layer, seven an attention layer; torch makes memory and views, and computes nothing.

    From nine tokens on what stands between two products is launches of its own.
    """
    done = compiling("-c", FORWARD, str(SCRIPTS))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    delta_net = ["_int8_gemv_kernel", "_few_tokens_kernel"]
    attention = ["_rope_kv_write_kernel", "_attention_prefill_kernel", "_attention_join_kernel"]
    mixers = [*[delta_net] * 3, attention] * 16
    start, norm = ["_int8_embedding_kernel", "_rotary_kernel"], ["_rms_norm_kernel"]
    product = ["int4_few_tokens_kernel"]
    layers = [[*product, *mixer, *product * 3] for mixer in mixers]
    layers[0][:1] = [*norm, *product, *norm]  # behind the embedding, which sums no squares
    few = [*start, *chain(*layers), *norm, "int8_few_tokens_kernel"]
    many = ["many_tokens_kernel"]
    mlp = [*norm, *many, "_swiglu_kernel", *many]
    layers = [[*norm, *many, *(norm if mixer is delta_net else []), *mixer, *many, *mlp] for mixer in mixers]
    for tokens, wanted in (("2", few), ("8", few), ("16", [*start, *chain(*layers), *norm, *many])):
        names, others = said[tokens]
        assert names == wanted
        assert {name.split(".")[1] for name in others} <= {"empty", "empty_like", "slice", "split", "view"}


def test_a_small_model_from_end_to_end() -> None:
    done = compiling(str(SCRIPTS / "expected_decode"), "qwen2.5-0.5b", "--card", "RTX 4090", "--card", "RTX 3090")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().split("\n\n")
    assert first.startswith("qwen2.5-0.5b on RTX 4090, 1,024 tokens of context (computed: sm_89")
    assert "  gate_up_proj 9728 x 896" in second
    rates = [float(part.split("together ")[1].split(": ")[1].split(" tok/s")[0]) for part in (first, second)]
    assert rates[0] > rates[1] > 50
