"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizer that the metadata was made from."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from localchat.errors import BadCheckpoint
from localchat.quantize.gguf import _Reader
from localchat.quantize.gguf_config import Metadata
from localchat.quantize.gguf_tokenizer import tokenizer_files

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind; it's the fox's day.",
    "In 1989 there were 365 days; 1234567 is a number, 3.14159 too. We'll see what they're doing there.",
    "def f(x):\n    return x + 1\n\n\nfor i in range(10):\n\tprint(i)\n",
    "Größe, naïve café, Москва и Санкт-Петербург, 日本語のテキスト, 안녕하세요.",
] * 3
TEXTS = [
    *CORPUS[:4],
    "  leading and   inner spaces \n\n trailing  ",
    "12345 007 ½ ² x²",
    "e\u0301 is e with an accent, and é is one letter",
    "emoji 🙂👩‍👩‍👧 and control \x07 \u200b text",
    "<|im_start|>user\nHello<|im_end|>\n<think>\nhm</think> <|im_start|>",
    "DON'T don't WE'LL\r\n\r\nnew",
    "text <s>more</s> text",
    "",
]
SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture
def rebuild(tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """A function: the files rebuilt from metadata that `change` writes."""

    def build(change: Callable[[gguf.GGUFWriter], Any]) -> dict[str, bytes]:
        path = tmp_path / "t.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tokenizer_files(Metadata(path, _Reader(path)))

    return build


def train_byte_level(pre_tokenizer: Any, normalizer: Any = None, specials_first: bool = False) -> Tokenizer:
    """A byte-level BPE of 400 tokens; special tokens before the vocabulary (SmolLM2) or behind it (Qwen, Llama 3)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL if specials_first else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def write_byte_level(tokenizer: Tokenizer, pre: str, padding: int = 0) -> Callable[[gguf.GGUFWriter], None]:
    """Metadata as llama.cpp's converter writes it; `padding` unused tokens at the end, as Qwen's have."""
    raw = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    added = {t["id"]: 3 if t["special"] else 4 for t in raw["added_tokens"]}
    tokens = [tokenizer.id_to_token(i) for i in range(size)] + [f"[PAD{size + i}]" for i in range(padding)]

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([added.get(i, 1) for i in range(size)] + [5] * padding)
        writer.add_token_merges([" ".join(m) for m in raw["model"]["merges"]])
        writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
        writer.add_chat_template("{{ messages }}")

    return change


def same_ids(files: dict[str, bytes], reference: Tokenizer) -> None:
    rebuilt = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in TEXTS:
        want = reference.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special_tokens=False).ids == want, text
        assert rebuilt.decode(want, skip_special_tokens=False) == reference.decode(want, skip_special_tokens=False)
        assert rebuilt.decode(want) == reference.decode(want)  # special tokens skipped, <think> not


def test_smollm(rebuild: Callable[..., dict[str, bytes]]) -> None:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference = train_byte_level(words, specials_first=True)  # has merges of digits, which the splitter keeps apart
    reference.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    assert reference.token_to_id("<|im_start|>") == 0
    same_ids(rebuild(write_byte_level(reference, "smollm")), reference)


def test_gpt2(rebuild: Callable[..., dict[str, bytes]]) -> None:
    reference = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    same_ids(rebuild(write_byte_level(reference, "gpt-2")), reference)


@pytest.mark.parametrize("padding", [0, 7])
def test_qwen2(rebuild: Callable[..., dict[str, bytes]], padding: int) -> None:
    """Against transformers' own Qwen2 tokenizer; padding tokens are not part of it."""
    pytest.importorskip("transformers")
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer

    backend = Qwen2Tokenizer()._tokenizer
    reference = train_byte_level(backend.pre_tokenizer, backend.normalizer)
    assert PRETOKENIZE_REGEX in reference.to_str().replace("\\\\", "\\")
    files = rebuild(write_byte_level(reference, "qwen2", padding))
    same_ids(files, reference)
    assert Tokenizer.from_str(files["tokenizer.json"].decode()).get_vocab_size() == reference.get_vocab_size()


def test_qwen35(rebuild: Callable[..., dict[str, bytes]]) -> None:
    """Against transformers' own Qwen3.5 tokenizer: combining marks stay with their letter."""
    qwen = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    backend = qwen.Qwen3_5Tokenizer()._tokenizer
    reference = train_byte_level(backend.pre_tokenizer, backend.normalizer)
    files = rebuild(write_byte_level(reference, "qwen35"))
    same_ids(files, reference)
    assert qwen.PRETOKENIZE_REGEX in files["tokenizer.json"].decode().replace("\\\\", "\\")


def test_llama3(rebuild: Callable[..., dict[str, bytes]]) -> None:
    """Splitter as in transformers' converter; words that are tokens are taken without asking the merges."""
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    pattern = inspect.signature(convert.TikTokenConverter).parameters["pattern"].default
    split = pre_tokenizers.Split(__import__("tokenizers").Regex(pattern), behavior="isolated")
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raw = json.loads(train_byte_level(pre).to_str())
    raw["model"]["ignore_merges"] = True
    # A word without merges that lead to it: only ignore_merges finds it. It takes the last ordinary id.
    last = max(raw["model"]["vocab"].values())
    raw["model"]["merges"] = [m for m in raw["model"]["merges"] if raw["model"]["vocab"]["".join(m)] != last]
    old = next(token for token, i in raw["model"]["vocab"].items() if i == last)
    del raw["model"]["vocab"][old]
    raw["model"]["vocab"]["Ġspaces"] = last
    reference = Tokenizer.from_str(json.dumps(raw))
    assert last in reference.encode("inner spaces").ids
    files = rebuild(write_byte_level(reference, "llama-bpe"))
    same_ids(files, reference)
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is True


def train_sentencepiece(prefix: bool) -> tuple[Tokenizer, list[str], list[float], list[int]]:
    """A BPE with byte fallback as Llama 2's tokenizer.json has it, and its tokens, scores and types in a GGUF file."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    letters = sorted(t for t in model["vocab"] if len(t) == 1)
    merges = list(dict.fromkeys(tuple(m) for m in model["merges"]))
    results = list(dict.fromkeys("".join(m) for m in merges))
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *results, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(results))] + [-1e4] * len(letters)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(results) + len(letters))
    vocab = {t: i for i, t in enumerate(tokens)}
    reference = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    reference.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    reference.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return reference, tokens, scores, types


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(rebuild: Callable[..., dict[str, bytes]], prefix: bool) -> None:
    reference, tokens, scores, types = train_sentencepiece(prefix)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_add_space_prefix(prefix)

    files = rebuild(change)
    same_ids(files, reference)
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is True


def test_tokenizer_config(rebuild: Callable[..., dict[str, bytes]]) -> None:
    reference = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    config = json.loads(rebuild(write_byte_level(reference, "gpt-2"))["tokenizer_config.json"])
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ messages }}"
    assert config["add_bos_token"] is False


def byte_vocabulary(writer: gguf.GGUFWriter, model: str = "gpt2", pre: str | None = "gpt-2") -> None:
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(pre_tokenizers.ByteLevel.alphabet()))
    writer.add_token_merges([])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: byte_vocabulary(w, pre="chameleon"), "pre = 'chameleon' is not supported"),
        (lambda w: byte_vocabulary(w, pre=None), "pre = 'default' is not supported"),
        (lambda w: byte_vocabulary(w, model="t5"), "model = 't5' is not supported"),
        (lambda w: (byte_vocabulary(w), w.add_token_types([1])), "do not belong together"),
        (lambda w: byte_vocabulary(w, model="llama"), "256 tokens and 0 scores"),
        (lambda w: (byte_vocabulary(w), w.add_remove_extra_whitespaces(True)), "remove_extra_whitespaces"),
        (lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("gpt-2")), "do not belong together"),
    ],
)
def test_refused_by_name(rebuild: Callable[..., dict[str, bytes]], change: Any, words: str) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        rebuild(change)


def test_merge_of_unknown_tokens(rebuild: Callable[..., dict[str, bytes]]) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b", "a c"])

    with pytest.raises(BadCheckpoint, match="merges"):
        rebuild(change)
