"""The model against transformers: same dequantised weights, fp32, within 1e-3 of the largest logit.

Tiny random checkpoints of each family go the whole way: saved as safetensors, packed, loaded. transformers gets the
packed weights back in fp32, so the comparison sees the model and nothing of the quantisation. Norms, biases and
embeddings are random too: as initialised (1 and 0) they would hide faults.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from localchat.cache import KVCache
from localchat.checkpoint import load_model
from localchat.engine import Engine
from localchat.kernels.int4_packing import dequantize, dequantize_rows, unpack_scales
from localchat.model import Model
from localchat.ops import ReferenceOps
from localchat.quantize.convert import Recipe, convert
from localchat.sampling import Sampling

TOLERANCE = 1e-3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DELTA_NET = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 96,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3_5": ("Qwen3_5", DELTA_NET),
    "qwen3_5-tied-wrapped": (
        "Qwen3_5",
        {**DELTA_NET, "tie_word_embeddings": True, "linear_num_value_heads": 2, "linear_value_head_dim": 32},
    ),
    "qwen3_5-half-rotary-yarn": (
        "Qwen3_5",
        {
            **DELTA_NET,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,  # two to a key head, as in 4B and 9B; above three and one
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        },
    ),
}


def make_reference(family: str, **overrides: Any) -> Any:
    """A tiny random transformers model; every tensor differs from its initial value."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 320,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    name = {"Qwen3_5": "Qwen3_5TextConfig"}.get(family, f"{family}Config")
    config = getattr(transformers, name)(**{**shape, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(0.5 * noise if is_zero_centred(family, name) else 1 + 0.5 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise)
            else:
                wide = "embed" in name or "bias" in name or "conv1d" in name
                parameter.copy_(noise * (1.0 if wide else 0.15))
    return model


def is_zero_centred(family: str, name: str) -> bool:
    """Whether transformers multiplies by 1 + w."""
    return family == "Qwen3_5" and "norm" in name and "linear_attn.norm" not in name


def save(reference: Any, folder: Path, *, wrapped: bool) -> None:
    """As transformers saves it: alone, or as the language part of the multimodal model."""
    if not wrapped:
        reference.save_pretrained(folder)
        return
    config = transformers.Qwen3_5Config(
        text_config=reference.config.to_dict(),
        vision_config=VISION,
        tie_word_embeddings=reference.config.tie_word_embeddings,
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(reference.model.state_dict())
    whole.lm_head.load_state_dict(reference.lm_head.state_dict())
    whole.save_pretrained(folder)


def dequantized(folder: Path) -> dict[str, Tensor]:
    """The packed folder's tensors in fp32, under transformers' names, fused rows still fused."""
    stored: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored.update(load_file(file))
    plain = {}
    for name, tensor in stored.items():
        base, _, kind = name.rpartition(".")
        if kind == "qweight":
            kinds = [stored[f"{base}.{kind}"] for kind in ("scales", "mins") if f"{base}.{kind}" in stored]
            by_row = [unpack_scales(each, len(tensor)) for each in kinds]
            plain[f"{base}.weight"] = dequantize(tensor, *by_row, *[None] * (2 - len(kinds)))
        elif kind == "weight" and tensor.dtype == torch.int8:
            plain[name] = dequantize_rows(tensor, stored[f"{base}.scales"])
        elif kind in ("weight", "bias", "A_log", "dt_bias"):
            plain[name] = tensor.float()
    return plain


def give_packed_weights(reference: Any, folder: Path) -> None:
    """Load the packed weights into the transformers model, splitting the fused matrices."""
    config, state, family = reference.config, {}, type(reference).__name__.removesuffix("ForCausalLM")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    for name, tensor in dequantized(folder).items():
        if "qkv_proj" in name:
            sizes = [q, kv, kv, q][: 4 if len(tensor) > q + 2 * kv else 3]
            queries, keys, values, *gates = tensor.split(sizes)
            if gates:  # each head's gate behind its query
                heads = (t.view(-1, head_dim, t.shape[1]) for t in (queries, *gates))
                queries = torch.cat(list(heads), dim=1).view(2 * q, -1)
            parts = zip("qkv", (queries, keys, values), strict=True)
            state.update({"model." + name.replace("qkv", p): t for p, t in parts})
        elif "in_proj_" in name:
            kinds = ("qkv", "z") if "qkvz" in name else ("b", "a")
            values = config.linear_num_value_heads * (config.linear_value_head_dim if "qkvz" in name else 1)
            parts = zip(kinds, tensor.split([len(tensor) - values, values]), strict=True)
            state.update({"model." + name.replace("".join(kinds), p): t for p, t in parts})
        elif "conv1d" in name:
            state["model." + name] = tensor.unsqueeze(1)
        elif is_zero_centred(family, name):
            state["model." + name] = tensor - 1
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), (tensor[0::2], tensor[1::2]), strict=True)
            state.update({"model." + name.replace("gate_up", p): t for p, t in parts})
        else:
            state[name if name.startswith("lm_head") else "model." + name] = tensor
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Model, Path]:
    """(transformers model, our model, packed folder) with the same weights."""
    family, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_reference(family, **overrides)
    save(reference, folder / "hf", wrapped="wrapped" in request.param)
    for _ in convert(folder / "hf", folder / "packed", Recipe(group_size=32, symmetric="qwen" in request.param)):
        continue
    give_packed_weights(reference, folder / "packed")
    return reference, load_model(folder / "packed", ops=ReferenceOps()), folder / "packed"


