"""What a conversion reads: one checkpoint under the names transformers uses, whatever file it came from.

`hf.py` and `gguf.py` each give a `Source`. Names are canonical: as in a Hugging Face checkpoint without the leading
"model.", e.g. "layers.0.self_attn.q_proj.weight". `check` compares a source with its config before anything is written.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor

from localchat.config import ModelConfig
from localchat.errors import BadCheckpoint

# Files of a model folder that the chat needs beside the weights.
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

# Scales and mins, fp32 [N, K/32].
Grid = tuple[Tensor, Tensor]


class Source(ABC):
    """A checkpoint that can be converted.

    kind: "safetensors" or "gguf". name: the path, for messages. config: config.json's content; model_config: the same,
    read. shapes: canonical tensor name -> shape. coarse_grid: the weights already lie on a 4-bit grid with groups of
    32, so that only the same grid keeps them.
    """

    kind: str
    name: str
    config: dict[str, Any]
    model_config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    coarse_grid: bool = False

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor under its canonical name, on the CPU, in bf16, fp16 or fp32.

        Raises:
            BadCheckpoint: its bytes cannot be read.
        """

    def grid(self, name: str) -> Grid | None:
        """Where the levels of a 4-bit source lie, or None: for groups of 32 inputs, w = scale * code + min."""
        return None

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
    """Every tensor a checkpoint of this shape holds, by canonical name."""
    hidden, inter, head = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden), "norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        matrices = {
            "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
            "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
            "mlp.gate_proj": (inter, hidden, config.mlp_bias),
            "mlp.up_proj": (inter, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inter, config.mlp_bias),
        }
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"layers.{i}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"layers.{i}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"layers.{i}.self_attn.q_norm.weight"] = (head,)
            shapes[f"layers.{i}.self_attn.k_norm.weight"] = (head,)
    return shapes


def check(source: Source) -> None:
    """Refuse a source whose tensors are not those its config describes.

    Raises:
        BadCheckpoint: a tensor is missing, unexpected, or of another shape; it is named.
    """
    expected = expected_shapes(source.model_config)
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
