"""Plans: legal ones, dropped by predicted memory, ranked by predicted time; the command always answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.monitor.registry import MONITORS
from deepspeed.planner import cli, predict_memory
from deepspeed.planner.search import (
    ALL,
    HOST_ALL,
    HOST_OPTIMIZER,
    NARROW,
    Task,
    TrainingPlan,
    device_bytes,
    judge,
    legal_plans,
    search,
    table,
)
from deepspeed.planner.train_program import Program
from deepspeed.simulator.machine import Machine

RATES = [[64, 1e10], [1024, 5e10]]
MACHINE = Machine(2, 1 << 30, {"fp32": RATES, "bf16": RATES}, 1e10, 1e-6, 1e9, 1e9, "/tmp")
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Net(nn.Module):
    """Blocks whose activations outweigh their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def factory() -> tuple[nn.Module, object]:
    return Net(), lambda rows: torch.zeros(rows, 128, 64)


TASK = Task(Net, lambda rows: torch.zeros(rows, 128, 64), 8, ADAMW)


class Frozen(nn.Module):
    """Four large matrices between small ones."""

    SIDE = 512

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, self.SIDE)
        self.rest = nn.ModuleList(nn.Linear(self.SIDE, self.SIDE, bias=False) for _ in range(4))
        self.rest.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])  # the latter's states are made in the first update, and stay
@pytest.mark.parametrize("frozen", [False, True])
def test_memory_is_new_where_an_update_makes_it(frozen: bool, optimizer: str) -> None:
    """One gradient of each trained matrix in each micro-batch: not the weights, and nothing that stays."""
    size = 4 * Frozen.SIDE**2
    told = {"optimizer": {"type": optimizer, "params": {"lr": 0.1}}}
    for stage, steps in ((0, 1), (0, 8), (1, 8)):
        task = Task(lambda: Frozen(frozen), lambda rows: torch.zeros(rows, 4), 2 * steps, told)
        plan = TrainingPlan(stage, "none", 1, steps, False)
        fresh, plain = (judge(task, plan, replace(MACHINE, fresh=f)).seconds for f in ([[size, 1e9]], []))
        assert (fresh - plain) * 1e9 / size == pytest.approx(0 if frozen else 4 * steps)


def test_what_the_optimizer_does_is_of_an_update_and_not_of_its_micro_batches() -> None:
    for steps in (1, 4):
        task = replace(TASK, train_batch=2 * steps)
        told = ({"optimizer": {"type": kind, "params": {"lr": 0.1}}} for kind in ("SGD", "AdamW"))
        times = [
            judge(replace(task, config=each), TrainingPlan(0, "none", 1, steps, False), MACHINE).time for each in told
        ]
        plain, adam = (time for time in times if time is not None)
        assert plain.compute == pytest.approx(adam.compute, rel=1e-6)
        assert adam.update > plain.update


