"""Every kernel as it is launched for real shapes, to be compiled for cards that are not there.

`CASES` is the registry: a new kernel adds its own lines. tests/kernels/test_compile.py reads it and runs this file in a
process of its own (where TRITON_INTERPRET is set, `triton.jit` gives functions that cannot be compiled). Run as a
script it compiles all cases and prints JSON: {"<case> sm_<arch>": {"shared", "stack", "local", "registers",
"fragments", "word_loads", "stores", "dependent", "unwritten"} or {"error"}}. fragments: the layouts of what
instructions for tensor cores in inline PTX take and give; word_loads: how a program loads what it reads only once;
stores: how it writes; dependent: in which order programmatic dependent launch's two instructions come; unwritten: see
there.
"""

import functools
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from localchat.kernels import (
    attention,
    attention_decode,
    gated_delta_net_decode,
    gated_delta_net_few_tokens,
    gated_delta_net_prefill,
    int4_matmul,
    int8_matmul,
    many_tokens,
)
from localchat.kernels.cards import TABLE, Fragments

ARCHS = (80, 86, 89, 90, 120)
HOPPER, OTHERS = (90,), (80, 86, 89, 120)
# Integers that follow from how long a prompt is: a kernel that is compiled anew for multiples of 16 makes people wait.
VARYING = ("tokens", "T", "tiles_t", "splits", "first", "last", "part", "part_count", "count", "capacity")


@dataclass(frozen=True)
class Case:
    """A kernel, "module.function" below localchat.kernels, and how it is launched.

    `signature` lists the types of all parameters that are not in `constexprs`, in their order: "*bf16", "i32", "fp32";
    "i32:16" is an integer known to be a multiple of 16. Pointers are aligned to 16 bytes. A pointer that is None at
    launch belongs into `constexprs`.
    """

    name: str
    kernel: str
    signature: str
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    archs: tuple[int, ...] = ARCHS


def _row_cases() -> list[Case]:
    cases = []
    for half, out in ((True, "*fp16 *fp32"), (False, "*bf16")):
        missing = {} if half else {"scale_ptr": None}
        name = "half" if half else "bf16"
        cases.append(
            Case(
                f"rms_norm {name}",
                "rms_norm._rms_norm_kernel",
                f"*fp32 *fp32 {out} i32:16 fp32",
                {**missing, "HALF": half, "BLOCK": 8192},
                num_warps=16,
            )
        )
        cases += [
            Case(
                f"swiglu {name} {dtype} block {block}",
                "swiglu._swiglu_kernel",
                f"*{dtype} {out} i32:16",
                {**missing, "HALF": half, "WHOLE": block > 4096, "BLOCK": block},
                num_warps=warps,
            )
            for dtype in ("fp32", "bf16")
            for block, warps in ((4096, 16), (32768, 32))
        ]
    return cases


