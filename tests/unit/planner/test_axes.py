"""Plans over axes of the mesh: which are legal, what they ask of the engine; each is judged or has a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.planner import plan_of
from deepspeed.config import DeepSpeedConfig
from deepspeed.planner import cli
from deepspeed.planner.machine_benchmark import calibrate
from deepspeed.planner.mesh_options import MeshShape, asks_for_axes, unjudged
from deepspeed.planner.search import WHOLE, Judged, Task, TrainingPlan, judge, legal_plans, mesh_plans, search, table
from tests.unit.planner.toys import ADAMW, LAYERS, MACHINE, TOKENS, WIDTH, FeedExperts, Mixture, Net, rows


class Uncut(Net):
    """One that does not say what it takes."""

    def __init__(self) -> None:
        super().__init__()
        del self.example_input_array


def factory() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    return Net(), rows


def test_axes_are_plans_of_their_own_and_the_usual_ones_stay() -> None:
    plans = mesh_plans(24, MACHINE)
    usual = legal_plans(24, MACHINE)
    assert {plan.shape for plan in usual} == {MeshShape()}
    assert not set(plans) & set(usual)
    for plan in plans:
        assert plan.micro * plan.steps * MACHINE.ranks // plan.shape.width == 24
    assert {plan.shape for plan in plans} == {
        MeshShape(tensor=2),
        MeshShape(tensor=4),
        MeshShape(sequence=2),
        MeshShape(sequence=4),
        MeshShape(shard=2),
        MeshShape(stages=2),
        MeshShape(stages=4),
    }
    assert {plan.stage for plan in plans if plan.shape.tensor == 4} == {0}  # nobody is left to share the state with
    assert {plan.stage for plan in plans if plan.shape.shard} == {3}
    assert {plan.stage for plan in plans if plan.shape.stages == 2} == {0, 1}
    assert all(plan.steps >= plan.shape.stages for plan in plans)
    assert not mesh_plans(24, replace(MACHINE, ranks=1))
    assert len({plan.name for plan in [*plans, *usual]}) == len(plans) + len(usual)


@pytest.mark.parametrize("batch", [MACHINE.ranks // 2, MACHINE.ranks, 3 * MACHINE.ranks])
def test_no_update_of_a_pipeline_has_fewer_micro_batches_than_stages(batch: int) -> None:
    plans = [plan for plan in mesh_plans(batch, MACHINE) if plan.shape.stages > 1]
    assert [plan for plan in plans if plan.steps < plan.shape.stages] == []
    if batch >= MACHINE.ranks:  # a batch that all ranks can share: every size has plans, the smallest micro-batch too
        assert {plan.shape.stages for plan in plans if plan.micro == 1} == {2, 4}


@pytest.mark.parametrize("shape", [MeshShape(tensor=2), MeshShape(sequence=4), MeshShape(shard=2), MeshShape(stages=2)])
def test_the_engine_reads_the_keys_as_the_plan_means_them(shape: MeshShape) -> None:
    plan = next(plan for plan in mesh_plans(8, MACHINE) if plan.shape == shape and plan.stage in (1, 3))
    config = plan.config({**ADAMW, "train_batch_size": 8}, "") | {"train_batch_size": 8}
    data = MACHINE.ranks // shape.width
    found = DeepSpeedConfig(config, world=data, replicas=data * shape.sequence)
    wanted = {"tp": shape.tensor, "sp": shape.sequence, "shard": shape.shard, "pp": shape.stages}
    assert {axis: size for axis, size, _ in found.mesh_sizes()} == {a: size for a, size in wanted.items() if size > 1}


def test_models_with_experts_have_plans_that_divide_them() -> None:
    plans = [plan for plan in mesh_plans(8, MACHINE, experts=True) if plan.shape.expert > 1]
    assert {plan.shape for plan in plans} == {MeshShape(expert=2), MeshShape(expert=4)}
    assert not [plan for plan in mesh_plans(8, MACHINE) if plan.shape.expert > 1]
    assert all(plan.micro * plan.steps * MACHINE.ranks == 8 for plan in plans)  # every rank has samples of its own
    config = plans[0].config({**ADAMW, "train_batch_size": 8}, "")
    assert DeepSpeedConfig.for_init(config).expert_parallel_size == plans[0].shape.expert
    assert plans[0].name.endswith(f"_ep{plans[0].shape.expert}")
    assert asks_for_axes(config)


def test_what_is_no_expert_is_shared_by_all_ranks_and_an_expert_by_those_that_have_it() -> None:
    """Per gather and reduction: 7 / 8 of 100 bytes, and of the half of 40 that a rank has 3 / 4."""
    shape = MeshShape(expert=2)
    assert shape.message_bytes(140, 8, 1, 2, 40, 2) == pytest.approx(3 * (100 * 7 / 8 + 20 * 3 / 4))
    assert shape.message_bytes(140, 2, 1, 2, 40, 2) == pytest.approx(3 * 100 / 2)  # one rank alone has an expert


@pytest.mark.parametrize(("micro", "divided"), [(1, True), (128, False)])
def test_few_tokens_travel_to_experts_and_many_have_experts_travel_to_them(micro: int, divided: bool) -> None:
    task = Task(Mixture, rows, micro * MACHINE.ranks, {**ADAMW, "zero_optimization": {"overlap_comm": False}})
    assert task.has_experts() and not Task(Net, rows, 4, ADAMW).has_experts()
    plans = [TrainingPlan(3, "none", micro, 1, False, 0, shape) for shape in (MeshShape(), MeshShape(expert=4))]
    whole, parts = (judge(task, plan, MACHINE) for plan in plans)
    assert whole.fits and parts.fits, (whole.reason, parts.reason)
    assert whole.memory is not None and parts.memory is not None and parts.time is not None and whole.time is not None
    # Three quarters of the rows, there, back, and their results' gradients there (the input needs none); the router.
    tokens, dense = micro * TOKENS, 4 * 3 * (WIDTH + 1) * FeedExperts.num_experts * 3 / 4
    rows_sent = 3 * tokens * WIDTH * 4 * 3 / 4
    small = tokens * (4 + 4 + 8) * 3 / 4  # weights, their gradients, numbers of experts
    assert parts.time.messages == pytest.approx((rows_sent + small + dense) / MACHINE.collective, rel=0.02)
    assert (parts.seconds < whole.seconds) is divided
    assert (min((whole, parts), key=lambda judged: judged.worth) is parts) is divided


class Frozen(Mixture):
    """Trains its experts alone."""

    def __init__(self) -> None:
        super().__init__()
        experts = {
            param for module in self.modules() if isinstance(module, FeedExperts) for param in module.parameters()
        }
        for param in set(self.parameters()) - experts:
            param.requires_grad_(False)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("model", [Mixture, Frozen])
def test_divided_elements_are_counted_whatever_is_trained(stage: int, model: type[nn.Module]) -> None:
    plan = TrainingPlan(stage, "none", 1, 1, False, 0, MeshShape(expert=2))
    judged = judge(Task(model, rows, MACHINE.ranks, ADAMW), plan, MACHINE)
    assert judged.memory is not None and judged.time is not None, judged.reason
    assert judged.memory.experts == FeedExperts.num_experts * 8 * WIDTH * WIDTH
    assert judged.time.messages > 0


def test_the_time_of_a_plan_has_the_messages_of_its_axis() -> None:
    """Two sums of activations for each block: one forward, one of the gradient of what it reads."""
    task, micro = Task(Net, rows, 4, ADAMW), 2
    plan = TrainingPlan(0, "none", micro, 2, False, 0, MeshShape(tensor=4))
    alone, slow = judge(task, plan, MACHINE), judge(task, plan, replace(MACHINE, collective=1e6))
    assert alone.time is not None and slow.time is not None and alone.memory is not None
    assert slow.time.limit == "messages"
    # The first block's input has no gradient. A ring moves a sum twice, but for the own part.
    sums = 2 * LAYERS - 1
    expected = plan.steps * sums * 2 * micro * TOKENS * WIDTH * 4 * 3 / 4
    assert slow.time.messages == pytest.approx(expected / 1e6)
    assert slow.time.compute == pytest.approx(alone.time.compute)
    # A quarter of the matrices, and no gradient of theirs travels.
    whole = judge(task, replace(plan, micro=1, steps=1, shape=MeshShape()), MACHINE)
    assert whole.memory is not None
    assert alone.memory.held < 0.3 * alone.memory.parameters == 0.3 * whole.memory.held
    assert alone.memory.at_rest["optimizer"] < 0.3 * whole.memory.at_rest["optimizer"]


def test_what_cannot_be_cut_says_why_and_is_tried_once() -> None:
    told: list[TrainingPlan] = []
    task = Task(Uncut, rows, 8, ADAMW)
    found = search(task, MACHINE, report=lambda each: told.append(each.plan), axes=True)
    cut = [each for each in found if each.plan.shape.tensor > 1]
    assert {each.plan.shape.tensor for each in cut} == {2, 4}
    assert not any(each.fits for each in cut)
    assert all("example_input_array" in each.reason for each in cut)
    assert sum(plan.shape.tensor > 1 for plan in told) == 2
    # This model takes no slices of sequences either: each rank would do all the work.
    assert {each.reason for each in found if each.plan.shape.sequence > 1} == {WHOLE}
    assert any(each.fits for each in found)
    own = replace(task, config={**ADAMW, "tensor_parallel": {"autotp_size": 2}})
    assert {each.plan.shape for each in search(own, MACHINE, seconds=0, axes=True)} == {MeshShape()}


def test_of_an_axis_the_first_that_fits_is_the_last_that_is_run() -> None:
    task, told = Task(Net, rows, 16, ADAMW), list[Judged]()
    tensor = {"axes": True, "allowed": lambda plan: plan.shape.tensor == 2 and plan.stage == 0}
    found = search(task, MACHINE, report=told.append, **tensor)
    assert [each.plan.name for each in told] == ["z0_gas1_tmbspg8_tp2"]
    assert {each.reason for each in found[1:]} == {"not looked at: z0_gas1_tmbspg8_tp2 fits"}
    assert told[0].memory is not None
    needs = max(told[0].memory.peak, told[0].memory.birth)
    less = list[Judged]()
    tight = search(task, replace(MACHINE, memory=needs - 1), report=less.append, **tensor)
    assert [each.plan.micro for each in less if not each.fits][0] == 8
    assert tight[0].fits and tight[0].plan.micro * (1 + tight[0].plan.recompute) <= 8
    # Every rank's share of the samples, however many take them together.
    assert table([tight[0]]).splitlines()[1].split()[3] == f"{4 / tight[0].seconds:.2f}"


def test_a_plan_that_the_benchmark_has_kept_comes_back() -> None:
    for plan in (*legal_plans(8, MACHINE), *mesh_plans(8, MACHINE)):
        kept = json.loads(json.dumps({"plan": dataclasses.asdict(plan)}))
        assert plan_of(kept) == plan
        del kept["plan"]["shape"]  # of an earlier run
        assert plan_of(kept) == replace(plan, shape=MeshShape())


def test_what_is_not_judged_is_named() -> None:
    lines = unjudged(MACHINE)
    assert not [line for line in lines if line.startswith("pipeline.stages")]
    assert any(line.startswith("pipeline.stages = 5, 6, 10") for line in unjudged(replace(MACHINE, ranks=60)))
    assert all("not judged" in line for line in lines)
    assert not unjudged(replace(MACHINE, ranks=1))
    assert any("= 5, 6, 10" in line or "10" in line for line in unjudged(replace(MACHINE, ranks=60)))


@pytest.mark.slow  # the command answers: test_plans.py; the engine reads a plan's keys: above
def test_the_answer_carries_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine with too little memory for the whole model and its state on one rank, and costly messages of state."""
    machine, output, config = tmp_path / "machine.json", tmp_path / "plan.json", tmp_path / "ds.json"
    config.write_text(json.dumps({**ADAMW, "zero_optimization": {"overlap_comm": False}}))
    task = Task(Net, rows, 2, json.loads(config.read_text()))
    two = replace(MACHINE, ranks=2)
    whole, cut = (judge(task, TrainingPlan(0, "none", 1 + (shape.tensor == 2), 1, False, 0, shape), two)
                  for shape in (MeshShape(), MeshShape(tensor=2)))  # fmt: skip
    assert whole.memory is not None and cut.memory is not None
    held = [max(each.memory.peak, each.memory.birth) for each in (whole, cut) if each.memory is not None]
    assert held[1] < held[0]
    replace(two, memory=sum(held) // 2, collective=1e8).save(machine)
    told = [f"{__name__}:factory", "--batch", "2", "--machine", str(machine), "--output", str(output)]
    assert cli.main([*told, "--config", str(config)]) == 0
    said = capsys.readouterr().out
    assert "_tp2" in said
    assert next(line for line in said.splitlines() if "_pp2" in line).count("Net returned no loss") == 1
    best = json.loads(output.read_text())
    wide = best.get("tensor_parallel", {}).get("autotp_size", 1)
    assert best["train_micro_batch_size_per_gpu"] * best["gradient_accumulation_steps"] * 2 // wide == 2
    assert ("_tp2" in next(line for line in said.splitlines() if line.startswith("best: "))) == (wide == 2)


@pytest.mark.slow
def test_small_messages_are_measured() -> None:
    """An axis in the middle of a forward sends many: what one takes is more than its bytes."""
    found = calibrate(2)
    assert not found.notes
    assert 0 < found.latency < 0.1
    assert found.message("all_reduce", 1024, (0, 1))[0] < found.latency
