"""What a user can set about a reply: one table for the flags of `run` and for `/set`.

What flags, the environment, a session and the user's config say is joined in settings.py; below these come the
model's generation_config.json and the built-in value, which this file adds. Nothing here imports torch.
"""

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localchat.errors import BadCheckpoint, UsageError
from localchat.sampling import Sampling
from localchat.text_safety import one_line, visible
from localchat.values import Think

FLAG, MODEL, BUILT_IN, SET = "flag", "generation_config.json", "built-in", "/set"  # where a value can be from


@dataclass(frozen=True)
class Parameter:
    """One value: the field of `Sampling` (or `max_tokens`, `stop`), its kind, and what people call it.

    The flag is `--` and the name with dashes.
    """

    field: str
    kind: type
    names: tuple[str, ...]
    help: str


PARAMETERS = (
    Parameter("temperature", float, ("temperature", "temp"), "how freely a token is drawn, 0 is greedy"),
    Parameter("top_p", float, ("top_p",), "draw from the likeliest tokens that make up this share"),
    Parameter("top_k", int, ("top_k",), "draw from the K likeliest tokens, 0 is off"),
    Parameter("min_p", float, ("min_p",), "leave out tokens below this share of the likeliest one"),
    Parameter("repetition_penalty", float, ("repeat_penalty", "repetition_penalty"), "divides what was said, 1 is off"),
    Parameter("presence_penalty", float, ("presence_penalty",), "lowers what this reply has said, 0 is off"),
    Parameter("seed", int, ("seed",), "makes an answer reproducible"),
    Parameter(
        "max_tokens", int, ("max_tokens", "num_predict", "max_new_tokens"), "longest answer (default: to the context)"
    ),
    Parameter("stop", str, ("stop",), "end the answer before this text"),
)
NOT_SAMPLING = ("max_tokens", "stop")  # the fields that Sampling does not have
NAMES = {name: parameter for parameter in PARAMETERS for name in parameter.names}


def find(name: str) -> Parameter:
    """The parameter called `name`, in any case and with dashes or underscores.

    Raises:
        UsageError: there is none.
    """
    parameter = NAMES.get(name.lower().replace("-", "_"))
    if parameter is None:
        near = difflib.get_close_matches(name.lower(), NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(p.names[0] for p in PARAMETERS)}."
        raise UsageError(f"there is no parameter {one_line(name)!r}.", hint)
    return parameter


def parse(parameter: Parameter, text: str) -> Any:
    """The value of `text`, range-checked; for max_tokens -1 means no limit and gives None.

    Raises:
        UsageError: it is not a number of the right kind, or out of range.
    """
    name = parameter.names[0]
    try:
        value = parameter.kind(text)
    except ValueError:
        wanted = "a whole number" if parameter.kind is int else "a number"
        raise UsageError(f"{name} is {one_line(text)!r}, wanted {wanted}.") from None
    if parameter.field == "max_tokens":
        if value == -1:
            return None
        if value < 1:
            raise UsageError(f"{name} is {value}, it must be at least 1 (or -1 for no limit).")
    elif parameter.field == "stop":
        if not value:
            raise UsageError("stop is empty, wanted a text.")
    else:
        replace(Sampling(), **{parameter.field: value})  # checks the range
    return value


def sampling_for(flags: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Sampling:
    """The sampling of a conversation: `flags` (field -> value) over the model's defaults over the built-in ones.

    Without a seed in `flags` one is drawn.

    Raises:
        BadCheckpoint: generation_config.json has a value that is out of range.
    """
    try:
        defaults = Sampling.from_generation_config(generation_config)
    except UsageError as error:
        raise BadCheckpoint(f"generation_config.json: {error}") from error
    return replace(defaults, **{"seed": draw_seed(), **flags})


def sampling_origins(given: Mapping[str, str], generation_config: Mapping[str, Any]) -> dict[str, str]:
    """Field -> where its value is from, for every parameter. `given`: the origins that are known already."""
    model = Sampling.fields_given(generation_config)
    below = {p.field: MODEL if p.field in model else BUILT_IN for p in PARAMETERS}
    return below | dict(given)


def think_variables(think: Think | None) -> dict[str, Any]:
    """The template's variables for a wish about thinking: None leaves it to the template, an effort is named to it."""
    if think is None:
        return {}
    variables: dict[str, Any] = {"enable_thinking": think is not False}
    return variables | ({"reasoning_effort": think} if isinstance(think, str) else {})


def table(rows: Sequence[tuple[str, Any, str]]) -> str:
    """(name, value, where it is from) as aligned lines."""
    shown = [(name, "not set" if value is None else visible(str(value)), origin) for name, value, origin in rows]
    width = max(len(value) for _, value, _ in shown)
    return "\n".join(
        f"{name:<18} {value:<{min(width, 28)}}  {visible(origin)}".rstrip() for name, value, origin in shown
    )


def draw_seed() -> int:
    """A seed that is short enough to type again."""
    return secrets.randbelow(2**32)
