"""Environment and config file: what counts before what, and where a fault is said to be."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from localchat import cli, settings
from localchat.arguments import parse_command_line
from localchat.errors import UsageError


@pytest.fixture(autouse=True)
def config(_private_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's config file, in a folder that is there."""
    for setting in settings.SETTINGS:
        for name in setting.names:
            monkeypatch.delenv(settings.PREFIX + name.upper(), raising=False)
    path = _private_home / ".config" / "localchat" / "config.toml"
    path.parent.mkdir(parents=True)
    return path


def completed(*words: str) -> argparse.Namespace:
    args = parse_command_line(["run", "m", *words])
    assert settings.complete(args) == []
    return args


def test_flag_over_environment_over_session_over_config(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("# mine\n\ntemp = 0.1\ntop-p = 0.2\nmin_p = 0.3\ntop_k = 4\nctx = 99\n")
    monkeypatch.setenv("LOCALCHAT_TEMP", "0.5")
    monkeypatch.setenv("LOCALCHAT_TOP_P", "0.6")
    args = completed("--temp", "0.9")
    before = vars(args) | {"origins": dict(args.origins)}
    adopted = settings.adopted(args, {"temperature": 7, "top_p": 7, "min_p": 0.7, "presence_penalty": 1.5}, "session x")
    assert vars(args) == before
    got = {name: (getattr(adopted, name, None), adopted.origins.get(name)) for name in _SHOWN}
    assert got == {
        "temperature": (0.9, "flag"),
        "top_p": (0.6, "LOCALCHAT_TOP_P"),
        "min_p": (0.7, "session x"),
        "top_k": (4, f"{config}, line 6"),
        "ctx": (99, f"{config}, line 7"),
        "presence_penalty": (1.5, "session x"),
        "repetition_penalty": (None, None),  # the model's or the built-in value
        "gpu": ("auto", "built-in"),
    }
    assert "gpu" not in settings.given_origins(adopted)


_SHOWN = ("temperature", "top_p", "min_p", "top_k", "ctx", "presence_penalty", "repetition_penalty", "gpu")


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("stop = ['a', \"b\"]", "stop", ["a", "b"]),
        ("stop = 'a'", "stop", ["a"]),
        ("num_predict = -1", "max_tokens", None),
        ("temperature = 1", "temperature", 1.0),
        ("think = true", "think", True),
        ("think = false", "think", False),
        ("think = 'low'", "think", "low"),
        ("think = 300", "think", 300),
        ("raw = true", "raw", True),
        ("hide-thinking = true", "hide_thinking", True),
        ("gpu = 1", "gpu", "1"),
        ("vram = 8", "vram", 8.0),
        ("color = 'off'", "color", "off"),
        ('system = """Be\nbrief."""', "system", "Be\nbrief."),
        ("kv_cache = 'bf16'", "kv_cache", "bf16"),
        ("kv-cache = 'int8'", "kv_cache", "int8"),
    ],
)
def test_config_values(config: Path, line: str, field: str, value: Any) -> None:
    config.write_text(line + "\n")
    got = getattr(completed(), field)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("LOCALCHAT_MAX_NEW_TOKENS", "7", "max_tokens", 7),
        ("LOCALCHAT_STOP", "a,b", "stop", ["a,b"]),
        ("LOCALCHAT_THINK", "off", "think", False),
        ("LOCALCHAT_THINK", "1", "think", 1),
        ("LOCALCHAT_RAW", "1", "raw", True),
        ("LOCALCHAT_VERBOSE", "No", "verbose", False),
        ("LOCALCHAT_CTX", "", "ctx", None),
        ("LOCALCHAT_OFFLINE", "yes", "offline", True),
    ],
)
def test_environment_values(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: Any) -> None:
    monkeypatch.setenv(variable, text)
    got = getattr(completed(), field)
    assert (got, type(got)) == (value, type(value))


