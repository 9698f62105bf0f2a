"""What the engine promises about windows, counters, optimizers, schedules and reports, at every stage on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, UsageError
from tests.parallel.tiny import (
    STAGES,
    Tiny,
    adamw,
    expect_close,
    loss_of,
    masters,
    micro_step,
    raises,
    reference,
    rows,
    said,
    sgd,
    start,
    tiny,
    with_words,
)
from tests.parity.configs import config
from tests.parity.reference import Reference

RANKS = 2


# -- windows and counters ---------------------------------------------------------------------------------------------


def counters() -> None:
    for stage in STAGES:
        with start(stage, accumulation=2) as engine:
            assert engine.get_batch_info() == (8, 2, 2) and engine.train_batch_size() == 8
            seen = []
            for step in range(5):
                boundary = engine.is_gradient_accumulation_boundary()
                micro_step(engine, step)
                assert engine.was_step_applied() == boundary
                seen.append((engine.micro_steps, engine.global_steps, engine.global_samples))
            assert seen == [(1, 0, 0), (2, 1, 8), (3, 1, 8), (4, 2, 16), (5, 2, 16)]
            engine.flush()
            engine.flush()  # an empty window: nothing
            assert (engine.global_steps, engine.skipped_steps) == (3, 0)


def test_counters(workers: Any) -> None:
    workers(RANKS).run(counters)


def batch_size_changes() -> None:
    twin = reference([[0], [1, 2, 3], [4]], RANKS)
    for stage in STAGES:
        with start(stage) as engine:
            micro_step(engine, 0)
            engine.set_train_batch_size(12)
            assert engine.get_batch_info() == (12, 2, 3)
            micro_step(engine, 1)
            with raises(UsageError, "middle of a window"):
                engine.set_train_batch_size(4)
            micro_step(engine, 2)
            micro_step(engine, 3)
            engine.set_train_batch_size(4)
            micro_step(engine, 4)
            expect_close(masters(engine), twin.parameters(), at=stage)
            with raises(ArgumentError, "13", "4"):
                engine.set_train_batch_size(13)
            engine.set_train_micro_batch_size(5)
            assert engine.train_batch_size() == 10


def test_set_train_batch_size(workers: Any) -> None:
    workers(RANKS).run(batch_size_changes)


def forced_boundaries() -> None:
    """Accelerate's way: the boundary is set before each backward, `step` called only at a boundary."""
    twin = reference([[0, 1], [2]], RANKS, accumulation=2)  # the last window keeps the factor 1/2
    for stage in STAGES:
        with start(stage, accumulation=2) as engine:
            for step, boundary in enumerate([False, True, True]):
                loss = loss_of(engine, rows(step, dist.get_rank()))
                engine.set_gradient_accumulation_boundary(is_boundary=boundary)
                assert engine.is_gradient_accumulation_boundary() == boundary
                engine.backward(loss)
                if boundary:
                    engine.step()
            assert engine.global_steps == 2
            expect_close(masters(engine), twin.parameters(), at=stage)


def test_forced_boundary_keeps_the_factor(workers: Any) -> None:
    workers(RANKS).run(forced_boundaries)


def sums_over_the_window() -> None:
    twin = reference([[0, 1], [2, 3]], RANKS, accumulation=1)
    for stage in STAGES:
        with start(stage, accumulation=2) as engine:
            for step in range(4):
                loss = loss_of(engine, rows(step, dist.get_rank()))
                returned = engine.backward(loss, scale_wrt_gas=False)
                assert returned.item() == loss.item()
                engine.step()
            expect_close(masters(engine), twin.parameters(), at=stage)


def test_scale_wrt_gas_false_sums_over_the_window(workers: Any) -> None:
    workers(RANKS).run(sums_over_the_window)


ITEMS = 12
SPLITS = {  # per rank: the sizes of its micro-batches
    "even": [[6], [6]],
    "uneven ranks": [[5], [7]],
    "uneven micro-batches": [[1, 4], [3, 4]],
    "three": [[2, 2, 2], [1, 1, 4]],
}


