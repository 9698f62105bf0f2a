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


def like_plain(cases: list[tuple[str, bool, Any]], tiers: tuple[str, ...], stages: tuple[int, ...] = STAGES) -> None:
    for technique, over_all, optimizer in cases:
        expected = plain(technique, over_all, optimizer, dist.get_world_size())
        scope = "global" if over_all else "layer"
        for stage in stages:
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


@pytest.mark.parametrize("case", range(len(CASES)))
def test_final_masks_train_as_in_a_plain_process(workers: Any, case: int) -> None:
    workers(2).run(like_plain, CASES[case : case + 1], ("none", "cpu")[case % 2 :][:1], timeout=120)


def test_final_masks_with_uneven_cuts(workers: Any) -> None:
    workers(3).run(like_plain, CASES[1:2], ("none",), (0, 3), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_final_masks_everywhere(workers: Any, ranks: int) -> None:
    workers(ranks).run(like_plain, CASES, ("none", "cpu"), timeout=240)


# -- masks that later ones may undo -----------------------------------------------------------------------------------


def ramp(technique: str = "sparse_pruning", **shared: Any) -> dict[str, Any]:
    return pruning(technique, schedule_offset_end=4, schedule="cubic", **{"schedule_offset": 1, **shared})


def plain_ramp(criterion: str, ranks: int) -> dict[str, torch.Tensor]:
    """A dense master, masks re-formed after each step: forward sees the masked copy, gradients pass straight."""
    model, twin = tiny(), tiny()
    params, seen = dict(model.named_parameters()), dict(twin.named_parameters())
    inner = momentum(list(model.parameters()))
    scores = {name: torch.zeros_like(params[name]) for name in WEIGHTS}
    flags: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        twin.zero_grad()
        for rank in range(ranks):
            (loss_of(twin, rows(step, rank)) / ranks).backward()
        with torch.no_grad():
            for name, param in params.items():
                param.grad = seen[name].grad.clone()
                if name in scores:
                    scores[name] -= 0.1 * param.grad * param
                    if step >= 4:  # the mask is final
                        param.grad.mul_(flags[name])
            inner.step()
            done = min((step + 1 - 1) / 3, 1.0)
            ratio = 1 - 0.5 * (1 - (1 - done) ** 3)
            if step + 1 <= 4:
                for name in WEIGHTS:
                    score = scores[name] if criterion == "movement" else params[name].abs()
                    flags[name] = largest(score, -int(-round(score.numel() * ratio, 6) // 1)).view_as(score)
            for name, param in params.items():
                if step + 1 == 4 and name in flags:
                    param.mul_(flags[name])
                    inner.state[param]["momentum_buffer"].mul_(flags[name])
                seen[name].copy_(param * flags[name] if name in flags else param)
    return {name: param.detach().clone() for name, param in params.items()}


def ramps_like_plain(stages: list[int], tier: str) -> None:
    for criterion in ("magnitude", "movement"):
        expected = plain_ramp(criterion, dist.get_world_size())
        for stage in stages:
            zero = {"offload_optimizer": {"device": tier}} if tier != "none" and stage else {}
            with trained(stage, {**ramp(criterion=criterion), "zero": zero}, momentum) as engine:
                found = masters(engine)
                for name, value in expected.items():
                    at = (criterion, stage, tier, name)
                    assert torch.equal(found[name] == 0, value == 0), at
                    assert torch.allclose(found[name], value, atol=1e-6, rtol=1e-5), at
                masks = engine.compression.masks
                assert masks.nbytes() <= -(-108 // 8) + 12, "a mask is one bit per element of the slice"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ramp_keeps_the_master_dense(workers: Any, ranks: int) -> None:
    workers(ranks).run(ramps_like_plain, [0, 2, 3] if ranks == 2 else [0], "cpu" if ranks == 2 else "none", timeout=120)


def patterns() -> None:
    shared = {"block_pattern": "2:3", "schedule_offset": 1}
    found = []
    for stage in (0, 3):
        with trained(stage, pruning("sparse_pruning", ratio=2 / 3, **shared), adamw, 2) as engine:
            kept_ = kept(engine)
            assert all((kept_[name].view(-1, 3).sum(1) == 2).all() for name in WEIGHTS)
            found.append(torch.cat([kept_[name].reshape(-1) for name in WEIGHTS]))
        block = {"block_pattern": "3x2", "method": "snip_momentum", "schedule_offset": 1}
        with trained(stage, pruning("sparse_pruning", **block), adamw, 2) as engine:
            tall = kept(engine)[WEIGHTS[0]].view(2, 3, 3, 2).float().mean((1, 3))
            assert set(tall.unique().tolist()) == {0.0, 1.0} and tall.mean() == 0.5
    assert torch.equal(found[0], found[1])


def test_patterns_and_blocks(workers: Any) -> None:
    workers(2).run(patterns, timeout=90)


def resumes(folder: str) -> None:
    """A ramp is saved on the way and goes on elsewhere: masks, scores and the dense master are those of the save."""
    for criterion in ("movement", "magnitude"):
        settings = ramp(criterion=criterion)
        with trained(3, settings, adamw) as engine:
            expected = masters(engine)
        with trained(3, settings, adamw, 2) as engine:
            engine.save_checkpoint(folder, tag=criterion)
        for stage in (0, 2):
            with start(stage, optimizer=adamw, **settings) as engine:
                engine.load_checkpoint(folder, tag=criterion)
                assert engine.compression_scheduler.training_steps == 2
                for step in range(2, STEPS):
                    loss = loss_of(engine, rows(step, dist.get_rank()))
                    engine.backward(loss)
                    engine.step()
                for name, value in masters(engine).items():
                    assert torch.equal(value == 0, expected[name] == 0), (criterion, stage, name)
                    assert torch.allclose(value, expected[name], atol=1e-6), (criterion, stage, name)


def test_a_ramp_resumes_at_another_stage(workers: Any, tmp_path: Any) -> None:
    workers(2).run(resumes, str(tmp_path), timeout=120)


# -- quantized in forward ---------------------------------------------------------------------------------------------


def quantized(stage: int, optimizer: Any) -> dict[str, torch.Tensor]:
    group = {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0}, "modules": ["layers"]}
    shared = {"enabled": True, "quantize_weight_in_forward": True}
    section = {"weight_quantization": {"shared_parameters": shared, "different_groups": {"g": group}}}
    with trained(stage, {"compression_training": section}, optimizer) as engine:
        return masters(engine)


def quantized_like_plain() -> None:
    from deepspeed.compression.utils import straight_through, symmetric

    ranks = dist.get_world_size()
    model = tiny()
    inner = momentum(list(model.parameters()))
    for step in range(STEPS):
        inner.zero_grad()
        grads: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            seen = {
                name: straight_through(p, symmetric(p.detach(), 8)) if name in WEIGHTS else p
                for name, p in model.named_parameters()
            }
            loss = torch.func.functional_call(model, seen, rows(step, rank)).float().square().mean()
            for name, part in zip(seen, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                grads[name] = part / ranks if name not in grads else grads[name] + part / ranks
        for name, param in model.named_parameters():
            param.grad = grads[name]
        inner.step()
    for stage in STAGES:
        for name, value in quantized(stage, momentum).items():
            assert torch.equal(value, model.get_parameter(name)), (stage, name)


def test_fake_quantization_is_bit_equal_to_plain(workers: Any) -> None:
    workers(2).run(quantized_like_plain, timeout=90)
