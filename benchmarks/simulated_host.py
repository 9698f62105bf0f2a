"""The host's time per launch: steps of a model so small that nothing else takes any, with every check off.

Both sides run on the CPU with real operators on tiny tensors, as one rank of eight that are not there; CPU time of the
calling thread, the least of many steps, over the operators and messages of a step.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import deepspeed
from benchmarks import simulated_models
from benchmarks.simulated_models import Decoder, llama, package_config
from deepspeed.planner.fake_world import simulated_world
from deepspeed.simulator.trace import KERNEL, Recording
from deepspeed.simulator.trace_recorder import StepRecorder

TINY = llama(24, 32, 2, 64, vocabulary=128)
STEPS = 15


def _attention(q: Any, k: Any, v: Any, *_: Any) -> tuple[torch.Tensor]:
    return (F.scaled_dot_product_attention(q, k, v, is_causal=True),)


def _package(stage: int) -> Callable[[], None]:
    config = package_config(stage, 1)
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else units so small are never gathered
    engine, *_ = deepspeed.initialize(model=Decoder(TINY), config=config, dist_init_required=False)
    tokens = torch.zeros(1, 8, dtype=torch.long)

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


def _fsdp2() -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = Decoder(TINY)
    mesh = init_device_mesh("cpu", (8,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), fused=True), torch.zeros(1, 8, dtype=torch.long)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _measured(step: Callable[[], None]) -> dict[str, float]:
    for _ in range(3):
        step()
    recording = Recording("host", 0, 8)
    with StepRecorder(recording):
        step()
    launches = sum(entry.kind == KERNEL for entry in recording.entries)
    least = float("inf")
    for _ in range(STEPS):
        begun = time.thread_time()
        step()
        least = min(least, time.thread_time() - begun)
    return {"seconds": least, "launches": launches, "per_launch": least / launches}


def main(path: str) -> None:
    """Measure all, and keep it."""
    torch.set_num_threads(1)
    simulated_models.attention = _attention
    found = {}
    for stage in (0, 2, 3):
        with simulated_world(0, 8):
            found[f"package-{stage}"] = _measured(_package(stage))
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with contextlib.suppress(NotImplementedError):
        found["fsdp2"] = _measured(_fsdp2())
    for name, row in found.items():
        print(f"{name:12s} {row['seconds'] * 1e3:7.1f} ms CPU, {row['launches']:5d} operators, "
              f"{row['per_launch'] * 1e6:5.1f} us each")  # fmt: skip
    Path(path).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