def summed_items(split: list[list[int]], items: torch.Tensor) -> list[torch.Tensor]:
    before = sum(sum(sizes) for sizes in split[: dist.get_rank()])
    mine = split[dist.get_rank()]
    return list(items[before : before + sum(mine)].split(mine))


def counted_items() -> None:
    items = rows(0, 0, ITEMS)
    dense = tiny()
    (dense(items).square().mean(-1).sum() / ITEMS).backward()
    wanted = {name: p.grad for name, p in dense.named_parameters()}
    norm = torch.stack([g.norm() for g in wanted.values()]).norm().item()
    before = {name: p.detach().clone() for name, p in dense.named_parameters()}
    for stage in STAGES:
        for name, split in SPLITS.items():
            for flushed in (False, True):
                window = len(split[0]) + flushed
                with start(stage, optimizer=lambda p: sgd(p, lr=1.0), accumulation=window) as engine:
                    for x in summed_items(split, items):
                        loss = engine(x).square().mean(-1).sum()
                        engine.backward(loss, num_items=len(x))
                        engine.step()
                    if flushed:
                        engine.flush()
                    after = masters(engine)
                    ours = {key: before[key] - after[key] for key in wanted}
                    expect_close(ours, wanted, at=(stage, name, flushed))
                    assert abs(engine.get_global_grad_norm() - norm) <= 1e-5
    with start(1, accumulation=2) as engine:
        micro_step(engine, 0)
        with raises(UsageError, "num_items"):
            engine.backward(loss_of(engine, rows(1, 0)), num_items=2)


def test_num_items_is_the_same_for_every_split(workers: Any) -> None:
    workers(RANKS).run(counted_items)


LOADERS = {  # policy: the batches each rank sees, as (first sample, size, weight)
    "drop": [[(0, 2), (2, 2)], [(10, 2), (12, 1)]],
    "pad": [[(0, 2), (2, 2), (4, 1)], [(10, 2), (12, 1), None]],
    "cycle": [[(0, 2), (2, 2), (4, 1)], [(10, 2), (12, 1), (10, 2)]],
}


def loop_policies() -> None:
    """Rank 0 has batches of 2, 2, 1 samples, rank 1 of 2, 1; windows hold two micro-batches."""
    data = rows(7, 0, 20)
    loaders = [[data[0:2], data[2:4], data[4:5]], [data[10:12], data[12:13]]]
    for policy, seen in LOADERS.items():
        twin = tiny()
        optimizer = sgd(twin.parameters())
        for low in range(0, len(seen[0]), 2):
            batches = [data[b[0] : b[0] + b[1]] for rank in seen for b in rank[low : low + 2] if b is not None]
            samples = torch.cat(batches)
            (twin(samples).square().mean(-1).sum() / len(samples)).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = {name: p.detach() for name, p in twin.named_parameters()}
        for stage in STAGES:
            with start(stage, accumulation=2) as engine:
                steps = 0
                for x in engine.loop(loaders[dist.get_rank()], policy=policy):
                    engine.backward(engine(x).square().mean())
                    engine.step()
                    steps += 1
                assert steps == len(seen[0]), (policy, steps)
                expect_close(masters(engine), wanted, at=(policy, stage))


def test_loop_policies_weigh_real_samples(workers: Any) -> None:
    workers(RANKS).run(loop_policies)


def no_sync_rules() -> None:
    twin = reference([[0, 1]], RANKS, accumulation=1)
    for stage in STAGES:
        with start(stage) as engine:
            with engine.no_sync():
                assert engine.inside_no_sync_ctxt
                engine.backward(loss_of(engine, rows(0, dist.get_rank())))
                with raises(UsageError, "no_sync"):
                    engine.step()
                with raises(UsageError, "nested"), engine.no_sync():
                    pass
            assert not engine.inside_no_sync_ctxt
            micro_step(engine, 1)
            expect_close(masters(engine), twin.parameters(), at=stage)
            engine.backward(loss_of(engine, rows(2, dist.get_rank())))
            engine.zero_grad()
            assert engine.module.out.weight.grad is None


def test_no_sync_and_zero_grad(workers: Any) -> None:
    workers(RANKS).run(no_sync_rules)