def test_a_switch_is_taken_back_on_the_command_line(config: Path) -> None:
    config.write_text("raw = true\nverbose = true\nthink = true\n")
    args = completed("--no-raw", "--no-think")
    assert (args.raw, args.verbose, args.think) == (False, True, False)
    assert args.origins["raw"] == args.origins["think"] == "flag"


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        ("a = 1\n", ", line 1: there is no setting 'a'.", "there are temperature, top_p"),
        ("\ntop_k = 1\ntempp = 1\n", ", line 3: there is no setting 'tempp'.", "did you mean temp?"),
        ("\n  top_p = 2\n", ", line 2: top_p is 2.0, it must be between 0 and 1.", ""),
        ("temp = '0.5'", ", line 1: temp is '0.5', wanted a number.", ""),
        ("temp = true", ", line 1: temp is True, wanted a number.", ""),
        ("top_k = 1.5", ", line 1: top_k is 1.5, wanted a whole number.", ""),
        ("stop = [1]", ", line 1: stop is [1], wanted a text in quotes.", ""),
        ("raw = 1", ", line 1: raw is 1, wanted true or false.", ""),
        ("think = 'hard'", ", line 1: think: 'hard' is not on, off, low,", ""),
        ("color = 'red'", ", line 1: color: 'red' is not auto or on or off.", ""),
        ("[run]\ntemp = 1", ", line 1: there is no setting 'run'.", ""),
        ("temp = 1\ntemperature = 2", ", line 2: temperature is temp, which is set already.", ""),
        ("temp = \n", "is not TOML: Invalid value (at line 1, column 8).", ""),
        (b"system = '\xff'", "is not TOML", ""),
        ("'a\\u001b' = 1", ", line 1: there is no setting 'a\\\\u001b'", ""),
        ('"a\\u001b[1m" = 1', "there is no setting 'a^[[1m'.", ""),
    ],
)
def test_what_the_config_cannot_say(config: Path, text: str | bytes, sentence: str, hint: str) -> None:
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        completed()
    assert str(caught.value).startswith(str(config))
    assert sentence in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("LOCALCHAT_TEMP", "hot", "LOCALCHAT_TEMP: temperature is 'hot', wanted a number."),
        ("LOCALCHAT_CTX", "-1", "LOCALCHAT_CTX: '-1' is not a positive whole number."),
        ("LOCALCHAT_RAW", "maybe", "LOCALCHAT_RAW: 'maybe' is neither on nor off."),
    ],
)
def test_what_a_variable_cannot_say(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, sentence: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=sentence):
        completed()


def test_a_command_takes_only_what_it_has_a_flag_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALCHAT_TEMP", "hot")
    monkeypatch.setenv("LOCALCHAT_YES", "on")
    args = parse_command_line(["pull", "m"])
    settings.complete(args)
    assert args.yes
    assert not hasattr(args, "temperature")
    args = parse_command_line(["rm", "m"])  # whose -y is about something else than a download
    settings.complete(args)
    assert not args.sure


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("LOCALCHAT_TEMPP", "did you mean LOCALCHAT_TEMP?"),
        ("LOCALCHAT_KVCACHE", "did you mean LOCALCHAT_KV_CACHE?"),
        ("LOCALCHAT_N", "did you mean LOCALCHAT_MAX_TOKENS?"),
        ("LOCALCHAT_CAHCE", "did you mean LOCALCHAT_CACHE?"),
        ("LOCALCHAT_FOO", "`localchat run --help` says which names there are"),
        ("LOCALCHAT_top_p", "did you mean LOCALCHAT_TOP_P?"),
    ],
)
@pytest.mark.parametrize("words", [["run", "m"], ["list"]])
def test_a_variable_that_nothing_reads_is_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, hint: str, words: list[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("LOCALCHAT_TEMP", "1")
    monkeypatch.setenv("LOCALCHAT_CACHE", "/tmp")
    monkeypatch.setenv("LOCALCHAT_HISTORY", "off")
    assert settings.complete(parse_command_line(words)) == [f"warning: {variable} means nothing, {hint}"]


def test_what_a_shell_reads_has_no_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALCHAT_FOO", "1")
    assert cli.main(["completion", "bash"]) == cli.main(["__complete", "localchat", "ru"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().err.startswith("localchat: warning: LOCALCHAT_FOO means nothing, ")


def test_where_the_config_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings.config_path() == tmp_path / "localchat" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert settings.config_path() == Path.home() / ".config" / "localchat" / "config.toml"


def test_every_setting_is_a_value_of_run() -> None:
    args = parse_command_line(["run", "m"])
    assert {setting.field for setting in settings.SETTINGS} <= args.settable
