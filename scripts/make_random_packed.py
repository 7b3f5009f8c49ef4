#!/usr/bin/env python3
"""A packed folder of a real model's shapes with random weights, to measure loading: make_random_packed.py MODEL OUT

MODEL is a name of the registry, such as qwen3.5-27b. With --tokenizer FOLDER that folder's tokenizer and template files
are taken along, so that `localchat run OUT` answers (nonsense). Needs the model's size in memory, of the card's if
there is one, and on the disk; OUT may lie on a RAM disk.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

from localchat.config import QuantizationConfig, TensorFormat
from localchat.kernels.int4_packing import LAYOUT, VERSION
from localchat.ledger import default_formats
from localchat.ops import ReferenceOps
from localchat.quantize.writer import ShardWriter
from localchat.registry import MODELS
from localchat.synthetic import synthetic_model

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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = synthetic_model(entry, device, ops=ReferenceOps())
    tensors = model.state_dict()
    args.out.mkdir(parents=True)
    with ShardWriter(args.out, tensors, max_shard_size=5_000_000_000) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        nbytes = writer.finish()
    quantization = QuantizationConfig(LAYOUT, VERSION, TensorFormat(4, 128), default_formats(entry.config))
    config = entry.config_dict() | {"quantization_config": quantization.to_dict()}
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER_FILES:
        if args.tokenizer and (args.tokenizer / name).exists():
            shutil.copy(args.tokenizer / name, args.out / name)
    print(f"{args.out}: {nbytes / 1e9:.2f} GB of {args.model}'s shapes, random weights")


if __name__ == "__main__":
    main()