def summed_over_ranks() -> None:
    twin = Reference(tiny(), lambda p: sgd(p, lr=0.2), RANKS)
    for rank in range(RANKS):
        twin.backward(rank, loss_of(twin.copies[rank], rows(0, rank)))
    twin.step()
    for stage in STAGES:
        with start(stage, gradient_allreduce_op="sum") as engine:
            micro_step(engine, 0)
            expect_close(masters(engine), twin.parameters(), at=stage)


def test_gradient_allreduce_op_sum(workers: Any) -> None:
    workers(RANKS).run(summed_over_ranks)


def without_norm_or_unused() -> None:
    twin = reference([[0]], RANKS)
    for stage in STAGES:
        with start(stage, zero={"compute_grad_norm": False}) as engine:
            micro_step(engine, 0)
            assert engine.get_global_grad_norm() is None
            expect_close(masters(engine), twin.parameters(), at=stage)
        with start(stage, zero={"ignore_unused_parameters": False}) as engine:
            micro_step(engine, 0)
            engine.backward(engine.module.layers[0](rows(1, 0)).square().mean())
            with raises(UsageError, "out.weight", "ignore_unused_parameters"):
                engine.step()
    with raises(DeepSpeedConfigError, "compute_grad_norm"):
        start(1, clip=1.0, zero={"compute_grad_norm": False})


def test_compute_grad_norm_and_unused_parameters(workers: Any) -> None:
    workers(RANKS).run(without_norm_or_unused)


# -- optimizers and schedules -----------------------------------------------------------------------------------------


def client_groups() -> None:
    for stage in STAGES:
        twin, model = Reference(tiny(), lambda p: grouped(p), RANKS), tiny()
        optimizer = grouped(list(model.parameters()))
        dicts = list(optimizer.param_groups)
        with start(stage, model, optimizer=optimizer) as engine:
            assert engine.client_optimizer is optimizer
            assert all(a is b for a, b in zip(engine.optimizer.param_groups, dicts, strict=True))
            for step, rate in enumerate([0.1, 0.3]):
                dicts[1]["lr"] = twin.optimizer.param_groups[1]["lr"] = rate  # in the client's own object
                assert engine.get_lr() == [0.05, rate] and engine.get_type() == ["a", None]
                for rank in range(RANKS):
                    twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank)))
                twin.step()
                micro_step(engine, step)
                expect_close(masters(engine), twin.parameters(), at=(stage, step))
            assert engine.get_mom() == [0.9, 0.0]


def grouped(parameters: list[Any]) -> torch.optim.Optimizer:
    first = {"params": parameters[:3], "lr": 0.05, "momentum": 0.9, "type": "a"}
    return torch.optim.SGD([first, {"params": parameters[3:]}], lr=0.1)


def test_client_groups_stay_live(workers: Any) -> None:
    workers(RANKS).run(client_groups)


def ways_to_name_an_optimizer() -> None:
    model = tiny()
    halves = [{"params": list(model.parameters())[:4], "lr": 0.5}, {"params": list(model.parameters())[4:]}]
    json = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    settings = config(1, model, **json)
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, model_parameters=halves, config=settings)
    assert engine.get_lr() == [0.5, 0.1] and optimizer is engine.optimizer and loader is schedule is None
    engine.destroy()
    with said() as lines:  # a generator, and nothing named: AdamW with torch's defaults
        model = tiny()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(2, model))
    assert isinstance(engine.basic_optimizer, torch.optim.AdamW) and engine.get_lr() == [1e-3]
    assert engine.basic_optimizer.param_groups[0]["weight_decay"] == 1e-2
    assert with_words(lines, "AdamW") >= (dist.get_rank() == 0)
    engine.destroy()
    model = tiny()
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config(3, model))
    assert isinstance(engine.basic_optimizer, torch.optim.SGD)
    engine.destroy()


def test_ways_to_name_an_optimizer(workers: Any) -> None:
    workers(RANKS).run(ways_to_name_an_optimizer)


