#!/usr/bin/env python3
"""Trains a small Qwen3.5 hybrid from nothing, on the text of installed Python packages: a second model to measure
packing with, whose weights were never rounded to 4 bits.

    python scripts/train_hybrid.py --out /tmp/hybrid                          # about four minutes on a card
    scripts/quantize_table /tmp/hybrid --text /tmp/hybrid/heldout.txt         # what each way of packing costs

Sources and documentation (.py, .rst, .md, .txt) under the standard library and site-packages become a byte-level BPE
tokenizer and a stream of tokens; every hundredth file is kept for heldout.txt. The model: 12 layers, 9 of them gated
delta nets, widths that are multiples of 128, about 50 million weights. The learning rate follows the clock, so that
--seconds decides how long it takes. Weights are not kept in this repository. Needs transformers (the extra `test`).
"""

import argparse
import json
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from make_tiny_checkpoint import CHAT_TEMPLATE, SPECIAL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SUFFIXES = (".py", ".rst", ".md", ".txt")
HELD_OUT = 100  # one file in so many
TOKENIZER_BYTES = 12_000_000
BASE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# For a test: seconds on a CPU.
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def corpus(most_bytes: int, roots: list[Path]) -> tuple[list[str], str]:
    """Texts of installed packages, at most so many bytes of them in an order that is the same every time; held out."""
    found = {path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()}
    paths = sorted(found)
    random.Random(0).shuffle(paths)
    train: list[str] = []
    held: list[str] = []
    seen: set[int] = set()
    size = 0
    for i, path in enumerate(paths):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not 500 < len(text) < 400_000 or hash(text) in seen:
            continue
        seen.add(hash(text))
        (held if i % HELD_OUT == 0 else train).append(text)
        size += len(text)
        if size > most_bytes:
            break
    return train, "\n\n".join(held)[:400_000]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE with `vocab` tokens, special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def some() -> Iterator[str]:
        left = TOKENIZER_BYTES
        for text in texts:
            yield text
            left -= len(text)
            if left < 0:
                return

    tokenizer.train_from_iterator(some(), trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one int32 [n], each ended by the first special token."""
    ids: list[int] = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False):
            ids += [*encoding.ids, 0]
    return torch.tensor(ids, dtype=torch.int32)


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk: int = 64, **_: Any
) -> tuple[Tensor, None]:
    """The delta rule over many tokens for autograd, `chunk` of them at a time, in fp32: for training only.

    query, key [B, T, heads, dk], value [B, T, value heads, dv], g (log decay) and beta [B, T, value heads]; T is a
    multiple of `chunk`. The formulas stand in kernels/gated_delta_net_prefill.py. transformers' own form is a loop over
    rows in some versions.
    """
    dtype, (tokens, heads) = value.dtype, value.shape[1:3]
    if tokens % chunk:
        raise ValueError(f"chunk_gated_delta_rule: got {tokens} tokens, wanted a multiple of {chunk}")

    def split(x: Tensor) -> Tensor:  # [B, T, heads, ...] -> [B, value heads, chunks, chunk, ...]
        x = x.float().repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)
        return x.unflatten(2, (-1, chunk))

    with torch.autocast(value.device.type, enabled=False):
        q, k, v, total, b = split(query), split(key), split(value), split(g).cumsum(-1), split(beta).unsqueeze(-1)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(~later, float("-inf")).exp()
        a = (b * (k @ k.mT) * decay).tril(-1)
        grown = total.exp().unsqueeze(-1)
        right = torch.cat((b * v, b * grown * k), dim=-1)
        u, w = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True).split(
            (v.shape[-1], k.shape[-1]), dim=-1
        )
        seen = (q @ k.mT) * decay
        left = k * (total[..., -1:] - total).exp().unsqueeze(-1)
        read, last = grown * q, grown[..., -1:, :]
        state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
        out = []
        for c in range(q.shape[2]):
            x = u[:, :, c] - w[:, :, c] @ state
            out.append(read[:, :, c] @ state + seen[:, :, c] @ x)
            state = state * last[:, :, c] + left[:, :, c].mT @ x
    return torch.stack(out, dim=2).flatten(2, 3).transpose(1, 2).to(dtype), None


def build(vocab: int, sizes: dict[str, int]) -> "torch.nn.Module":
    """The untrained model."""
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5

    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    config = transformers.Qwen3_5TextConfig(
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        **sizes,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.Qwen3_5ForCausalLM(config)
    return model


def train(model: "torch.nn.Module", ids: Tensor, args: argparse.Namespace) -> float:
    """Train until the time is over; returns the mean loss of the last tenth."""
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    model.to(device).train()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(args.length + 1)
    start, step, losses = time.perf_counter(), 0, []
    while (done := (time.perf_counter() - start) / args.seconds) < 1 and step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * done)))
        starts = torch.randint(len(ids) - args.length - 1, (args.batch,), generator=generator)
        batch = ids[starts[:, None] + window].long().to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        losses.append(loss.detach())
        if step % 50 == 0 or step == 1:
            seconds = time.perf_counter() - start
            rate = step * args.batch * args.length / seconds
            print(f"step {step:5d}  {seconds:5.0f} s  loss {float(losses[-1]):.3f}  {rate:,.0f} tok/s", flush=True)
    return float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean())


def write(out: Path, model: "torch.nn.Module", tokenizer: Tokenizer, held: str) -> None:
    """The Hugging Face folder, and the text that was held out."""
    out.mkdir(parents=True, exist_ok=True)
    model.to("cpu", torch.bfloat16).save_pretrained(out)  # type: ignore[operator]
    tokenizer.save(str(out / "tokenizer.json"))
    texts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(texts, indent=2))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "do_sample": False}))
    (out / "heldout.txt").write_text(held, encoding="utf-8")


def main() -> None:
    """Read the command line, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0, help="of training alone (default 240)")
    parser.add_argument("--steps", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--batch", type=int, default=48, help="sequences in a step (default 48)")
    parser.add_argument("--length", type=int, default=768, help="tokens of one, a multiple of 64 (default 768)")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--corpus-mb", type=float, default=80.0, help="text to read (default 80)")
    parser.add_argument("--root", type=Path, action="append", help="where text is (default: stdlib, site-packages)")
    parser.add_argument("--tiny", action="store_true", help="a model of a million weights, for a test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    paths = sysconfig.get_paths()
    roots = args.root or list(dict.fromkeys(Path(paths[kind]) for kind in ("purelib", "platlib", "stdlib")))
    start = time.perf_counter()
    texts, held = corpus(int(args.corpus_mb * 1e6), roots)
    tokenizer = train_tokenizer(texts, args.vocab)
    ids = token_stream(tokenizer, texts)
    print(f"{len(texts):,} files, {len(ids):,} tokens, {time.perf_counter() - start:.0f} s", flush=True)
    model = build(tokenizer.get_vocab_size(), TINY if args.tiny else BASE)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights", flush=True)
    loss = train(model, ids, args)
    write(args.out, model, tokenizer, held)
    print(f"loss {loss:.3f} (perplexity {math.exp(loss):.2f}); wrote {args.out}")


if __name__ == "__main__":
    main()
