"""Offload at the level of an engine: what users see and touch is what it is without offload, wherever state rests."""

from __future__ import annotations

import copy
import functools
import tempfile
from typing import Any

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.storage.async_copy import mover_of
from tests.parallel.test_hard_models import misses
from tests.parallel.tiny import adamw, loss_of, masters, micro_step, raises, rows, said, start, tiny, with_words
from tests.parity.cases import CASES
from tests.parity.cells import tier_of
from tests.parity.configs import config
from tests.parity.worlds import EngineWorld, ReferenceWorld

RANKS = 2


def begin(stage: int, tier: str, optimizer: Any = adamw, **settings: Any) -> Any:
    zero = {"reduce_bucket_size": 40, **tier_of(tier), **settings.pop("zero", {})}
    return start(stage, optimizer=optimizer, zero=zero, **settings)


def trained(engine: Any, steps: int) -> dict[str, torch.Tensor]:
    for step in range(steps):
        micro_step(engine, step)
    return masters(engine)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- hard models ------------------------------------------------------------------------------------------------------


def hard_case(name: str, stage: int, tier: str, precision: str) -> Any:
    world = EngineWorld(stage, precision, zero=tier_of(tier))
    CASES[name](world)
    world.close()
    return world.notes


HARD = [
    ("unfreezing_later", 3, "nvme-nvme", "fp32"),
    ("unfreezing_later", 2, "cpu", "bf16"),
    ("gan", 3, "cpu-cpu", "bf16"),
    ("gradient_inspection", 2, "nvme", "fp32"),
    ("branch_on_one_rank", 3, "nvme-nvme", "bf16"),
    ("partial_window", 1, "ratio", "fp32"),
    ("deepcopied", 3, "nvme-cpu", "fp32"),
    ("no_sync", 1, "nvme", "bf16"),
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("name", "stage", "tier", "precision"), HARD)
def test_hard_models_equal_the_dense_reference(workers: Any, name: str, stage: int, tier: str, precision: str) -> None:
    world = ReferenceWorld(RANKS, precision)
    CASES[name](world)
    for rank, notes in enumerate(workers(RANKS).run(hard_case, name, stage, tier, precision, timeout=90)):
        assert not misses(notes, world.notes[rank], precision), f"rank {rank}"


# -- what users read and write ----------------------------------------------------------------------------------------


def touched_state(stage: int, tier: str) -> dict[str, torch.Tensor]:
    """Read and write state by every public way between steps; what comes out at the end."""
    from deepspeed.utils import (
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )
    from deepspeed.zero import GatheredParameters

    engine = begin(stage, tier, precision="bf16")
    seen = {}
    trained(engine, 2)
    weight, bias = engine.module.out.weight, engine.module.layers[0][0].bias
    seen["moment"] = safe_get_full_optimizer_state(weight, "exp_avg").clone()
    safe_set_full_optimizer_state(weight, seen["moment"] * 2, "exp_avg")
    safe_set_full_fp32_param(bias, torch.linspace(0, 1, bias.numel()))
    with GatheredParameters(weight, modifier_rank=0):
        with torch.no_grad():
            weight.mul_(0.5)
    for param in (weight, bias):
        local, state = safe_get_local_fp32_param(param), safe_get_local_optimizer_state(param, "exp_avg_sq")
        if local is not None and state is not None:
            safe_set_local_optimizer_state(param, state + 1e-3, "exp_avg_sq")
        safe_set_local_fp32_param(param, local * 1.25 if local is not None else None)
    engine.backward(loss_of(engine, rows(9, 0)))
    seen["grad"] = safe_get_full_grad(weight).clone()
    assert torch.equal(seen["grad"], weight.grad.float())
    safe_get_local_grad(weight)
    safe_set_full_grad(bias, torch.ones_like(bias, dtype=torch.float32))
    engine.step()
    saved = copy.deepcopy(engine.optimizer.state_dict())
    micro_step(engine, 3)
    engine.optimizer.load_state_dict(saved)
    seen |= trained(engine, 1)
    engine.destroy()
    return seen