def schedules() -> None:
    def rates(**how: Any) -> list[float]:
        with start(1, accumulation=2, **how) as engine:
            seen = []
            for step in range(6):
                seen += engine.get_lr()
                micro_step(engine, step)
            return seen

    halving = {"step_size": 1, "gamma": 0.5}
    wanted = [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    optimizer = sgd((model := tiny()).parameters())
    client = torch.optim.lr_scheduler.StepLR(optimizer, **halving)
    assert rates(model=model, optimizer=optimizer, lr_scheduler=client) == wanted
    assert rates(lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, **halving)) == wanted
    assert rates(scheduler={"type": "StepLR", "params": halving}) == wanted
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.3, "warmup_num_steps": 3, "warmup_type": "linear"}
    found = rates(scheduler={"type": "WarmupLR", "params": warmup})
    assert torch.allclose(torch.tensor(found), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.1])), found
    with raises(ArgumentError, "lr_scheduler"):
        start(1, lr_scheduler=lambda: None)


def test_client_callable_and_json_schedules(workers: Any) -> None:
    workers(RANKS).run(schedules)


# -- engines without an optimizer, several engines, modules behind engines ---------------------------------------------


def without_optimizer() -> None:
    wanted = tiny()(rows(0, 0))
    for stage in STAGES:
        for parameters in (None, []):
            model = tiny()
            engine, *rest = deepspeed.initialize(model=model, model_parameters=parameters, config=config(stage, model))
            assert rest[1:] == [None, None] and engine.basic_optimizer is None and engine.get_lr() == []
            engine.eval()
            with torch.no_grad():
                assert (engine(rows(0, 0)) - wanted).abs().max() <= 1e-6
            held = engine.state_bytes()
            assert held["masters"] == held["gradients"] == held["optimizer"] == 0, held
            for call in (engine.step, engine.flush, lambda e=engine: e.backward(loss_of(e, rows(0, 0)))):
                with raises(UsageError, "model_parameters"):
                    call()
            assert engine.get_global_grad_norm() is None and engine.loss_scale() == 1.0
            engine.destroy()


def test_engine_without_optimizer(workers: Any) -> None:
    workers(RANKS).run(without_optimizer)


def engines_side_by_side() -> None:
    twin = reference([[0, 1], [2, 3]], RANKS, optimizer=adamw)
    engines = [start(stage, optimizer=adamw, accumulation=2) for stage in (3, 1, 0, 2, 3)]
    for step in range(4):
        for engine in engines:
            micro_step(engine, step)
    for engine in engines:
        expect_close(masters(engine), twin.parameters(), at=engine.zero_optimization_stage())
    for engine in engines:
        engine.destroy()


def test_engines_of_different_stages_side_by_side(workers: Any) -> None:
    workers(RANKS).run(engines_side_by_side)


