"""Which matrices of an architecture get more bits than the others: a table, chosen by measured KL divergence per byte.

`scripts/quantize_table --placement` measures one kind of matrix at a time; the evidence stands in quantize/NOTES.md.
A byte more in one matrix is a byte that every token reads, so an entry has to gain more for its bytes than the same
bytes gain in smaller groups for all. Where nothing is listed, one format for all matrices is the best that was found.
"""

from dataclasses import replace

from localchat.config import ModelConfig, TensorFormat

# model_type -> (regex of a matrix name, its format). The first match counts.
EXCEPTIONS: dict[str, tuple[tuple[str, TensorFormat], ...]] = {
    # The first layer: all others work on what it rounds away.
    "qwen3_5": ((r"^layers\.0\.", TensorFormat(4, 32)),),
}


def exceptions_for(config: ModelConfig, symmetric: bool) -> tuple[tuple[str, TensorFormat], ...]:
    """`Recipe.placement` for a model whose other matrices are symmetric or have a minimum."""
    found = EXCEPTIONS.get(config.model_type, ())
    return tuple((pattern, replace(form, symmetric=symmetric or form.bits != 4)) for pattern, form in found)
