"""Text to token ids and back: the checkpoint's tokenizer.json, the ids that end a reply, and streaming text.

Two things differ from calling `tokenizers` directly. Text that came from a person never becomes a control token
(`Segment.special`), and a reply is turned into text one id at a time without decoding it again and again.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from localchat.config import read_json
from localchat.errors import BadCheckpoint

# Terminators that some checkpoints declare nowhere but in their chat template.
_KNOWN_STOPS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered prompt. special=False: typed text that spells an added token and must stay text."""

    text: str
    special: bool = True


class Tokenizer:
    """A checkpoint's tokenizer.

    `added_tokens` maps the text of every added token, special or not, to its id. `stop_ids` end a reply.
    `hidden_ids` (special tokens and stop ids) never show in text. `vocab_size` is the highest id + 1, which can be
    less than the rows of the embedding.
    """

    def __init__(self, backend: tokenizers.Tokenizer, stop_ids: Iterable[int] = ()) -> None:
        # A tokenizer.json may carry its training's truncation, which would silently cut a long prompt.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.added_tokens: dict[str, int] = {token.content: i for i, token in added.items()}
        self.stop_ids = frozenset(stop_ids) | {self.added_tokens[t] for t in _KNOWN_STOPS if t in self.added_tokens}
        self.hidden_ids = self.stop_ids | {i for i, token in added.items() if token.special}
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
        self._decoders = _decoder_types(backend)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json, and the stop ids from the three configs beside it, as far as they exist.

        Raises:
            BadCheckpoint: tokenizer.json is absent or damaged, or a config is not JSON.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadCheckpoint(f"{folder}: there is no tokenizer.json, so this is not a complete model folder.")
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except (ValueError, OSError) as error:
            raise BadCheckpoint(f"{path}: cannot be read as a tokenizer ({error}); fetch it again.") from error
        return cls(backend, _declared_stop_ids(folder, backend))

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """The ids of a rendered prompt. No BOS is added, the template writes its own."""
        return [i for segment in segments for i in self.encode_text(segment.text, segment.special)]

    def encode_beside(self, segments: Sequence[Segment], known: Sequence[Segment], ids: Sequence[int]) -> list[int]:
        """The same as `encode(segments)`, where `known` is known to give `ids`: what both begin with costs nothing.

        That is all in front of the last added token which they share. Added tokens are found before anything else, so
        what stands in front of one does not depend on what follows it.
        """
        alike = next((n for n, (a, b) in enumerate(zip(segments, known, strict=False)) if a != b), None)
        if alike is None:
            alike = min(len(segments), len(known))
        rest, known_rest = list(segments[alike:]), list(known[alike:])
        cut = 0
        if rest and known_rest and rest[0].special and known_rest[0].special:
            cut = self._last_added_token(rest[0].text, _common_length(rest[0].text, known_rest[0].text))
            rest[0], known_rest[0] = Segment(rest[0].text[cut:]), Segment(known_rest[0].text[cut:])
        if not alike and not cut:
            return self.encode(segments)
        known_ids = self.encode(known_rest)
        shared = len(ids) - len(known_ids)
        if list(ids[shared:]) != known_ids:
            return self.encode(segments)
        return [*ids[:shared], *self.encode(rest)]

    def encode_text(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`, with added tokens recognised or, when special is False, all of it as plain text."""
        text = text.encode(errors="replace").decode()  # a lone surrogate has no tokens
        if special:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self._plain_ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without hidden ones; invalid UTF-8 becomes U+FFFD, ids beyond the vocabulary nothing."""
        shown = [i for i in ids if i not in self.hidden_ids]
        return self._backend.decode(shown, skip_special_tokens=False)

    def detokenizer(self) -> "Detokenizer":
        """A new Detokenizer for one reply."""
        return Detokenizer(self._backend, self.hidden_ids, byte_level="ByteLevel" in self._decoders)

    def _last_added_token(self, text: str, end: int) -> int:
        """Where the last added token within the first `end` characters begins; 0 where there is none."""
        found = 0
        for token in self.added_tokens:
            if token.strip():  # white space that is an added token may overlap with itself
                found = max(found, text.rfind(token, found, end))
        return found

    def _plain_ids(self, text: str) -> Iterator[int]:
        """The stages of encoding without the first one, which finds added tokens."""
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        words = [text]
        if self._backend.pre_tokenizer is not None:
            words = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]
        added = frozenset(self.added_tokens.values())
        for word in words:
            yield from _word_ids(self._backend.model, word, added)


def _common_length(a: str, b: str) -> int:
    """How many characters `a` and `b` have in common from the start, by halving: comparing slices takes no time."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _word_ids(model: Any, word: str, added: frozenset[int]) -> list[int]:
    """The ids of one pre-tokenised word, none of them an added token's.

    Added tokens may stand in the model's own vocabulary too (SmolLM2 has them there), where ignore_merges or a
    Unigram model could find them: such a word is cut in two until none is left. One character cannot be cut.
    """
    ids = [token.id for token in model.tokenize(word)]
    if len(word) < 2 or added.isdisjoint(ids):
        return ids
    half = len(word) // 2
    return _word_ids(model, word[:half], added) + _word_ids(model, word[half:], added)


def _declared_stop_ids(folder: Path, backend: tokenizers.Tokenizer) -> set[int]:
    """The union of what generation_config, config (also its text_config) and tokenizer_config declare.

    No single file is enough: Qwen3.5-9B has no generation_config, its config names only <|endoftext|>, and <|im_end|>
    stands in tokenizer_config alone.
    """
    generation, config, tokenizer = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("generation_config.json", "config.json", "tokenizer_config.json")
    )
    text_config = config.get("text_config")
    found: set[int] = set()
    for source in (generation, config, text_config if isinstance(text_config, dict) else {}):
        found.update(_token_ids(source.get("eos_token_id")))
    eos = backend.token_to_id(token_content(tokenizer.get("eos_token")))
    return found if eos is None else found | {eos}


def _token_ids(value: object) -> list[int]:
    """The ids of an `eos_token_id` as configs write it: absent, one id, or a list."""
    ids = value if isinstance(value, list) else [value]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]


def token_content(value: object) -> str:
    """A token as tokenizer_config.json writes it (a string, or an object with `content`); "" when there is none."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """The type names of the decoder's parts, such as ["ByteLevel"] or ["Replace", "ByteFallback", "Fuse", "Strip"]."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for their own byte, the rest for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


class Detokenizer:
    """A reply's ids to text, one at a time.

    The pieces, with `flush` at the end, join to Tokenizer.decode of all ids. Bytes go through an incremental UTF-8
    decoder: at most three wait for the rest of their character, and what is invalid becomes U+FFFD at once. (Where
    byte-fallback tokens spell invalid UTF-8, Tokenizer.decode replaces the whole run, this only what is invalid.)
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden_ids: frozenset[int], byte_level: bool) -> None:
        self._backend = backend
        self._hidden_ids = hidden_ids
        self._alphabet = _byte_of_character() if byte_level else None
        self._previous: list[int] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: "" for a hidden id and inside a character."""
        if token_id in self._hidden_ids:
            return ""
        return self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """End of the text: U+FFFD if a character is unfinished, else ""."""
        return self._utf8.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # a padding row of the embedding
            return b""
        if self._alphabet is not None:
            if all(character in self._alphabet for character in token):
                return bytes(self._alphabet[character] for character in token)
            return token.encode()  # an added token with characters outside of the alphabet
        if len(token) == 6 and token.startswith("<0x") and token > "<0x7F>" and self._decode([token_id]) == "\ufffd":
            return bytes([int(token[3:5], 16)])  # SentencePiece's byte fallback
        # Other decoders treat the first token differently (they strip its space), so decode beside the one before.
        text = self._decode([*self._previous, token_id])[len(self._decode(self._previous)) :]
        self._previous = [token_id]
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
