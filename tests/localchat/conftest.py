"""A tiny scripted model, and a terminal to talk to `localchat` through."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HIDDEN = 288  # one per token: 256 bytes, the added tokens, padding
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|go|>")
PLAIN = ("<think>", "</think>")
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if enable_thinking is defined %}{{ '[on]' if enable_thinking else '[off]' }}{%- endif %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<|go|>{%- endif %}"
)


def _write_tokenizer(folder: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 258, "do_sample": False}))
    return tokenizer


def _write_checkpoint(folder: Path, says: list[str | bytes], loop: bool) -> None:
    """A one-layer Qwen2 whose next token depends on the current one alone, so it says `says`, whatever it is asked.

    Each token may occur once: text is taken byte by byte, the added tokens by name.
    """
    import torch
    import transformers

    tokenizer = _write_tokenizer(folder)
    ids = [tokenizer.token_to_id("<|go|>")]
    for part in says:
        known = tokenizer.token_to_id(part) if isinstance(part, str) and part in (*SPECIAL, *PLAIN) else None
        ids += [known] if known is not None else list(part.encode() if isinstance(part, str) else part)
    if len(set(ids)) != len(ids):
        raise ValueError(f"a token occurs twice in {says}")
    config = transformers.Qwen2Config(
        vocab_size=HIDDEN,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=258,
    )
    model = transformers.Qwen2ForCausalLM(config)
    follows = dict(itertools.pairwise(ids)) | ({ids[-1]: ids[1]} if loop else {})
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(HIDDEN))
        model.lm_head.weight.zero_()
        for current in range(HIDDEN):
            model.lm_head.weight[follows.get(current, 258), current] = 4.0
    model.to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """scripted("Hello", loop=False): a packed model that says this. Made once for each text."""
    made: dict[tuple[Any, ...], Path] = {}

    def make(*says: str | bytes, loop: bool = False) -> Path:
        from localchat.quantize.convert import Recipe, convert

        key = (says, loop)
        if key not in made:
            folder = tmp_path_factory.mktemp("scripted")
            source, packed = folder / "source", folder / "tiny"
            source.mkdir()
            _write_checkpoint(source, list(says), loop)
            for _ in convert(source, packed, Recipe(group_size=32, search=False)):
                continue
            made[key] = packed
        return made[key]

    return make


@pytest.fixture
def opening(scripted: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """opening("hm", "</think>", "yes"): a scripted model whose template opens the thought, as Qwen3.5's does."""

    def make(*says: str) -> Path:
        folder = shutil.copytree(scripted("<think>", *says), tmp_path / "opening")
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config["chat_template"] = config["chat_template"].replace("<|go|>", "<|go|><think>")
        path.write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def environment(_private_home: Path) -> dict[str, str]:
    """The environment of a fresh user with a plain terminal."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "LOCALCHAT_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def command(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """command("run", MODEL, stdin=b"..."): run `localchat` with pipes and return what it wrote."""

    def run(*words: str | Path, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "localchat", *map(str, words)],
            input=stdin,
            capture_output=True,
            env=environment | variables,
            timeout=120,
            check=False,
        )

    return run


class Terminal:
    """A process behind a pseudo-terminal, its screen, and everything it ever wrote."""

    def __init__(self, arguments: list[str], environment: dict[str, str], rows: int, columns: int) -> None:
        import pexpect
        import pyte

        self.process = pexpect.spawn(
            arguments[0], arguments[1:], env=environment, dimensions=(rows, columns), timeout=60, encoding=None
        )
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.frames: list[str] = []  # the screen after each read

    @property
    def text(self) -> str:
        """What the screen shows, without the blanks at the ends."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def read(self, seconds: float) -> bool:
        """Take what is written within `seconds`; False where nothing was, or at the process's end."""
        import pexpect

        try:
            piece = self.process.read_nonblocking(4096, timeout=seconds)
        except (pexpect.TIMEOUT, pexpect.EOF):
            return False
        self.raw += piece
        self._stream.feed(piece)
        self.frames.append(self.text)
        return True

    def wait_for(self, condition: str | Callable[[str], bool], seconds: float = 60) -> str:
        """Read until the screen shows a text (or fulfils a condition) and return the screen."""
        fulfilled = (lambda text: condition in text) if isinstance(condition, str) else condition
        end = time.monotonic() + seconds
        while not fulfilled(self.text):
            if time.monotonic() > end or not (self.read(0.2) or self.process.isalive()):
                pytest.fail(f"waited in vain for {condition!r}; the screen shows:\n{self.text}")
        return self.text

    def send(self, keys: str) -> None:
        self.process.send(keys.encode())

    def end(self, seconds: float = 30) -> int:
        """Read to the end and return the exit code."""
        end = time.monotonic() + seconds
        while self.read(0.2) or self.process.isalive():
            if time.monotonic() > end:
                pytest.fail(f"it does not end; the screen shows:\n{self.text}")
        self.process.close()
        return self.process.exitstatus if self.process.exitstatus is not None else -self.process.signalstatus


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    """terminal("run", MODEL): `localchat` in a pseudo-terminal; program=[...] runs something else."""
    opened: list[Terminal] = []

    def start(
        *words: str | Path, rows: int = 24, columns: int = 80, program: list[str] | None = None, **variables: str
    ) -> Terminal:
        arguments = program or [sys.executable, "-m", "localchat", *map(str, words)]
        opened.append(Terminal(arguments, environment | variables, rows, columns))
        return opened[-1]

    yield start
    for each in opened:
        each.process.close(force=True)


@pytest.fixture(scope="session")
def hybrid() -> Any:
    """A small random Qwen3.5: three gated delta net layers to one of attention, fp32 references, 280 ids."""
    import torch

    from localchat.config import ModelConfig
    from localchat.model import Model
    from localchat.ops import ReferenceOps

    raw = {"model_type": "qwen3_5", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 280}
    raw |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    raw |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    raw |= {"max_position_embeddings": 1 << 16, "tie_word_embeddings": True}
    generator = torch.Generator().manual_seed(3)
    model = Model(ModelConfig.from_dict(raw), ReferenceOps())
    frequencies = model.inv_freq
    for buffer in model.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    model.inv_freq = frequencies
    model.ops.prefill_chunk = 32
    return model


@pytest.fixture
def tiny_backend() -> Any:
    """A `tokenizers.Tokenizer` of 256 bytes, one merge, and added tokens of every kind.

    The special ones, 0..2, stand in the model's vocabulary too, as SmolLM2's do; the others only behind it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ll"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("l", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    backend.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>", "<tool_call>", "  ")])
    return backend


@pytest.fixture
def tiny_tokenizer(tiny_backend: Any) -> Any:
    """The same as a localchat Tokenizer."""
    from localchat.tokenizer import Tokenizer

    return Tokenizer(tiny_backend)


@pytest.fixture
def tiny_folder(tiny_backend: Any, tmp_path: Path) -> Path:
    """A folder with its tokenizer.json and nothing else."""
    tiny_backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def qwen_folder() -> Path:
    """The real files of a large model, where they lie beside the repository."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "qwen3.5-27b"
    if not folder.is_dir():
        pytest.skip("../shared/data is absent")
    return folder
