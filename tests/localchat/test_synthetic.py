"""A synthetic model has the formats of a real conversion and gives finite logits."""

from dataclasses import replace

import torch

from localchat.engine import Engine
from localchat.ledger import ledger
from localchat.model import Linear
from localchat.registry import MODELS
from localchat.sampling import Sampling
from localchat.synthetic import synthetic_model


def test_a_synthetic_model_runs_and_is_as_large_as_the_ledger_says() -> None:
    model = synthetic_model(MODELS["smollm2-135m"], "cpu")
    engine = Engine(model, 40)
    for _ in engine.prefill(list(range(20))):
        continue
    with torch.inference_mode():
        logits = model.logits(engine._hidden)  # type: ignore[arg-type]
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0.1
    assert len(list(engine.generate(Sampling(temperature=0.0), (), 5))) == 5
    codes = sum(m.cpu_qweight.nbytes for m in model.modules() if isinstance(m, Linear) and m.cpu_qweight is not None)
    assert codes == next(row.nbytes for row in ledger(MODELS["smollm2-135m"].config).rows if row.name == "INT4 weights")


def test_a_synthetic_hybrid_stays_finite_and_remembers() -> None:
    """Two layers of each kind with the real widths of a head; the last token depends on the first one."""
    entry = replace(
        MODELS["qwen3.5-27b"], hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=400, full_attention_interval=2, linear_num_key_heads=1,
        linear_num_value_heads=3,
    )  # fmt: skip
    model = synthetic_model(entry, "cpu")
    logits = []
    for first in (1, 2):
        engine = Engine(model, 80)
        for _ in engine.prefill([first, *range(10, 70)]):
            continue
        with torch.inference_mode():
            logits.append(model.logits(engine._hidden)[-1])  # type: ignore[arg-type]
    assert bool(logits[0].isfinite().all())
    assert float(logits[0].std()) > 0.1
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3
    for state in model.buffers():
        assert not state.is_meta
