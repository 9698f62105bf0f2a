"""Generation where Transformers is too old for generators: the module's own `generate`, and typed errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["deepspeed.inference.executors.paged"] = None  # as if an import of it failed
import torch, deepspeed
from deepspeed.errors import NotAvailableError
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
config = {
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1},
    "hybrid_engine": {"enabled": True},
}
engine, *_ = deepspeed.initialize(model=LlamaForCausalLM(LlamaConfig(**sizes)), config=config)
ids = torch.tensor([[3, 4, 5]])
own = type(engine.module).generate(engine.module, ids, max_new_tokens=4, do_sample=False)
assert torch.equal(engine.module.generate(ids, max_new_tokens=4, do_sample=False), own)
for call in (lambda: engine.rollout([[1, 2]]), lambda: engine.score([[1, 2]]), lambda: engine.weights_version):
    try:
        call()
    except NotAvailableError as error:
        assert "generators need Transformers" in str(error)
    else:
        raise AssertionError("no error")
engine.destroy()
"""


@pytest.mark.slow
def test_old_releases_generate_by_themselves() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=dict(os.environ), text=True, capture_output=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "generate goes through LlamaForCausalLM's own: generators need Transformers" in run.stderr + run.stdout
