"""The settings that a conversation keeps: those its user chose, by flag or /set, and no others.

So a model's own defaults hold again when another model goes on with it. Their place is below the flags and the
environment and above the config file.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from localchat import parameters, settings
from localchat.chat import Chat
from localchat.errors import UsageError

_FIELDS = {parameter.field: parameter for parameter in parameters.PARAMETERS}


_ORIGIN = "session "


def stored(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value of a saved conversation's settings; what makes no sense in them is left out.

    The fields are those of `parameters`, "system" (a text or None) and "think" (as `args.think`).
    """
    return {name: value for name, value in saved.items() if _makes_sense(name, value)}


def _makes_sense(name: str, value: Any) -> bool:
    if name == "stop":
        return isinstance(value, list) and all(isinstance(stop, str) and stop for stop in value)
    if name == "max_tokens" and value is None:
        return True
    if name in ("system", "think"):
        return isinstance(value, str | None if name == "system" else bool | int | str | None)
    if name not in _FIELDS or isinstance(value, bool) or not isinstance(value, int | _FIELDS[name].kind):
        return False
    try:
        parameters.parse(_FIELDS[name], str(value))
    except UsageError:
        return False
    return True


def chosen_by(args: argparse.Namespace) -> dict[str, Any]:
    """Field -> value of the flags that were given, and of a conversation that was adopted."""
    fields = [field for field in (*_FIELDS, "system", "think") if _is_kept(args.origins.get(field, ""))]
    return {field: getattr(args, field) for field in fields if getattr(args, field) is not None}


def _is_kept(origin: str) -> bool:
    return origin == parameters.FLAG or origin.startswith(_ORIGIN)


def adopted(args: argparse.Namespace, saved: Mapping[str, Any], name: str) -> argparse.Namespace:
    """A copy of `args` with the settings of the conversation `name`, where no flag and no variable was given."""
    return settings.adopted(args, stored(saved), f"{_ORIGIN}{name}")


def apply(chat: Chat, args: argparse.Namespace, generation_config: Mapping[str, Any]) -> None:
    """Give `chat` what `args` say of a reply, and the model's defaults where they say nothing.

    Raises:
        BadCheckpoint: generation_config.json has a value that is out of range.
    """
    sampling = {n: v for n, v in vars(args).items() if n in _FIELDS and n not in ("max_tokens", "stop")}
    chat.sampling = parameters.sampling_for(sampling, generation_config)
    chat.system, chat.max_tokens, chat.stop = args.system, args.max_tokens, tuple(args.stop or ())
    chat.template_variables = parameters.think_variables(args.think)
    chat.think_budget = args.think if type(args.think) is int else None
