"""A model's config.json as one frozen record.

Fields are named as the hub names them. Whatever this program would compute wrongly is refused by name, here, before
a tensor is read: an unknown architecture, another activation, sliding windows, an unknown RoPE type. Keys that do not
change the result (initializer_range, use_cache, ...) are ignored.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from localchat.errors import BadCheckpoint
from localchat.foreign import Foreign, read_foreign

_MOST_LAYERS = 1000  # more is a damaged file, not a model
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_5")
# The same language model under the name it has without its multimodal wrapper.
_TEXT_MODELS = {"qwen3_5_text": "qwen3_5"}
GROUP_SIZES = (32, 64, 128)  # both as in kernels/int4_packing.py (which imports torch)
TILE_ROWS = 16

NO_EXPERTS = "mixture-of-experts models are not supported, use a dense one such as qwen3.5-27b"
# Families of such that do not say so in their name, and the keys that count the experts of every other one.
_WITH_EXPERTS = ("qwen3_next", "qwen4_exp", "mixtral")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class RopeParameters:
    """Rotary position embedding: base frequency and how it is stretched for long contexts.

    rope_type is "default", "linear", "yarn" or "llama3"; the other fields are used by the type that names them.
    `original_max_position_embeddings` is in tokens. Formulas: YaRN arXiv 2309.00071; Llama 3.1 model card.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class TensorFormat:
    """How one matrix is stored: bits 4 (with group_size and symmetric), 8 (INT8 rows) or 16 (unquantised)."""

    bits: int
    group_size: int = 0
    symmetric: bool = True


