"""The plan on paper: what it says is what the conversion then writes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat import prepare
from localchat.arguments import parse_command_line
from localchat.config import ModelConfig
from localchat.errors import BadCheckpoint, UsageError, UserError
from localchat.quantize import dry_run
from localchat.quantize.convert import Recipe, convert, open_source
from localchat.quantize.dry_run import plan_lines
from localchat.quantize.plan import plan
from localchat.shards import open_shards

Make = Callable[..., Any]
ROW = re.compile(r"(\S+) +(INT4 g\d+(?: \+ min)?|INT8 rows|unquantised) +(\d+) x (\d+) +([\d,.]+) MB")


def lines_of(source: Path, recipe: Recipe) -> list[str]:
    with open_source(source) as opened:
        return list(plan_lines(opened.model_config, recipe, opened, source.parent))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3_5"])
@pytest.mark.parametrize(
    "recipe", [Recipe(32, False), Recipe(64, True, keep=(("down_proj", 16), ("o_proj", 8)))], ids=["fine", "kept"]
)
def test_it_is_what_is_written(make_hf: Make, tmp_path: Path, arch: str, recipe: Recipe) -> None:
    """Every matrix with its bytes, and their sum, to the digits that are shown."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    source = make_hf(arch, **sizes)
    lines = lines_of(source, recipe)
    rows = {m[1]: (m[2], int(m[3]), int(m[4]), float(m[5].replace(",", ""))) for m in map(ROW.match, lines) if m}
    list(convert(source, tmp_path / "out", recipe))
    with open_shards(tmp_path / "out") as shards:
        written = {name: shards.span(name).nbytes for name in shards.names}
    stems = {name.rpartition(".")[0] for name in written}
    for name, (form, n, k, megabytes) in rows.items():
        nbytes = sum(size for tensor, size in written.items() if tensor.rpartition(".")[0] == name)
        assert name in stems
        assert megabytes == pytest.approx(nbytes / 1e6, abs=0.0051), name
        assert form.startswith("INT4") == (f"{name}.qweight" in written)
        assert (n * k if form == "INT8 rows" else n * k * 4 if form == "unquantised" else None) in (
            None,
            written.get(f"{name}.weight"),
        )
    assert {name for name in stems if f"{name}.qweight" in written or f"{name}.scales" in written} <= set(rows)
    with open_source(source) as opened:
        planned = plan(opened.model_config, recipe, mtp=False)
        exact = {m.name: dry_run._size(m, opened, opened.model_config, recipe.exact) for m in planned}
    for name, size in exact.items():
        assert size == sum(b for tensor, b in written.items() if tensor.rpartition(".")[0] == name), name
    total = next(float(m[1]) for m in (re.match(r"total ([\d.]+) GB", line) for line in lines) if m)
    assert total == pytest.approx(sum(written.values()) / 1e9, abs=0.0051)
    other = next(float(m[1]) for m in (re.search(r"other tensors .* ([\d.]+) MB", line) for line in lines) if m)
    assert other == pytest.approx(sum(written.values()) / 1e6 - sum(row[3] for row in rows.values()), abs=0.2)


