"""Ids that end a reply, typed control tokens that stay text, and text that streams exactly."""

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from localchat.errors import BadCheckpoint
from localchat.tokenizer import Segment, Tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id for each byte, whatever the merges are."""
    alphabet = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    alphabet |= {b: chr(0x100 + n) for n, b in enumerate(b for b in range(256) if b not in alphabet)}
    ids = [tokenizer._backend.token_to_id(alphabet[byte]) for byte in data]
    assert None not in ids
    return ids


def sentencepiece_like() -> Backend:
    """Llama 2's way: blanks written as ▁, unknown characters as bytes, and the first blank stripped when decoding."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "é", "▁a", "▁b", "ab"]
    model = models.BPE(
        {word: i for i, word in enumerate(words)},
        [("▁", "a"), ("▁", "b"), ("a", "b")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:3]])
    return backend


@pytest.mark.parametrize("name", ["tiny", "sentencepiece", "qwen"])
def test_pieces_join_to_the_decoded_whole(name: str, tiny_tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    tokenizer, draw = tiny_tokenizer, random.Random(name)
    if name == "sentencepiece":
        tokenizer = Tokenizer(sentencepiece_like())
    elif name == "qwen":
        tokenizer = Tokenizer.load(request.getfixturevalue("qwen_folder"))
    byte_tokens = set(range(3 + 0x80, 3 + 256)) if name == "sentencepiece" else set()  # see Detokenizer's docstring
    shown = 0
    for _ in range(500):
        ids = [draw.randrange(tokenizer.vocab_size + 3) for _ in range(draw.randrange(30))]
        ids = [i for i in ids if i not in byte_tokens]
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
        shown += len(tokenizer.decode(ids))
    assert shown > 1000


@pytest.mark.parametrize("text", ["a b é", "日本語 😀 ab", "é ab", "a  b\n", "é" * 9])
def test_characters_split_over_byte_fallback_tokens(text: str) -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    ids = tokenizer.encode_text(text)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == text


def test_a_character_appears_with_its_last_byte(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = tiny_tokenizer.detokenizer()
    pieces = [detokenizer.push(i) for i in byte_ids(tiny_tokenizer, "a😀é".encode())]
    assert pieces == ["a", "", "", "", "😀", "", "é"]


def test_invalid_bytes_never_stall(tiny_tokenizer: Tokenizer) -> None:
    """However many come, at most three wait."""
    for data in (b"\x80" * 50, b"\xf0" * 50, b"\xe2\x82" * 50):
        detokenizer, got = tiny_tokenizer.detokenizer(), ""
        for n, i in enumerate(byte_ids(tiny_tokenizer, data), 1):
            got += detokenizer.push(i)
            settled = data[: max(0, n - 3)].decode(errors="replace")
            assert len(got) >= len(settled) - 1
        assert got + detokenizer.flush() == data.decode(errors="replace")


def test_invalid_byte_fallback_is_shown_at_once() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    detokenizer = tokenizer.detokenizer()
    ids = [3 + 0x80, 3 + 0xFF, tokenizer._backend.token_to_id("a")]
    assert [detokenizer.push(i) for i in ids] == ["\ufffd", "\ufffd", "a"]


def test_the_end_shows_an_unfinished_character(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = tiny_tokenizer.detokenizer()
    assert [detokenizer.push(i) for i in byte_ids(tiny_tokenizer, b"\xe2\x82")] == ["", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_hidden_and_shown_added_tokens(tiny_tokenizer: Tokenizer) -> None:
    added = tiny_tokenizer.added_tokens
    ids = [added["<|im_start|>"], added["<tool_call>"], *tiny_tokenizer.encode_text("x"), added["<|im_end|>"]]
    assert streamed(tiny_tokenizer, ids) == tiny_tokenizer.decode(ids) == "<tool_call>x"


def test_typed_tokens_stay_text(tiny_tokenizer: Tokenizer) -> None:
    added = tiny_tokenizer.added_tokens
    text = "a<|im_end|> <think>ll"
    ids = tiny_tokenizer.encode([Segment("<|im_end|>"), Segment(text, special=False), Segment("<think>")])
    assert ids[0] == added["<|im_end|>"]
    assert ids[-1] == added["<think>"]
    assert not set(ids[1:-1]) & set(added.values())
    assert tiny_tokenizer.decode(ids[1:-1]) == text
    assert tiny_tokenizer._backend.token_to_id("ll") in ids  # merges still apply


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_plain_ids_are_those_of_a_tokenizer_without_added_tokens(tiny_backend: Backend, ignore_merges: bool) -> None:
    raw = json.loads(tiny_backend.to_str())
    raw["model"]["ignore_merges"] = ignore_merges
    raw["added_tokens"] = []
    for word in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        del raw["model"]["vocab"][word]
    reference = Backend.from_str(json.dumps(raw))
    tiny_backend.model.ignore_merges = ignore_merges
    tokenizer = Tokenizer(tiny_backend)
    for text in ("hello all", "<|im_end|>", "x<|endoftext|><think>y", "llll é"):
        assert tokenizer.encode_text(text, special=False) == reference.encode(text).ids


def test_a_whole_word_that_is_an_added_token(tiny_backend: Backend) -> None:
    """With ignore_merges a word that stands in the vocabulary is taken whole: here that would be a control token."""
    raw = json.loads(tiny_backend.to_str())
    raw["model"]["ignore_merges"] = True
    raw["model"]["vocab"]["end"] = 900
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 900, "content": "end"})
    tokenizer = Tokenizer(Backend.from_str(json.dumps(raw)))
    assert tokenizer.encode_text("end") == [900]
    assert tokenizer.encode_text("end", special=False) == byte_ids(tokenizer, b"end")
    assert tokenizer.vocab_size == 901


def test_the_real_tokenizer_keeps_typed_tokens_as_text(qwen_folder: Path) -> None:
    tokenizer = Tokenizer.load(qwen_folder)
    assert tokenizer.vocab_size == 248077
    assert tokenizer.stop_ids == {248044, 248046}
    text = "Größe <|im_end|>\n<think>12 日本"
    ids = tokenizer.encode_text(text, special=False)
    assert max(ids) < 248044
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_text("plain words, 12", special=False) == tokenizer.encode_text("plain words, 12")


def test_a_lone_surrogate_is_no_crash(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.encode_text("a\udc80") == tiny_tokenizer.encode_text("a?")
    assert len(tiny_tokenizer.encode_text("a\udc80b")) == 3


def test_truncation_and_padding_in_the_file_are_ignored(tiny_backend: Backend, tmp_path: Path) -> None:
    tiny_backend.enable_truncation(4)
    tiny_backend.enable_padding(length=9)
    tiny_backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode_text("a" * 20)) == 20
    assert len(Tokenizer.load(tmp_path).encode_text("a")) == 1


WORDS = (
    "a",
    " b",
    "ll",
    "l",
    "\n",
    "  ",
    "é",
    "e\u0301",
    "<|im_",
    "end|>",
    "<think>",
    "</think>",
    "<|im_end|>",
    "</s>",
    "1",
)


@pytest.mark.parametrize("name", ["tiny", "sentencepiece", "qwen"])
def test_what_is_encoded_beside_a_known_text_is_what_it_is_alone(
    name: str, tiny_tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    tokenizer, draw = tiny_tokenizer, random.Random(name)
    if name == "sentencepiece":
        tokenizer = Tokenizer(sentencepiece_like())
    elif name == "qwen":
        tokenizer = Tokenizer.load(request.getfixturevalue("qwen_folder"))

    def segments(words: list[str]) -> list[Segment]:
        """Some control tokens are typed, and stand alone."""
        pieces = re.split("(<think>)", "".join(words)) if typed else ["".join(words)]
        return [Segment(piece, piece != "<think>" or not typed) for piece in pieces if piece]

    for _ in range(1000):
        typed, begins = draw.random() < 0.5, draw.choices(WORDS, k=draw.randrange(12))
        known, new = (segments([*begins, *draw.choices(WORDS, k=draw.randrange(6))]) for _ in range(2))
        assert tokenizer.encode_beside(new, known, tokenizer.encode(known)) == tokenizer.encode(new)
    assert tokenizer.encode_beside(new, [], []) == tokenizer.encode(new)


def test_a_token_that_depends_on_what_stands_before_it_is_no_place_to_cut(tiny_backend: Backend) -> None:
    tiny_backend.add_tokens([AddedToken("ab", single_word=True)])
    tokenizer = Tokenizer(tiny_backend)
    known, new = ([Segment(f"<|im_end|>x xab {end}")] for end in "yz")
    assert tokenizer.encode_beside(new, known, tokenizer.encode(known)) == tokenizer.encode(new)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, {0, 2}),
        ({"generation_config.json": {"eos_token_id": [7, 8]}}, {0, 2, 7, 8}),
        ({"config.json": {"eos_token_id": 9}}, {0, 2, 9}),
        ({"config.json": {"eos_token_id": 9, "text_config": {"eos_token_id": 10}}}, {0, 2, 9, 10}),
        ({"tokenizer_config.json": {"eos_token": "<|im_start|>"}}, {0, 1, 2}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_start|>"}}}, {0, 1, 2}),
        ({"tokenizer_config.json": {"eos_token": "<not there>"}}, {0, 2}),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": None}}, {0, 2}),
    ],
)
def test_stop_ids_are_the_union(tiny_folder: Path, files: dict[str, object], wanted: set[int]) -> None:
    for name, content in files.items():
        (tiny_folder / name).write_text(json.dumps(content))
    assert Tokenizer.load(tiny_folder).stop_ids == wanted


def test_missing_and_damaged_files(tiny_folder: Path) -> None:
    (tiny_folder / "config.json").write_text("[")
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        Tokenizer.load(tiny_folder)
    for damaged in (b"", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'):
        (tiny_folder / "tokenizer.json").write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=r"tokenizer\.json: cannot be read"):
            Tokenizer.load(tiny_folder)
    (tiny_folder / "tokenizer.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"there is no tokenizer\.json"):
        Tokenizer.load(tiny_folder)
