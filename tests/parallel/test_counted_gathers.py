"""What scripts count of an engine on two ranks: gathers of stage 3, names of sharded parameters, samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed.errors import UsageError
from deepspeed.runtime.zero.partitioned_param_profiler import PartitionedParameterProfiler
from deepspeed.utils import debug
from tests.harness.pool import WorkerPool
from tests.parallel.tiny import micro_step, raises, start, tiny

Workers = Callable[[int], WorkerPool]
NONE_LEFT = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def gathers() -> list[dict[str, tuple[int, int, bool]]]:
    """Events of two watched steps, the second after a reset, and of one that nobody watched."""
    with start(3, zero=NONE_LEFT) as engine:
        micro_step(engine, 0)
        profiler = PartitionedParameterProfiler(engine.timers)
        profiler.watch(engine)
        found = []

        def note() -> None:
            counters = profiler.event_counters.items()
            found.append({n: (c.count, c.num_elem, engine.timers(n).elapsed(reset=False) > 0) for n, c in counters})

        for step in (1, 2):
            profiler.reset_events()
            micro_step(engine, step)
            note()
        profiler.log_events()
        profiler.stop()
        micro_step(engine, 3)
        note()
        return found


def test_gathers_are_counted(workers: Workers) -> None:
    count, elements = 4, sum(p.numel() for p in tiny().parameters())  # three blocks and a head, each gathered whole
    for first, second, unwatched in workers(2).run(gathers):
        assert first == second == unwatched
        for way in ("forward", "backward"):
            for event in ("fetch_submit", "fetch_wait"):
                assert first[f"{way}_{event}"] == (count, elements, True), (way, event)
        assert not any("prefetch" in name for name in first)


def ahead() -> dict[str, int]:
    limits = {"stage3_max_live_parameters": 10**6, "stage3_max_reuse_distance": 0}
    with start(3, zero={**limits, "stage3_prefetch_bucket_size": 10**6}) as engine:
        for step in range(2):
            micro_step(engine, step)
        profiler = PartitionedParameterProfiler(engine.timers)
        profiler.watch(engine.module)
        micro_step(engine, 2)
        return {name: counter.count for name, counter in profiler.event_counters.items()}


def test_gathers_ahead_of_use_are_counted_apart(workers: Workers) -> None:
    for found in workers(2).run(ahead):
        assert found["forward_prefetch_submit"] >= 1, found


def refusals() -> None:
    profiler = PartitionedParameterProfiler(None)
    profiler.start_event("x")
    profiler.stop_event("x", 1)
    profiler.log_events()
    assert not profiler.event_counters
    with start(2) as engine:
        counting = PartitionedParameterProfiler(engine.timers)
        with raises(UsageError, "without sharded parameters", "stage 3"):
            counting.watch(engine)
        with raises(UsageError, "stop_event('mine')", "without start_event"):
            counting.stop_event("mine", 1)


def test_what_cannot_be_counted_is_said(workers: Workers) -> None:
    workers(2).run(refusals)


def named() -> tuple[str, ...]:
    with start(3) as engine:
        debug.debug_extract_module_and_param_names(engine.module)
        param = engine.module.out.weight
        found = debug.debug_param2name_id_shape_status(param), debug.debug_param2name_id_numel(param), str(param.ds_id)
        debug.debug_clear_module_and_param_names()
        return found


def test_a_sharded_parameter_is_named_with_its_true_shape(workers: Workers) -> None:
    for status, numel, number in workers(2).run(named):
        assert status == f"name=out.weight id={number} shape=torch.Size([3, 6]) status=ZeroParamStatus.NOT_AVAILABLE"
        assert numel == f"name=out.weight id={number} numel=18"


def rate(accumulation: int, enabled: bool) -> tuple[Any, ...]:
    """The engine's figures after four updates, and those of a watch around the last two."""
    with start(1, accumulation=accumulation, timers={"throughput": {"enabled": enabled}}) as engine:
        watched = 0.0
        for update in range(4):
            for micro in range(accumulation):
                began = time.perf_counter()
                micro_step(engine, micro)
                watched += (time.perf_counter() - began) * (update >= 2)
            time.sleep(0.2)  # between updates: not theirs
            dist.barrier()
        timer = engine.tput_timer
        samples = 2 * engine.train_batch_size() / watched
        return timer.avg_samples_per_sec() / samples, timer.global_step_count, timer.micro_step_count, timer.batch_size


@pytest.mark.parametrize("accumulation", [1, 3])
def test_samples_per_second(workers: Workers, accumulation: int) -> None:
    for ratio, updates, micros, batch in workers(2).run(rate, accumulation, True):
        assert 1.0 <= ratio < 3.0  # of what a watch around forward, backward and step says: without what is around them
        assert (updates, micros, batch) == (4, 4 * accumulation, 2 * accumulation * 2)


def test_samples_per_second_can_be_off(workers: Workers) -> None:
    assert [one[:3] for one in workers(2).run(rate, 1, False)] == [(0.0, 0, 0)] * 2
