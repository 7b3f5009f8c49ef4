#!/usr/bin/env python3
"""Makes a tiny random checkpoint of a supported architecture, as Hugging Face folders are: something to try
`localchat quantize` and `localchat run` on without a download. It answers with nonsense.

    python scripts/make_tiny_checkpoint.py --arch qwen3 --out /tmp/tiny
    localchat quantize /tmp/tiny -o /tmp/tiny-int4

Every weight is random, also norms and biases: left at the 1 and 0 they are created with, they would hide faults.
Needs transformers (the extra named `test`).
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<think>", "</think>")
VOCAB_SIZE = 384
# Configuration and model class in transformers begin with this.
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_5": "Qwen3_5"}
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte (ids 0..255), then SPECIAL, then NOT_SPECIAL."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL])
    return tokenizer


def random_model(arch: str, tied: bool, seed: int) -> "torch.nn.Module":
    """A two-layer model of about 0.3 million weights; grouped queries, a head size that is not hidden / heads.

    Of Qwen3.5 four layers, the last of which is attention.
    """
    import transformers

    sizes: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    if arch != "qwen2":
        sizes["head_dim"] = 48
    if arch == "qwen3_5":
        sizes |= DELTA_NET
    suffix = "TextConfig" if arch == "qwen3_5" else "Config"
    config = getattr(transformers, CLASSES[arch] + suffix)(**sizes)
    model: torch.nn.Module = getattr(transformers, f"{CLASSES[arch]}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:  # Qwen3.5 multiplies by 1 + weight, except behind the delta net
                weight.copy_((arch != "qwen3_5" or "linear_attn" in name) + 0.2 * noise)
            else:
                weight.copy_(noise * (0.1 if weight.dim() == 2 else 0.5))
    return model


def write(out: Path, arch: str, tied: bool, dtype: str, shards: int, seed: int) -> None:
    """Write the folder `out`: weights in about `shards` files, config, tokenizer, chat template, generation config."""
    out.mkdir(parents=True, exist_ok=True)
    model = random_model(arch, tied, seed).to(getattr(torch, dtype))
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(out, max_shard_size=size if shards == 1 else -(-size // shards))  # type: ignore[operator]
    byte_tokenizer().save(str(out / "tokenizer.json"))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    generation = {"eos_token_id": [258, 256], "pad_token_id": 256, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2))


def main() -> None:
    """Read the command line and write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", choices=tuple(CLASSES), default="llama")
    parser.add_argument("--tied", action="store_true", help="the output uses the embedding's weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--shards", type=int, default=1, help="roughly how many files (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, args.arch, args.tied, args.dtype, args.shards, args.seed)
    print(f"wrote {args.out}: {', '.join(sorted(path.name for path in args.out.iterdir()))}")


if __name__ == "__main__":
    main()