def run_in_chunks(model: Model, ids: Tensor, borders: list[int], *, int8_kv: bool = False) -> Tensor:
    """Logits of every position, with the forward called once per chunk."""
    cache = KVCache(model.config, len(ids), dtype=model.ops.cache_dtype, device=model.device, int8=int8_kv)
    rows = []
    with torch.inference_mode():
        for start, end in zip([0, *borders], [*borders, len(ids)], strict=True):
            rows.append(model(ids[start:end], torch.arange(start, end, device=ids.device), cache))
            cache.append(end - start)
        return model.logits(torch.cat(rows))


@pytest.mark.parametrize(
    "borders",
    [[], [70, 83], [1, 2, 3, 130], list(range(1, 150)), list(range(70, 150))],
    ids=["prefill", "chunked prefill", "odd chunks", "step decode", "prefill, then 80 steps"],
)
def test_logits_equal_transformers(pair: tuple[Any, Model, Path], borders: list[int]) -> None:
    reference, model, _ = pair
    ids = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = reference(ids[None]).logits[0]
    error = (run_in_chunks(model, ids, borders) - wanted).abs().max() / wanted.abs().max()
    assert float(error) < TOLERANCE


def test_int8_keys_and_values_move_the_logits_a_little_and_chunks_do_not(pair: tuple[Any, Model, Path]) -> None:
    """In chunks a key may be rounded the other way, where it is a tie but for the order of a sum: one step of 127."""
    _, model, _ = pair
    ids = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(1))
    exact, whole = run_in_chunks(model, ids, []), run_in_chunks(model, ids, [], int8_kv=True)
    largest = exact.abs().max()
    assert 1e-5 < float((whole - exact).norm() / exact.norm()) < 0.03
    for borders in ([1, 2, 3, 130], list(range(70, 150))):
        assert float((run_in_chunks(model, ids, borders, int8_kv=True) - whole).abs().max() / largest) < 3e-3


