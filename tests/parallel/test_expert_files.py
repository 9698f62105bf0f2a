"""Files of models whose experts are divided: any mesh loads them, and no way of export leaves experts out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed import utils
from deepspeed.checkpoint import cli
from deepspeed.errors import DeepSpeedError
from deepspeed.moe import expert_parallel
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.layout.placement import Cut, Placement, place, placement_of
from tests.parallel.test_experts import loss_of, tokens, toy, with_adamw


class Ranks(NamedTuple):
    """A mesh, with the stage of an engine on it."""

    world: int
    tp: int
    ep: int
    stage: int


MESHES = [
    Ranks(world, tp, ep, stage)
    for world in (1, 2, 4)
    for tp in (1, 2)
    for ep in (1, 2, 4)
    for stage in range(4)
    if world % tp == 0 and (world // tp) % ep == 0
]


def engine_on(ranks: Ranks, seed: int = 0) -> Any:
    more = {"tensor_parallel": {"autotp_size": ranks.tp}} if ranks.tp > 1 else {}
    config = with_adamw(ranks.stage, ranks.ep, **more)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return deepspeed.initialize(model=toy("Qwen2Moe", seed), config=config)[0]


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Masters and moments, whole, by name."""
    state = {}
    for name, param in engine.module.named_parameters():
        for kind in ("", "exp_avg", "exp_avg_sq"):
            value = utils.safe_get_full_optimizer_state(param, kind) if kind else utils.safe_get_full_fp32_param(param)
            assert value is not None, (name, kind)
            state[f"{name} {kind}"] = value.clone()
    return state


def step(engine: Any, number: int) -> None:
    """The same sample on every rank, so that windows of all meshes are equal."""
    engine.backward(loss_of(engine, tokens(0, number)))
    engine.step()


def saved(folder: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    engine = engine_on(ranks)
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(folder)
    state = state_of(engine)
    engine.destroy()
    return state if dist.get_rank() == 0 else {}


def loaded(folder: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    engine = engine_on(ranks, seed=5)
    engine.load_checkpoint(folder)
    state = state_of(engine)
    step(engine, 2)
    engine.destroy()
    return state if dist.get_rank() == 0 else {}


def check(workers: Any, folder: Path, before: Ranks, after: Ranks) -> None:
    first = workers(before.world).run(saved, str(folder), before, timeout=180)[0]
    second = workers(after.world).run(loaded, str(folder), after, timeout=180)[0]
    assert first.keys() == second.keys()
    assert not (wrong := [name for name in first if not torch.equal(first[name], second[name])]), wrong
    assert cli.main(["verify", str(folder)]) == 0
    exported = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert all(torch.equal(exported[name.strip()], value) for name, value in first.items() if name.endswith(" "))


def test_another_mesh_loads_it(workers: Any, tmp_path: Path) -> None:
    check(workers, tmp_path, Ranks(2, 1, 2, 1), Ranks(4, 2, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_random_pairs_of_meshes(workers: Any, tmp_path: Path, trial: int) -> None:
    draw = random.Random(trial)
    check(workers, tmp_path, *draw.sample(MESHES, 2))


# -- a rank's experts are missing -------------------------------------------------------------------------------------


def without_a_ranks_experts(stage: int) -> Any:
    """An engine whose last rank of experts says that it has those of the first."""

    def planted(param: torch.Tensor, dim: int, ranges: Any, **how: Any) -> None:
        original(param, dim, ranges, **how)
        whole = placement_of(param)
        cut = whole.cuts[0]
        place(
            param, Placement((Cut(cut.dim, cut.size, ((0, cut.local_size),)),), whole.relations, whole.stages, whole.ep)
        )

    original = expert_parallel.cut_tensor
    expert_parallel.cut_tensor = planted
    try:
        return engine_on(Ranks(2, 1, 2, stage))
    finally:
        expert_parallel.cut_tensor = original


def saves_pretrained(engine: Any, folder: str) -> None:
    state = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state)


EXPORTS = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder),
    "save_pretrained": saves_pretrained,
    "state_dict": lambda engine, folder: engine.module.state_dict(),
    "safe_get_full_fp32_param": lambda engine, folder: [
        utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()
    ],
    "consolidated": lambda engine, folder: engine._consolidated_16bit_state_dict(),
}


def exported_with_a_gap(stage: int, folder: str) -> dict[str, str]:
    """By way of export, the error it raises."""
    try:
        engine = without_a_ranks_experts(stage)
    except DeepSpeedError as error:
        return {"initialize": str(error)}
    errors = {}
    for name, export in EXPORTS.items():
        try:
            export(engine, f"{folder}/{name}")
        except DeepSpeedError as error:
            errors[name] = str(error)
    engine.destroy()
    return errors


@pytest.mark.parametrize("stage", [1, 3])
def test_no_export_leaves_experts_out(workers: Any, tmp_path: Path, stage: int) -> None:
    for errors in workers(2).run(exported_with_a_gap, stage, str(tmp_path), timeout=120):
        if "initialize" not in errors:
            assert errors.keys() == EXPORTS.keys(), errors
        assert all("experts" in text for text in errors.values()), "\n".join(errors.values())
