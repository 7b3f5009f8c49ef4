"""What the user has set before the command line: environment variables and a config file, below the flags.

Precedence: flag > LOCALCHAT_NAME in the environment > a session that is continued > the config file >
generation_config.json > built-in. The file is $XDG_CONFIG_HOME/localchat/config.toml, else ~/.config/localchat's, with
the flags' names as keys, dashes or underscores: `temp = 0.6`, `max-tokens = 500`, `stop = ["END"]`, `raw = true`.
A key that is unknown and a value that makes no sense are named with their place; nothing is passed over.
"""

import argparse
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from localchat import flags, parameters, values
from localchat.errors import UsageError
from localchat.parameters import BUILT_IN, FLAG
from localchat.text_safety import one_line
from localchat.values import Think

PREFIX = "LOCALCHAT_"
_SHORT = {"N": "MAX_TOKENS", "C": "CTX", "S": "SYSTEM", "Y": "YES"}  # the flags' short names are not variables' names
OTHER_VARIABLES = ("LOCALCHAT_CACHE", "LOCALCHAT_HISTORY")  # read elsewhere, and no flag's


@dataclass(frozen=True)
class Setting:
    """One value that can be set: its field in the Namespace, what people call it, and how text becomes the value.

    `kinds` are the types that it may have in the config file; one that ends with list may be a list of texts too.
    """

    field: str
    names: tuple[str, ...]
    kinds: tuple[type, ...]
    convert: Callable[[str], Any]


def _of_parameter(parameter: parameters.Parameter) -> Setting:
    kinds = {str: (str, list), int: (int,), float: (int, float)}[parameter.kind]
    return Setting(parameter.field, parameter.names, kinds, partial(parameters.parse, parameter))


SETTINGS = (
    *map(_of_parameter, parameters.PARAMETERS),
    Setting("system", ("system",), (str,), values.text),
    Setting("think", ("think",), (bool, str, int), values.think),
    Setting("hide_thinking", ("hide_thinking",), (bool,), values.switch),
    Setting("raw", ("raw",), (bool,), values.switch),
    Setting("verbose", ("verbose",), (bool,), values.switch),
    Setting("color", ("color",), (str,), values.one_of(*flags.COLORS)),
    Setting("ctx", ("ctx", "ctx_size", "num_ctx"), (int,), values.positive),
    Setting("kv_cache", ("kv_cache",), (str,), values.one_of(*flags.KV_CACHES)),
    Setting("gpu", ("gpu",), (int, str), values.text),
    Setting("vram", ("vram",), (int, float), values.gigabytes),
    Setting("offline", ("offline",), (bool,), values.switch),
    Setting("yes", ("yes",), (bool,), values.switch),
)
_BY_NAME = {name: setting for setting in SETTINGS for name in setting.names}


@dataclass(frozen=True)
class Given:
    """A value, and where it is from in a few words."""

    value: Any
    origin: str


def complete(args: argparse.Namespace) -> list[str]:
    """Fill in what no flag gave; `args.origins` tells then where each value is from (field -> words).

    Returns a warning for each LOCALCHAT_* variable that nothing reads.

    Raises:
        UsageError: a variable or the config file has something that cannot be understood.
    """
    args.origins = {}
    fields = [setting.field for setting in SETTINGS if setting.field in args.settable]
    if not fields:
        return _slips(os.environ)
    environment, config = from_environment(os.environ, fields), from_config(config_path())
    for field in fields:
        given = environment.get(field) or config.get(field)
        if field in args.given:
            args.origins[field] = FLAG
        elif given:
            setattr(args, field, given.value)
            args.origins[field] = given.origin
        elif hasattr(args, field):
            args.origins[field] = BUILT_IN
    return _slips(os.environ)


def adopted(args: argparse.Namespace, saved: Mapping[str, Any], origin: str) -> argparse.Namespace:
    """A copy of `args` with a session's values (field -> value), but where a flag or the environment says otherwise."""
    copy = argparse.Namespace(**vars(args))
    copy.origins = dict(args.origins)
    for field, value in saved.items():
        now = args.origins.get(field, "")
        if now != FLAG and not now.startswith(PREFIX):
            setattr(copy, field, value)
            copy.origins[field] = origin
    return copy


def given_origins(args: argparse.Namespace) -> dict[str, str]:
    """`args.origins` without the values that nobody chose, which the model may still decide."""
    return {field: origin for field, origin in args.origins.items() if origin != BUILT_IN}


def unheard(args: argparse.Namespace, template: str, device: str) -> list[str]:
    """A sentence for each flag that was given and changes nothing for this model on this device."""
    lines = []
    if "think" in args.given:
        flag = "--no-think" if args.think is False else "--think"
        lines += [f"{flag}{fault}" for fault in [think_unheard(args.think, template, "=", flag)] if fault]
    if "kv_cache" in args.given and args.kv_cache == "bf16" and device == "cpu":
        lines.append("--kv-cache bf16 is for cards: a processor keeps keys and values in fp32, or as INT8")
    return lines


