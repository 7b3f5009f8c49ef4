#!/usr/bin/env python3
"""A packed folder of a real model's shapes with random weights, to measure loading: make_random_packed.py MODEL OUT

MODEL is a name of the registry, such as qwen3.5-27b. With --tokenizer FOLDER that folder's tokenizer and template files
are taken along, so that `localchat run OUT` answers (nonsense). Needs the model's size in memory, of the card's if
there is one, and on the disk; OUT may lie on a RAM disk. OUT appears when it is complete; until then it is OUT.partial.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

from localchat.config import QuantizationConfig, TensorFormat
from localchat.errors import UserError
from localchat.kernels.int4_packing import LAYOUT, VERSION
from localchat.ledger import default_formats
from localchat.ops import ReferenceOps
from localchat.quantize.target import move_into_place, partial_folder
from localchat.quantize.writer import ShardWriter
from localchat.registry import MODELS, Entry
from localchat.synthetic import synthetic_model
from localchat.template import ChatTemplate
from localchat.tokenizer import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS, metavar="MODEL")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"make_random_packed.py: {args.out} exists already; name another folder or remove it.")
    entry = MODELS[args.model]
    try:
        if args.tokenizer:
            check_tokenizer(args.tokenizer, entry)
        with partial_folder(args.out) as partial:
            nbytes = write(entry, partial, args.tokenizer)
            move_into_place(partial, args.out)
    except UserError as error:
        sys.exit(f"make_random_packed.py: {error}")
    print(f"{args.out}: {nbytes / 1e9:.2f} GB of {args.model}'s shapes, random weights")


def check_tokenizer(folder: Path, entry: Entry) -> None:
    """Refuse, before anything is made, a tokenizer with which `localchat run` could not answer.

    Raises:
        UserError: it is missing or damaged, has no template, or has ids for which the model has no rows.
    """
    tokenizer = Tokenizer.load(folder)
    ChatTemplate.load(folder, tokenizer)
    if tokenizer.vocab_size > entry.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids, and {entry.alias} has room for "
            f"{entry.vocab_size:,}; take the tokenizer of a model with as many or fewer."
        )


def write(entry: Entry, out: Path, tokenizer: Path | None) -> int:
    """Fill the folder `out`; returns the weights' bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = synthetic_model(entry, device, ops=ReferenceOps()).state_dict()
    with ShardWriter(out, tensors, max_shard_size=5_000_000_000) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        nbytes = writer.finish()
    quantization = QuantizationConfig(LAYOUT, VERSION, TensorFormat(4, 128), default_formats(entry.config))
    config = entry.config_dict() | {"quantization_config": quantization.to_dict()}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        if tokenizer and (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)
    return nbytes


if __name__ == "__main__":
    main()
