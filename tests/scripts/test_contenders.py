"""The compiled contender computes what it should: a peer that is wrong is no peer."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from localchat.cache import KVCache
from localchat.config import ModelConfig
from localchat.model import Model
from localchat.ops import ReferenceOps

SCRIPT = Path(__file__).parents[2] / "scripts" / "contenders.py"
RAW = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
RAW |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}


@pytest.fixture
def contenders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contenders", SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(SCRIPT)
    module = sys.modules["contenders"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_torch_operations_give_the_reference_s_logits(contenders: ModuleType) -> None:
    config = ModelConfig.from_dict(RAW)
    generator = torch.Generator().manual_seed(0)
    reference, theirs = Model(config, ReferenceOps()), Model(config, contenders.TorchOps(32, "cpu"))
    frequencies = reference.inv_freq
    for buffer in reference.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    reference.inv_freq = theirs.inv_freq = frequencies
    theirs.load_state_dict({name: tensor.bfloat16() for name, tensor in reference.state_dict().items()}, assign=True)
    theirs.inv_freq = frequencies
    ours_cache = KVCache(config, 32, dtype=torch.float32, device=torch.device("cpu"))
    their_cache = contenders.LayerCaches(config, 32, "cpu")
    for ids, positions in ((torch.arange(10), torch.arange(10)), (torch.tensor([5]), torch.tensor([10]))):
        wanted = reference.logits(reference(ids, positions, ours_cache))
        ours_cache.append(len(ids))
        got = theirs.logits(theirs(ids, positions, their_cache)).float()
        assert float((got - wanted).abs().max() / wanted.abs().max()) < 2e-2  # bf16 throughout