@dataclass(frozen=True)
class QuantizationConfig:
    """`quantization_config` of a packed folder: the default format, the tensors that differ, and where it came from.

    layout and version are those of kernels/int4_packing.py at the time of writing.
    """

    layout: str
    version: int
    default: TensorFormat
    exceptions: Mapping[str, TensorFormat] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    def format_of(self, name: str) -> TensorFormat:
        """The format of the matrix `name`, e.g. "layers.0.self_attn.qkv_proj" or "embed_tokens"."""
        return self.exceptions.get(name, self.default)

    def to_dict(self) -> dict[str, Any]:
        """The value of config.json's `quantization_config`."""
        return {
            "quant_method": "localchat",
            "layout": self.layout,
            "version": self.version,
            **asdict(self.default),
            "exceptions": {name: asdict(f) for name, f in self.exceptions.items()},
            "source": dict(self.source),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "QuantizationConfig":
        """Read back what `to_dict` wrote.

        Raises:
            BadCheckpoint: a key is missing or has a value of the wrong kind.
        """
        try:
            return cls(
                layout=str(raw["layout"]),
                version=int(raw["version"]),
                default=_tensor_format(raw),
                exceptions={str(name): _tensor_format(f) for name, f in raw.get("exceptions", {}).items()},
                source=dict(raw.get("source", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(f"config.json: quantization_config cannot be read ({error!r})") from error


def _tensor_format(raw: Mapping[str, Any]) -> TensorFormat:
    bits, group_size = int(raw["bits"]), int(raw.get("group_size", 0))
    if bits not in (4, 8, 16) or (bits == 4 and group_size not in GROUP_SIZES):
        raise ValueError(f"bits {bits}, group_size {group_size}")
    return TensorFormat(bits, group_size, bool(raw.get("symmetric", True)))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a dense decoder. Sizes are counts of elements; `head_dim` is per head.

    layer_types: the mixer of each layer, "full_attention" or "linear_attention" (a gated delta net, which the fields
    `linear_...` describe). attn_output_gate: attention's result is multiplied by a sigmoid gate. rotary_dim: so many
    dimensions of a head are rotated, the first ones; the others are left as they are.
    `quantization` is None for a checkpoint that was not packed by this program; `foreign_quantization` then
    says how another tool has quantised it, if one has, for the reader that converts it.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeParameters
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] = ()
    attn_output_gate: bool = False
    rotary_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    quantization: QuantizationConfig | None = None
    foreign_quantization: Foreign | None = None

    @property
    def q_size(self) -> int:
        """Rows of the query part of qkv_proj."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key part, and of the value part, of qkv_proj."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linear_value_size(self) -> int:
        """Features of a gated delta net between its two projections."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of a gated delta net's convolution: queries and keys of the key heads, values of the value heads."""
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.linear_value_size

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read config.json's content, old (`rope_scaling`) and new (`rope_parameters`) spelling.

        Raises:
            BadCheckpoint: the architecture is unknown, a key is missing, or a value would be computed wrongly.
        """
        text = flat_config(raw)
        model_type = _model_type(raw, text)
        hybrid = model_type == "qwen3_5"
        _refuse_what_would_be_wrong(text, hybrid)
        attention_bias, qwen2 = _flag(text, "attention_bias"), model_type == "qwen2"
        heads = _count(text, "num_attention_heads")
        kv_heads = _count(text, "num_key_value_heads", heads)
        head_dim = _count(text, "head_dim", _count(text, "hidden_size") // heads)
        if heads % kv_heads or head_dim % 2:
            raise BadCheckpoint(
                f"config.json: num_attention_heads {heads}, num_key_value_heads {kv_heads}, head_dim {head_dim} "
                "do not divide as grouped-query attention with RoPE needs."
            )
        quantization = text.get("quantization_config")
        if not isinstance(quantization, Mapping | None):
            raise BadCheckpoint(f"config.json: quantization_config is {quantization!r}, wanted an object.")
        max_position = _count(text, "max_position_embeddings")
        layers = _count(text, "num_hidden_layers", most=_MOST_LAYERS)
        rope, rotary_factor = _rope(text, max_position, hybrid)
        rotary_dim = int(head_dim * rotary_factor)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise BadCheckpoint(f"config.json: partial_rotary_factor {rotary_factor} of head_dim {head_dim}.")
        return cls(
            model_type=model_type,
            hidden_size=_count(text, "hidden_size"),
            intermediate_size=_count(text, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_count(text, "vocab_size"),
            rms_norm_eps=_number(text, "rms_norm_eps", 1e-6),
            max_position_embeddings=max_position,
            tie_word_embeddings=_flag(text, "tie_word_embeddings"),
            rope=rope,
            qk_norm=model_type == "qwen3" or hybrid,
            qkv_bias=qwen2 or attention_bias,
            o_bias=attention_bias and not qwen2,
            mlp_bias=_flag(text, "mlp_bias") and model_type == "llama",
            attn_output_gate=hybrid,
            rotary_dim=rotary_dim,
            **_mixers(text, layers, hybrid),
            quantization=QuantizationConfig.from_dict(quantization) if _is_ours(quantization) else None,
            foreign_quantization=_foreign(text, quantization),
        )


def flat_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content as that of the language model alone.

    A multimodal wrapper nests it; what is missing there (or null) stands at the top. Whether the embedding is tied is
    the wrapper's to say: its own value is the one that it was saved by.

    Raises:
        BadCheckpoint: text_config is there and no object.
    """
    nested = raw.get("text_config")
    if nested is None:
        return dict(raw)
    if not isinstance(nested, Mapping):
        raise BadCheckpoint(f"config.json: text_config is {nested!r}, wanted an object.")
    text = {key: value for key, value in raw.items() if key != "text_config"}
    text |= {key: value for key, value in nested.items() if value is not None}
    if raw.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return text


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json.

    Raises:
        BadCheckpoint: the file is absent, is not JSON, or ModelConfig.from_dict refuses it.
    """
    return ModelConfig.from_dict(read_json(folder / "config.json"))


def packed_format(folder: Path) -> QuantizationConfig | None:
    """How `folder` was packed by this program, of whatever version; None where it is no complete packed folder."""
    try:
        raw = read_json(folder / "config.json").get("quantization_config")
        return QuantizationConfig.from_dict(raw) if _is_ours(raw) else None
    except BadCheckpoint:
        return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        BadCheckpoint: the file is absent, unreadable, or holds something else than a JSON object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(
            f"{path.parent}: there is no {path.name}, so this is not a complete model folder."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: cannot be read as JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise BadCheckpoint(f"{path}: holds a JSON {type(raw).__name__}, wanted an object.")
    return raw


def _is_ours(quantization: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a `quantization_config` was written by `QuantizationConfig.to_dict`."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "localchat"


def _foreign(text: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> Foreign | None:
    """How another tool has quantised the checkpoint: MLX and old files of compressed-tensors have keys of their own."""
    given = quantization or text.get("compression_config") or text.get("quantization")
    return read_foreign(given) if isinstance(given, Mapping) and given and not _is_ours(given) else None


def _flag(text: Mapping[str, Any], key: str) -> bool:
    value = text.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadCheckpoint(f"config.json: {key} is {value!r}, wanted true or false.")
    return bool(value)


def _number(text: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = text.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise BadCheckpoint(f"config.json: {key} is {value!r}, wanted a positive number.")
    return float(value)


def _count(text: Mapping[str, Any], key: str, default: int | None = None, most: int = 1 << 31) -> int:
    value = _number(text, key, default)
    if value != int(value) or value > most:
        raise BadCheckpoint(f"config.json: {key} is {value:,g}, wanted a whole number up to {most:,}.")
    return int(value)


def _model_type(raw: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The architecture, by the wrapper's name where there is one.

    Raises:
        BadCheckpoint: it, or the language model inside the wrapper, is not one of those known here.
    """
    if text.get("model_type") is None:
        raise BadCheckpoint(f"config.json: names no model_type; known architectures are {', '.join(ARCHITECTURES)}.")
    counted = next((key for key in _EXPERTS if text.get(key) not in (None, 0, 1)), "")
    for given in (text["model_type"], raw.get("model_type", text["model_type"])):
        model_type = _TEXT_MODELS.get(str(given), str(given))
        if model_type not in ARCHITECTURES:
            experts = counted or "moe" in model_type or model_type in _WITH_EXPERTS
            reason = NO_EXPERTS if experts else f"known architectures are {', '.join(ARCHITECTURES)}"
            raise BadCheckpoint(f"config.json: model_type {model_type!r} cannot be run: {reason}.")
    if counted:
        raise BadCheckpoint(f"config.json: {counted} = {text[counted]!r} cannot be run: {NO_EXPERTS}.")
    return model_type


def _mixers(text: Mapping[str, Any], layers: int, hybrid: bool) -> dict[str, Any]:
    """`layer_types` and the shape of the gated delta net layers, as fields of ModelConfig."""
    if not hybrid:
        return {"layer_types": ("full_attention",) * layers}
    kinds = text.get("layer_types")
    if kinds is None:
        interval = _count(text, "full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise BadCheckpoint(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}.")
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = {f"linear_{key}": _count(text, f"linear_{key}") for key in keys}
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        raise BadCheckpoint("config.json: linear_num_value_heads is not a multiple of linear_num_key_heads.")
    return {"layer_types": tuple(kinds), **sizes}


def _refuse_what_would_be_wrong(text: Mapping[str, Any], hybrid: bool) -> None:
    """Values of known keys that would change the result in a way that is not implemented.

    hybrid: the family with gated delta net layers, which has keys of its own.
    """
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu", "swish"),
        "use_sliding_window": (False,),
        "partial_rotary_factor": (1,),
        "mlp_only_layers": ([],),
        "is_encoder_decoder": (False,),
        "pretraining_tp": (1, 0),
        "rotary_pct": (1,),
        "logit_scale": (1,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "attn_output_gate": (hybrid,),
    }
    if hybrid:  # output_gate_type is the activation of the delta net's own gate; attention's is always a sigmoid
        wanted |= {"attention_bias": (False,), "output_gate_type": ("silu", "swish"), "linear_conv_kernel_dim": (4,)}
        del wanted["partial_rotary_factor"]
    for key, allowed in wanted.items():
        value = text.get(key)
        if value is not None and value not in allowed:
            raise BadCheckpoint(f"config.json: {key} = {value!r} is not implemented, the answers would be wrong.")
    if text.get("use_sliding_window") is None and text.get("sliding_window") and text.get("model_type") == "llama":
        raise BadCheckpoint(f"config.json: sliding_window = {text['sliding_window']!r} is not implemented.")
    kinds, known = text.get("layer_types") or [], ("full_attention", "linear_attention")[: 1 + hybrid]
    other = [kind for kind in kinds if kind not in known] if isinstance(kinds, list) else [kinds]
    if other:
        raise BadCheckpoint(f"config.json: layer_types has {other[0]!r}, not implemented here.")


# Keys a RoPE record may carry. Another one could change the frequencies, so it is refused.
_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}


def _rope(text: Mapping[str, Any], max_position: int, hybrid: bool) -> tuple[RopeParameters, float]:
    """`rope_parameters` (new), or top-level `rope_theta` with `rope_scaling` (old, type key `type` or `rope_type`).

    The second value is the share of a head's dimensions that is rotated: 0.25 where a hybrid does not say, else 1.
    """
    raw = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise BadCheckpoint(f"config.json: rope parameters are a {type(raw).__name__}, wanted an object.")
    raw = {k: v for k, v in raw.items() if v is not None}
    rope_type = str(raw.pop("rope_type", raw.get("type", "default")))
    raw.pop("type", None)
    theta = _number({"rope_theta": raw.pop("rope_theta", text.get("rope_theta"))}, "rope_theta", 10000.0)
    if rope_type not in _ROPE_KEYS:
        raise BadCheckpoint(f"config.json: rope_type {rope_type!r} is not one of {', '.join(_ROPE_KEYS)}.")
    share = raw.pop("partial_rotary_factor", text.get("partial_rotary_factor"))
    share = _number({"partial_rotary_factor": share}, "partial_rotary_factor", 0.25 if hybrid else 1.0)
    if share != 1 and not hybrid:
        raise BadCheckpoint("config.json: a partial_rotary_factor other than 1 is not implemented for this family.")
    if hybrid:  # three positions per token, for images; those of text are equal, which is plain RoPE
        raw = {key: value for key, value in raw.items() if not key.startswith("mrope_")}
    if rope_type == "default":
        raw.pop("factor", None)
    raw.pop("max_position_embeddings", None)
    unknown = set(raw) - _ROPE_KEYS[rope_type]
    if unknown:
        raise BadCheckpoint(f"config.json: {rope_type} RoPE with {', '.join(sorted(unknown))} is not implemented.")
    if rope_type == "default":
        return RopeParameters(rope_theta=theta), share
    factor = _number(raw, "factor")
    attention = 0.1 * math.log(factor) + 1.0 if rope_type == "yarn" and factor > 1 else 1.0
    original = _count(raw, "original_max_position_embeddings", max_position) if rope_type != "linear" else 0
    scaled = RopeParameters(
        rope_type=rope_type,
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_number(raw, "beta_fast", 32.0),
        beta_slow=_number(raw, "beta_slow", 1.0),
        attention_factor=_number(raw, "attention_factor", attention),
        truncate=bool(raw.get("truncate", True)),
        low_freq_factor=_number(raw, "low_freq_factor", 1.0),
        high_freq_factor=_number(raw, "high_freq_factor", 4.0),
    )
    return scaled, share