@pytest.mark.parametrize("case", CASES)
def test_an_unquantised_conversion_is_the_checkpoint(case: str, tmp_path: Path) -> None:
    """Against transformers as it was saved: here the conversion has nobody to agree with."""
    reference = make_reference(CASES[case][0], **CASES[case][1])
    save(reference, tmp_path / "hf", wrapped="wrapped" in case)
    for _ in convert(tmp_path / "hf", tmp_path / "packed", Recipe(keep=((".", 16),))):
        continue
    ids = torch.randint(0, 320, (75,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        wanted = reference(ids[None]).logits[0]
    got = run_in_chunks(load_model(tmp_path / "packed", ops=ReferenceOps()), ids, [])
    assert float((got - wanted).abs().max() / wanted.abs().max()) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("borders", "bound"),
    [([], 5e-2), ([70, 90, 93], 5e-2), (list(range(1, 150)), 2e-2)],  # bf16 products above 32 tokens; a bf16 cache
    ids=["prefill", "chunked prefill", "step decode"],
)
@pytest.mark.parametrize("int8_kv", [False, True], ids=["bf16", "int8"])
def test_logits_on_a_card_equal_transformers(
    pair: tuple[Any, Model, Path], borders: list[int], bound: float, int8_kv: bool
) -> None:
    """Over INT8 keys and values, those of the fp32 references over such. Where the reference itself loses more in bf16
    (random delta nets do), that is the bound. All logits together: the largest error of 48,000 differs by a factor of
    two from prompt to prompt, in transformers' bf16 too.
    """
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    reference, model, folder = pair
    ids = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = run_in_chunks(model, ids, borders, int8_kv=True) if int8_kv else reference(ids[None]).logits[0]
        exact, rounded = (
            each(ids[None]).logits[0].float() for each in (reference, copy.deepcopy(reference).bfloat16())
        )
    got = run_in_chunks(load_model(folder, "cuda"), ids.cuda(), borders, int8_kv=int8_kv).cpu()
    error, of_bf16 = (float((a - b).norm() / b.norm()) for a, b in ((got, wanted), (rounded, exact)))
    assert error < max(bound, of_bf16)


def test_greedy_ids_equal_transformers_over_64_tokens(pair: tuple[Any, Model, Path]) -> None:
    reference, model, _ = pair
    prompt = torch.arange(5, 25)
    wanted = reference.generate(prompt[None], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)[
        0, len(prompt) :
    ].tolist()
    engine = Engine(model, 128)
    for _ in engine.prefill(prompt.tolist()):
        continue
    assert list(engine.generate(Sampling(temperature=0.0), (), 64)) == wanted


def test_every_tensor_moves_the_logits(pair: tuple[Any, Model, Path]) -> None:
    """Perturb each stored tensor in turn: a tensor that is not read, or read in the wrong place, would not show."""
    _, model, _ = pair
    ids = torch.arange(0, 320, 2)
    before = run_in_chunks(model, ids, [])
    for name, tensor in model.state_dict().items():
        kept = tensor.clone()
        with torch.inference_mode():
            if tensor.dtype == torch.int32:
                tensor ^= 0x11111111  # every code moves by one
            elif tensor.dtype == torch.int8:
                tensor.copy_(torch.where(kept > 0, kept - 20, kept + 20))
            else:
                tensor += 0.2 * kept.abs().mean() * torch.randn(kept.shape, generator=torch.Generator().manual_seed(0))
        moved = (run_in_chunks(model, ids, []) - before).abs().max() / before.abs().max()
        with torch.inference_mode():
            tensor.copy_(kept)
        assert float(moved) > 10 * TOLERANCE, name
    assert torch.equal(run_in_chunks(model, ids, []), before)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "mscale": 0.7}),
        ("model_type", "qwen3_moe"),
        ("num_key_value_heads", 4),
        ("rms_norm_eps", "small"),
        ("vocab_size", 0.5),
        ("tie_word_embeddings", "false"),
        ("layer_types", 5),
        ("rope_scaling", {"rope_type": ["yarn"]}),
        ("quantization_config", 5),
    ],
)
def test_a_config_value_that_would_be_computed_wrongly_is_refused_by_name(
    key: str, value: object, config_error: Callable[[dict[str, Any]], str]
) -> None:
    base = make_reference("Qwen2").config.to_dict()
    base.pop("rope_parameters" if key == "rope_scaling" else key, None)
    sentence = config_error({**base, key: value})
    assert key.replace("rope_scaling", "rope") in sentence.lower()
