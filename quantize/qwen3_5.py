"""What a Qwen3.5 checkpoint stores otherwise than other families, brought to the form that the packed folder has.

* self_attn.q_proj holds each head's query rows and then its gate rows. Here these are two matrices under two names:
  q_proj, all queries, and gate_proj, all gates.
* Norms are zero-centred, x (1 + w), except the delta net's own: 1 is added once and for all, in fp32, since bf16 has no
  digits for it.
* conv1d.weight [C, 1, 4] loses its middle dimension; A_log and dt_bias become fp32, which they are computed in.
* mtp.* is the head that guesses the token after the next. A checkpoint comes with all of it or without it.

Source: the layouts of transformers' Qwen3_5 classes.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from localchat.config import ModelConfig
from localchat.quantize.source import mtp_shapes

T = TypeVar("T")
_ZERO_CENTRED = re.compile(r"(?<!linear_attn\.)(norm|pre_fc_norm_\w+)\.weight")
VISION = ("visual.", "vision_tower.")


def is_qwen3_5(config: ModelConfig) -> bool:
    """Whether this file is about that model."""
    return config.model_type == "qwen3_5"


def with_gates(names: Mapping[str, T]) -> dict[str, T]:
    """Canonical names as stored -> with a gate_proj beside each q_proj, which leads to the same place."""
    gates = {name.replace(".q_proj.", ".gate_proj."): place for name, place in names.items() if ".q_proj." in name}
    return {**names, **gates}


def our_shape(name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what `ours` returns."""
    if _is_query_or_gate(name) and stored[0] % 2 == 0:
        return (stored[0] // 2, *stored[1:])
    if name.endswith(".conv1d.weight") and len(stored) == 3 and stored[1] == 1:
        return (stored[0], stored[2])
    return stored


def ours(name: str, tensor: Tensor, config: ModelConfig, *, zero_centred: bool) -> Tensor:
    """The stored tensor behind the canonical `name` (for q_proj and gate_proj both halves of it) in our form.

    Also for the scales of a 4-bit grid, which has the same rows. zero_centred: norms are stored that way.
    """
    if _is_query_or_gate(name):
        halves = tensor.view(config.num_attention_heads, 2, config.head_dim, *tensor.shape[1:])
        return halves[:, int("gate_proj" in name)].reshape(-1, *tensor.shape[1:])
    if name.endswith((".A_log", ".dt_bias")):
        return tensor.float()
    if zero_centred and _ZERO_CENTRED.search(name):
        return 1 + tensor.float()
    return tensor.reshape(our_shape(name, tuple(tensor.shape)))


def incomplete_mtp(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> list[str]:
    """The names of an mtp head that is not as expected, which is left out: the answers do not depend on it."""
    found = {name: shape for name, shape in shapes.items() if name.startswith("mtp.")}
    return [] if found == mtp_shapes(config) else list(found)


def _is_query_or_gate(name: str) -> bool:
    return name.endswith((".self_attn.q_proj.weight", ".self_attn.gate_proj.weight"))