def test_a_plan_may_fit_while_ranks_keep_step() -> None:
    task = Task(lambda: Frozen(False), lambda rows: torch.zeros(rows, 4), 8, ADAMW)  # gradients outweigh activations
    plan = TrainingPlan(2, "none", 1, 4, False)
    sizes = judge(task, plan, replace(MACHINE, memory=1))
    assert sizes.memory is not None
    most, least = sizes.memory.most, sizes.least
    assert least < most and "while ranks keep step" not in sizes.reason
    between = replace(MACHINE, memory=(least + most) // 2)
    found = judge(task, plan, between)
    assert found.perhaps and not found.fits
    assert "while ranks keep step" in found.reason
    assert judge(task, plan, replace(MACHINE, memory=most)).fits
    assert not judge(task, plan, replace(MACHINE, memory=least - 1)).perhaps
    listed = search(task, replace(between, disk=0.0), allowed=lambda each: each.micro < 4)
    kinds = [2 * each.fits + each.perhaps * (not each.fits) for each in listed]
    assert kinds == sorted(kinds, reverse=True)
    assert 1 in kinds


def test_legal_plans_keep_the_batch_and_leave_out_what_changes_nothing() -> None:
    plans = legal_plans(24, MACHINE)
    assert {plan.micro * plan.steps * 2 for plan in plans} == {24}
    assert {plan.micro for plan in plans} == {1, 2, 3, 4, 6, 12}
    assert {plan.stage for plan in plans if plan.tier == ALL} == {3}
    assert {plan.stage for plan in legal_plans(8, replace(MACHINE, ranks=1, disk=0.0))} == {0}
    with pytest.raises(ArgumentError, match="multiple of 2"):
        legal_plans(7, MACHINE)


def test_memory_drops_plans_and_recompute_brings_one_back() -> None:
    plain, again = TrainingPlan(2, "none", 4, 1, False), TrainingPlan(2, "none", 4, 1, True)
    needs = [judged.memory.peak for judged in (judge(TASK, p, MACHINE) for p in (plain, again)) if judged.memory]
    assert needs[1] < needs[0]
    tight = replace(MACHINE, memory=sum(needs) // 2)
    found = judge(TASK, plain, tight)
    assert not found.fits
    assert "most of it activations" in found.reason
    assert judge(TASK, again, tight).fits


def test_samples_are_those_of_all_ranks() -> None:
    found = judge(TASK, TrainingPlan(0, "none", 4, 1, False), MACHINE)
    rate = float(table([found], machine=MACHINE).splitlines()[1].split()[3])
    assert rate == pytest.approx(8 / found.seconds, abs=0.01)


def test_narrow_buckets_bring_plans_back_where_the_usual_ones_do_not_fit() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    task = Task(Wide, lambda rows: torch.zeros(rows, 4, 1024), 4, ADAMW)
    usual = TrainingPlan(2, "none", 2, 1, False)
    sizes = [judged.memory.peak for judged in (judge(task, p, MACHINE) for p in (usual, replace(usual, bucket=NARROW)))
             if judged.memory]  # fmt: skip
    assert sizes[1] < 0.9 * sizes[0]
    tight = replace(MACHINE, memory=sum(sizes) // 2, disk=0.0)
    found = search(task, tight, allowed=lambda plan: plan.stage in (1, 2) and not plan.recompute)
    best = next(judged.plan for judged in found if judged.fits and judged.plan.bucket)
    assert best.bucket == NARROW
    assert best.name == "z2_gas1_tmbspg2_bucket4000000"
    assert best.config(ADAMW, "")["zero_optimization"]["reduce_bucket_size"] == NARROW
    assert {judged.plan.bucket for judged in found if judged.plan.stage == 1} == {0}
    # The user's own buckets are narrow already: nothing is to be had there.
    own = replace(task, config={**ADAMW, "zero_optimization": {"reduce_bucket_size": 1000}})
    assert {judged.plan.bucket for judged in search(own, tight, allowed=lambda plan: plan.stage == 2)} == {0}


def test_the_host_is_a_tier_where_a_device_has_memory_of_its_own() -> None:
    assert not {plan for plan in legal_plans(8, MACHINE) if "cpu" in plan.tier}
    with_device = replace(MACHINE, link=1e9, host_memory=1 << 30, disk=0.0)
    tiers = {(plan.tier, plan.stage) for plan in legal_plans(8, with_device)}
    assert {stage for tier, stage in tiers if tier == HOST_OPTIMIZER} == {1, 2, 3}
    assert {stage for tier, stage in tiers if tier == HOST_ALL} == {3}
    config = {**ADAMW, "bf16": {"enabled": True}, "zero_optimization": {"stage3_param_persistence_threshold": 0}}
    task = replace(TASK, config=config)
    plain, moved, all_moved = (TrainingPlan(3, tier, 4, 1, False) for tier in ("none", HOST_OPTIMIZER, HOST_ALL))
    made = all_moved.config(config, "")["zero_optimization"]
    assert made["offload_optimizer"] == made["offload_param"] == {"device": "cpu"}
    assert all_moved.name == "z3_gas1_tmbspg4_all-cpu"
    here, there, all_there = (judge(task, plan, with_device) for plan in (plain, moved, all_moved))
    assert here.memory and there.memory and all_there.memory and there.time and here.time and all_there.time
    count = sum(p.numel() for p in Net().parameters())
    assert here.memory.on_host == 0 and here.time.link == 0.0
    # A rank's half of masters, moments and gradient sums; then of the parameters too.
    host = there.memory.host
    for name, width in (("masters", 4), ("optimizer", 8), ("gradients", 4)):  # in whole pages
        assert 1 <= host[name] / (width * count / 2) < 1.25, name
    assert 1 <= all_there.memory.host["parameters"] / count < 1.6
    sizes = [device_bytes(each.memory, with_device) for each in (here, there, all_there) if each.memory]
    assert sizes[2] < sizes[1] < sizes[0]
    assert sizes[0] - sizes[1] == pytest.approx(8 * count, rel=0.25)
    assert there.time.link == pytest.approx(4 * count / 2 / 1e9, rel=0.02)
    # Messages of a device have buffers to receive into; a CPU's ranks read each other's memory.
    of_cpu = judge(task, plain, MACHINE)
    assert of_cpu.memory and here.memory.at_rest["transit"] > of_cpu.memory.at_rest["transit"]
    # Each limit drops plans by its own name.
    near = judge(task, plain, replace(with_device, memory=sizes[1]))
    assert not near.fits and "of the device" in near.reason
    assert judge(task, moved, replace(with_device, memory=sizes[1])).fits
    far = judge(task, moved, replace(with_device, host_memory=there.memory.on_host - 1))
    assert not far.fits and "of the host" in far.reason and "most of it optimizer" in far.reason
    assert "+" in table([there], machine=with_device).splitlines()[1]


def test_time_follows_the_machine() -> None:
    plan = TrainingPlan(3, "none", 4, 1, False)
    slow = judge(TASK, plan, replace(MACHINE, collective=1e5))
    assert slow.time is not None
    assert slow.time.limit == "messages"
    # Parameters without the own half: one reduction and two gathers.
    count = sum(p.numel() for p in Net().parameters())
    assert slow.time.messages == pytest.approx(3 * count * 4 / 2 / 1e5)
    fast = judge(TASK, plan, MACHINE)
    assert fast.time is not None
    assert fast.time.limit == "compute"


def test_new_blocks_cost_what_the_machine_takes_to_provide_them() -> None:
    plan = TrainingPlan(1, "none", 4, 1, False)
    largest = 4 * 128 * 64 * 4  # bytes of an activation of this micro-batch
    free = judge(TASK, plan, MACHINE).seconds
    found = [judge(TASK, plan, replace(MACHINE, fresh=table)).seconds - free
             for table in ([[largest, 1e9]], [[largest, 5e8]], [[largest, 0.0]], [[4 * largest, 1e9]])]  # fmt: skip
    assert found[0] > 12 * largest / 1e9  # three operators of each of four blocks make one, and so does backward
    assert found[1] == pytest.approx(2 * found[0])
    assert found[2:] == [0.0, 0.0]
    # Twice as many micro-batches make twice as many blocks of half the size.
    halves = judge(TASK, TrainingPlan(1, "none", 2, 2, False), replace(MACHINE, fresh=[[largest / 2, 1e9]]))
    plain = judge(TASK, TrainingPlan(1, "none", 2, 2, False), MACHINE)
    assert halves.seconds - plain.seconds == pytest.approx(found[0], rel=0.1)


def test_a_plan_that_cannot_be_made_has_a_reason_and_the_search_ends() -> None:
    broken = replace(TASK, batch=lambda rows: torch.zeros(rows, 3), train_batch=2)
    found = search(broken, replace(MACHINE, disk=0.0), seconds=60)
    assert not any(judged.fits for judged in found)
    assert "mat1 and mat2" in found[0].reason
    found = search(TASK, MACHINE, seconds=0)
    assert [judged.fits for judged in found].count(True) == 1
    assert "time was over" in found[-1].reason


def test_the_command_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, output = tmp_path / "machine.json", tmp_path / "plan.json"
    replace(MACHINE, disk=0.0).save(machine)
    name = f"{__name__}:factory"
    told = [name, "--batch", "2", "--machine", str(machine), "--output", str(output)]
    assert cli.main(told) == 0
    said = capsys.readouterr().out
    best = json.loads(output.read_text())
    assert f"best: z{best['zero_optimization']['stage']}_gas{best['gradient_accumulation_steps']}" in said
    assert best["bf16"] == {"enabled": True}
    assert best["train_micro_batch_size_per_gpu"] * best["gradient_accumulation_steps"] == 1
    replace(MACHINE, disk=0.0, memory=1000).save(machine)
    assert cli.main(told) == 1
    assert "no plan fits" in capsys.readouterr().out
    machine.write_text("{")
    assert cli.main(told) == 2
    assert "machine file" in capsys.readouterr().err
    assert cli.main([f"{__name__}:nothing", *told[1:]]) == 2


def test_predictions_leave_the_model_alone_and_refuse_a_rank_that_is_not_there() -> None:
    model = Net()
    before = [p.clone() for p in model.parameters()]
    predict_memory(model, {"train_micro_batch_size_per_gpu": 1, **ADAMW}, 2, batch=torch.zeros(1, 2, 64))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ArgumentError, match="rank 2"):
        predict_memory(Net, ADAMW, 2, rank=2, batch=torch.zeros(1, 2, 64))
    with torch.no_grad():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(UsageError, match="process group"):
                predict_memory(Net, ADAMW, 1, batch=torch.zeros(1, 2, 64))
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("block", ["jsonl_monitor", "csv_monitor"])
def test_a_prediction_writes_no_events(block: str, tmp_path: Path) -> None:
    events = {block: {"enabled": True, "output_path": str(tmp_path)}}
    config = {"train_micro_batch_size_per_gpu": 1, **ADAMW, **events}
    predict_memory(Net, config, batch=torch.zeros(1, 2, 64))
    assert not list(tmp_path.iterdir())


def test_a_program_has_no_block_of_a_monitor() -> None:
    blocks = {name: {"enabled": True} for name in MONITORS}
    assert Program(Net, {**ADAMW, **blocks}, torch.zeros(1, 2, 64)).settings() == ADAMW


def test_allocator_events_agree_with_the_count() -> None:
    """A ruler that shares no code with ours: what torch's own allocator says it has lent."""
    from torch.profiler import ProfilerActivity, profile

    from deepspeed.ops.fake_tensors import Valueless
    from deepspeed.profiling.live_memory import LiveMemory

    def train() -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 128, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with Valueless(), LiveMemory() as live:
        train()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    total, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    assert live.peak == pytest.approx(most, rel=0.005)