@pytest.mark.parametrize(("stage", "tiers"), [(2, ("cpu", "nvme")), (3, ("cpu-cpu", "nvme-nvme", "ratio-nvme"))])
def test_accessors_see_and_set_what_rests_elsewhere(workers: Any, stage: int, tiers: tuple[str, ...]) -> None:
    wanted = workers(RANKS).run(touched_state, stage, "device")
    for tier in tiers:
        for ours, theirs in zip(workers(RANKS).run(touched_state, stage, tier), wanted, strict=True):
            assert same(ours, theirs), tier


def edited_in_place() -> None:
    outcomes = []
    for tier in ("device", "cpu", "nvme"):
        engine = begin(2, tier)
        trained(engine, 1)
        with torch.no_grad():
            engine.module.out.weight.clamp_(-0.01, 0.01)
        outcomes.append(trained(engine, 2))
        engine.destroy()
    assert same(outcomes[1], outcomes[0]) and same(outcomes[2], outcomes[0])


def test_edits_of_whole_parameters_reach_their_masters(workers: Any) -> None:
    workers(RANKS).run(edited_in_place)


# -- the step in waves ------------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its groups, as schedule-free ones do, and steps by the count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        step = torch.optim.SGD.step
        # Once some SGD has been made, torch's wrapper would run the hooks here a second time.
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, closure)


def note(step: Any, seen: list[str], closure: Any = None) -> Any:
    """What somebody puts around a step."""
    seen.append("begin")
    found = step(closure)
    seen.append("end")
    return found


def waves() -> None:
    seen: list[str] = []
    outcomes = []
    for tier in ("device", "cpu", "nvme"):
        engine = begin(2, tier, optimizer=lambda parameters: Counting(parameters, lr=0.1))
        inner = engine.basic_optimizer
        inner.register_step_pre_hook(lambda *_: seen.append("before"))
        inner.register_step_post_hook(lambda *_: seen.append("after"))
        assert len(engine.optimizer.groups) > 2
        around = functools.partial(note, inner.step, seen)
        inner.step = around
        outcomes.append(trained(engine, 3))
        assert inner.param_groups[0]["count"] == 3
        engine.destroy()
    assert seen == ["begin", "before", "after", "end"] * 9
    assert same(outcomes[1], outcomes[0]) and same(outcomes[2], outcomes[0])


def test_one_step_runs_hooks_once_and_counts_once(workers: Any) -> None:
    workers(RANKS).run(waves)


def placeholders() -> None:
    engine = begin(3, "nvme-nvme")
    trained(engine, 2)
    held = engine.state_bytes()
    assert held["masters"] == held["gradients"] == held["optimizer"] == held["parameters"] == 0
    for leaf in [leaf for group in engine.basic_optimizer.param_groups for leaf in group["params"]]:
        state = engine.basic_optimizer.state[leaf]
        assert leaf.untyped_storage().nbytes() == leaf.itemsize and leaf.isnan().all()
        assert state["exp_avg"].shape == leaf.shape and state["exp_avg"].device.type == "meta"
        assert state["exp_avg"].abs().sum() > 0  # who uses it reads it
        state["exp_avg"].zero_()
        assert not state["exp_avg"].any() and state["exp_avg"].device.type == "meta"
        with raises(UsageError, "safe_set_full_optimizer_state"):
            state["exp_avg"].view(-1)[:1].fill_(1.0)
    assert engine.state_bytes()["optimizer"] == 0
    engine.destroy()


def test_between_steps_nothing_stands_in_memory_for_state_on_disk(workers: Any) -> None:
    workers(RANKS).run(placeholders)


def standing_still(stage: int, tier: str) -> None:
    engine = begin(stage, tier, precision="bf16", accumulation=2)
    pools = {t.pool for g in engine.optimizer.groups for t in (g.tiers.optimizer, g.tiers.parameters) if t.pool}
    assert pools

    def window(step: int) -> tuple[Any, ...]:
        micro_step(engine, 2 * step)
        micro_step(engine, 2 * step + 1)
        return engine.state_bytes(), sum(p.allocations for p in pools), sum(p.nbytes for p in pools)

    window(0)
    settled = window(1)
    assert all(window(step) == settled for step in range(2, 6))
    engine.destroy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("stage", "tier"), [(1, "cpu"), (2, "nvme"), (3, "cpu-cpu"), (3, "nvme-nvme")])
