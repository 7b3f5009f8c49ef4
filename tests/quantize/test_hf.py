"""Hugging Face folders as a source: every spelling of names, and refusals by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localchat.errors import BadCheckpoint, UserError
from localchat.quantize.hf import canonical_name, open_hf
from localchat.quantize.source import check, expected_shapes

MakeHF = Callable[..., Path]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_names_of_all_spellings(make_hf: MakeHF, prefix: str, shards: int) -> None:
    folder = make_hf("qwen3", prefix=prefix, shards=shards)
    with open_hf(folder) as source:
        check(source)
        assert source.shapes == expected_shapes(source.model_config)
        assert source.read("layers.1.mlp.down_proj.weight").shape == (64, 96)


def test_canonical_name() -> None:
    assert canonical_name("language_model.lm_head.weight") == "lm_head.weight"
    assert canonical_name("lm_head.weight") == "lm_head.weight"
    assert canonical_name("model.norm.weight") == "norm.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_keep_their_dtype(make_hf: MakeHF, dtype: torch.dtype) -> None:
    with open_hf(make_hf(dtype=dtype)) as source:
        tensor = source.read("norm.weight")
        assert tensor.dtype == dtype
        assert source.nbytes("norm.weight") == tensor.nbytes


def test_expected_shapes_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from localchat.config import ModelConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name in ("Llama", "Qwen2", "Qwen3"):
        for tied in (True, False):
            config = getattr(transformers, f"{name}Config")(
                **sizes, vocab_size=40, num_key_value_heads=2, tie_word_embeddings=tied
            )
            model = getattr(transformers, f"{name}ForCausalLM")(config)
            theirs = {canonical_name(n): tuple(w.shape) for n, w in model.named_parameters()}
            assert expected_shapes(ModelConfig.from_dict(config.to_dict())) == theirs


def test_tied_model_leaves_out_lm_head(make_hf: MakeHF) -> None:
    def add_head(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = torch.zeros(40, 64)

    with open_hf(make_hf(tie_word_embeddings=True, change=add_head)) as source:
        check(source)
        assert "lm_head.weight" not in source.shapes


def test_buffers_are_left_out(make_hf: MakeHF) -> None:
    def add_buffer(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    with open_hf(make_hf(change=add_buffer)) as source:
        check(source)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught, open_hf(folder) as source:
        check(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        (lambda w: w.pop("lm_head.weight"), "tie_word_embeddings"),
        (lambda w: [w.pop(n) for n in list(w) if "layers.1" in n], "more tensors are missing"),
        (lambda w: w.update({"model.layers.2.x.weight": torch.ones(1)}), "layers.2.x.weight is unexpected"),
        (lambda w: w.update({"model.norm.weight": torch.ones(63)}), "norm.weight has the shape [63], wanted [64]"),
        (lambda w: w.update({"norm.weight": torch.ones(64)}), "the same tensor under two names"),
        (lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.float8_e4m3fn)}), "dtype F8_E4M3"),
        (lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), "dtype I32"),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(1)}),
            "quantised by GPTQ or AWQ, but",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}),
            "quantised by FP8, but",
        ),
    ],
)
def test_refused_by_name(make_hf: MakeHF, change: Callable[[dict[str, Tensor]], Any], words: str) -> None:
    assert words in refusal(make_hf(change=change))


def test_other_tools_quantization_config(make_hf: MakeHF) -> None:
    folder = make_hf()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert "quantised by bitsandbytes (int8), which is not read here: use the unquantised repository" in refusal(folder)


def test_packed_folder_is_refused(make_hf: MakeHF) -> None:
    ours = {"quant_method": "localchat", "layout": "x", "version": 1, "bits": 4, "group_size": 32, "symmetric": True}
    assert "already packed" in refusal(make_hf(quantization_config=ours))


def test_digest_changes_with_config_and_tensors(make_hf: MakeHF) -> None:
    digests = set()
    for i, overrides in enumerate([{}, {"rope_theta": 5e5}, {"dtype": torch.float16}]):
        with open_hf(make_hf(name=f"m{i}", **overrides)) as source:
            digests.add(source.digest())
    assert len(digests) == 3


def test_files(make_hf: MakeHF) -> None:
    folder = make_hf()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_x.py").write_text("raise SystemExit")
    with open_hf(folder) as source:
        assert set(source.files()) == {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
        assert json.loads(source.files()["generation_config.json"]) == {"eos_token_id": [2]}


def test_folder_without_config(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        open_hf(tmp_path)
