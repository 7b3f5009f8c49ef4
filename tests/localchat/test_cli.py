"""The command as a process: pipes byte for byte, exit codes, one sentence for each error, nothing heavy for --help."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localchat import cli, listing
from localchat.config import QuantizationConfig, TensorFormat, packed_format
from localchat.envelope import packed_hash

HEAVY = ("torch", "rich", "prompt_toolkit", "huggingface_hub", "transformers", "jinja2", "numpy")
Command = Callable[..., Any]
Scripted = Callable[..., Path]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["doctor", "--help"],
        ["rnu"],
        ["run", "m", "--tmep"],
        ["run", "m", "--think=hard"],
        ["completion", "zsh"],
        ["__complete", "bash", "2", "localchat", "run", ""],
        ["__complete", "fish", "2", "localchat", "run", "--"],
        ["list"],
    ],
)
def test_nothing_heavy_is_imported(words: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    quantization = QuantizationConfig("x", 1, TensorFormat(4, 32, False), source={"id": "Qwen/Qwen3-8B"})
    (tmp_path / "packed" / "one").mkdir(parents=True)
    config = {"quantization_config": quantization.to_dict()}
    (tmp_path / "packed" / "one" / "config.json").write_text(json.dumps(config))
    environment |= {"LOCALCHAT_CACHE": str(tmp_path)}
    program = (
        "import sys\nfrom localchat.cli import main\nmain(sys.argv[1:])\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    if words == ["list"]:
        program = program.replace("'rich', ", "")
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert words[:2] != ["__complete", "bash"] or b"qwen3-8b\ton this machine" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "sentence", "hint"),
    [
        (["rnu", "m"], 2, "there is no command 'rnu'.", "did you mean `localchat run`?"),
        (["run", "m", "--tmep", "1"], 2, "there is no flag '--tmep' of `localchat run`.", "did you mean --temp?"),
        (["run"], 2, "`localchat run` needs MODEL.", "`localchat run --help` lists the flags."),
        (["run", "smollm2-135n", "hi"], 3, "", "did you mean smollm2-135m?"),
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


def test_a_reply_that_ends_inside_its_thought_is_no_answer_and_fails(command: Command, opening: Scripted) -> None:
    model = opening("hm", "</think>", "\nyes")
    said = (
        b"localchat: error: the reply ended inside its thought, before an answer.\n"
        b"-n allows more tokens, --think N ends a thought after N tokens, --no-think asks for none.\n"
    )
    done = command("run", model, "-n", "2", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", said)
    done = command("run", model, "-n", "2", "-x", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", said)
    done = command("run", model, "-n", "2", "--json", "hi")
    assert (done.returncode, done.stderr) == (1, said)
    document = json.loads(done.stdout)
    assert (document["text"], document["thinking"], document["finish_reason"]) == ("", "hm", "length")


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


@pytest.mark.parametrize("words", [["--file", "{}"], ["-f{}", "-f", "{}"]])
def test_files_stand_named_between_stdin_and_the_argument(
    command: Command, scripted: Scripted, tmp_path: Path, words: list[str]
) -> None:
    file = tmp_path / "a b.md"
    file.write_bytes(b"\xef\xbb\xbfone\r\n```\n\n")
    given = [word.format(file) for word in words]
    block = f"{file}:\n````\none\n```\n````"
    wanted = "\n\n".join(["in", *[block] * "".join(words).count("{}"), "argument"])
    counts = []
    for more, stdin in ((given, b"in\n"), ([], wanted.removesuffix("\n\nargument").encode())):
        done = command("run", scripted("abc"), "--json", *more, "argument", stdin=stdin)
        assert done.returncode == 0, done.stderr
        counts.append(json.loads(done.stdout)["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


def test_a_file_alone_is_a_prompt(terminal: Callable[..., Any], scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("what?")
    opened = terminal("run", scripted("abc"), "-f", tmp_path / "a")
    assert opened.end() == 0
    assert "abc" in opened.text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x7fELF\0\0", "a^[[1m holds 2 NUL bytes in 6, so it is binary"),
        (bytes(range(128, 256)), "128 bytes with"),
        (None, "a^[[1m cannot be read: No such file or directory."),
        ("folder", "a^[[1m cannot be read: Is a directory."),
    ],
)
@pytest.mark.parametrize("flag", ["-f", "--system-file"])
def test_files_that_are_no_text(
    command: Command, scripted: Scripted, tmp_path: Path, flag: str, content: bytes | str | None, sentence: str
) -> None:
    file = tmp_path / "a\x1b[1m"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        file.mkdir()
    done = command("run", scripted("abc"), flag, file, "hi")
    assert (done.returncode, done.stdout) == (2, b"")
    assert sentence in done.stderr.decode()


def test_a_file_with_faults_is_decoded_with_a_warning(command: Command, scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("Grüße an alle".encode("latin-1"))
    done = command("run", scripted("abc"), "-f", tmp_path / "a")
    assert (done.returncode, done.stdout) == (0, b"abc\n")
    assert done.stderr.decode() == f"localchat: warning: replaced 2 sequences in {tmp_path}/a that are not UTF-8\n"


def test_a_system_prompt_from_a_file(command: Command, scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("Be brief.\n")
    counts = [
        json.loads(command("run", scripted("abc"), "--json", *words, "hi").stdout)["usage"]["prompt_tokens"]
        for words in (["--system-file", tmp_path / "a"], ["-s", "Be brief."])
    ]
    assert counts[0] == counts[1]


def test_json_is_one_object_that_says_everything(command: Command, scripted: Scripted) -> None:
    model = scripted("<think>", "hu", "</think>", "\x1b[1ma")
    done = command("run", model, "--json", "--seed", "7", "--temp", "0", "-c", "500", "hi")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    assert done.stdout.count(b"\n}\n") == 1
    said = json.loads(done.stdout)
    assert (said["text"], said["thinking"], said["finish_reason"]) == ("\x1b[1ma", "hu", "stop")
    assert (said["seed"], said["sampling"]["seed"], said["sampling"]["temperature"], said["context"]) == (7, 7, 0, 500)
    # <think>, h, m, </think>, five bytes, the stop token
    assert said["usage"]["completion_tokens"] == 10
    assert said["usage"]["total_tokens"] == said["usage"]["prompt_tokens"] + 10
    assert said["timings"]["load_seconds"] > said["timings"]["ttft_seconds"] > 0
    assert said["timings"]["decode_tokens_per_second"] > 0
    assert said["model"]["name"] == "tiny"
    assert said["model"]["path"] == str(model)
    assert said["quantization"]["format"].startswith("INT4 groups of 32")
    assert json.loads(command("run", model, "--json", "-n", "1", "hi").stdout)["finish_reason"] == "length"


def test_the_hash_tells_packings_apart(scripted: Scripted, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(scripted("abc"), tmp_path / "copy"))
    quantization = packed_format(folder)
    assert quantization
    before = packed_hash(folder, quantization)
    assert before == packed_hash(scripted("abc"), quantization)
    assert before != packed_hash(scripted("abd"), quantization)
    (tensors,) = folder.glob("*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    assert before != packed_hash(folder, quantization)
    other = replace(quantization, default=replace(quantization.default, group_size=64))
    assert packed_hash(folder, quantization) != packed_hash(folder, other)


def test_extract_without_a_block_prints_nothing_and_fails(command: Command, scripted: Scripted) -> None:
    done = command("run", scripted("plain"), "-x", "--seed", "3", "hi")
    assert (done.returncode, done.stdout) == (1, b"")
    first, hint = done.stderr.decode().splitlines()
    assert first == "localchat: error: the answer has no code block, so nothing was extracted."
    assert hint == "--seed 3 without --extract shows the same answer whole."


@pytest.fixture
def coding(scripted: Scripted, tmp_path: Path) -> Path:
    """A model that says one line of prose, a code block, and more prose: its two added tokens are the fences."""
    folder = Path(shutil.copytree(scripted("So:", "<think>", "x=1", "</think>", "ya"), tmp_path / "coding"))
    path = folder / "tokenizer.json"
    text = path.read_text().replace('"<think>"', json.dumps("\n```py\n")).replace('"</think>"', json.dumps("\n```\n"))
    path.write_text(text)
    return folder


def test_extract_prints_the_code_alone(command: Command, coding: Path) -> None:
    whole = command("run", coding, "hi")
    assert whole.stdout == b"So:\n```py\nx=1\n```\nya\n"
    done = command("run", coding, "-x", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x=1\n", b"")
    said = json.loads(command("run", coding, "-x", "--json", "hi").stdout)
    assert (said["code"], said["text"]) == ("x=1\n", whole.stdout.decode().removesuffix("\n"))
    cut = command("run", coding, "-x", "-n", "6", "hi")
    assert (cut.returncode, cut.stdout, cut.stderr) == (0, b"x=\n", b"localchat: the code block was not finished\n")


@pytest.mark.parametrize("flag", ["--json", "-x"])
def test_one_answer_flags_need_a_prompt(terminal: Callable[..., Any], scripted: Scripted, flag: str) -> None:
    opened = terminal("run", scripted("abc"), flag)
    assert opened.end() == 2
    assert "is for one answer, and there is no prompt." in opened.text


def test_what_changes_nothing_is_said(command: Command, scripted: Scripted, tmp_path: Path) -> None:
    done = command("run", scripted("abc"), "--think=low", "--kv-cache", "bf16", "hi")
    assert done.stdout == b"abc\n"
    assert done.stderr.decode().splitlines() == [
        "localchat: --think=low is --think here: this model's chat template knows no efforts",
        "localchat: --kv-cache bf16 is for cards: a processor keeps keys and values in fp32, or as INT8",
    ]
    folder = Path(shutil.copytree(scripted("abc"), tmp_path / "plain"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("enable_thinking", "something_else")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert b"--think changes nothing" in command("run", folder, "--think", "hi").stderr
    assert command("run", folder, "hi", LOCALCHAT_THINK="on").stderr == b""
    assert command("run", folder, "--think", "5", "hi").stderr == b""  # bounds a thought that nobody asked for


def test_settings_of_the_environment_and_the_config(
    command: Command, scripted: Scripted, environment: dict[str, str]
) -> None:
    model = scripted("abcdef", loop=True)
    config = Path(environment["HOME"]) / ".config" / "localchat" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("max-tokens = 3\n")
    assert command("run", model, "hi").stdout == b"abc\n"
    assert command("run", model, "hi", LOCALCHAT_MAX_TOKENS="2").stdout == b"ab\n"
    assert command("run", model, "hi", "-n1", LOCALCHAT_MAX_TOKENS="2").stdout == b"a\n"
    config.write_text("max-tokens = 3\ntempp = 1\n")
    done = command("run", model, "hi")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().splitlines() == [
        f"localchat: error: {config}, line 2: there is no setting 'tempp'.",
        "did you mean temp?",
    ]
    assert command("list").returncode == 0  # which has no settings, and must work to repair things


def test_where_values_are_from_is_shown_in_a_chat(
    terminal: Callable[..., Any], scripted: Scripted, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(scripted("abc"), tmp_path / "copy"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 258, "repetition_penalty": 1.25}')
    opened = terminal("run", folder, "--top-p", "0.5", columns=100, rows=30, LOCALCHAT_TOP_K="3")
    opened.wait_for(">>>")
    opened.send("/set min_p 0.1\r/show parameters\r")
    rows = [line.split() for line in opened.wait_for("vram  ").splitlines()]
    wanted = {"top_p": "0.5 flag", "top_k": "3 LOCALCHAT_TOP_K", "repeat_penalty": "1.25 generation_config.json"}
    wanted |= {"min_p": "0.1 /set", "presence_penalty": "0.0 built-in", "ctx": "8192 built-in", "gpu": "cpu built-in"}
    for name, value in wanted.items():
        assert [name, *value.split()] in rows
    opened.send("\x04")
    assert opened.end() == 0


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


def test_an_interrupted_answer_is_a_whole_object(environment: dict[str, str], scripted: Scripted) -> None:
    words = [sys.executable, "-m", "localchat", "run", str(scripted("abcdefghij", loop=True)), "-c", "65000", "hi"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*words, "--json"], env=environment, **pipes) as process:
        time.sleep(5)  # it has nothing to say before its end
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (130, b"")
    assert json.loads(stdout)["finish_reason"] == "interrupted"
    assert json.loads(stdout)["text"].startswith("abcdefghijabc")


@pytest.mark.parametrize("flag", ["--json", "-x", "--raw"])
def test_a_pipe_that_is_closed_or_full(environment: dict[str, str], coding: Path, flag: str) -> None:
    base = f"{sys.executable} -m localchat run {coding} {flag} hi </dev/null"
    ended = [
        subprocess.run(["bash", "-c", line], capture_output=True, env=environment, check=False)
        for line in (f"({base}; echo $? >&2) | true", f"{base} >/dev/full")
    ]
    assert ended[0].stderr == b"141\n"
    assert ended[1].returncode == 1
    assert ended[1].stderr.startswith(b"localchat: error: No space left on device.")


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


def test_quantize_calibrated_with_a_report(command: Command, scripted: Scripted, tmp_path: Path) -> None:
    source, out, text = scripted("abc").parent / "source", tmp_path / "out", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    words = ("quantize", source, "-o", out, "--method", "gptq", "--calib", text, f"--report={text}")
    done = command(*words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0 <= found["quality"]["kl"] < 0.5 and found["quality"]["agreement"] > 0.5
    assert found["quality"]["tokens"] == 1350
    assert found["size"] > 0 and 4 < found["bits_per_weight"] < 16
    assert found["most_tokens_per_second"] > 0 and found["largest_context"] > 0
    assert set(found["quality"]["errors"]) >= {"layers.0.mlp.down_proj", "lm_head"}
    origin = json.loads((out / "config.json").read_text())["quantization_config"]["source"]
    assert origin["method"] == "gptq"
    shown = command(*words, "--overwrite").stdout.decode()
    assert "KL divergence" in shown and "mlp.down_proj" in shown and "tok/s" in shown
    assert command("run", out, "hi").stdout == b"abc\n"


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
