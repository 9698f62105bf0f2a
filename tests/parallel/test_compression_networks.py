"""Channels leave a running engine with their norms: it goes on as one that is masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.tiny import said
from tests.unit.compression import networks
from tests.unit.compression.networks import KINDS, lively

pytest.importorskip("torch_pruning")
STEPS = 4


def settings(stage: int, modules: list[str], physical: bool) -> dict[str, Any]:
    shared = {"enabled": True, "method": "l1", "schedule_offset": 2, "physical": physical}
    group = {"params": {"dense_ratio": 0.5}, "modules": [f"^{name}$" for name in modules]}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}},
        "compression_training": {"channel_pruning": {"shared_parameters": shared, "different_groups": {"g": group}}},
    }


def trained(kind: str, stage: int, physical: bool) -> tuple[list[float], torch.Tensor, int]:
    """Losses, outputs in evaluation mode, parameters that are left."""
    import deepspeed

    torch.manual_seed(0)
    model: Any = lively(getattr(networks, kind)()).train()
    made = settings(stage, KINDS[type(model)][0], physical)
    losses = []
    with deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=made)[0] as engine:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = engine(torch.randn(2, 3, 8, 8, generator=generator)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            seen = engine(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(99))).clone()
        return losses, seen, sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def removed_like_masked(kinds: list[str], stages: tuple[int, ...]) -> None:
    for kind in kinds:
        for stage in stages:
            masked, wanted, before = trained(kind, stage, False)
            with said() as lines:
                removed, found, after = trained(kind, stage, True)
            if dist.get_rank() == 0:
                planned = next(line for line in lines if "leave the engine" in line)
                assert f"{before - after:,} parameters of" in planned, (planned, before - after)
            assert after < 0.5 * before, (kind, stage, before, after)
            assert max(abs(a - b) for a, b in zip(masked, removed, strict=True)) <= 1e-5, (kind, stage, masked, removed)
            assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (kind, stage)


@pytest.mark.parametrize(("kind", "stage"), [("Residual", 3), ("Grouped", 0)])
def test_channels_leave_the_running_engine(workers: Any, kind: str, stage: int) -> None:
    workers(2).run(removed_like_masked, [kind], (stage,), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_channels_of_every_kind_leave_at_every_stage(workers: Any, ranks: int) -> None:
    workers(ranks).run(removed_like_masked, [kind.__name__ for kind in KINDS], (0, 1, 2, 3), timeout=400)