def _attention_cases() -> list[Case]:
    """smollm2, qwen2.5-32b, qwen3-8b and qwen3.5-27b, which is gated, each in bf16 and INT8; an fp32 cache.

    fp16: slabs of an INT8 cache, of which there may be several whatever the number of rows.
    """
    cases = []
    shapes = [(d, group, kv) for d, group in ((64, 3), (128, 5), (128, 8), (256, 6)) for kv in ("bf16", "i8", "fp16")]
    for d, group, kv in (*shapes, (64, 7, "fp32")):
        dtype, size = ("bf16", 1) if kv == "i8" else (kv, 4 if kv == "fp32" else 2)
        launch = {"GROUP": group, "D": d, "INT8": kv == "i8", "WIDEN": False}
        launch |= {} if kv == "i8" else {"key_scales_ptr": None, "value_scales_ptr": None}
        gated = {"GATED": d == 256} | ({} if d == 256 else {"gate_ptr": None})
        pointers = f"*{dtype} *{kv} *{kv} {'*fp32 *fp32 ' * (kv == 'i8')}*i64"
        shape = f"D {d} group {group} {kv}"
        forms = [(32, False, "fp16"), (10_000, False, "fp32"), (32, True, "fp32"), (1200, True, "fp32")]
        if kv == "fp16":
            forms = [(10_000, False, "bf16"), (10_000, True, "fp32")]
        for rows, cut, out in forms[:2] if group == 8 else forms:
            for archs in ((86, 120) if cut and kv != "fp16" else (80, 86, 89, 120), (90,)):
                block_m, block_n, warps, stages = attention.prefill_blocks(d, size, rows, archs[0] // 10)
                cases.append(
                    Case(
                        f"attention_prefill {shape} rows {rows}{' of parts' * cut}",
                        "attention._attention_prefill_kernel",
                        f"{pointers} {'*fp32 ' * (d == 256)}*{out} {'*fp32 ' * cut}fp32 {'i32 ' * 6}i32:16 i32:16",
                        {**launch, **gated, "CUT": cut, "BLOCK_M": block_m, "BLOCK_N": block_n}
                        | ({} if cut else {"stats_ptr": None}),
                        num_warps=warps,
                        num_stages=stages,
                        archs=archs,
                    )
                )
    cases += [
        Case(
            f"dequantize_kv D {d}",
            "attention_slabs._dequantize_kv_kernel",
            "*i8 *i8 *fp32 *fp32 *fp16 i32 i32 i32",
            {"D": d, "ROWS": 2048 // d},
            num_warps=8,
        )
        for d in (64, 256)
    ]
    join = {"GATED": True, "GROUP": 6, "D": 256, "ROWS": 8, "AT_ONCE": 8}
    return [
        *cases,
        *(
            Case(
                f"attention_join {out}",
                "attention_parts._attention_join_kernel",
                f"*fp32 *fp32 *fp32 *{out} i32 i32:16",
                join,
            )
            for out in ("fp32", "fp16")
        ),
    ]


def _attention_decode_cases() -> list[Case]:
    """The same models; splits as on an H200, and one. fp32 caches too, which no card has."""
    return [case for archs in (HOPPER, OTHERS) for case in _attention_decode_cases_of(archs)]


def _attention_decode_cases_of(archs: tuple[int, ...]) -> list[Case]:
    cases = []
    shapes = [
        (d, rotary, group, splits, kv)
        for d, rotary, group, splits in ((64, 64, 3, 44), (128, 128, 5, 16), (128, 128, 8, 16), (256, 64, 6, 33))
        for kv in ("bf16", "i8")
    ]
    shapes += [
        (64, 64, 7, 66, "fp32"),
        (256, 64, 6, 1, "bf16"),
        (128, 128, 32, 1, "i8"),
        (128, 128, 16, 66, "bf16"),
        (128, 128, 7, 33, "bf16"),
    ]
    for d, rotary, group, splits, kv in shapes:
        size = {"fp32": 4, "bf16": 2, "i8": 1}[kv]
        blocks = attention_decode.decode_blocks(4 if group == 7 else 8, d, size, archs[0] // 10)
        splits *= blocks.programs if splits > 1 else 1
        rows = 1 << (group - 1).bit_length()
        launch = {"GROUP": group, "D": d, "ROTARY": rotary, "INT8": kv == "i8", "WIDEN": False, "UNITS": True}
        launch |= {"NORM": group > 5, "GATED": d == 256, "ONE": splits == 1, "BLOCK_M": max(16, rows), "ROWS": rows}
        launch |= {"BLOCK_N": blocks.keys, "PART": max(64, blocks.keys)}
        launch |= {"AT_ONCE": attention_decode.parts_at_once(splits, rows, d)}
        launch |= {} if kv == "i8" else {"key_scales_ptr": None, "value_scales_ptr": None}
        launch |= {} if group > 5 else {"q_norm_ptr": None, "k_norm_ptr": None}
        launch |= {} if d == 256 else {"gate_ptr": None}
        signature = (
            f"*fp32 {'*fp32 *fp32 ' * (group > 5)}*fp32 *fp32 *i64 {'*fp32 ' * (d == 256)}*{kv} *{kv} "
            f"{'*fp32 *fp32 ' * (kv == 'i8')}*fp32 *fp32 *i32 *fp16 fp32 fp32 i32:16"
        )
        cases.append(
            Case(
                f"attention_decode D {d} group {group} {kv} {splits} splits",
                "attention_decode._attention_decode_kernel",
                signature,
                launch,
                blocks.warps if rows <= 16 else 8,
                blocks.stages,
                archs,
            )
        )
    return cases


def _delta_net_cases() -> list[Case]:
    """qwen3.5-27b, 9b and 2b: 3, 2 and 1 value heads per key head."""
    module, chunk, dims = "gated_delta_net_prefill", {"CHUNK": 64}, {"KEY_HEADS": 16, "REPEATS": 3, "DK": 128}
    length = gated_delta_net_prefill.CONV_LENGTH
    runs = {"RUNS": 64 // length, "LENGTH": length}
    prefill = [
        Case(
            f"gated_delta_net_prefill conv {dtype} {'q, k' if norm else 'v'}",
            f"{module}._conv_kernel",
            f"*{dtype} *bf16 *i64 *bf16 *fp16 {'' if norm else '*fp32 '}i32 i32:16 i32:16 i32:16",
            {"L2_EPS": 1e-6, "NORM": norm, "D": 128, **runs, **({"scale_ptr": None} if norm else {})},
        )
        for dtype in ("fp32", "bf16")
        for norm in (True, False)
    ]
    prefill.append(
        Case(
            "gated_delta_net_prefill triangle",
            f"{module}._triangle_kernel",
            "*fp16 *fp32 *fp32 *fp32 *i64 *fp16 *fp16 *fp32 i32 i32:16",
            {**dims, **chunk, "BLOCK_K": 64},
            4,
            2,
        )
    )
    for archs, repeats in (((80, 86, 89, 120), 3), ((90,), 3), ((90,), 2), ((90,), 1)):
        block_v, state_warps, stages = gated_delta_net_prefill.state_blocks(16 * repeats, 128, archs[0] // 10, 132)
        prefill.append(
            Case(
                f"gated_delta_net_prefill state, {repeats} heads",
                f"{module}._state_kernel",
                "*fp16 *fp16 *fp32 *fp16 *fp16 *fp32 *fp32 *fp32 i32",
                {**dims, **chunk, "REPEATS": repeats, "DV": 128, "BLOCK_V": block_v},
                state_warps,
                stages,
                archs,
            )
        )
    prefill += [
        Case(
            f"gated_delta_net_prefill norm {out}",
            f"{module}._gated_norm_kernel",
            f"*fp32 *{inputs} *bf16 *{out} i32 i32:16 i32:16 fp32",
            {"D": 128, "BLOCK_T": 16},
        )
        for inputs, out in (("bf16", "bf16"), ("fp32", "fp16"))
    ]
    decode, kernel, product = [], "gated_delta_net_decode._decode_kernel", "*fp16 *fp32 *i8 *fp32"
    weights, warps = "*bf16 *fp32 *fp32 *bf16 *i64 *bf16 *fp32", gated_delta_net_decode.decode_warps(128, 128)
    sizes = {"L2_EPS": 1e-6, "DK": 128, "DV": 128, "WIDTH": 32}
    for repeats, hidden, squares in ((3, 5120, 512), (2, 2560, 256), (2, 4096, 256), (1, 2048, 128), (1, 1024, 0)):
        launch = {**sizes, "REPEATS": repeats, "UNITS": True, "SQUARES": squares, "STEPS": -(-hidden // 1024)}
        decode.append(
            Case(
                f"gated_delta_net_decode {repeats} heads, {hidden} columns",
                kernel,
                f"*fp32 {product} {weights} *fp16 i32:16 i32:16 i32:16 fp32 fp32",
                {**launch, "ba_ptr": None, "BLOCK_K": 1024},
                warps,
            )
        )
    missing = dict.fromkeys(("x_ptr", "factors_ptr", "ba_weight_ptr", "ba_scales_ptr"))
    launch = {**sizes, **missing, "REPEATS": 3, "UNITS": False, "SQUARES": 0, "STEPS": 0, "BLOCK_K": 256}
    decode.append(
        Case(
            "gated_delta_net_decode 3 heads, b and a given",
            kernel,
            f"*fp32 *fp32 {weights} *fp32 i32:16 i32:16 i32:16 fp32 fp32",
            launch,
            warps,
        )
    )
    few_module, few = gated_delta_net_few_tokens, []
    launch = {**sizes, "UNITS": True, "MOST": few_module.MOST_TOKENS, "AT_ONCE": few_module.AT_ONCE}
    for repeats, dtype in ((3, "fp32"), (2, "fp32"), (1, "fp32"), (3, "bf16")):
        few.append(
            Case(
                f"gated_delta_net_few_tokens {repeats} heads, {dtype}",
                "gated_delta_net_few_tokens._few_tokens_kernel",
                f"*{dtype} *fp32 {weights} *i32 *fp32 *fp16 i32 i32:16 i32:16 i32:16 fp32",
                {**launch, "REPEATS": repeats},
                warps,
            )
        )
    return [*decode, *few, *prefill]


def _sampling_cases() -> list[Case]:
    """151,936 candidates."""
    grid = {"BLOCK": 2048, "BLOCKS": 128}
    row, settings = "*fp32 *fp32 *i64", "*fp32 *i64"
    adjust = {"BLOCK": 2048, "HISTOGRAM_BLOCK": 1024}
    return [
        Case("sample adjust", "sampling._adjust_kernel", f"*fp32 *u8 *fp32 {row} i32:16", adjust, 8),
        Case("sample coarse", "sampling._coarse_kernel", f"{row} {settings} i32:16", grid, 8),
        *(
            Case(f"sample {name}", f"sampling._{name}_kernel", f"{row} *i64 {settings} i32:16", grid, 8)
            for name in ("top_k_middle", "top_k_last", "top_p_middle")
        ),
        Case("sample top_p_last", "sampling._top_p_last_kernel", f"{row} *i64 *fp32 i32:16", grid, 8),
        Case("sample draw", "sampling._draw_kernel", f"{row} *i64 {settings} *i64 *fp32 *i32 i32:16", grid, 8),
        Case("sample choose", "sampling._choose_kernel", "*fp32 *i32 *i64 i32:16", grid, 1),
        Case("mark_seen", "sampling._mark_seen_kernel", "*i64 *u8", {"BITS": 3}, 1),
    ]


def _product_cases() -> list[Case]:
    """INT8 rows, and an INT4 matrix itself."""
    cases = []
    for group, has_min, scales, n, k in (
        (128, False, "fp16", 5120, 27648),
        (128, True, "fp32", 17408, 5120),
        (64, False, "fp16", 5120, 14336),
        (32, True, "fp16", 1536, 576),
    ):
        launch = int4_matmul.dequantize_options(n, k, group, has_min)
        cases.append(
            Case(
                f"dequantize_int4 {n} x {k} groups of {group}{' with min' if has_min else ''}, {scales}",
                "int4_matmul._dequantize_int4_kernel",
                f"*i32 *{scales} *{scales} *bf16 i32:16 i32",
                launch,
                launch.pop("num_warps"),
            )
        )
    pointers, flags = "*fp16 *fp32 *i8 *fp32 *fp32 *fp32 *fp32", {"HAS_BIAS": True, "HAS_RES": True, "SQUARES": 0}
    vector = {**flags, "ROWS": int8_matmul.GEMV_ROWS, "BLOCK_K": int8_matmul.GEMV_K, "STEPS": int8_matmul.GEMV_STEPS}
    gemv = "int8_matmul._int8_gemv_kernel"
    return [
        *cases,
        Case("int8_gemv", gemv, f"{pointers} i32 i32:16 i32 fp32", vector, int8_matmul.GEMV_WARPS),
        Case(
            "int8_gemv squares",
            gemv,
            f"{pointers} i32 i32:16 i32 fp32",
            vector | {"SQUARES": 512},
            int8_matmul.GEMV_WARPS,
        ),
        Case("dequantize_int8", "int8_matmul._dequantize_int8_kernel", "*i8 *fp32 *bf16 i32", {"BLOCK_K": 2048}),
    ]


def _int8_few_tokens_cases() -> list[Case]:
    """An lm_head with each number of columns; one token, where told to; K with masks, in a loop, and of few steps."""
    cases = []
    for n, k, tokens, settings in (
        (248320, 5120, 2, int8_matmul.FRAGMENTS),
        (248320, 5120, 4, int8_matmul.FRAGMENTS),
        (248320, 5120, 8, int8_matmul.FRAGMENTS),
        (248320, 5120, 1, int8_matmul.ONE_TOKEN),
        (151936, 16384, 2, int8_matmul.FRAGMENTS),
        (5120, 27648, 8, int8_matmul.FRAGMENTS),
        (49152, 1424, 8, int8_matmul.FRAGMENTS),
    ):
        launch = int8_matmul.few_tokens_options(tokens, k, settings)
        parts, batch = launch.pop("num_warps"), launch["BATCH"]
        launch |= {"HAS_BIAS": True, "HAS_RES": True, "SQUARES": 512 if k == 5120 else 0, "USE_PTX": True}
        launch |= {"T": 1} if tokens == 1 else {}
        cases.append(
            Case(
                f"int8_few_tokens {n} x {k} {tokens} tokens, {parts} parts batch {batch}",
                "int8_few_tokens.int8_few_tokens_kernel",
                f"*fp16 *fp32 *i8 *fp32 *fp32 *fp32 *fp32 {'i32 ' * (tokens > 1)}i32:16 i32 i32 fp32",
                launch,
                parts,
            )
        )
    return cases


def _many_tokens_cases() -> list[Case]:
    """Each tile of both formats, other groups, minima, a K that ends within a step."""
    hopper, others = many_tokens._HOPPER, many_tokens._OTHERS
    plain = [(archs, tile, bits, 128, False, 5120) for archs, tiles in ((HOPPER, hopper), (OTHERS, others))
             for tile in tiles for bits in (4, 8)]  # fmt: skip
    cases = []
    for archs, tile, bits, group, has_min, k in (
        *plain,
        (HOPPER, hopper[0], 4, 32, True, 1504),
        (HOPPER, hopper[-1], 4, 32, True, 1504),
        (HOPPER, hopper[-1], 4, 64, False, 5120),
        (OTHERS, others[0], 4, 32, True, 1504),
        (OTHERS, others[1], 4, 32, True, 1504),
        (OTHERS, others[-1], 8, 128, False, 1424),
    ):
        stored, whole = "*i32 *i32 *i32" if bits == 4 else "*i8 *fp32 *fp32", k % 128 == 0
        cases.append(
            Case(
                f"many_tokens INT{bits} K {k} {tile}{f', groups of {group}' if bits == 4 else ''}",
                "many_tokens.many_tokens_kernel",
                f"*fp16 *fp32 {stored} *fp32 *fp32 *fp32 *fp32 *i32 i32 i32 i32:16 i32:16",
                {"BITS": bits, "G8": group // 8, "HAS_MIN": has_min, "WHOLE": whole, "HAS_BIAS": True, "HAS_RES": True}
                | {"BLOCK_M": tile.rows, "BLOCK_T": tile.tokens, "AT_ONCE": min(tile.tokens, many_tokens._AT_ONCE)}
                | {"USE_PTX": True},
                tile.warps,
                tile.stages,
                archs,
            )
        )
    return cases


def _few_tokens_cases() -> list[Case]:
    """All forms with and without a minimum, K with and without masks, each number of columns; other settings."""
    cases = []
    for group, has_min, n, k, scales, tokens, settings in (
        (128, False, 55296, 5120, "fp16", 1, None),
        (128, False, 55296, 5120, "fp16", 2, None),
        (128, False, 55296, 5120, "fp16", 4, None),
        (128, False, 55296, 5120, "fp16", 8, None),
        (128, False, 5120, 27648, "fp16", 1, None),
        (128, True, 5120, 5120, "fp16", 1, None),
        (128, True, 55296, 5120, "fp16", 8, None),
        (128, True, 5120, 5120, "fp32", 1, None),
        (128, False, 5120, 6144, "fp16", 8, None),
        (32, False, 5120, 6144, "fp16", 8, None),
        (32, False, 5120, 6144, "fp32", 4, None),
        (128, False, 5120, 5120, "fp16", 1, Fragments(8, 2)),
        (128, False, 6144, 5120, "fp16", 1, None),
        (128, True, 6144, 5120, "fp16", 8, None),
        (128, False, 24576, 4096, "fp16", 1, None),
        (128, False, 5120, 5120, "fp16", 1, Fragments(4, 2)),
        (128, False, 14336, 5120, "fp16", 1, Fragments(4, 2)),
        (128, False, 1152, 896, "fp16", 1, None),
        (64, False, 9728, 896, "fp16", 1, None),
        (32, True, 3072, 576, "fp16", 8, None),
        (32, True, 3072, 1536, "fp16", 1, None),
        (32, True, 3072, 576, "fp32", 8, Fragments(4, 1)),
        (32, True, 5120, 5120, "fp32", 1, None),
        (32, True, 5120, 5120, "fp32", 8, None),
        (128, False, 5120, 17408, "fp16", 1, "early"),
        (128, False, 5120, 17408, "fp16", 8, "early"),
        (128, True, 5120, 17408, "fp16", 8, "early"),
        (128, False, 5120, 16384, "fp16", 1, "early"),
        (128, False, 34816, 5120, "fp16", 1, Fragments(4, 3, 7, late=True)),
    ):
        early = settings == "early"
        chosen = settings if isinstance(settings, Fragments) else TABLE["NVIDIA H200"].fragments(n, k)
        dtype = torch.float16 if scales == "fp16" else torch.float32
        launch = int4_matmul.few_tokens_options(tokens, k, group, dtype, has_min, chosen, early=early)
        warps = launch.pop("num_warps")
        launch |= {"G8": group // 8, "HAS_MIN": has_min, "HAS_BIAS": True, "HAS_RES": True, "WHOLE": k % 128 == 0}
        down = n < k  # its end makes what the next norm needs, as gate_up's makes SwiGLU
        launch |= {"SQUARES": 0 if down else 512, "SWIGLU": n > 4 * k, "NORM": down}
        fills = n == 6144  # a layer's first product
        launch |= {"USE_PTX": True, "FILL": fills} | ({"T": 1} if tokens == 1 else {})
        kind = f"groups of {group}{' with min' if has_min else ''}, scales {scales}, {tokens} tokens"
        kind += ", early" * launch["EARLY"]
        cases.append(
            Case(
                f"int4_few_tokens {n} x {k} {kind}, {launch['PARTS']} parts batch {launch['BATCH']}",
                "int4_few_tokens.int4_few_tokens_kernel",
                f"*fp16 *fp32 *i32 *{scales} *{scales} *fp32 *fp32 {'*fp16' if n > 4 * k else '*fp32'} "
                f"*fp32 *fp16 *fp32 {'i32 ' * (tokens > 1)}i32:16 i32 i32 fp32 *i32 i32:16",
                launch,
                warps,
                archs=tuple(arch for arch in ARCHS if arch >= 90) if early else ARCHS,
            )
        )
    return cases


@functools.cache
def cases() -> list[Case]:
    """The registry."""
    rope = {"D": 128, "ROTARY": 128, "BLOCK": 128, "INT8": False, "key_scales_ptr": None, "value_scales_ptr": None}
    integers = "fp32 i32:16 i32 i32 i32:16"
    rope_signature = f"*i64 *bf16 *bf16 *bf16 {integers}"
    return [
        *_row_cases(),
        Case(
            "int8_embedding",
            "int8_embedding._int8_embedding_kernel",
            "*i64 *i8 *fp32 *fp32 i32:16",
            {"BLOCK": 1024},
        ),
        Case("rotary", "rotary._rotary_kernel", "*i64 *fp32 *fp32 *fp32 fp32 i32:16", {"BLOCK": 64}, 1),
        Case(
            "rope_kv_write",
            "rope_kv_write._rope_kv_write_kernel",
            f"*fp32 *fp32 *fp32 {rope_signature}",
            {"q_norm_ptr": None, "k_norm_ptr": None, "NORM": False, **rope},
            1,
        ),
        Case(
            "rope_kv_write with norms",
            "rope_kv_write._rope_kv_write_kernel",
            f"*bf16 *bf16 *bf16 *fp32 *fp32 {rope_signature}",
            {"NORM": True, **rope},
            1,
        ),
        Case(
            "rope_kv_write 64 of 256",
            "rope_kv_write._rope_kv_write_kernel",
            f"*fp32 *fp32 *fp32 *fp32 *fp32 {rope_signature}",
            {**rope, "NORM": True, "D": 256, "ROTARY": 64, "BLOCK": 256},
            1,
        ),
        *(
            Case(
                f"rope_kv_write INT8 {rotary} of {d}",
                "rope_kv_write._rope_kv_write_kernel",
                f"*fp32 *fp32 *fp32 *fp32 *fp32 *i64 *bf16 *i8 *i8 *fp32 *fp32 {integers}",
                {"NORM": True, "D": d, "ROTARY": rotary, "BLOCK": d, "INT8": True},
                1,
            )
            for d, rotary in ((64, 64), (128, 128), (256, 64))
        ),
        *_product_cases(),
        *_few_tokens_cases(),
        *_int8_few_tokens_cases(),
        *_many_tokens_cases(),
        *_attention_cases(),
        *_attention_decode_cases(),
        *_delta_net_cases(),
        *_sampling_cases(),
        Case("advance", "advance._advance_kernel", "*i64 *i64 *i64 *i64", num_warps=1),
        Case("read", "read_bandwidth._read_kernel", "*fp32 *fp32", {"BLOCK": 8192, "ITERATIONS": 8}, 8),
    ]


def compile_case(case: Case, arch: int) -> dict[str, Any]:
    """What the compiler says of one kernel on one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, function = case.kernel.rsplit(".", 1)
    kernel = getattr(importlib.import_module(f"localchat.kernels.{module}"), function)
    constexprs = dict(case.constexprs)
    if "PDL" in kernel.arg_names:  # as kernels/pdl.py decides
        constexprs["PDL"] = arch >= 90
    types = iter(case.signature.split())
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind, _, multiple = ("constexpr", "", "") if name in constexprs else next(types).partition(":")
        signature[name] = kind
        if kind.startswith("*") or multiple:
            attrs[(i,)] = [["tt.divisibility", 16]]
    if left := list(types):
        raise ValueError(f"{case.name}: got the types {left} too many for {kernel.arg_names}")
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constexprs.items()}, attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    free = (p.name for p in kernel.params if not (p.do_not_specialize or p.do_not_specialize_on_alignment))
    return {
        "shared": compiled.metadata.shared,
        "specialized": sorted(set(free) & set(VARYING)),
        "fragments": _fragments(compiled.asm["ttgir"]),
        "word_loads": _word_loads(compiled.asm["ptx"]),
        "stores": sorted(set(re.findall(r"st\.global\S*", compiled.asm["ptx"]))),
        "dependent": list(dict.fromkeys(re.findall(r"griddepcontrol\.(\w+)", compiled.asm["ptx"]))),
        "unwritten": unwritten(_tool("nvdisasm", "-c", compiled.asm["cubin"]))
        if "wgmma" in compiled.asm["ptx"]
        else [],
        **_resource_usage(compiled.asm["cubin"]),
    }


def _fragments(ttgir: str) -> list[str]:
    """Layouts of the operands and results of inline PTX with an mma, or that loads four registers."""
    aliases = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    asm = [
        line.split("pure = true}", 1)[1]
        for line in ttgir.splitlines()
        if "inline_asm" in line and ("mma.sync" in line or ".v4.b32" in line)
    ]
    return sorted({aliases.get(name, name) for line in asm for name in re.findall(r"tensor<[^,>]+, (.*?)>", line)})


def _word_loads(ptx: str) -> list[str]:
    """Loads that are evicted first or never kept, without their registers."""
    loads = re.findall(r"ld\.\S*(?:evict_first|no_allocate)\S*", ptx)
    return sorted({re.sub(r"\[.*?\], |, %\w+", "", load) for load in loads})


def unwritten(sass: str) -> list[str]:
    """Instructions, of nvdisasm's text, that read a uniform register which none before them has written.

    Of descriptors of shared memory ptxas 12.8 has forgotten such writes (kernels/NOTES.md). A pair of descriptors is 4
    registers, of which the first two are of an operand that may be in ordinary registers instead.
    """
    line = r"^\s*/\*\w{4,}\*/\s+(?:@!?U?P\w+ +)?(\S+) +(.*?);"
    written: set[int] = set()
    found = []
    for name, text in re.findall(line, sass, re.MULTILINE):
        operands = [part.strip() for part in text.split(",")]
        writes = name.startswith(("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")) and operands[0].startswith("UR")
        for operand in operands[1:] if writes else operands:
            for wide, register in re.findall(r"(gdesc\[)?\bUR(\d+)", operand):
                skipped = 2 if re.match(r"R\d", operands[1]) else 0
                needed = range(skipped, 4) if wide else range(1)
                if any(int(register) + i not in written for i in needed):
                    found.append(f"{name} {text}".strip())
        if writes:
            count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            written |= set(range(int(operands[0][2:]), int(operands[0][2:]) + count))
    return found


def _resource_usage(cubin: bytes) -> dict[str, int]:
    text = _tool("cuobjdump", "--dump-resource-usage", cubin)
    usage = {}
    for key, label in (("registers", "REG"), ("stack", "STACK"), ("local", "LOCAL")):
        found = re.search(rf"\b{label}:(\d+)", text)
        if found is None:
            raise ValueError(f"cuobjdump: got {text!r}, wanted a {label}: field")
        usage[key] = int(found[1])
    return usage


def _tool(name: str, option: str, cubin: bytes) -> str:
    """What a tool inside the triton package says of compiled code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


def _report(task: tuple[Case, int]) -> tuple[str, dict[str, Any]]:
    case, arch = task
    try:
        return f"{case.name} sm_{arch}", compile_case(case, arch)
    except Exception as error:  # noqa: BLE001  (the compiler's errors have no common class; a test prints them)
        return f"{case.name} sm_{arch}", {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    tasks = [(case, arch) for case in cases() for arch in case.archs]
    with multiprocessing.Pool(os.cpu_count()) as pool:
        json.dump(dict(pool.imap_unordered(_report, tasks)), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
