"""Perplexity against a formulation in one line, over borders of windows and of rows."""

import pytest
import torch

from localchat.cache import KVCache
from localchat.config import ModelConfig
from localchat.model import Model
from localchat.ops import ReferenceOps
from localchat.perplexity import perplexity


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
