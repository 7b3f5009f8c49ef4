"""Conversions on a card (-m gpu): the same folder as a CPU's but for rounding, and the same bytes each time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.errors import BadCheckpoint
from localchat.kernels.int4_packing import dequantize, unpack_scales
from localchat.quantize import scales
from localchat.quantize.calibration_text import report_windows
from localchat.quantize.convert import Recipe, convert, open_source
from localchat.quantize.layerwise import SourceWeights
from localchat.quantize.report import compare_folder, reference
from localchat.shards import Shards, open_shards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card"),
]
Make = Callable[..., Any]
SHAPES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000, "num_hidden_layers": 4}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weights(shards: Shards, name: str) -> torch.Tensor:
    qweight, kinds = shards.get(f"{name}.qweight"), ("scales", "mins")
    scales, mins = (shards.get(f"{name}.{kind}") if f"{name}.{kind}" in shards.names else None for kind in kinds)
    by_row = [None if stored is None else unpack_scales(stored, len(qweight)) for stored in (scales, mins)]
    assert by_row[0] is not None
    return dequantize(qweight, by_row[0], by_row[1])


@pytest.mark.parametrize("arch", ["qwen2", "qwen3_5"])
@pytest.mark.parametrize("recipe", [Recipe(64, True), Recipe(32, False), Recipe(32, False, search=False)])
def test_it_is_the_cpus(make_hf: Make, tmp_path: Path, arch: str, recipe: Recipe) -> None:
    """Sums are in another order, so a few groups choose another of two equally good ranges."""
    source = make_hf(arch, dtype=torch.bfloat16, **SHAPES)
    list(convert(source, tmp_path / "card", recipe, device="cuda"))
    list(convert(source, tmp_path / "cpu", recipe, device="cpu"))
    with open_shards(tmp_path / "card") as card, open_shards(tmp_path / "cpu") as cpu:
        assert set(card.names) == set(cpu.names)
        for name in cpu.names:
            assert (card.shape(name), card.dtype(name)) == (cpu.shape(name), cpu.dtype(name))
            stem, _, kind = name.rpartition(".")
            if kind == "qweight":
                got, wanted = weights(card, stem), weights(cpu, stem)
                assert float((got - wanted).norm() / wanted.norm()) < 0.01
            elif kind not in ("scales", "mins"):
                got, wanted = card.get(name).float(), cpu.get(name).float()
                assert float((got - wanted).abs().max()) <= (1 if cpu.dtype(name) == "I8" else 0), name


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("recipe", [Recipe(64, True), Recipe(32, False)], ids=["sym", "min"])
def test_calibrated_it_is_as_good_as_the_cpus(talker: Make, tmp_path: Path, arch: str, recipe: Recipe) -> None:
    """Codes differ, since an error goes on to the columns behind it. H with a noise of 1e-3 moves KL by 1 to 3 %."""
    shapes = {name: size for name, size in SHAPES.items() if name != "vocab_size"}
    source, text = talker(arch, dtype=torch.bfloat16, **shapes)
    calibrated = replace(recipe, method="gptq", calibration=text)
    list(convert(source, tmp_path / "rounded", recipe, device="cuda"))
    list(convert(source, tmp_path / "card", calibrated, device="cuda"))
    list(convert(source, tmp_path / "again", calibrated, device="cuda"))
    list(convert(source, tmp_path / "cpu", calibrated, device="cpu"))
    assert content(tmp_path / "again") == content(tmp_path / "card")
    with open_source(source) as opened:
        ref = reference(SourceWeights(opened), report_windows(opened.files(), text, 1024), "cuda")
        kl = {name: compare_folder(opened, tmp_path / name, ref, "cuda").kl for name in ("rounded", "card", "cpu")}
    assert kl["card"] < 0.9 * kl["rounded"]
    assert kl["card"] == pytest.approx(kl["cpu"], rel=0.15)


def awq(n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a random matrix, whose weights are not used."""
    words = [torch.randint(-(2**31), 2**31, (rows, n // 8)).to(torch.int32) for rows in (k, k // 32)]
    scales = (torch.rand(k // 32, n) / 64 + 0.001).half()
    return {"qweight": words[0], "qzeros": words[1], "scales": scales}, torch.zeros(n, k)


@pytest.mark.parametrize("recipe", [Recipe(32, False), Recipe(32, False, exact=False)], ids=["exact", "narrow"])
def test_kept_codes_are_the_cpus_bit_for_bit(make_quantised: Make, tmp_path: Path, recipe: Recipe) -> None:
    source, _ = make_quantised(awq, {"quant_method": "awq", "bits": 4, "group_size": 32})
    for device in ("cuda", "cpu"):
        list(convert(source, tmp_path / device, recipe, device=device))
    with open_shards(tmp_path / "cuda") as card, open_shards(tmp_path / "cpu") as cpu:
        assert set(card.names) == set(cpu.names)
        kept = [name for name in cpu.names if name.startswith("layers.") and "norm" not in name]
        assert kept
        for name in kept:
            assert card.dtype(name) == cpu.dtype(name) and torch.equal(card.get(name), cpu.get(name)), name


def test_each_time_the_same_bytes_also_in_two_runs(
    make_hf: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of tensors is used again while other streams are at work: what is read too late would show."""
    monkeypatch.setitem(scales._BLOCK, "cuda", 1 << 14)
    source, recipe = make_hf("qwen3_5", dtype=torch.bfloat16, **SHAPES), Recipe(32, False, max_shard_size=200_000)
    list(convert(source, tmp_path / "wanted", recipe, device="cuda"))
    for i in range(5):
        list(convert(source, tmp_path / f"again{i}", recipe, device="cuda"))
        assert content(tmp_path / f"again{i}") == content(tmp_path / "wanted")
    steps = convert(source, tmp_path / "out", recipe, device="cuda", resume=True)
    for _ in range(8):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    list(convert(source, tmp_path / "out", recipe, device="cuda", resume=True))
    assert content(tmp_path / "out") == content(tmp_path / "wanted")


def test_not_a_number_is_found_there(make_hf: Make, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[-1] = float("inf")

    with pytest.raises(BadCheckpoint, match=r"up_proj\.weight holds NaN or infinite"):
        list(convert(make_hf(dtype=torch.bfloat16, change=change), tmp_path / "out", Recipe(32, False), device="cuda"))


def test_large_matrices_take_little_more_than_themselves(make_hf: Make, tmp_path: Path) -> None:
    source = make_hf(dtype=torch.bfloat16, hidden_size=2048, head_dim=512, intermediate_size=8192, vocab_size=60_000)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    list(convert(source, tmp_path / "out", Recipe(), device="cuda"))
    most = torch.cuda.max_memory_allocated() - before
    embedding, block = 60_000 * 2048 * 2, 4 * scales._BLOCK["cuda"]
    assert most < 2 * 1.5 * embedding + 14 * block  # two steps and their codes, and the search's buffers for one block
