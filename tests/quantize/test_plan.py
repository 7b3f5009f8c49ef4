"""The plan of a packed folder: order, fusing, formats, sizes."""

from collections.abc import Callable
from typing import Any

from localchat.config import ModelConfig, TensorFormat
from localchat.quantize.plan import Matrix, Recipe, plan, upper_size


def test_order_and_fusing(config_of: Callable[..., dict[str, Any]]) -> None:
    matrices = plan(ModelConfig.from_dict(config_of("qwen2", num_hidden_layers=1)), Recipe(32, False))
    assert [(m.name, m.shape, m.bias, m.norm) for m in matrices] == [
        ("embed_tokens", (40, 64), False, ""),
        ("layers.0.self_attn.qkv_proj", (128, 64), True, "layers.0.input_layernorm.weight"),
        ("layers.0.self_attn.o_proj", (64, 64), False, ""),
        ("layers.0.mlp.gate_up_proj", (192, 64), False, "layers.0.post_attention_layernorm.weight"),
        ("layers.0.mlp.down_proj", (64, 96), False, ""),
        ("lm_head", (40, 64), False, ""),
    ]
    assert matrices[1].parts == tuple(f"layers.0.self_attn.{x}_proj" for x in "qkv")
    assert matrices[3].parts == ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")


def test_upper_size() -> None:
    def size(*format_: Any) -> int:
        return upper_size(Matrix("x", ("x",), (10, 256), TensorFormat(*format_)))

    assert size(4, 64, True) == 16 * 128 + 16 * 4 * 2
    assert size(4, 64, False) == 16 * 128 + 16 * 4 * 4
    assert size(8) == 10 * 256 + 10 * 4
    assert size(16) >= 10 * 256 * 4
