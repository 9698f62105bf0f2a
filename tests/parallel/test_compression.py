"""Masks at the owner's slice, beside one plain process: every stage, rank count, tier and kind of mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.tiny import STAGES, adamw, loss_of, masters, rows, start, tiny

OFFSET, STEPS = 2, 5
WEIGHTS = [f"layers.{i}.0.weight" for i in range(3)]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def pruning(technique: str, ratio: float = 0.5, modules: Any = ("layers",), **shared: Any) -> dict[str, Any]:
    shared = {"enabled": True, "method": "l1", "schedule_offset": OFFSET, **shared}
    group = {"params": {"dense_ratio": ratio}, "modules": list(modules)}
    return {"compression_training": {technique: {"shared_parameters": shared, "different_groups": {"g": group}}}}


# -- the plain process ------------------------------------------------------------------------------------------------


def largest(scores: torch.Tensor, keep: int) -> torch.Tensor:
    flags = torch.zeros(scores.numel())
    flags[torch.sort(scores.reshape(-1), descending=True, stable=True).indices[:keep]] = 1
    return flags


def masks_of(values: dict[str, torch.Tensor], technique: str, over_all: bool, ratio: float) -> dict[str, torch.Tensor]:
    """Flags by name, from equal weights."""
    if technique == "row_pruning":
        made = {}
        for name in WEIGHTS:
            rows_ = largest(values[name].double().abs().sum(1), -int(-len(values[name]) * ratio // 1))
            made[name] = rows_[:, None].expand_as(values[name])
            made[name.replace("weight", "bias")] = rows_
        return made
    sets = [WEIGHTS] if over_all else [[name] for name in WEIGHTS]
    found = {}
    for names in sets:
        flat = torch.cat([values[name].abs().reshape(-1) for name in names])
        flags = largest(flat, -int(-flat.numel() * ratio // 1)).split([values[name].numel() for name in names])
        found |= {name: flag.view_as(values[name]) for name, flag in zip(names, flags, strict=True)}
    return found


def plain(technique: str, over_all: bool, optimizer: Any, ranks: int) -> dict[str, torch.Tensor]:
    model = tiny()
    inner = optimizer(list(model.parameters()))
    params = dict(model.named_parameters())
    flags: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        inner.zero_grad()
        for rank in range(ranks):
            (loss_of(model, rows(step, rank)) / ranks).backward()
        with torch.no_grad():
            for name, flag in flags.items():
                params[name].grad.mul_(flag)
            inner.step()
            if step + 1 == OFFSET:
                flags = masks_of(params, technique, over_all, 0.5)
                for name, flag in flags.items():
                    params[name].mul_(flag)
                    for value in inner.state[params[name]].values():
                        if value is not None and value.shape == flag.shape:
                            value.mul_(flag)
    return {name: param.detach().clone() for name, param in params.items()}


# -- the engine -------------------------------------------------------------------------------------------------------


def trained(stage: int, settings: dict[str, Any], optimizer: Any, steps: int = STEPS) -> Any:
    engine = start(stage, optimizer=optimizer, **settings)
    for step in range(steps):
        loss = loss_of(engine, rows(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
    return engine


def kept(engine: Any) -> dict[str, torch.Tensor]:
    return {name: (value != 0) for name, value in masters(engine).items()}


def like_plain(cases: list[tuple[str, bool, Any]], tiers: tuple[str, ...]) -> None:
    for technique, over_all, optimizer in cases:
        expected = plain(technique, over_all, optimizer, dist.get_world_size())
        scope = "global" if over_all else "layer"
        for stage in STAGES:
            for tier in tiers:
                if tier != "none" and stage == 0:
                    continue
                settings = pruning(technique, scope=scope)
                if tier != "none":
                    settings["zero"] = {"offload_optimizer": {"device": tier}}
                with trained(stage, settings, optimizer) as engine:
                    found = masters(engine)
                    for name, value in expected.items():
                        at = (technique, scope, stage, tier, name)
                        assert torch.equal(found[name] == 0, value == 0), at
                        assert torch.allclose(found[name], value, atol=1e-6, rtol=1e-5), at
                    assert sum(int((found[name] == 0).sum()) for name in WEIGHTS) == 54, (technique, stage)
                    with torch.no_grad():
                        whole = loss_of(engine, rows(99, 0))
                    twin = tiny()
                    twin.load_state_dict(found)
                    assert torch.allclose(whole, loss_of(twin, rows(99, 0)), atol=1e-6), "forward sees other weights"


CASES = [("sparse_pruning", False, momentum), ("sparse_pruning", True, adamw), ("row_pruning", False, momentum)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_final_masks_train_as_in_a_plain_process(workers: Any, ranks: int) -> None:
    workers(ranks).run(like_plain, CASES, ("none", "cpu") if ranks == 2 else ("none",), timeout=120)