def test_after_the_second_step_nothing_is_allocated(workers: Any, stage: int, tier: str) -> None:
    workers(1).run(standing_still, stage, tier)
    workers(RANKS).run(standing_still, stage, tier)


# -- keys -------------------------------------------------------------------------------------------------------------


def shares() -> None:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    for ratio in (0.0, 0.3, 0.5, 1.0):
        zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
        engine = begin(2, "device", zero=zero)
        groups = engine.optimizer.groups
        away = sum(g.numel for g in groups if g.tiers.optimizer.name == "cpu")
        total, largest = sum(g.numel for g in groups), max(g.numel for g in groups)
        assert abs(away - ratio * total) <= largest
        engine.destroy()
    for kind, cls in (("Adam", DeepSpeedCPUAdam), ("AdamW", DeepSpeedCPUAdam), ("Lion", DeepSpeedCPULion)):
        model = tiny()
        json = config(2, model, zero=tier_of("cpu"), optimizer={"type": kind, "params": {"lr": 1e-3}})
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=json)
        assert type(engine.basic_optimizer) is cls
        engine.destroy()


def test_ratio_and_optimizer_of_the_json(workers: Any) -> None:
    workers(RANKS).run(shares)


def low_masters(precision: str) -> None:
    block = {precision: {"enabled": True, f"{precision}_master_weights_and_grads": True}}
    if precision == "fp16":
        block["fp16"]["initial_scale_power"] = 4
    outcomes = []
    for stage, tier in ((2, "device"), (2, "cpu"), (3, "cpu-cpu"), (3, "nvme-nvme")):
        engine = begin(stage, tier, **block)
        outcomes.append(trained(engine, 3))
        assert all(g.updated.dtype == g.dtype for g in engine.optimizer.groups)
        assert all(b.total.dtype == b.group.dtype for b in engine._components.reducer.buckets)
        engine.destroy()
    assert all(same(found, outcomes[0]) for found in outcomes[1:])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_masters_rest_where_they_are_told(workers: Any, precision: str) -> None:
    workers(RANKS).run(low_masters, precision)


def kept_in_memory() -> None:
    zero = tier_of("nvme-nvme")
    zero["offload_param"]["max_in_cpu"] = 30
    engine = begin(3, "device", zero=zero)
    slices = [(g.tiers.parameters.name, g.values.numel) for g in engine.optimizer.groups]
    assert 0 < sum(numel for name, numel in slices if name == "cpu") <= 30
    assert any(name == "nvme" for name, _ in slices)
    engine.destroy()


def test_max_in_cpu_limits_what_stays_in_memory(workers: Any) -> None:
    workers(RANKS).run(kept_in_memory)


def predicted() -> None:
    with said() as lines:
        begin(3, "nvme-nvme").destroy()
    assert with_words(lines, "predicted for each rank at rest", "device 0.00 MB", "nvme") == 1
    assert with_words(lines, "nvme_path", "free", "MB/s", "step") == 1


def small_on_disk() -> None:
    zero = {"offload_param": {"device": "nvme", "nvme_path": tempfile.gettempdir() + "/deepspeed-tests"}}
    for limit, times in ((None, 1), (0, 0)):  # by default so much stays in memory that nothing is on the disk
        zero["offload_param"] |= {} if limit is None else {"max_in_cpu": limit}
        with said() as lines:
            begin(3, "device", zero=zero).destroy()
        assert with_words(lines, "nothing rests on nvme", "max_in_cpu") == times, lines


def test_a_disk_on_which_nothing_rests_is_said(workers: Any) -> None:
    workers(1).run(small_on_disk)


def test_the_plan_is_said_in_a_line(workers: Any) -> None:
    workers(1).run(predicted)


# -- birth, and moving state by hand ----------------------------------------------------------------------------------


