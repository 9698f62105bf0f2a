"""Trains a few steps; rank 0 prints where the package was imported from, its native library, and the losses."""

from __future__ import annotations

import torch
from torch import nn

import deepspeed
from deepspeed import native

STEPS = 6

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
config = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
rows = torch.randn(STEPS, 16, 32).chunk(deepspeed.comm.get_world_size(), dim=1)[deepspeed.comm.get_rank()]
losses = []
for batch in rows:
    loss = (engine(batch) - batch.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if deepspeed.comm.get_rank() == 0:
    native.library()
    print(f"package {deepspeed.__path__[0]}")
    print(f"native {native.state()}")
    print("losses", *losses, flush=True)
engine.destroy()
