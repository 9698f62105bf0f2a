"""Models cut by one number in the JSON train as the dense ones do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.utils import safe_get_full_grad
from tests.parallel.dense import momentum
from tests.parallel.tensor_runs import batch_of, config_of, loss_of, model_of, trained


def close(windows: list[tuple[float, ...]]) -> None:
    worst = [max(column) for column in zip(*windows, strict=True)]
    assert worst[0] <= 2e-6 and max(worst[1:]) <= 5e-6, worst


CELLS = [
    pytest.param("Llama", 2, 2, 3, 2, 0.0, id="llama-dp2-tp2-zero3"),
    pytest.param("GPTNeoX", 1, 2, 1, 1, 0.5, id="neox-tp2-zero1"),
    *[
        pytest.param(family, dp, tp, stage, 4, 0.0, id=f"{family}-dp{dp}-tp{tp}-zero{stage}", marks=pytest.mark.slow)
        for family, tp in (("Llama", 1), ("Llama", 2), ("Llama", 3), ("Falcon", 3), ("GPT2", 2))
        for dp in (1, 2)
        for stage in (0, 1, 2, 3)
    ],
]


@pytest.mark.parametrize(("family", "dp", "tp", "stage", "accumulation", "clip"), CELLS)
def test_one_number_cuts_a_model(
    workers: Any, family: str, dp: int, tp: int, stage: int, accumulation: int, clip: float
) -> None:
    count = 10 if accumulation == 4 else 4  # windows of the slow cells, and of the fast ones
    for windows in workers(dp * tp).run(trained, family, dp, tp, stage, accumulation, clip, count, timeout=240):
        close(windows)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_slices_rest_on_other_tiers(workers: Any, tmp_path: Path, dp: int, tp: int, tier: str) -> None:
    place = {"device": tier, "nvme_path": str(tmp_path)}
    settings = {"zero": {"offload_param": place, "offload_optimizer": place}}
    for windows in workers(dp * tp).run(trained, "Llama", dp, tp, 3, 1, 0.5, 10, settings, timeout=240):
        close(windows)


@pytest.mark.slow
@pytest.mark.parametrize("dp", [2, 4])
def test_slices_are_shared_out_in_copies(workers: Any, dp: int) -> None:
    """Hybrid sharding: copies of the state over pairs of ranks."""
    settings = {"zero": {"mics_shard_size": dp // 2}}
    for windows in workers(dp * 2).run(trained, "Llama", dp, 2, 3, 1, 0.5, 10, settings, timeout=240):
        close(windows)


def in_bf16(family: str, dp: int, stage: int) -> list[tuple[float, float]]:
    """By step: the distance of losses, and of gradients from those of fp32 over dense bf16's own."""
    import deepspeed

    model = model_of(family)
    masters, dense, exact = (copy.deepcopy(model) for _ in range(3))
    optimizer = momentum(masters.parameters())
    config = config_of(stage, 2, bf16={"enabled": True})
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    found = []
    with engine:
        for step in range(5):
            exact.load_state_dict(masters.state_dict())
            dense.bfloat16().load_state_dict(masters.state_dict())
            sums = {}
            for twin in (dense, exact):
                twin.zero_grad()
                losses = [loss_of(twin, step, rank) / dp for rank in range(dp)]
                torch.stack(losses).sum().backward()
                sums[twin] = float(torch.stack(losses).sum())
            loss = loss_of(engine, step, engine.get_data_parallel_rank())
            engine.backward(loss)
            ours = theirs = 0.0
            for name, param in exact.named_parameters():
                wanted, low = param.grad, dense.get_parameter(name).grad
                ours += float((safe_get_full_grad(model.get_parameter(name)) - wanted).square().sum())
                theirs += float((low.float() - wanted).square().sum())
                masters.get_parameter(name).grad = low.float()
            engine.step()
            optimizer.step()
            every = loss.detach().float()
            torch.distributed.all_reduce(every)
            gap = abs(float(every) / torch.distributed.get_world_size() - sums[dense]) / sums[dense]
            found.append((gap, (ours / theirs) ** 0.5))
    return found


@pytest.mark.parametrize(
    ("family", "dp", "stage"),
    [
        pytest.param(family, dp, stage, marks=() if (family, dp, stage) == ("Llama", 1, 3) else pytest.mark.slow)
        for family in ("Llama", "GPT2")
        for dp in (1, 2)
        for stage in (0, 1, 2, 3)
    ],
)
def test_bf16_is_no_further_off_than_dense_bf16(workers: Any, family: str, dp: int, stage: int) -> None:
    for steps in workers(2 * dp).run(in_bf16, family, dp, stage, timeout=120):
        assert all(loss <= 1e-2 and gradient <= 2 for loss, gradient in steps), steps


def held(stage: int, dp: int) -> tuple[float, float]:
    """Bytes of state on this rank, and what the plan says."""
    import deepspeed
    from deepspeed.comm.process_groups.mesh import current_mesh
    from deepspeed.tensor_parallel.parallelize import plan_of
    from deepspeed.zero.api.memory_estimate import state_bytes

    model = model_of("Llama", hidden_size=96, intermediate_size=256, num_hidden_layers=4)
    dense = sum(param.numel() for param in model.parameters())
    config = {**config_of(stage, 2), "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with engine:
        plan, tp = plan_of(model), current_mesh().axis("tp").rank
        assert plan is not None and plan.held(tp) == sum(
            p.ds_numel if stage == 3 else p.numel() for p in model.parameters()
        )
        assert plan.held(tp) < 0.6 * dense and f"{plan.held(0):,} of {dense:,} parameters" in plan.table()
        for step in range(2):  # the formula is of the moment before a step, with moments there
            engine.backward(loss_of(engine, step, 0))
            bytes_now = engine.state_bytes()
            engine.step()
        return sum(bytes_now.values()) - bytes_now["gathered"], state_bytes(
            stage, dp, low_precision=False
        ).total * plan.held(tp)


@pytest.mark.parametrize(("stage", "dp"), [(1, 1), (3, 2), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_states_are_what_the_plan_says(workers: Any, stage: int, dp: int) -> None:
    for found, said in workers(2 * dp).run(held, stage, dp, timeout=60):
        assert abs(found - said) <= 0.03 * said, (found, said)


def moved() -> None:
    """Bytes that a rank gets in one step, by axis, beside the formulas."""
    import deepspeed
    from deepspeed.comm import comms_logger
    from deepspeed.comm.process_groups.mesh import current_mesh

    model = model_of("Llama")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=momentum(model.parameters()), config=config_of(1, 2, comms_logger={"enabled": True})
    )
    with engine:
        rank = engine.get_data_parallel_rank()
        for step in range(2):
            comms_logger.reset()
            engine.backward(loss_of(engine, step, rank))
            engine.step()
        mesh, received = current_mesh(), comms_logger.received
        tokens = batch_of(model, 0, 0)["input_ids"].numel()
        sums = 4 * model.config.num_hidden_layers * tokens * model.config.hidden_size * 4
        over_tp = received[mesh.axis("tp").ranks]
        assert sums <= over_tp <= 1.02 * sums, (over_tp, sums)  # half of what is summed is taken in, twice
        state = 4 * sum(param.numel() for param in model.parameters())
        over_dp = received[mesh.axis("dp_shard").ranks]
        assert state <= over_dp <= 1.02 * state, (over_dp, state)  # half of it reduced, half of it published
        assert sum(received.values()) <= over_tp + over_dp + 4096, received
    comms_logger.enabled = False


def test_bytes_by_axis_are_the_formulas(workers: Any) -> None:
    workers(4).run(moved, timeout=60)
