"""Files that go with a message: `@path` in it stands for the file's text.

Only what names a file is taken so; every other @ (a handle, a decorator in pasted code) is text. The file's text comes
before the message, as stdin does before the prompt argument.
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localchat.counted import counted
from localchat.errors import InputTooLong, UsageError
from localchat.prompt_input import decode
from localchat.text_safety import one_line

if TYPE_CHECKING:
    from localchat.tokenizer import Tokenizer

_REFERENCE = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|([^\s"]+))')
_READ = re.compile(r"(?<=\s)/read[ \t]+(\S[^\n]*)$")
_PUNCTUATION = ".,;:!?)]}'"
# No text has more bytes for each token on average; what is larger need not be read to be refused.
_MOST_BYTES_PER_TOKEN = 64


@dataclass(frozen=True)
class Attachment:
    """A file's text, and how many tokens it has. `notice`: what there is to say of it, "" for nothing."""

    name: str
    text: str
    tokens: int
    notice: str = ""

    def __str__(self) -> str:
        return f"{one_line(self.name)}: {counted(self.tokens, 'token')}" + (f" ({self.notice})" if self.notice else "")


def attach(message: str, tokenizer: "Tokenizer", context: int) -> tuple[str, list[Attachment]]:
    """`message` with the text of the files that it names, and these files.

    Raises:
        UserError: a file cannot be read, is not text, or is more than a context of `context` tokens holds.
    """
    found: dict[str, Attachment] = {}

    def name_of(match: re.Match[str]) -> str:
        quoted, word = match[1], match[2]
        name = quoted or (word if is_file(word) else word.rstrip(_PUNCTUATION))
        if not is_file(name):
            return match[0]
        found[name] = found.get(name) or read(name, tokenizer, context)
        return name + ("" if quoted else word[len(name) :])

    text = _REFERENCE.sub(name_of, message)
    return "\n\n".join([*map(_quoted, found.values()), text]), list(found.values())


def missed(message: str) -> list[str]:
    """The @words of a message that look like a path and name no file, each once; handles and decorators do not."""
    words = dict.fromkeys(match[1] or match[2].rstrip(_PUNCTUATION) for match in _REFERENCE.finditer(message))
    return [one_line(word) for word in words if not is_file(word) and _looks_like_a_path(word)]


def _looks_like_a_path(word: str) -> bool:
    if word.startswith(("/", "~", "./", "../")) or re.search(r"\.\w{1,5}$", word):
        return True
    try:
        return Path(word).exists()  # a folder, a device
    except (OSError, ValueError):
        return False


def read_inside(text: str) -> tuple[str, str] | None:
    """Of a message that ends with `/read NAME`: NAME, and the message with `@NAME` in its place. None: another one.

    So are messages that happen to say that: NAME is no file, and there is more before it than references.
    """
    match = _READ.search(text)
    if match is None:
        return None
    name, before = match[1].rstrip(), text[: match.start()]
    if not is_file(name) and _REFERENCE.sub("", before).strip():
        return None
    return name, before + reference(name)


def reference(name: str) -> str:
    """What is typed for a file."""
    return f'@"{name}"' if re.search(r"\s", name) or name[-1:] in _PUNCTUATION else f"@{name}"


def is_file(name: str) -> bool:
    """Whether `name` (~ is the home) is a file whose end can be reached."""
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def read(name: str, tokenizer: "Tokenizer", context: int) -> Attachment:
    """The file called `name`.

    Raises:
        UsageError: there is none, or it is not text.
        InputTooLong: it alone fills the context.
        OSError: it cannot be read.
    """
    if not is_file(name):
        raise UsageError(f"{one_line(name)} is not a file here.")
    most = _MOST_BYTES_PER_TOKEN * context
    path = Path(name).expanduser()
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        size = max(path.stat().st_size, len(data))
        raise InputTooLong(f"{one_line(name)} has {size:,} bytes and the context holds {context:,} tokens.")
    notices = io.StringIO()
    text = decode(data, notices, name=name).rstrip("\n")
    tokens = len(tokenizer.encode_text(text, special=False))
    if tokens >= context:
        raise InputTooLong(f"{one_line(name)} has {tokens:,} tokens and the context holds {context:,}.")
    return Attachment(name, text, tokens, notices.getvalue().partition("warning: ")[2].strip())


def _quoted(attachment: Attachment) -> str:
    """A file as a block of Markdown, fenced with more backticks than it holds."""
    longest = max((len(run) for run in re.findall("`{3,}", attachment.text)), default=2)
    fence = "`" * (longest + 1)
    return f"{attachment.name}:\n{fence}\n{attachment.text}\n{fence}"
