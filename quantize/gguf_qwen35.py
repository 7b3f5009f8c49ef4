"""What llama.cpp's converter does to a Qwen3.5 checkpoint (its architecture "qwen35"), undone.

* Names: a delta net's are those of a state space model; the block behind the last one is the mtp head, whose own parts
  are called nextn.
* Value heads. Value head j of key head k is number k r + j in transformers and j nk + k in the file (r = nv / nk): the
  value rows of in_proj_qkv and conv1d, the rows of z, a, b, A_log and dt_bias, and the columns of out_proj move.
* ssm_a is -exp(A_log). Norms have their 1 added already; queries and gates lie as in transformers (qwen3_5.py).

Source: the converter's code, and what inverts it bit for bit in others' hands.
"""

import torch
from torch import Tensor

from localchat.config import ModelConfig
from localchat.errors import BadCheckpoint

_NAMES = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_MTP_NAMES = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}
_PER_VALUE_HEAD = (".in_proj_z.weight", ".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")


def canonical_name(name: str, common: str, layers: int) -> str:
    """The name of a tensor of the file, whose name among all architectures is `common`, in a model of so many layers.

    Every tensor of the blocks behind the last layer begins with "mtp.".
    """
    if not name.startswith("blk."):
        return common
    _, number, kind = (*name.split(".", 2), "")[:3]
    layer = f"layers.{number}."
    common = f"{layer}{_NAMES[kind]}" if kind in _NAMES else common
    if not number.isdecimal() or int(number) < layers:
        return common
    own = f"mtp.{_MTP_NAMES.get(kind, kind)}"
    return f"mtp.layers.{int(number) - layers}.{common.removeprefix(layer)}" if common.startswith(layer) else own


def in_our_order(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """The tensor `name`, or the scales of its 4-bit grid, with the value heads as transformers has them."""
    if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        keys = config.conv_channels - config.linear_value_size
        return torch.cat((tensor[:keys], _grouped(tensor[keys:], config, 0)))
    if name.endswith(".linear_attn.out_proj.weight"):
        return _grouped(tensor, config, 1)
    return _grouped(tensor, config, 0) if name.endswith(_PER_VALUE_HEAD) else tensor


def a_log(name: str, stored: Tensor) -> Tensor:
    """A_log from ssm_a.

    Raises:
        BadCheckpoint: a value is not negative, so that the state would grow.
    """
    if not bool((stored < 0).all()):
        raise BadCheckpoint(f"{name} is not negative throughout, so this is not a Qwen3.5 that can be read.")
    return (-stored.double()).log().float()


def _grouped(tensor: Tensor, config: ModelConfig, axis: int) -> Tensor:
    """Value heads along `axis` from the file's order (r, nk) to transformers' (nk, r)."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    shape = tensor.shape
    if shape[axis] % value_heads:
        raise BadCheckpoint(
            f"A tensor of the delta net has the shape {list(shape)}, which are not {value_heads} heads."
        )
    heads = (value_heads // key_heads, key_heads, shape[axis] // value_heads)
    tiled = tensor.reshape(*shape[:axis], *heads, *shape[axis + 1 :])
    return tiled.transpose(axis, axis + 1).reshape(shape)
