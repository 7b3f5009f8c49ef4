"""GGUF metadata as the config.json and generation_config.json that transformers would have.

Keys are those of the GGUF specification, "llama.attention.head_count" and so on. What would change the result and has
no counterpart in the architectures known here is refused by its key.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from localchat.config import NO_EXPERTS
from localchat.errors import BadCheckpoint

# Keys under the architecture's name, with the value that changes nothing.
_REFUSED = {"attention.sliding_window": 0, "attention.clamp_kqv": 0, "attention.scale": 0}
# The architecture -> transformers' model_type and the beginning of its class names.
_ARCHITECTURES = {
    "llama": ("llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "qwen35": ("qwen3_5", "Qwen3_5"),
}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class Metadata:
    """The key-value part of a GGUF file. `path` is for messages, `arch` the architecture."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._fields = reader.fields
        parts = self.count("split.count", 1)
        if parts > 1:
            raise BadCheckpoint(
                f"{path}: is one of {parts} parts of a model; join them with `llama-gguf-split --merge` first."
            )
        self.arch = self.text("general.architecture")

    def value(self, key: str) -> Any:
        """The value of `key` as Python has it (str, bool, int, float or a list), or None.

        Raises:
            BadCheckpoint: it cannot be decoded.
        """
        field = self._fields.get(key)
        if field is None:
            return None
        try:
            value = field.contents()
        except (ValueError, IndexError, TypeError) as error:
            raise BadCheckpoint(f"{self.path}: the value of {key} cannot be read ({error}).") from error
        if field.types and field.types[0] == GGUFValueType.FLOAT32:
            return float(str(np.float32(value)))  # 1e-5, not 9.99999974e-06
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._typed(key, default, str))

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        return int(self._typed(key, default, int))

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        return float(self._typed(key, default, int, float))

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        return bool(self._typed(key, default, bool))

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of `kind`; empty where the key is absent."""
        value = self._typed(key, [], list)
        if not all(isinstance(item, kind) for item in value):
            raise BadCheckpoint(f"{self.path}: {key} is not a list of {kind.__name__}.")
        return list(value)

    def _typed(self, key: str, default: Any, *kinds: type) -> Any:
        value = self.value(key)
        value = default if value is None else value
        if value is None:
            raise BadCheckpoint(f"{self.path}: the metadata lacks {key}, so this is not a complete model.")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise BadCheckpoint(f"{self.path}: {key} is {value!r:.60}, wanted {wanted}.")
        return value


def check_architecture(metadata: Metadata) -> None:
    """Refuse a model of a kind that cannot be run.

    Raises:
        BadCheckpoint: naming it.
    """
    arch, path = metadata.arch, metadata.path
    experts = metadata.count(f"{arch}.expert_count", 0)
    if experts or "moe" in arch:
        counted = f"{arch}.expert_count = {experts}" if experts else f"the architecture {arch!r}"
        raise BadCheckpoint(f"{path}: {counted} cannot be run: {NO_EXPERTS}.")
    if arch not in _ARCHITECTURES:
        raise BadCheckpoint(f"{path}: the architecture {arch!r} is not supported (known: {', '.join(_ARCHITECTURES)}).")


def config_from(metadata: Metadata, tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """The content of config.json, of an architecture that `check_architecture` has passed.

    Raises:
        BadCheckpoint: a missing key, or a value that would be computed wrongly.
    """
    arch = metadata.arch
    model_type, class_name = _ARCHITECTURES[arch]
    for key, harmless in _REFUSED.items():
        value = metadata.value(f"{arch}.{key}")
        if value not in (None, harmless):
            raise BadCheckpoint(f"{metadata.path}: {arch}.{key} = {value!r} is not implemented.")
    hidden = metadata.count(f"{arch}.embedding_length")
    heads = _same_in_all_layers(metadata, f"{arch}.attention.head_count", None)
    if heads < 1:
        raise BadCheckpoint(f"{metadata.path}: {arch}.attention.head_count is {heads}.")
    head_dim = metadata.count(f"{arch}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", *(() if arch == "qwen35" else ("rope.dimension_count",))):
        if metadata.count(f"{arch}.{key}", head_dim) != head_dim:
            raise BadCheckpoint(f"{metadata.path}: {arch}.{key} is not the head size {head_dim}: not implemented.")
    config: dict[str, Any] = {
        "architectures": [f"{class_name}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _same_in_all_layers(metadata, f"{arch}.feed_forward_length", None),
        "num_hidden_layers": metadata.count(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _same_in_all_layers(metadata, f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": _rows(metadata, tensors, "token_embd.weight"),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count(f"{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "dtype": "bfloat16",
        "rope_parameters": _rope(metadata, head_dim, tensors.get("rope_freqs.weight")),
        "bos_token_id": metadata.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.value("tokenizer.ggml.eos_token_id"),
    }
    if arch == "qwen35":
        config |= _delta_net(metadata)
        config["num_hidden_layers"] -= metadata.count(f"{arch}.nextn_predict_layers", 0)
        config["rope_parameters"]["partial_rotary_factor"] = metadata.count(f"{arch}.rope.dimension_count") / head_dim
    return {key: value for key, value in config.items() if value is not None}


def _delta_net(metadata: Metadata) -> dict[str, Any]:
    """The gated delta net's shape from the keys of a state space model."""
    prefix = f"{metadata.arch}.ssm"
    heads, features = metadata.count(f"{prefix}.time_step_rank"), metadata.count(f"{prefix}.inner_size")
    if heads < 1 or features % heads:
        raise BadCheckpoint(f"{metadata.path}: {prefix}.inner_size {features} are not {heads} heads.")
    return {
        "full_attention_interval": metadata.count(f"{metadata.arch}.full_attention_interval", 4),
        "linear_num_key_heads": metadata.count(f"{prefix}.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.count(f"{prefix}.state_size"),
        "linear_value_head_dim": features // heads,
        "linear_conv_kernel_dim": metadata.count(f"{prefix}.conv_kernel"),
    }


def generation_config_from(metadata: Metadata) -> dict[str, Any]:
    """The content of generation_config.json: the ids that end a turn, and sampling where the file suggests one."""
    ends = [metadata.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    values: dict[str, Any] = {
        "bos_token_id": metadata.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(i for i in ends if isinstance(i, int))) or None,
        "pad_token_id": metadata.value("tokenizer.ggml.padding_token_id"),
        "repetition_penalty": metadata.value("general.sampling.penalty_repeat"),
        **{ours: metadata.value(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()},
    }
    return {key: value for key, value in values.items() if value is not None}


def _same_in_all_layers(metadata: Metadata, key: str, default: int | None) -> int:
    """A count that newer files may give per layer."""
    value = metadata.value(key)
    if not isinstance(value, list):
        return metadata.count(key, default)
    if len(set(value)) != 1 or not isinstance(value[0], int):
        raise BadCheckpoint(f"{metadata.path}: {key} differs between layers, which is not implemented.")
    return value[0]


def _rows(metadata: Metadata, tensors: Mapping[str, ReaderTensor], name: str) -> int:
    if name not in tensors or len(tensors[name].shape) != 2:
        raise BadCheckpoint(f"{metadata.path}: holds no matrix {name}, so this is not a complete model.")
    return int(tensors[name].shape[1])


def _rope(metadata: Metadata, head_dim: int, freqs: ReaderTensor | None) -> dict[str, Any]:
    """`rope_parameters`: theta, and the stretching for long contexts that the keys or the tensor describe."""
    prefix = f"{metadata.arch}.rope"
    theta = metadata.number(f"{prefix}.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = metadata.text(f"{prefix}.scaling.type", "linear")  # llama.cpp's default
    factor = metadata.number(f"{prefix}.scaling.factor", metadata.number(f"{prefix}.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise BadCheckpoint(f"{metadata.path}: {prefix}.scaling.type = {kind!r} is not implemented.")
    scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if freqs is not None:
        if scaled:
            raise BadCheckpoint(f"{metadata.path}: has both rope_freqs.weight and {kind} scaling: not implemented.")
        return {**rope, **_llama3_from(metadata, freqs, theta, head_dim)}
    if kind == "yarn":
        return {**rope, **_yarn(metadata, factor)}
    return {**rope, "rope_type": "linear", "factor": factor} if scaled else rope


def _yarn(metadata: Metadata, factor: float) -> dict[str, Any]:
    """YaRN's keys. llama.cpp multiplies its own attention factor, 0.1 ln(factor) + 1, by the one in the file."""
    prefix = f"{metadata.arch}.rope.scaling"
    for key, harmless in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0)):
        if metadata.number(f"{prefix}.{key}", harmless) != harmless:
            raise BadCheckpoint(f"{metadata.path}: {prefix}.{key} is not implemented.")
    attention = metadata.number(f"{prefix}.attn_factor", metadata.number(f"{prefix}.yarn_attn_factor", 1.0))
    context = metadata.count(f"{metadata.arch}.context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.count(f"{prefix}.original_context_length", context),
        "beta_fast": metadata.number(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number(f"{prefix}.yarn_beta_slow", 1.0),
        "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    }


def _llama3_from(metadata: Metadata, freqs: ReaderTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling from the divisors of its frequencies, which is how a GGUF file holds it.

    The divisors are 1 for short wavelengths, the factor for long ones, and interpolated between; the limits 1, 4 and
    8192 are those of every published Llama 3. Divisors that do not follow from them are refused.
    """
    stored = np.array(freqs.data, dtype=np.float32).reshape(-1)
    if stored.size != head_dim // 2 or not np.isfinite(stored).all() or (stored < 1).any():
        raise BadCheckpoint(f"{metadata.path}: rope_freqs.weight does not hold {head_dim // 2} divisors.")
    factor, low, high, original = round(float(stored.max()), 4), 1.0, 4.0, 8192
    if factor == 1.0:
        return {}
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise BadCheckpoint(f"{metadata.path}: rope_freqs.weight is not Llama 3's RoPE scaling: not implemented.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
