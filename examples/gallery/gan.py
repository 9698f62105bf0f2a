"""Two engines, one against the other, both with BatchNorm: `deepspeed --num_gpus 2 examples/gallery/gan.py`.

A generator learns to draw points like those of eight clusters on a ring; a discriminator learns to tell them apart.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from pictures import picture
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed

NOISE, BATCH = 16, 256


def real(count: int, draw: torch.Generator) -> Tensor:
    """fp32 `[count, 2]`: eight clusters on a ring."""
    angle = torch.randint(0, 8, (count,), generator=draw) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=draw)


def engine_of(model: nn.Module, stage: int) -> Any:
    """An engine with its own optimizer."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.5, 0.99]}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def main() -> None:
    """Train both in turn, then draw what the generator draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--output", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    torch.manual_seed(0)
    width = 96
    draws = nn.Sequential(
        nn.Linear(NOISE, width), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2),
    )  # fmt: skip
    tells = nn.Sequential(
        nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
    )
    generator, discriminator = engine_of(draws, given.stage), engine_of(tells, given.stage)
    draw = torch.Generator().manual_seed(1 + generator.global_rank)  # other points on every rank
    for step in range(given.steps):
        points = generator(torch.randn(BATCH, NOISE, generator=draw))
        truth, fake = discriminator(real(BATCH, draw)), discriminator(points.detach())
        loss = F.softplus(-truth).mean() + F.softplus(fake).mean()
        discriminator.backward(loss)
        discriminator.step()
        # The discriminator's gradients of this pass are not wanted: it is only a path to the points.
        for param in tells.parameters():
            param.requires_grad_(False)
        against = F.softplus(-discriminator(points)).mean()
        generator.backward(against)
        generator.step()
        for param in tells.parameters():
            param.requires_grad_(True)
        if generator.global_rank == 0 and step % 250 == 0:
            print(f"step {step}: discriminator {loss.item():.3f}, generator {against.item():.3f}", flush=True)
    generator.eval()
    with torch.no_grad():
        made = generator(torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(5)))
    first = generator.global_rank == 0
    generator.destroy()
    discriminator.destroy()
    if first:
        centres = torch.stack([torch.tensor([math.cos(a), math.sin(a)]) for a in torch.arange(8) * math.pi / 4])
        near = torch.cdist(made, centres).min(1)
        reached = len(near.indices[near.values < 0.25].unique())
        share = 100 * (near.values < 0.25).float().mean().item()
        with picture(given.output / "gan.png", columns=2) as (left, right):
            for axes, points, title in (
                (left, real(2000, draw), "data"),
                (right, made, f"drawn: {reached} of 8 clusters, {share:.0f} % near one"),
            ):
                axes.scatter(*points.T, s=2)
                axes.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), title=title, aspect="equal")
        print(f"{reached} of 8 clusters are reached, {share:.0f} % of the points are near one")


if __name__ == "__main__":
    main()
