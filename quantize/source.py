"""What a conversion reads: one checkpoint under the names transformers uses, whatever file it came from.

`hf.py` and `gguf.py` each give a `Source`. Names are canonical: as in a Hugging Face checkpoint without the leading
"model.", e.g. "layers.0.self_attn.q_proj.weight" (Qwen3.5's tensors are in the form of qwen3_5.py). `check` compares a
source with its config before anything is written.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from localchat.config import ModelConfig, TensorFormat
from localchat.errors import BadCheckpoint
from localchat.quantize.codes import Codes
from localchat.shards import Span

# Files of a model folder that the chat needs beside the weights.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

# Scales and mins, fp32 [N, K/32].
Grid = tuple[Tensor, Tensor]


class Arrival(ABC):
    """How the files of a source come, where they do so while it is converted: in an order, and not for long."""

    @abstractmethod
    def rank(self, name: str) -> int:
        """How many files come before the last one that holds some of the tensor `name`."""

    @abstractmethod
    def most_bytes(self, steps: Sequence[Collection[str]]) -> int:
        """The most that the files take on the disk at once, if tensors are needed in this order."""

    @abstractmethod
    def keep(self, names: Collection[str]) -> None:
        """These tensors will still be read. The files that hold some of them come; every other one goes."""

    @abstractmethod
    def arrived_bytes(self) -> int:
        """How much has come so far."""

    @abstractmethod
    def stop(self) -> None:
        """Let nothing more come; who waits for it gets an error."""


class Source(ABC):
    """A checkpoint that can be converted.

    kind: "safetensors" or "gguf". name: the path, for messages. config: config.json's content; model_config: the same,
    read. shapes: canonical tensor name -> shape. kept_format: the weights already lie on a 4-bit grid, which a packed
    folder of this format keeps. arrival: None where all of it is here.
    """

    kind: str
    name: str
    config: dict[str, Any]
    model_config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    kept_format: TensorFormat | None = None
    arrival: Arrival | None = None

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor under its canonical name, on the CPU, in bf16, fp16 or fp32.

        Raises:
            BadCheckpoint: its bytes cannot be read.
        """

    def span(self, name: str) -> Span | None:
        """Where the bytes lie that `formed` makes the tensor from, or None where `read` is the only way to it."""
        return None

    def formed(self, name: str, stored: Tensor) -> Tensor:
        """The tensor under its canonical name from what its span holds, on any device."""
        return stored

    def grid(self, name: str) -> Grid | None:
        """Where the levels of a 4-bit source lie, or None: for groups of 32 inputs, w = scale * code + min."""
        return None

    def codes(self, name: str) -> Codes | None:
        """The whole numbers behind a matrix of a 4-bit or 8-bit source, or None where `read` has all there is."""
        return None

    def has_wide_scales(self, name: str, format_: TensorFormat) -> bool:
        """Whether a matrix needs scales of fp32 in this format, so that every weight stays what it is."""
        return False

    def what_is_lost(self, group_size: int, symmetric: bool) -> str:
        """What packing into such a format does to a source that is quantised already, as a clause; or "".

        As in "it was quantised to FP8, so it is rounded a second time".
        """
        return ""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """The size of a tensor as stored in the source."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Those of TEXT_FILES that there are, with their content.

        Raises:
            BadCheckpoint: a tokenizer cannot be rebuilt.
        """

    @abstractmethod
    def digest(self) -> str:
        """A sha256 (hex) over the config and every tensor's name, shape and dtype."""

    @abstractmethod
    def close(self) -> None:
        """Release the files."""

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this shape holds, by canonical name, without those of `mtp_shapes`."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i, kind in enumerate(config.layer_types):
        shapes |= _layer_shapes(config, f"layers.{i}", kind)
    return shapes


def mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of Qwen3.5's head for the token after the next, by canonical name; none for other families.

    A checkpoint may come without it.
    """
    if config.model_type != "qwen3_5":
        return {}
    hidden = config.hidden_size
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    return {"mtp.fc.weight": (hidden, 2 * hidden), **shapes, **_layer_shapes(config, "mtp.layers.0", "full_attention")}


def has_mtp(source: Source) -> bool:
    """Whether it comes with the tensors of `mtp_shapes`."""
    return "mtp.fc.weight" in source.shapes


def _layer_shapes(config: ModelConfig, layer: str, kind: str) -> dict[str, tuple[int, ...]]:
    """The tensors of one block, whose mixer is of `kind`."""
    hidden, inter, head = config.hidden_size, config.intermediate_size, config.head_dim
    matrices = {
        "mlp.gate_proj": (inter, hidden, config.mlp_bias),
        "mlp.up_proj": (inter, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inter, config.mlp_bias),
    }
    others: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if kind == "full_attention":
        matrices |= {
            "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
            "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
        }
        if config.attn_output_gate:
            matrices["self_attn.gate_proj"] = (config.q_size, hidden, config.qkv_bias)
        if config.qk_norm:
            others |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    else:
        channels, values, heads = config.conv_channels, config.linear_value_size, config.linear_num_value_heads
        matrices |= {
            "linear_attn.in_proj_qkv": (channels, hidden, False),
            "linear_attn.in_proj_z": (values, hidden, False),
            "linear_attn.in_proj_b": (heads, hidden, False),
            "linear_attn.in_proj_a": (heads, hidden, False),
            "linear_attn.out_proj": (hidden, values, False),
        }
        others |= {
            "linear_attn.conv1d.weight": (channels, config.linear_conv_kernel_dim),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (config.linear_value_head_dim,),
        }
    others |= {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in matrices.items()}
    others |= {f"{name}.bias": (rows,) for name, (rows, _, bias) in matrices.items() if bias}
    return {f"{layer}.{name}": shape for name, shape in others.items()}


def check(source: Source) -> None:
    """Refuse a source whose tensors are not those its config describes.

    Raises:
        BadCheckpoint: a tensor is missing, unexpected, or of another shape; it is named.
    """
    expected = expected_shapes(source.model_config)
    if has_mtp(source):
        expected |= mtp_shapes(source.model_config)
    missing = [name for name in expected if name not in source.shapes]
    if missing == ["lm_head.weight"]:
        raise BadCheckpoint(
            f"{source.name}: lm_head.weight is missing, but config.json says tie_word_embeddings = false."
        )
    if missing:
        raise BadCheckpoint(f"{source.name}: {_listed(missing)} missing, so the checkpoint is incomplete.")
    unexpected = [name for name in source.shapes if name not in expected]
    if unexpected:
        raise BadCheckpoint(
            f"{source.name}: {_listed(unexpected)} unexpected in a {source.model_config.model_type} model of this "
            "config, and leaving out a tensor would give wrong answers."
        )
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            raise BadCheckpoint(
                f"{source.name}: {name} has the shape {list(source.shapes[name])}, wanted {list(shape)} by config.json."
            )


def _listed(names: list[str]) -> str:
    """ "a is", "a and b are", "a and 12 more tensors are"."""
    if len(names) <= 2:
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
    return f"{names[0]} and {len(names) - 1} more tensors are"
