"""The command as a process: pipes byte for byte, exit codes, one sentence for each error, nothing heavy for --help."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat import cli, listing

HEAVY = ("torch", "rich", "prompt_toolkit", "huggingface_hub", "transformers", "jinja2", "numpy")
Command = Callable[..., Any]
Scripted = Callable[..., Path]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["run", "--help"], ["doctor", "--help"], ["rnu"], ["run", "m", "--tmep"], ["list"]],
)
def test_nothing_heavy_is_imported(words: list[str], environment: dict[str, str]) -> None:
    program = (
        "import sys\nfrom localchat.cli import main\nmain(sys.argv[1:])\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    if words == ["list"]:
        program = program.replace("'rich', ", "")
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("words", "code", "sentence", "hint"),
    [
        (["rnu", "m"], 2, "there is no command 'rnu'.", "did you mean `localchat run`?"),
        (["run", "m", "--tmep", "1"], 2, "there is no flag '--tmep' of `localchat run`.", "did you mean --temp?"),
        (["run"], 2, "`localchat run` needs MODEL.", "`localchat run --help` lists the flags."),
        (["run", "smollm2-135n", "hi"], 3, "", "Did you mean smollm2-135m?"),
        (["show", "qwen2.5-7c"], 3, "qwen2.5-7c is neither on this machine nor", "did you mean qwen2.5-7b?"),
        (["run", "./absent", "hi"], 3, "./absent: there is no such file or folder.", ""),
        (["run", "--offline", "smollm2-135m", "hi"], 3, "--offline", ""),
        (["run", "--offline", "qwen3.5-27b", "hi"], 3, "Qwen/Qwen3.5-27B", ""),
        (["run", "smollm2-135m"], 2, "stdin is empty and there is no prompt argument", ""),
        (["run", "smollm2-135m", "  "], 2, "the prompt is empty", ""),
        (["run", "./a\x1b[2Jb", "hi"], 3, "./a^[[2Jb: there is no", ""),
    ],
)
def test_errors(command: Command, words: list[str], code: int, sentence: str, hint: str) -> None:
    done = command(*words)
    assert done.returncode == code
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert lines[0].startswith("localchat: error: ")
    assert sentence in lines[0]
    assert lines[0].endswith(".")
    assert len(lines) <= 2
    assert hint in (lines[1] if hint else "")
    assert "\x1b" not in done.stderr.decode()


def test_a_notice_of_the_registry_comes_first(command: Command) -> None:
    lines = command("run", "--offline", "qwen2.5-27b", "hi").stderr.decode().splitlines()
    assert lines[0].startswith("localchat: Qwen2.5 was never released with 27B: this is Qwen3.5-27B")
    assert lines[1].startswith("localchat: error: Qwen/Qwen3.5-27B is not")


def test_the_answer_in_a_pipe(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("Wel\t", "come!\n".replace("e", "")), "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Wel\tcom!\n", b"")


def test_flags_may_stand_anywhere(command: Command, scripted: Scripted) -> None:
    model = scripted("abcdef", loop=True)
    for words in (["-n", "4", model, "hi"], [model, "-n4", "hi"], [model, "hi", "--num-predict=4", "you"]):
        assert command("run", *words).stdout == b"abcd\n"
    assert command("run", model, "--stop", "de", "--", "--hi").stdout == b"abc\n"


def test_escape_sequences_of_a_model_are_made_visible(command: Command, scripted: Scripted) -> None:
    assert command("run", scripted("\x1b]0;x\x07"), "hi").stdout == b"^[]0;x^G\n"


def test_characters_split_over_tokens(command: Command, scripted: Scripted) -> None:
    assert command("run", scripted("🙂é"), "hi").stdout == "🙂é\n".encode()


def test_thoughts_do_not_reach_a_pipe(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("<think>", "hm", "</think>", "\nyes"), "hi")
    assert done.stdout == b"yes\n"


def test_a_thought_that_the_template_opens_does_not_reach_a_pipe(command: Command, opening: Scripted) -> None:
    done = command("run", opening("hm", "</think>", "\nyes"), "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"yes\n", b"")


def test_a_reply_that_ends_inside_its_thought_is_an_empty_answer_and_says_so(
    command: Command, opening: Scripted
) -> None:
    done = command("run", opening("hm", "</think>", "\nyes"), "-n", "2", "hi")
    assert (done.returncode, done.stdout) == (0, b"\n")
    assert done.stderr == b"localchat: the reply ended inside its thought, before an answer\n"


def test_verbose_tells_counts_and_seed(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("abc"), "--verbose", "--seed", "7", "hi")
    assert done.stdout == b"abc\n"
    rows = dict(line.split(":", 1) for line in done.stderr.decode().splitlines())
    assert rows["eval count"].split() == ["4", "token(s)"]
    assert rows["seed"].strip() == "7"
    # <|im_start|>user\nhi<|im_end|><|im_start|>assistant\n<|go|>, byte by byte
    assert rows["prompt eval count"].split()[0] == str(1 + 5 + 2 + 1 + 1 + 10 + 1)


def test_stdin_comes_before_the_argument(command: Command, scripted: Scripted) -> None:
    model = scripted("abc")
    counts = []
    joined, marked = b"ab\n\ncd\n", b"\xef\xbb\xbfab\r\n\r\ncd"
    for stdin, words in ((b"ab\n", ["cd"]), (b"", ["ab\n\ncd"]), (joined, []), (marked, [])):
        done = command("run", model, "--verbose", *words, stdin=stdin)
        counts.append(next(line for line in done.stderr.decode().splitlines() if "prompt eval count" in line))
    assert len(set(counts)) == 1


def test_binary_stdin_is_refused_with_counts(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("abc"), "what is this?", stdin=b"\x00PNG\x00")
    assert done.returncode == 2
    assert "stdin holds 2 NUL bytes in 5" in done.stderr.decode()


def test_invalid_utf8_is_replaced_with_a_warning(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("abc"), stdin="Grüße an alle".encode("latin-1"))
    assert (done.returncode, done.stdout) == (0, b"abc\n")
    assert done.stderr.decode() == "localchat: warning: replaced 2 sequences in stdin that are not UTF-8\n"


def test_a_prompt_over_the_context(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("abc"), "-c", "64", stdin=b"x" * 100)
    assert done.returncode == 5
    assert "has 119 tokens and the context holds 64" in done.stderr.decode()


def test_thinking_is_passed_to_the_template(command: Command, scripted: Scripted) -> None:
    model = scripted("abc")

    def prompt_tokens(*flags: str) -> int:
        text = command("run", model, "--verbose", *flags, "hi").stderr.decode()
        return int(text.partition("prompt eval count:")[2].split()[0])

    assert prompt_tokens("--think") == prompt_tokens() + len("[on]")
    assert prompt_tokens("--no-think") == prompt_tokens() + len("[off]")


def test_stdin_that_stays_open_is_waited_for_and_said(environment: dict[str, str], scripted: Scripted) -> None:
    words = [sys.executable, "-m", "localchat", "run", str(scripted("abc")), "hi"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        assert process.stderr.readline() == b"localchat: waiting for stdin to end (--no-stdin ignores it)\n"
        assert process.communicate(b"")[0] == b"abc\n"
    with subprocess.Popen([*words, "--no-stdin"], env=environment, **pipes) as process:
        assert process.stdout.read() == b"abc\n"
        assert process.stderr.read() == b""


def test_a_closed_pipe_ends_quietly(environment: dict[str, str], scripted: Scripted) -> None:
    model = scripted("abcdefghij", loop=True)
    line = f"{sys.executable} -m localchat run {model} -n 5000 hi </dev/null | head -c 10; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment, check=False)
    assert done.stdout == b"abcdefghij141\n"
    assert done.stderr == b""


def test_a_full_disk_is_one_sentence(environment: dict[str, str], scripted: Scripted) -> None:
    line = f"{sys.executable} -m localchat run {scripted('abc')} hi </dev/null >/dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=environment, check=False)
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert lines == ["localchat: error: No space left on device.", "run again with --debug for a traceback."]


def test_closed_standard_streams(environment: dict[str, str], scripted: Scripted) -> None:
    base = f"{sys.executable} -m localchat run {scripted('abc')} hi"
    ended = [
        subprocess.run(["bash", "-c", f"{base} {closing}"], capture_output=True, env=environment, check=False)
        for closing in ("<&-", "</dev/null >&-", "</dev/null 2>&-")
    ]
    answered, silent = (0, b"abc\n", b""), (0, b"", b"")
    assert [(e.returncode, e.stdout, e.stderr) for e in ended] == [answered, silent, answered]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_during_an_answer(
    environment: dict[str, str], scripted: Scripted, number: signal.Signals, code: int
) -> None:
    words = [sys.executable, "-m", "localchat", "run", str(scripted("abcdefghij", loop=True)), "-c", "65000", "hi"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        assert process.stdout.read(5) == b"abcde"
        process.send_signal(number)
        _, stderr = process.communicate()
    assert process.returncode == code
    assert b"Traceback" not in stderr


def test_interrupted_while_waiting(environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "localchat", "run", "smollm2-135m", "hi"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == b"localchat: interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            4,
            "memory ran out: this process holds",
        ),
        (MemoryError(), 4, "memory ran out: this process holds"),
        (ZeroDivisionError("by\nzero \x1b[1m"), 1, "ZeroDivisionError: by zero ^[[1m"),
        (OSError(28, "No space left on device", "/tmp/x"), 1, "/tmp/x: No space left on device."),
        (KeyboardInterrupt(), 130, "localchat: interrupted"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (SystemExit(143), 143, ""),
    ],
)
def test_every_ending_has_a_code(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> int:
        raise error

    monkeypatch.setattr(listing, "print_models", fail)
    assert cli.main(["list"]) == code
    shown = capsys.readouterr().err
    assert text in shown
    assert "Traceback" not in shown
    assert cli.main(["list", "--debug"] if code in (1, 4) else ["list"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code in (1, 4))


def test_quantize_and_run_what_is_not_quantised(command: Command, scripted: Scripted, tmp_path: Path) -> None:
    source = scripted("abc").parent / "source"
    out = tmp_path / "new" / "out"
    done = command("quantize", source, "-o", out, "--group-size", "32", "--min", "--keep", "lm_head=bf16")
    assert (done.returncode, done.stdout) == (0, b"")
    assert list(out.parent.iterdir()) == [out]  # no lock and nothing unfinished is left beside it
    assert command("run", out, "hi").stdout == b"abc\n"
    assert command("quantize", source, "-o", out).returncode == 1
    assert "quantised already" in command("quantize", out).stderr.decode()
    first, second = command("run", source, "hi"), command("run", source, "hi")
    assert first.stdout == second.stdout == b"abc\n"
    assert first.stderr == b"localchat: quantising source to INT4 by rounding, once\n"
    assert second.stderr == b""


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer"),
        ("tokenizer_config.json", "{}", "no chat template"),
        ("generation_config.json", "{", "generation_config.json"),
    ],
)
def test_what_cannot_chat_is_refused_before_its_weights_are_converted(
    command: Command, scripted: Scripted, tmp_path: Path, file: str, content: str | None, word: str
) -> None:
    source = Path(shutil.copytree(scripted("abc").parent / "source", tmp_path / "source"))
    (source / file).unlink(missing_ok=True)
    if content is not None:
        (source / file).write_text(content)
    done = command("run", source, "hi", LOCALCHAT_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert word in done.stderr.decode()
    assert str(source) in done.stderr.decode()
    assert not (tmp_path / "cache").exists()


def test_main_leaves_the_signal_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cli.main(["--version"])
    assert signal.getsignal(signal.SIGTERM) is before
