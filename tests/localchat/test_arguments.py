"""Flags, their other names, and values that are refused with a sentence."""

from typing import Any

import pytest

from localchat.arguments import COMMANDS, overview, parse_command_line, parser_for
from localchat.errors import UsageError


def run(*words: str) -> Any:
    return parse_command_line(["run", "m", *words])


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--temp", "0.5"], "temperature", 0.5),
        (["--temperature=0.5"], "temperature", 0.5),
        (["--top-k", "3"], "top_k", 3),
        (["--repeat-penalty", "1.1"], "repetition_penalty", 1.1),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["-n", "7"], "max_tokens", 7),
        (["--num-predict", "7"], "max_tokens", 7),
        (["--max-new-tokens", "-1"], "max_tokens", None),
        (["-c", "9"], "ctx", 9),
        (["--num-ctx", "9"], "ctx", 9),
        (["--ctx-size", "9"], "ctx", 9),
        (["--stop", "a", "--stop", "b"], "stop", ["a", "b"]),
        (["-s", "x"], "system", "x"),
        (["--think"], "think", True),
        (["--no-think"], "think", False),
        ([], "think", None),
        (["--think=off"], "think", False),
        (["--think=high"], "think", "high"),
        (["--think=300", "hi"], "think", 300),
        (["--think", "300", "hi"], "think", 300),
        (["--think", "low", "hi"], "prompt", ["hi"]),
        (["--think", "why?"], "think", True),
        (["--think", "why?"], "prompt", ["why?"]),
        (["--think", "--", "300"], "prompt", ["300"]),
        (["--think", "--", "300"], "think", True),
        (["--", "--think"], "prompt", ["--think"]),
        (["--think", "--no-think"], "think", False),
        (["-f", "a", "hi", "--file=b"], "files", ["a", "b"]),
        (["--system-file", "x"], "system_file", "x"),
        (["-C"], "continue_last", True),
        ([], "continue_last", False),
        (["--session", "x"], "session", "x"),
        (["-x"], "extract", True),
        (["--extract"], "extract", True),
        (["--json"], "json", True),
        (["--raw"], "raw", True),
        (["--no-raw"], "raw", False),
        (["--kv-cache", "bf16"], "kv_cache", "bf16"),
        (["--kv-cache=int8"], "kv_cache", "int8"),
        (["--gpu", "GPU-5c3b"], "gpu", "GPU-5c3b"),
        ([], "gpu", "auto"),
        (["a", "--offline", "b"], "prompt", ["a", "b"]),
        (["--", "--a"], "prompt", ["--a"]),
    ],
)
def test_run(words: list[str], field: str, value: Any) -> None:
    assert getattr(run(*words), field) == value


def test_sampling_flags_that_are_not_given_are_absent() -> None:
    assert not hasattr(run(), "temperature")


def test_what_was_given_is_told_from_what_is_a_default() -> None:
    assert run("--think", "-n", "3", "hi").given >= {"think", "max_tokens", "prompt"}
    assert not run("hi").given & {"think", "max_tokens", "gpu", "color", "stop", "raw"}


def test_other_names_of_commands() -> None:
    assert parse_command_line(["chat", "m"]).command == "run"
    assert parse_command_line(["ls"]).command == "list"
    assert parse_command_line(["quantise", "m"]).command == "quantize"
    assert parse_command_line([]).command == ""
    assert parse_command_line(["--debug", "run", "m"]).debug