def awq(n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a random matrix, whose weights are not used."""
    words = [torch.randint(-(2**31), 2**31, (rows, n // 8)).to(torch.int32) for rows in (k, k // 32)]
    scales = (torch.rand(k // 32, n) / 64 + 0.001).half()
    return {"qweight": words[0], "qzeros": words[1], "scales": scales}, torch.zeros(n, k)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(32, False),
        Recipe(32, False, exact=False),
        Recipe(64, False),
        Recipe(32, True, keep=(("down_proj", 16), ("o_proj", 8))),
    ],
)
def test_of_what_another_tool_has_quantised(make_quantised: Make, tmp_path: Path, recipe: Recipe) -> None:
    """Scales are fp32 where they keep its levels. The sizes are also those that its config alone gives."""
    torch.manual_seed(0)
    source, _ = make_quantised(awq, {"quant_method": "awq", "bits": 4, "group_size": 32})
    list(convert(source, tmp_path / "out", recipe))
    with open_shards(tmp_path / "out") as shards, open_source(source) as opened:
        written = {name: shards.span(name).nbytes for name in shards.names}
        config = opened.model_config
        for matrix in plan(config, recipe):
            size = dry_run._size(matrix, opened, config, recipe.exact)
            kinds = [b for tensor, b in written.items() if tensor.rpartition(".")[0] == matrix.name]
            assert size == sum(kinds), matrix.name
            assert matrix.format.bits == 16 or size == dry_run._size(matrix, None, config, recipe.exact)
        wide = {name for name in written if name.endswith(".mins") and shards.dtype(name) == "F32"}
    down = {f"layers.{i}.mlp.down_proj.mins" for i in range(2)}  # of 96 inputs, in groups of 32 by any recipe
    kept = wide == {name for name in written if name.endswith(".mins")} if recipe.group_size == 32 else wide == down
    assert kept if recipe.exact and not recipe.symmetric else not wide


def test_of_a_config_alone(config_of: Make, tmp_path: Path) -> None:
    """Sizes of what is stored as it is are those of bf16; the head for the token after the next is supposed to come."""
    config = ModelConfig.from_dict(config_of("qwen3_5", hidden_size=256, head_dim=64))
    lines = list(plan_lines(config, Recipe(32, False), None, tmp_path))
    assert any(line.startswith("mtp.fc ") for line in lines)
    assert re.match(r"total 0\.00 GB, \d\.\d\d bits per weight; [\d.]+ GB are free in ", lines[-2])
    assert re.match(r"about \d+ s of arithmetic on (cpu|cuda) \(measured on samples\)", lines[-1])


def test_nothing_is_written(make_hf: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_hf()
    words = ["quantize", str(source), "-o", str(tmp_path / "new" / "out"), "--dry-run", "--group-size", "64"]
    assert prepare.quantize(parse_command_line(words)) is None
    assert "INT4 g64" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert prepare.quantize(parse_command_line([*words[:2], "-o", str(source), "--dry-run"])) is None  # a look is free


def test_exceptions_and_calibration_are_said(talker: Make, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = talker("qwen3_5", linear_value_head_dim=64)
    words = ["quantize", str(source), "--dry-run", "--group-size", "64", "--min", "--method", "gptq"]
    prepare.quantize(parse_command_line(words))
    first = capsys.readouterr().out
    assert re.search(r"layers\.0\.linear_attn\.out_proj +INT4 g32 \+ min", first)
    assert re.search(r"about \d+ s on \w+: \d+ s of arithmetic and \d+ s of calibration with [\d,]+ tokens", first)
    prepare.quantize(parse_command_line([*words[:-2], "--uniform"]))
    second = capsys.readouterr().out
    assert re.search(r"layers\.0\.linear_attn\.out_proj +INT4 g64 \+ min", second)
    assert "calibration" not in second


def test_levels_that_are_kept_are_not_calibrated(make_quantised: Make) -> None:
    source, _ = make_quantised(awq, {"quant_method": "awq", "bits": 4, "group_size": 32})
    last = lines_of(source, Recipe(32, False, method="gptq"))[-1]
    assert "s of calibration" not in last and last.endswith("; matrices that are not 4 bit yet are calibrated on top")
    assert "calibrat" not in lines_of(source, Recipe(32, False))[-1]


def test_what_would_fail_is_said(make_hf: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="matches no matrix"):
        lines_of(make_hf(), Recipe(32, False, keep=(("nothing", 8),)))
    damaged = make_hf(name="damaged", change=lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(BadCheckpoint, match="is missing"):
        lines_of(damaged, Recipe(32, False))
    with pytest.raises(UserError, match="nothing: cannot be read as a UTF-8 text"):
        lines_of(make_hf(name="mute"), Recipe(32, False, method="gptq", calibration=tmp_path / "nothing"))
