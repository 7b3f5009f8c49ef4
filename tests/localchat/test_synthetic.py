"""A synthetic model has the formats of a real conversion and gives finite logits."""

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
    assert codes == next(row.nbytes for row in ledger(MODELS["smollm2-135m"]).rows if row.name == "INT4 weights")