def test_quantize() -> None:
    words = ["quantize", "src", "-o", "out", "--group-size", "64", "--min", "--max-shard-size", "1.5GB", "--overwrite"]
    args = parse_command_line([*words, "--keep", "a=b=bf16", "--keep", "lm_head=int8"])
    assert (args.source, args.output, args.group_size, args.min, args.sym) == ("src", "out", 64, True, False)
    assert (args.keep, args.max_shard_size, args.overwrite) == ([("a=b", 16), ("lm_head", 8)], 1_500_000_000, True)
    assert parse_command_line(["quantize", "src", "--max-shard-size", "2GiB"]).max_shard_size == 2 << 30
    assert (args.resume, args.stream, args.dry_run) == (False, False, False)
    args = parse_command_line(["quantize", "src", "--resume", "--stream", "--dry-run"])
    assert (args.resume, args.stream, args.dry_run) == (True, True, True)
    plain = parse_command_line(["quantize", "src"])
    assert (plain.method, plain.calib, plain.report, plain.uniform) == ("rtn", None, None, False)
    args = parse_command_line(["quantize", "src", "--method", "gptq", "--calib", "f", "--report", "--uniform"])
    assert (args.method, args.calib, args.report, args.uniform) == ("gptq", "f", "", True)
    assert parse_command_line(["quantize", "--report=f", "src"]).report == "f"


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (["rum"], "there is no command 'rum'.", "did you mean `localchat run`?"),
        (["qwen3-8b"], "there is no command 'qwen3-8b'.", "did you mean `localchat run qwen3-8b`?"),
        (["a/b"], "there is no command 'a/b'.", "did you mean `localchat run a/b`?"),
        (["run", "m", "--tempp", "1"], "there is no flag '--tempp'", "did you mean --temp?"),
        (["run", "m", "--tempp=1"], "there is no flag '--tempp'", "did you mean --temp?"),
        (["run", "m", "--top-p", "2"], "top_p is 2.0, it must be between 0 and 1.", ""),
        (["run", "m", "-c", "0"], "'0' is not a positive whole number.", ""),
        (["run", "m", "--color", "red"], "invalid choice: 'red'", ""),
        (["pull", "a", "b"], "'b' is one argument too many for `localchat pull`.", ""),
        (["quantize", "m", "--keep", "x=fp8"], "'x=fp8' is not REGEX=bf16 or REGEX=int8.", ""),
        (["quantize", "m", "--keep", "(=int8"], "'(' is not a regular expression", ""),
        (["show", "m", "--offline"], "there is no flag '--offline' of `localchat show`.", ""),
        (["quantize", "m", "--group-size", "48"], "invalid choice: 48", ""),
        (["quantize", "m", "-o", ""], "an empty text is no path.", ""),
        (["quantize", "m", "--method", "gptq", "--calib="], "an empty text is no path.", ""),
        (["quantize", "m", "--max-shard-size", "big"], "'big' is not a size such as 5GB", ""),
        (["run", "m", "--think=hard"], "'hard' is not on, off, low, medium, high or a number of tokens from 1.", ""),
        (["run", "m", "--think=0"], "'0' is not on, off", ""),
        (["run", "m", "--kv-cache", "fp8"], "invalid choice: 'fp8'", ""),
        (["run", "m", "-C", "--session", "x"], "not allowed with argument -C/--continue", ""),
        (["run", "m", "-s", "x", "--system-file", "y"], "not allowed with argument -s/--system", ""),
        (["completion", "csh"], "invalid choice: 'csh'", ""),
        (["mr", "m"], "there is no command 'mr'.", "`localchat --help`"),  # never on to something that removes
        (["bench"], "`localchat bench` needs MODEL.", "`localchat bench --help`"),
        (["run", "--tmep"], "there is no flag '--tmep' of `localchat run`.", "did you mean --temp?"),
        (["run", "--temp", "1"], "`localchat run` needs MODEL.", "`localchat run --help`"),
    ],
)
def test_usage_errors(words: list[str], sentence: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command_line(words)
    assert sentence in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("command", COMMANDS)
def test_help_reads_well(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_command_line(["help", command])
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith(f"usage: localchat {command}")
    assert max(map(len, text.splitlines())) <= 80
    assert "==SUPPRESS==" not in text
    parser = parser_for(command)
    assert all(name in text for name in parser.actions)
    assert all(action.help for action in parser.actions.values())


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(f"\n  {command}" in overview() for command in COMMANDS)
    for command in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            parse_command_line([command, "--help"])
        assert caught.value.code == 0
        assert f"usage: localchat {command}" in capsys.readouterr().out
