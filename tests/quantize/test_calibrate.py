"""Calibrated conversions: inputs are those of the packed model, better than rounding, the same bytes after a break."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from localchat.cache import KVCache
from localchat.checkpoint import load_model
from localchat.config import load_config
from localchat.errors import BadCheckpoint, UserError
from localchat.model import Linear, Model
from localchat.ops import ReferenceOps
from localchat.quantize.calibrate import Calibration
from localchat.quantize.calibration_text import report_windows
from localchat.quantize.convert import Recipe, convert, open_source
from localchat.quantize.gptq import hessian_of
from localchat.quantize.layerwise import PackedWeights, SourceWeights
from localchat.quantize.plan import plan
from localchat.quantize.report import compare_folder
from localchat.shards import open_shards

Make = Callable[..., Any]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_5")
WINDOWS = [[(7 * i * i + 3 * w) % 40 for i in range(48 + w)] for w in range(6)]


class Recorder(ReferenceOps):
    """The references, with everything that each matrix was multiplied with."""

    def __init__(self) -> None:
        self.inputs: dict[Linear, list[Tensor]] = {}

    def product(self, x: Tensor, linear: Linear) -> Tensor:
        self.inputs.setdefault(linear, []).append(x)
        return super().product(x, linear)


def run_whole(folder: Path) -> tuple[Model, Recorder]:
    """The packed model run over WINDOWS as `localchat run` would."""
    ops = Recorder()
    model = load_model(folder, ops=ops)
    for window in WINDOWS:
        cache = KVCache(model.config, len(window), dtype=torch.float32, device=model.device)
        model(torch.tensor(window), torch.arange(len(window)), cache)
    return model, ops


def stored_of(folder: Path, name: str) -> dict[str, Tensor]:
    with open_shards(folder) as shards:
        kinds = [key.rpartition(".")[2] for key in shards.names if key.rpartition(".")[0] == name]
        return {kind: shards.get(f"{name}.{kind}").clone() for kind in kinds if kind != "bias"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_inputs_are_those_of_the_packed_model(make_hf: Make, tmp_path: Path, arch: str) -> None:
    source, packed = make_hf(arch, num_hidden_layers=3), tmp_path / "packed"
    recipe = Recipe(32, False, search=False)
    for _ in convert(source, packed, recipe):
        continue
    model, ops = run_whole(packed)
    with open_source(source) as opened:
        calibration = Calibration(opened, WINDOWS, "cpu")
        for matrix in plan(opened.model_config, recipe):
            if calibration.covers(matrix):
                got = calibration.hessian(matrix)
                want = hessian_of(ops.inputs[model.get_submodule(matrix.name)])  # type: ignore[index]
                assert (got - want).norm() / want.norm() < 1e-4, matrix.name
            calibration.settle(matrix, stored_of(packed, matrix.name))


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_matrices_that_are_settled_already_change_nothing(make_hf: Make, tmp_path: Path, arch: str) -> None:
    """What a resumed run does: `settle` alone for what is stored, then on as if nothing had happened."""
    source, packed = make_hf(arch), tmp_path / "packed"
    for _ in convert(source, packed, Recipe(32, True)):
        continue
    with open_source(source) as opened:
        matrices = [m for m in plan(opened.model_config, Recipe(32, True)) if m.name.startswith("layers.")]
        whole, resumed = (Calibration(opened, WINDOWS, "cpu") for _ in range(2))
        for matrix in matrices:
            whole.hessian(matrix)
            whole.settle(matrix, stored_of(packed, matrix.name))
        for matrix in matrices[:-1]:
            resumed.settle(matrix, stored_of(packed, matrix.name))
        assert torch.equal(whole.hessian(matrices[-1]), resumed.hessian(matrices[-1]))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_is_nearer_to_the_source_than_rounding(
    talker: Make, noise: Make, tmp_path: Path, arch: str, symmetric: bool
) -> None:
    source, text = talker(arch)
    quality = {}
    for method in ("rtn", "gptq"):
        out = tmp_path / method
        steps = list(convert(source, out, Recipe(32, symmetric, method=method, calibration=text)))
        assert steps[-1].done_bytes == steps[-1].total_bytes
        with open_source(source) as opened:
            windows = report_windows(opened.files(), noise(tmp_path / "another.txt", seed=1))
            quality[method] = compare_folder(opened, out, windows, "cpu")
    assert quality["gptq"].kl < 0.9 * quality["rtn"].kl
    assert load_model(tmp_path / "gptq").config.quantization is not None


def test_the_same_bytes_twice(talker: Make, tmp_path: Path) -> None:
    source, text = talker("qwen3_5")
    for name in "ab":
        for _ in convert(source, tmp_path / name, Recipe(32, True, method="gptq", calibration=text)):
            continue
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in "ab"]
    assert files[0] == files[1]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files[0])


def test_a_grid_that_fits_is_kept_as_it_is(make_gguf: Make, config_of: Make, weights_of: Make, tmp_path: Path) -> None:
    """A 4-bit source on its own grid loses nothing, so there is nothing to make good."""
    config = config_of("llama", vocab_size=260)
    source = make_gguf(config, weights_of(config), GGMLQuantizationType.Q4_1)
    text = tmp_path / "text"
    text.write_text("the quick brown fox " * 40)
    for name, method in (("a", "rtn"), ("b", "gptq")):
        for _ in convert(source, tmp_path / name, Recipe(32, False, method=method, calibration=text)):
            continue
    with open_shards(tmp_path / "a") as a, open_shards(tmp_path / "b") as b:
        assert all(torch.equal(a.get(name), b.get(name)) for name in a.names)


def gptq_matrix(n: int, k: int) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as GPTQ's tools write it, and what it decodes to: the n-th zero point is n mod 16 in all groups."""
    generator = torch.Generator().manual_seed(n * k)
    codes = torch.randint(0, 16, (k, n), generator=generator)
    zeros = (torch.arange(n) % 16).expand(k // 32, n)
    scales = (torch.rand(k // 32, n, generator=generator) / 64 + 1e-3).half()
    shifts = 4 * torch.arange(8)

    def words(rows: Tensor) -> Tensor:
        total = (rows << shifts[: rows.shape[-1]]).sum(-1)
        return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)

    kinds = {
        "qweight": words(codes.view(k // 8, 8, n).transpose(1, 2)),
        "qzeros": words(((zeros - 1) & 15).view(k // 32, n // 8, 8)),  # they are stored less one
        "scales": scales,
        "g_idx": (torch.arange(k) // 32).to(torch.int32),
    }
    rows = [group.repeat_interleave(32, 0) for group in (zeros, scales.float())]
    return kinds, (rows[1] * (codes - rows[0])).t().contiguous()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


def both_methods(source: Path, folder: Path, text: Path) -> None:
    for method in ("rtn", "gptq"):
        for _ in convert(source, folder / method, Recipe(32, False, method=method, calibration=text)):
            continue


def test_what_another_tool_has_calibrated_needs_no_measurement(
    make_quantised: Make, bytes_tokenizer: Make, noise: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = make_quantised(gptq_matrix, GPTQ, vocab_size=256)
    bytes_tokenizer(source)
    monkeypatch.setattr(Calibration, "hessian", lambda *_: pytest.fail("it was measured"))
    both_methods(source, tmp_path, noise(tmp_path / "text", seed=0))
    with open_shards(tmp_path / "rtn") as a, open_shards(tmp_path / "gptq") as b:
        assert all(torch.equal(a.get(name), b.get(name)) for name in a.names)


@pytest.mark.parametrize(
    ("part", "matrix", "rows"),
    [
        (".q_proj", "layers.1.self_attn.qkv_proj", slice(0, 64)),
        (".up_proj", "layers.1.mlp.gate_up_proj", slice(1, None, 2)),
    ],
)
def test_of_a_matrix_that_another_tool_has_in_part(
    make_quantised: Make, bytes_tokenizer: Make, noise: Make, tmp_path: Path, part: str, matrix: str, rows: slice
) -> None:
    """Its part is kept to the last bit, the others are calibrated; each row is in its place."""
    source, plain = make_quantised(gptq_matrix, GPTQ, only=part, vocab_size=256)
    bytes_tokenizer(source)
    both_methods(source, tmp_path, noise(tmp_path / "text", seed=0))
    with open_source(plain) as opened:
        w = SourceWeights(opened).tensor(f"{matrix}.weight", "cpu")
    packed = {}
    for method in ("rtn", "gptq"):
        with open_shards(tmp_path / method) as shards:
            packed[method] = PackedWeights(load_config(tmp_path / method), shards).tensor(f"{matrix}.weight", "cpu")
    others = torch.ones(len(w), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(packed["gptq"][rows], w[rows])
    assert (packed["gptq"][others] != packed["rtn"][others]).any(1).all()
    assert (packed["gptq"][others] - w[others]).norm() < 0.3 * w[others].norm()


def test_kept_matrices_and_the_mtp_head(talker: Make, tmp_path: Path) -> None:
    source, text = talker("qwen3_5", mtp=True)
    keep = ((r"down_proj$", 8), (r"\.0\.mlp\.gate_up", 16))
    for _ in convert(source, tmp_path / "out", Recipe(32, keep=keep, method="gptq", calibration=text)):
        continue
    model = load_model(tmp_path / "out")
    assert {m.bits for n, m in model.named_modules() if n.endswith("down_proj")} == {8}  # type: ignore[union-attr]
    assert model.layers[0].mlp.gate_up_proj.bits == 16  # type: ignore[union-attr]
    with open_shards(tmp_path / "out") as shards:
        assert "mtp.fc.qweight" in shards.names


def refusal(source: Path, out: Path, **recipe: Any) -> str:
    with pytest.raises((BadCheckpoint, UserError)) as caught:
        list(convert(source, out, Recipe(32, method="gptq", **recipe)))
    assert not out.exists() and not out.with_name(out.name + ".partial").exists()
    return str(caught.value)


def test_what_cannot_be_calibrated_is_said(talker: Make, make_hf: Make, tmp_path: Path) -> None:
    source, text = talker("llama")
    out, short = tmp_path / "out", tmp_path / "short"
    short.write_text("hello")
    assert "has 5 tokens" in refusal(source, out, calibration=short)
    assert "cannot be read" in refusal(source, out, calibration=tmp_path / "nothing")
    small = make_hf("llama", name="small")  # 40 rows of an embedding
    shutil.copy(source / "tokenizer.json", small)
    assert "its embedding has 40 rows" in refusal(small, out, calibration=text)
    (source / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(source, out, calibration=text)


def test_infinite_activations_are_named(talker: Make, bytes_tokenizer: Make, tmp_path: Path, make_hf: Make) -> None:
    def huge(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.mlp.up_proj.weight"] *= 1e30
        weights["model.layers.0.mlp.gate_proj.weight"] *= 1e30

    _, text = talker("llama")
    source = make_hf("llama", name="huge", vocab_size=256, change=huge)
    bytes_tokenizer(source)
    assert "the inputs of layers.0.mlp.down_proj are not finite" in refusal(source, tmp_path / "out", calibration=text)