class Tagged(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.config = "the model's"

    def shout(self) -> str:
        return self.greeting.upper()


def fall_through() -> None:
    with start(3, Tagged()) as engine:
        assert engine.greeting == "hello" and engine.shout() == "HELLO"
        assert isinstance(engine.config, dict) and engine.module.config == "the model's"
        assert {"shout", "backward"} <= set(dir(engine))
        with raises(AttributeError, "Tagged", "no_such_thing"):
            _ = engine.no_such_thing
        assert not hasattr(engine, "no_such_thing")


def test_attributes_fall_through_to_the_module(workers: Any) -> None:
    workers(RANKS).run(fall_through)


def destroyed() -> None:
    """After the context the model is plain at stages 0 to 2, and may get another engine at any stage."""
    model = tiny()
    windows = []
    for step, stage in enumerate((0, 1, 2, 3, 3, 0)):
        windows.append([step])
        with start(stage, model) as engine:
            micro_step(engine, step)
            after = masters(engine)
        expect_close(after, reference(windows, RANKS).parameters(), at=stage)
        assert engine.optimizer is None
        if stage < 3:
            assert all(type(p) is nn.Parameter for p in model.parameters())
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            loss_of(model, rows(0, 0)).backward()
            assert all(p.grad is not None for p in model.parameters())
            model.zero_grad()


def test_context_manager_gives_the_model_back(workers: Any) -> None:
    workers(RANKS).run(destroyed)


# -- data and reports -------------------------------------------------------------------------------------------------


def training_data() -> tuple[list[int], int]:
    samples = [(torch.full((6,), float(n)), n) for n in range(12)]
    with start(2, training_data=samples) as engine:
        loader = engine.training_dataloader
        seen = []
        for x, numbers in loader:
            engine.backward(loss_of(engine, x))
            engine.step()
            seen += numbers.tolist()
        evaluation = engine.deepspeed_io(samples, batch_size=3, route="eval")
        assert [len(numbers) for _, numbers in evaluation] == [3, 3]
        return seen, engine.global_steps


def test_training_data_is_shared_out(workers: Any) -> None:
    seen, steps = zip(*workers(RANKS).run(training_data), strict=True)
    assert sorted(seen[0] + seen[1]) == list(range(12)) and steps == (3, 3)


def reports() -> dict[str, list[str]]:
    found = {}
    for name, settings in {
        "silent": {"steps_per_print": float("inf")},
        "none": {},
        "often": {"steps_per_print": 2, "wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True},
    }.items():
        with said() as lines, start(1, **settings) as engine:
            lines.append("-- trained from here")
            for step in range(4):
                micro_step(engine, step)
        found[name] = lines
    return found


def test_reports(workers: Any) -> None:
    first, second = workers(RANKS).run(reports)
    for name in ("silent", "none"):
        assert first[name][-1] == "-- trained from here", first[name]
    often = first["often"]
    assert with_words(often, "step 2:", "lr 0.1", "gradient norm") == with_words(often, "step 4:", "samples/s") == 1
    assert with_words(often, "state bytes", "parameters", "masters") == 2
    assert with_words(often, "zero_optimization.stage") == 1, often
    assert with_words(often, "gradient_clipping is not set") == 1
    assert all(lines == ["-- trained from here"] for lines in second.values()), second


def breakdown() -> tuple[list[str], dict[str, float], dict[str, float]]:
    """Lines of two windows of two micro-batches, and the figures after the first and after the second."""
    settings = {"wall_clock_breakdown": True, "memory_breakdown": True, "accumulation": 2}
    with said() as lines, start(1, **settings) as engine:
        assert engine.get_wall_clock_timers() == {}
        found = []
        for step in range(4):
            micro_step(engine, step)
            found.append(engine.get_wall_clock_timers())
    return lines, found[1], found[3]


def test_times_of_micro_batches_and_windows(workers: Any) -> None:
    from deepspeed.utils import timer

    parts = ("FORWARD", "BACKWARD", "BACKWARD_INNER", "BACKWARD_REDUCE", "STEP")
    micro, window = ([getattr(timer, f"{part}_{kind}_TIMER") for part in parts] for kind in ("MICRO", "GLOBAL"))
    assert window == ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
    assert micro == [f"{name}_microstep" for name in window]
    (lines, first, second), (others, *_) = workers(RANKS).run(breakdown)
    shown = [line for line in lines if "time (ms) | " in line]
    of_micro = [line for line in shown if all(f"{name}: " in line for name in micro)]
    of_window = [line for line in shown if all(f"| {name}: " in line for name in window)]
    assert (len(of_micro), len(of_window), len(shown)) == (4, 2, 6), shown
    assert with_words(of_micro, "step_microstep: 0.00") == 2, of_micro  # those without an update
    for found in (first, second):
        assert set(found) == {*micro, *window}
        assert found["fwd"] > found["fwd_microstep"] > 0 and found["bwd"] >= found["bwd_inner"] > 0
        assert found["step"] > found["bwd_allreduce"] >= 0 and found["step"] == pytest.approx(
            found["step_microstep"], rel=0.01
        )
    for part, times in (("forward", 4), ("backward", 4), ("step", 2)):
        assert with_words(lines, f"before {part}\nMA ") == with_words(lines, f"after {part}\nMA ") == times
    assert not with_words(others, "time (ms)") and not with_words(others, "MA ")


def compiled() -> None:
    twin = reference([[0]], RANKS)
    for stage in (1, 3):
        with start(stage) as engine:
            assert not engine.is_compiled
            engine.compile(backend="eager")
            assert engine.is_compiled
            micro_step(engine, 0)
            expect_close(masters(engine), twin.parameters(), at=stage)
            with raises(NotImplementedError, "schedule"):
                engine.compile(schedule=[1])


def test_compile(workers: Any) -> None:
    workers(RANKS).run(compiled)
