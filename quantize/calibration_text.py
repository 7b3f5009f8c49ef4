"""The text that calibrated rounding measures its inputs with, as windows of token ids.

calibration.txt was written for this: prose, code, data and talk in many languages, and files of this project. Every
eighth of its documents is left out, for a report on what was not calibrated with.
A line "=== chat" or "=== text" begins a document. A chat's lines "[system]", "[user]" and "[assistant]" begin its
messages, which go through the model's own chat template: that is how the model will be used. A file without such lines
is one text.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from localchat.errors import BadCheckpoint, UserError
from localchat.quantize.layerwise import WINDOW
from localchat.quantize.source import Source
from localchat.template import ChatTemplate
from localchat.tokenizer import Segment, Tokenizer

SHIPPED = Path(__file__).parent / "calibration.txt"
MOST_TOKENS = 1 << 18
_FEWEST_TOKENS = 64
_HELD_OUT = 8
# For templates that write the date: the same text on every day.
_DATE = {"date_string": "1 Jan 2026"}
_BEGIN = re.compile(r"^=== (text|chat)\n", re.MULTILINE)
_ROLE = re.compile(r"^\[(system|user|assistant)\]\n", re.MULTILINE)


def calibration_windows(
    files: Mapping[str, bytes], path: Path | None = None, tokens: int = MOST_TOKENS
) -> list[list[int]]:
    """The ids of a text, cut into windows; where it has more than `tokens`, windows from all over it.

    files: the model's tokenizer and template (Source.files). path: the text, None for the one that is shipped.

    Raises:
        BadCheckpoint: the model has no tokenizer that can be read.
        UserError: the text cannot be read, or is too short.
    """
    found = documents(_read(path or SHIPPED))
    kept = found if path else [document for i, document in enumerate(found) if i % _HELD_OUT]
    return _windows(files, kept, path or SHIPPED, tokens)


def report_windows(files: Mapping[str, bytes], path: Path | None = None, tokens: int = MOST_TOKENS) -> list[list[int]]:
    """The same of a text to compare models with; None for what is left out of the shipped one."""
    found = documents(_read(path or SHIPPED))
    return _windows(files, found if path else found[::_HELD_OUT], path or SHIPPED, tokens)


def check_ids(source: Source, windows: Sequence[Sequence[int]]) -> None:
    """Refuse a tokenizer that is another model's.

    Raises:
        BadCheckpoint: an id has no row in the embedding.
    """
    highest, rows = max(max(window) for window in windows), source.shapes["embed_tokens.weight"][0]
    if highest >= rows:
        raise BadCheckpoint(f"{source.name}: its tokenizer gives the id {highest}, its embedding has {rows} rows.")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a UTF-8 text ({error}).") from error


def _windows(files: Mapping[str, bytes], found: Sequence[tuple[str, str]], path: Path, tokens: int) -> list[list[int]]:
    ids: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        try:
            for document in _encoded(found, Path(folder)):
                ids += document
        except BadCheckpoint as error:  # which names the place where the files are for a moment
            raise BadCheckpoint(str(error).replace(folder, "the model")) from error
    if len(ids) < _FEWEST_TOKENS:
        raise UserError(f"{path}: has {len(ids)} tokens, which are too few to measure with; give a longer text.")
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    most = max(1, tokens // WINDOW)
    return windows if len(windows) <= most else [windows[i * len(windows) // most] for i in range(most)]


def _encoded(found: Sequence[tuple[str, str]], folder: Path) -> Iterator[list[int]]:
    """The ids of each document."""
    tokenizer = Tokenizer.load(folder)
    try:
        template = ChatTemplate.load(folder, tokenizer)
    except BadCheckpoint:  # a base model, which was not made for chats
        template = None
    for kind, document in found:
        if kind == "text":
            yield tokenizer.encode_text(document, special=False)
        elif template is None:
            yield tokenizer.encode_text("\n\n".join(m["content"] for m in messages(document)), special=False)
        else:
            yield tokenizer.encode(_rendered(template, messages(document)))


def _rendered(template: ChatTemplate, chat: list[dict[str, str]]) -> list[Segment]:
    """A chat as the template writes it; without its system prompt where the template takes none."""
    try:
        return template.render(chat, add_generation_prompt=False, **_DATE)
    except UserError:
        return template.render([m for m in chat if m["role"] != "system"], add_generation_prompt=False, **_DATE)


def documents(text: str) -> list[tuple[str, str]]:
    """("text" or "chat", content) of every document that is not empty."""
    before, *rest = _BEGIN.split(text)
    found = [("text", before), *zip(rest[::2], rest[1::2], strict=True)]
    return [(kind, content) for kind, content in found if content.strip()]


def messages(document: str) -> list[dict[str, str]]:
    """The messages of a chat. What stands before the first role belongs to nobody and is left out."""
    _, *rest = _ROLE.split(document)
    return [{"role": role, "content": text.strip()} for role, text in zip(rest[::2], rest[1::2], strict=True)]
