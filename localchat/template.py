"""A conversation to the text a model was trained on: the checkpoint's chat template, rendered in a sandbox.

What a person typed must not act as a control token. Where a message spells an added token ("<|im_end|>"), that text is
masked before rendering by one private-use character, and the rendered text is cut at these characters afterwards: the
tokenizer gets such pieces as Segment(special=False). Everything else renders exactly as transformers renders it.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from localchat.config import read_json
from localchat.errors import BadCheckpoint, UserError
from localchat.sandbox import BoundedEnvironment, LimitExceeded, Refused
from localchat.tokenizer import Segment, Tokenizer, token_content

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_MAX_SOURCE = 1_000_000
_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a template's expressions can raise, as a Python program's can.
_FAILURES = (
    TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip


class ChatTemplate:
    """A compiled chat template.

    `added_tokens` are the texts that get masked, `token_variables` the variables such as bos_token.

    Raises:
        BadCheckpoint: the template has a syntax error.
    """

    def __init__(
        self, source: str, added_tokens: Iterable[str], token_variables: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self._token_variables = dict(token_variables or {})
        # White space that is an added token is ordinary text. Longest first, as the tokenizer finds them.
        tokens = sorted((token for token in added_tokens if token.strip()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._environment = BoundedEnvironment()
        if len(source) > _MAX_SOURCE:
            raise BadCheckpoint(f"the chat template has {len(source):,} characters, wanted at most {_MAX_SOURCE:,}.")
        try:
            self._template = self._environment.compile_template(source)
        except (SyntaxError, *_FAILURES) as error:
            raise BadCheckpoint(f"the model's chat template cannot be compiled ({error}).") from error

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template of a model folder: chat_template.jinja, else `chat_template` in tokenizer_config.json.

        `tokenizer`, the folder's own, names the added tokens.

        Raises:
            BadCheckpoint: there is no template, or it cannot be compiled.
        """
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        variables = {name: token_content(config.get(name)) for name in _TOKEN_VARIABLES}
        variables = {name: token for name, token in variables.items() if token}
        return cls(_source(folder, config), tokenizer.added_tokens, variables)

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[Segment]:
        """The conversation as text, cut where a message spells an added token.

        `messages` are {"role", "content"} and what else the template reads ("reasoning_content", "tool_calls").

        Raises:
            UserError: the template refuses these messages, fails, or goes over a bound.
        """
        masks = self._masks(messages)
        values = {"tools": None, "documents": None, **self._token_variables, **variables}
        values |= {"messages": _masked(messages, self._added, masks), "add_generation_prompt": add_generation_prompt}
        try:
            text = self._environment.render_bounded(self._template, values)
        except Refused as error:
            raise UserError(f"the model's chat template refuses this conversation: {error}") from error
        except LimitExceeded as error:
            raise UserError(f"the model's chat template was stopped: {error}.") from error
        except _FAILURES as error:
            raise UserError(f"the model's chat template fails with this conversation ({error!r}).") from error
        return _cut(text, masks)

    def _masks(self, messages: list[dict[str, Any]]) -> dict[str, str]:
        """For each added token spelled in `messages` a character that occurs neither there nor in the template."""
        if self._added is None:
            return {}
        texts = list(_strings(messages))
        spelled = {token for text in texts for token in self._added.findall(text)}
        if not spelled:
            return {}
        used = set(self.source).union(*texts)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        return dict(zip(sorted(spelled), free, strict=False))


def _source(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"{path}: cannot be read ({error}).") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if not isinstance(template, str) or not template.strip():
        raise BadCheckpoint(
            f"{folder}: this model has no chat template, so it is probably a base model: take its instruct or chat "
            "version, or put a chat_template.jinja into the folder."
        )
    return template


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _masked(value: Any, added: re.Pattern[str] | None, masks: Mapping[str, str]) -> Any:
    """A copy of `value` with each added token in its strings replaced by that token's mask."""
    if isinstance(value, str):
        return added.sub(lambda match: masks[match[0]], value) if added and masks else value
    if isinstance(value, Mapping):
        return {key: _masked(item, added, masks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, added, masks) for item in value]
    return value


def _cut(text: str, masks: Mapping[str, str]) -> list[Segment]:
    """`text` as segments, the masks turned back into the tokens they stand for."""
    spelled = {mask: token for token, mask in masks.items()}
    pieces = re.split(f"([{''.join(spelled)}])", text) if spelled else [text]
    return [Segment(spelled.get(piece, piece), piece not in spelled) for piece in pieces if piece]