def think_unheard(think: Think, template: str, joint: str, flag: str) -> str:
    """What a chat template does not heed of a wish about thinking, to stand behind `flag`; "" where it heeds it.

    `joint` stands between the flag and its value.
    """
    if type(think) is int:  # a thought that is not asked for is bounded too
        return ""
    if "enable_thinking" not in template:
        return " changes nothing: this model's chat template has no switch for thinking"
    if isinstance(think, str) and "reasoning_effort" not in template:
        return f"{joint}{think} is {flag} here: this model's chat template knows no efforts"
    return ""


def from_environment(environment: Mapping[str, str], fields: list[str]) -> dict[str, Given]:
    """The settings in LOCALCHAT_* variables. An empty one counts as absent; of two names the first in SETTINGS counts.

    Raises:
        UsageError: a value makes no sense.
    """
    found: dict[str, Given] = {}
    for name, setting in _BY_NAME.items():
        variable = PREFIX + name.upper()
        text = environment.get(variable, "")
        if text and setting.field in fields and setting.field not in found:
            found[setting.field] = Given(_converted(setting, [text], variable), variable)
    return found


def _slips(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable with this program's prefix that it does not know, with the name that is nearest."""
    known = [*(name.upper() for name in _BY_NAME), *(name.removeprefix(PREFIX) for name in OTHER_VARIABLES)]
    lines = []
    for variable in sorted(name for name in environment if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX)
        if name in known:
            continue
        near = [_SHORT[name]] if name in _SHORT else difflib.get_close_matches(name.upper(), known, n=1)
        help_ = f"did you mean {PREFIX}{near[0]}?" if near else "`localchat run --help` says which names there are"
        lines.append(f"warning: {one_line(variable)} means nothing, {help_}")
    return lines


def config_path() -> Path:
    """Where the user's config file is, if there is one."""
    xdg = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".config") / "localchat" / "config.toml"


def from_config(path: Path) -> dict[str, Given]:
    """The settings in the config file; none where there is no such file.

    Raises:
        UsageError: it cannot be read, is no TOML, or has a key or a value that makes no sense.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {str(error).removesuffix('.')}.") from error
    found: dict[str, Given] = {}
    keys: dict[str, str] = {}
    for key, value in raw.items():
        place = f"{path}{_line_of(text, key)}"
        setting = _BY_NAME.get(key.lower().replace("-", "_"))
        if setting is None:
            near = difflib.get_close_matches(key, _BY_NAME, n=1)
            raise UsageError(
                f"{place}: there is no setting {one_line(key)!r}.",
                f"did you mean {near[0]}?" if near else f"there are {', '.join(s.names[0] for s in SETTINGS)}.",
            )
        if setting.field in found:
            raise UsageError(f"{place}: {one_line(key)} is {keys[setting.field]}, which is set already.")
        found[setting.field] = Given(_converted(setting, _texts(setting, key, value, place), place), place)
        keys[setting.field] = key
    return found


def _texts(setting: Setting, key: str, value: Any, place: str) -> list[str]:
    """A TOML value as the text that a flag would have had, or a list of such."""
    items = value if isinstance(value, list) and list in setting.kinds else [value]
    kinds = [kind for kind in setting.kinds if kind is not list]
    for item in items:
        if type(item) not in kinds:
            names = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
            wanted = " or ".join(names[kind] for kind in kinds if not (kind is int and float in kinds))
            raise UsageError(f"{place}: {one_line(key)} is {one_line(repr(value))}, wanted {wanted}.")
    return [str(item).lower() if isinstance(item, bool) else str(item) for item in items]


def _converted(setting: Setting, texts: list[str], place: str) -> Any:
    try:
        parsed = [setting.convert(text) for text in texts]
    except UsageError as error:
        name = setting.names[0]  # parameters name themselves
        where = place if str(error).startswith(name) or place.startswith(PREFIX) else f"{place}: {name}"
        raise UsageError(f"{where}: {error}", error.hint) from error
    return parsed if setting.field == "stop" else parsed[0]


def _line_of(text: str, key: str) -> str:
    """Where `key` is set, as in ", line 3": tomllib keeps no lines."""
    spelled = (
        rf"""^[ \t]*(?:{re.escape(key)}|"{re.escape(key)}"|'{re.escape(key)}'|\[+[ \t]*{re.escape(key)})[ \t]*[=.\]]"""
    )
    found = re.search(spelled, text, re.MULTILINE)
    return f", line {text.count(chr(10), 0, found.start()) + 1}" if found else ""
