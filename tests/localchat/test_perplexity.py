"""Perplexity against a formulation in one line, over borders of windows and of rows."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from localchat.cache import KVCache
from localchat.config import ModelConfig
from localchat.model import Model
from localchat.ops import ReferenceOps
from localchat.perplexity import next_token_losses, perplexity
from localchat.registry import MODELS
from localchat.synthetic import synthetic_model


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rest = {"model_type": "llama", "vocab_size": 50, "max_position_embeddings": 512}
    made = Model(ModelConfig.from_dict(shape | rest), ReferenceOps())
    for buffer in made.buffers():
        buffer.copy_(torch.randn_like(buffer) * 0.5)
    return made


@pytest.mark.parametrize("window", [2, 129, 200, 512])
def test_it_is_the_exponential_of_the_mean_loss(model: Model, window: int) -> None:
    ids = torch.randint(0, 50, (401,), generator=torch.Generator().manual_seed(1))
    losses = []
    for chunk in ids.split(window):
        cache = KVCache(model.config, len(chunk), dtype=torch.float32, device=torch.device("cpu"))
        logits = model.logits(model(chunk, torch.arange(len(chunk)), cache))
        losses += torch.nn.functional.cross_entropy(logits[:-1], chunk[1:], reduction="none").tolist()
    wanted = torch.tensor(losses).mean().exp()
    assert perplexity(model, ids.tolist(), window) == pytest.approx(float(wanted), rel=1e-5)


def test_a_text_without_a_next_token_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        perplexity(model, [1])


def test_losses_are_those_of_log_softmax_over_borders_of_slices() -> None:
    """Large logits, and a vocabulary of more than two slices."""
    logits = torch.randn(5, 70_001, generator=torch.Generator().manual_seed(2)) * 30
    targets = torch.tensor([0, 32_767, 32_768, 70_000, 1234])
    wanted = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(next_token_losses(logits, targets).double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_window_is_read_in_the_chunks_of_a_prefill(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = perplexity(model, ids, 300)
    monkeypatch.setattr(model.ops, "prefill_chunk", 64)
    seen = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, *rest: seen.append(len(ids)) or forward(ids, *rest))
    assert perplexity(model, ids, 300) == pytest.approx(wanted, rel=1e-5)
    assert seen == [64, 64, 64, 64, 43]


PEAK = """
import resource, sys, torch
from localchat.config import ModelConfig
from localchat.model import Linear, Model
from localchat.ops import CpuOps
from localchat.perplexity import perplexity

raw = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
raw |= {"num_attention_heads": 1, "vocab_size": 248_320, "max_position_embeddings": 8192, "tie_word_embeddings": True}
model = Model(ModelConfig.from_dict(raw), CpuOps())
frequencies = model.inv_freq
for buffer in model.buffers():
    buffer.copy_(torch.randn_like(buffer))
model.inv_freq = frequencies
for module in model.modules():
    if isinstance(module, Linear):
        model.ops.prepare(module)
torch.manual_seed(0)
ids = torch.randint(0, 248_320, (int(sys.argv[1]),)).tolist()
perplexity(model, ids[:200], 200)  # what libraries take once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # a fault ends this process, not the machine
perplexity(model, ids, len(ids))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_logits_of_a_long_window_are_never_all_there() -> None:
    """1,024 positions x 248,320 ids in fp32 are 1 GB; what the first 200 positions needed is enough for all."""
    done = subprocess.run([sys.executable, "-c", PEAK, "1024"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200_000_000


@pytest.mark.gpu
def test_on_a_card_8k_positions_of_a_large_vocabulary_take_less_than_a_gigabyte() -> None:
    """Four layers of the 27B with its own head: everything beside the weights, the cache of these layers included."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card")
    model = synthetic_model(replace(MODELS["qwen3.5-27b"], num_hidden_layers=4), "cuda")
    ids = torch.randint(0, model.config.vocab_size, (8192,), generator=torch.Generator().manual_seed(0)).tolist()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert math.isfinite(perplexity(model, ids, 8192))
    assert torch.cuda.max_memory_allocated() - held < 1_000_000_000
