"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, rebuilt from its metadata.

A GGUF file carries the vocabulary, the kinds of the tokens, merges or scores, and the *name* of the text splitter.
What a name stands for is known for a few; another one is refused, since a tokenizer that is nearly right makes a model
that is quietly worse.
"""

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from localchat.errors import BadCheckpoint
from localchat.quantize.gguf_config import Metadata

# Token types of the GGUF specification.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)

# Splitters of byte-level BPE as the models' own tokenizer.json write them.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITTERS = {
    "qwen2": _WORDS % r"\p{N}",
    "deepseek-r1-qwen": _WORDS % r"\p{N}",
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    # Marks that combine with a letter are part of the word.
    "qwen35": (_WORDS % r"\p{N}").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),
}
_KNOWN = ("gpt-2", "smollm", *_SPLITTERS)


def tokenizer_files(metadata: Metadata) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json.

    Raises:
        BadCheckpoint: the tokenizer is of an unknown kind or its parts do not belong together.
    """
    model = metadata.text("tokenizer.ggml.model")
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    types = metadata.items("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens) or not tokens or len(set(tokens)) != len(tokens):
        raise BadCheckpoint(f"{metadata.path}: tokens and token types of the tokenizer do not belong together.")
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.value(f"tokenizer.ggml.{key}"):
            raise BadCheckpoint(f"{metadata.path}: tokenizer.ggml.{key} is not implemented.")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens, types)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types)
    else:
        raise BadCheckpoint(f"{metadata.path}: tokenizer.ggml.model = {model!r} is not supported (known: gpt2, llama).")
    _add_tokens(metadata, tokenizer, tokens, types)
    config = json.dumps(_tokenizer_config(metadata, tokens, model), indent=2, ensure_ascii=False)
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": config.encode()}


def _byte_level(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """Byte-level BPE (GPT-2's alphabet) with the splitter that tokenizer.ggml.pre names."""
    pre = metadata.text("tokenizer.ggml.pre", "default")
    if pre not in _KNOWN:
        raise BadCheckpoint(
            f"{metadata.path}: tokenizer.ggml.pre = {pre!r} is not supported (known: {', '.join(_KNOWN)}); "
            "use the model's safetensors repository."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.items("tokenizer.ggml.merges", str)]
    # Llama 3 takes a word that is a token as it is, without asking the merges.
    bpe = _bpe(metadata, _vocabulary(tokens, types), merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _SPLITTERS:
        split = pre_tokenizers.Split(Regex(_SPLITTERS[pre]), behavior="isolated")
        parts: list[Any] = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        parts = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE as Llama 2 has it: spaces are "▁", unknown characters fall back to bytes."""
    scores = metadata.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise BadCheckpoint(f"{metadata.path}: the tokenizer has {len(tokens)} tokens and {len(scores)} scores.")
    vocabulary = _vocabulary(tokens, types)
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_from_scores(vocabulary, scores, types)
    tokenizer = Tokenizer(_bpe(metadata, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score of the result first: the order SentencePiece merges in."""
    found = []
    for token, i in vocabulary.items():
        if types[i] != _NORMAL:
            continue
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in vocabulary and b in vocabulary]
        found += [(-scores[i], vocabulary[a], vocabulary[b], a, b) for a, b in known]
    return [(a, b) for *_, a, b in sorted(found)]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """The tokens of the BPE model: all up to the last ordinary one. What follows is added tokens and padding."""
    last = max((i for i, kind in enumerate(types) if kind in (_NORMAL, _BYTE)), default=-1)
    return {token: i for i, token in enumerate(tokens[: last + 1])}


def _bpe(metadata: Metadata, vocabulary: dict[str, int], merges: list[Any], **options: Any) -> Any:
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise BadCheckpoint(f"{metadata.path}: the tokenizer merges {merge!r}, which are not tokens.")
    return models.BPE(vocab=vocabulary, merges=merges, **options)


def _add_tokens(metadata: Metadata, tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens (special) and user-defined ones (not), under the ids they have in the file."""
    size = tokenizer.get_vocab_size()
    end = max((i + 1 for i, kind in enumerate(types) if kind in _ADDED), default=0)
    for i, (token, kind) in enumerate(zip(tokens[:end], types, strict=False)):
        if i >= size or kind in _ADDED:  # an unused one between added ones keeps its place
            tokenizer.add_tokens([AddedToken(token, special=kind != _USER_DEFINED, normalized=False)])
    wrong = [token for i, token in enumerate(tokens[: max(end, size)]) if tokenizer.token_to_id(token) != i]
    if wrong:
        raise BadCheckpoint(f"{metadata.path}: the tokenizer's {wrong[0]!r} cannot be given the id it has in the file.")


def _tokenizer_config(metadata: Metadata, tokens: list[str], model: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": metadata.flag(
            "tokenizer.ggml.add_bos_token", model == "llama" or metadata.value("tokenizer.ggml.pre") == "llama-bpe"
        ),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.value(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            config[f"{ours}_token"] = tokens[token_id]
    template = metadata.value("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config
