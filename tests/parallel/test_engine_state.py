"""State around an engine: named random states in its checkpoints, and what a dropped one leaves."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.comm.collectives.one_sided import release_abandoned
from deepspeed.comm.process_groups.axis import world_axis
from tests.parallel.tiny import adamw, micro_step, rows, start


def draws(names: tuple[str, ...]) -> list[torch.Tensor]:
    found = []
    for name in names:
        with get_cuda_rng_tracker().fork(name):
            found.append(torch.rand(3))
    return found


def named_states_come_back(folder: str) -> None:
    tracker, names = get_cuda_rng_tracker(), ("model-parallel-rng", "data")
    before = tracker.get_states()
    try:
        tracker.reset()
        for at, name in enumerate(names):
            tracker.add(name, 100 * dist.get_rank() + at)
        draws(names)
        with start(2) as engine:
            micro_step(engine, 0)
            engine.save_checkpoint(folder)
            wanted = [*draws(names), torch.rand(3)]
        tracker.reset()
        tracker.add("data", 7)
        tracker.add("later", 8)  # unknown to the checkpoint
        later = tracker.get_states()["later"]
        with start(2) as engine:
            engine.load_checkpoint(folder)
            assert all(torch.equal(a, b) for a, b in zip([*draws(names), torch.rand(3)], wanted, strict=True))
        assert torch.equal(tracker.get_states()["later"], later)
    finally:
        tracker.set_states(before)


def test_named_random_states_are_in_a_checkpoint(workers: Any, tmp_path: Path) -> None:
    workers(2).run(named_states_come_back, str(tmp_path), timeout=120)


def collect() -> None:
    while gc.collect():
        pass


def serving() -> int:
    shared = world_axis().shared
    return 0 if shared is None else len(shared.serving)


def drop_engines(stage: int, zero: dict[str, Any]) -> None:
    release_abandoned([world_axis()])
    served = serving()
    for turn in range(3):
        engine = start(stage, optimizer=adamw, zero=zero)
        micro_step(engine, turn)
        held = [weakref.ref(each) for each in (engine, engine.module, *engine._components.groups)]
        del engine
        collect()
        assert not any(each() is not None for each in held), stage
        assert serving() <= served + 8 * (stage == 3)  # those of the engine before have gone
    release_abandoned([world_axis()])
    assert serving() == served and not world_axis().abandoned


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dropped_engine_goes(workers: Any, stage: int) -> None:
    workers(2).run(drop_engines, stage, {}, timeout=120)


def test_a_dropped_offloaded_engine_goes(workers: Any) -> None:
    workers(2).run(
        drop_engines, 3, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, timeout=60
    )


def dropped_early() -> None:
    """Rank 0 drops its engine while rank 1 still pulls its slices, and makes tensors where they were."""
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    x = rows(0, 0)
    for _ in range(3):
        with torch.no_grad():
            engine = start(3, zero=zero)
            wanted = engine(x)
            dist.barrier()
            if dist.get_rank() == 0:
                del engine
                collect()
                axis = world_axis()
                kept = [axis.empty(5000, torch.float32, torch.device("cpu")).fill_(99) for _ in range(40)]
                dist.barrier()
                dist.barrier()
                del kept
            else:
                dist.barrier()
                time.sleep(0.01)
                assert torch.equal(engine(x), wanted)
                dist.barrier()
                del engine
        collect()


def test_a_slower_rank_may_pull_from_a_dropped_engine(workers: Any) -> None:
    workers(2).run(dropped_early, timeout=120)
