"""A model with every kind of tensor, its runs that save and resume, and what is compared: for checkpoint tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.tiny import adamw
from tests.parity.configs import config

WIDTH = 6
SAMPLES = 48


class Mixed(nn.Module):
    """Tied, frozen, buffer-only and non-divisible parameters, dropout, and running statistics."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.embed.weight
        self.odd = nn.Parameter(torch.ones(5))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.arange(7, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.norm(self.frozen(x)) * self.scale
        return self.out(x) * self.odd.sum() / 5


def mixed(seed: int = 0, dropout: float = 0.2) -> Mixed:
    torch.manual_seed(seed)
    return Mixed(dropout)


def samples() -> list[torch.Tensor]:
    return list(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(9)))


def make(stage: int, precision: str = "fp32", seed: int = 0, dropout: float = 0.2, **settings: Any) -> Any:
    """An engine over `Mixed` with a schedule and a loader; `settings` as those of `config`."""
    import deepspeed

    model = mixed(seed, dropout)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = settings.pop("optimizer", adamw)
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "weight_decay": 0.0}]
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups,
        optimizer=optimizer(groups),
        training_data=samples(),
        config=config(stage, model, precision, scheduler=scheduler, **settings),
    )
    torch.manual_seed(100 + seed + dist.get_rank() if dist.is_initialized() else 100)
    return engine


def train(engine: Any, batches: Any, steps: int) -> list[float]:
    """Micro-steps; gives the losses."""
    losses = []
    for _ in range(steps):
        loss = engine(next(batches)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: Any) -> dict[str, torch.Tensor]:
    """Full masters, moments and buffers by name."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        master = safe_get_full_fp32_param(param)
        if master is not None:
            found[name] = master.clone()
            for key in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(param, key)
                if value is not None:
                    found[f"{name} {key}"] = value.clone()
        else:
            found[name] = param.detach().clone().float()
    found |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return found


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not bit-equal."""
    missing = sorted(ours.keys() ^ theirs.keys())
    return missing + [name for name in ours if name in theirs and not torch.equal(ours[name], theirs[name])]


def mean_losses(engine: Any, steps: int) -> list[float]:
    """Losses of whole steps, the mean over ranks; statistics stay as they are, so that batches may be shared out."""
    engine.module.norm.eval()
    batches = iter(engine.training_dataloader)
    losses = []
    for _ in range(steps):
        loss = engine(next(batches)).float().square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(float(total))
    return losses
