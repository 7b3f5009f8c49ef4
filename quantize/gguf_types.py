"""The types that tensors of a .gguf are stored in: which are read here, and the others refused by their names.

Read are floats and the block formats whose levels lie at equal distances, of 4 bits and more. Weights that were rounded
to 2 or 3 bits have lost more than a second rounding may add to; those of IQ and TQ types, MXFP4 and NVFP4 lie on
levels that are not ours. Source of the numbers: ggml.h, enum ggml_type.
"""

from collections.abc import Mapping
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from localchat.errors import BadCheckpoint

UNQUANTISED = (Type.F32, Type.F16, Type.BF16)
READ = (*UNQUANTISED, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K)
# Types that the package has forgotten (rows interleaved for one processor), or that its older versions do not know.
_OTHERS = {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}


def check_types(path: Path, types: Mapping[str, int]) -> None:
    """Refuse a file with tensors of a type that is not read here; types: the number of each, by the tensor's name.

    Raises:
        BadCheckpoint: naming the types, and what to use instead.
    """
    refused = {name: number for name, number in types.items() if number not in READ}
    if not refused:
        return
    kinds = " and ".join(dict.fromkeys(map(type_name, refused.values())))
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    raise BadCheckpoint(
        f"{path}: holds tensors of {kinds} ({next(iter(refused))}{more}), which are not read here: use the model's "
        "Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16 file, or its unquantised repository."
    )


def type_name(number: int) -> str:
    """What ggml calls a type."""
    known = {int(kind): kind.name for kind in Type}
    return known.get(number) or _OTHERS.get(number, f"type {number}")