def born(remote: str | None, tier: str) -> None:
    import deepspeed

    wanted = begin(3, "device")
    expected = trained(wanted, 2)
    wanted.destroy()
    sections = tier_of(tier)
    json = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, **sections}}
    with deepspeed.zero.Init(remote_device=remote, config_dict_or_path=json):
        model = tiny()
    place = model.out.weight._ds_member.group.tiers.parameters.name
    assert place == (remote or sections["offload_param"]["device"])
    with torch.no_grad():
        assert all(p.isfinite().all() for p in model.parameters())
    engine = start(3, model, optimizer=adamw, zero=sections)
    assert same(trained(engine, 2), expected)
    engine.destroy()


@pytest.mark.parametrize(("remote", "tier"), [("cpu", "cpu-cpu"), ("nvme", "nvme-nvme"), (None, "nvme-nvme")])
def test_models_are_born_where_their_slices_rest(workers: Any, remote: str | None, tier: str) -> None:
    workers(RANKS).run(born, remote, tier)


def moved(stage: int) -> None:
    engine = begin(stage, "device", precision="bf16")
    before, held = trained(engine, 2), engine.state_bytes()
    engine.offload_states()
    away = engine.state_bytes()
    assert away["masters"] == away["gradients"] == away["optimizer"] == 0
    with raises(RuntimeError, "reload_states"):
        engine(rows(0, 0))
    with raises(RuntimeError, "reload_states"):
        masters(engine)
    with raises(RuntimeError, "reload_states"):
        engine.offload_states()
    engine.reload_states()
    assert same(masters(engine), before) and engine.state_bytes() == held
    engine.optimizer.offload_states(include=["optim_states"], device="cpu", pin_memory=False, non_blocking=True)
    assert engine.state_bytes()["optimizer"] == 0 and engine.state_bytes()["masters"] == held["masters"]
    with raises(RuntimeError, "reload_states"):
        engine.optimizer.offload_states()
    engine.optimizer.reload_states(non_blocking=True)
    again = trained(engine, 1)
    engine.destroy()
    other = begin(stage, "device", precision="bf16")
    trained(other, 2)
    assert same(trained(other, 1), again)
    other.destroy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_move_away_and_come_back(workers: Any, stage: int) -> None:
    workers(RANKS).run(moved, stage)


def leaving() -> None:
    """The way gradients take from a device to the host; its copies and streams are plain ones on the CPU."""
    engine = begin(2, "cpu", precision="bf16")
    bucket = engine._components.reducer.buckets[0]
    pool, numel = bucket.group.tiers.optimizer.pool, bucket.total.numel
    for round_, wanted in enumerate((1.5, 3.0, 4.5)):
        bucket.filled = round_ > 0
        total = bucket.total.acquire()
        parts = [torch.full((numel,), value, dtype=torch.bfloat16) for value in (1.0, 2.0)]
        bucket.leave_device(parts, 0.5, total).wait()
        assert total.eq(wanted).all()
    group = bucket.group
    with group.updated.borrowed(changed=True) as master, group.values.borrowed() as values:
        master.fill_(1 / 3)
        mover_of(group.device).deliver(values, master, pool)
        assert torch.equal(values, master.bfloat16())
    engine.destroy()


def test_the_way_between_device_and_host(workers: Any) -> None:
    workers(1).run(leaving)


def backward_of_a_part(stage: int, precision: str) -> None:
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    sections = {precision: {"enabled": True}} if precision != "fp32" else {}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, **sections,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    )  # fmt: skip
    x = torch.randn(4, 16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    engine.offload_states(include=[States.contiguous_grad_buffer, States.lp_grads])
    with raises(RuntimeError, "reload_states"):  # a part alone is not refused in forward
        engine.module[0](x).float().square().mean().backward()
    engine.destroy()


@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), (2, "fp32"), (3, "bf16")])
def test_gradients_are_not_written_to_an_accumulator_that_is_away(workers: Any, stage: int, precision: str) -> None:
    workers(1).run(backward_of_a_part, stage, precision)
