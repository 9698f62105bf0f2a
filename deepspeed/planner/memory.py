"""Prediction of each rank's memory, by running the engine on tensors without values in one process."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.fake_world import FakeMessage, UnheardError
from deepspeed.comm.shared_memory.transport import SharedMemory
from deepspeed.engine.initialize import initialize
from deepspeed.engine.memory.categories import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, POOLS, category_of
from deepspeed.engine.memory.report import holdings
from deepspeed.engine.state_size import bytes_of
from deepspeed.errors import ArgumentError
from deepspeed.foundation.log import logger
from deepspeed.ops.fake_tensors import Valueless, device_kernels
from deepspeed.planner.fake_world import simulated_world
from deepspeed.planner.train_program import Loss, Program
from deepspeed.profiling.live_memory import LiveMemory
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.layout.placement import placement_of

Beside = Callable[[], contextlib.AbstractContextManager[Any]]
_restricted = ContextVar("_restricted", default=False)  # whether a caller is inside of `young_objects`
_frozen_by_caller = threading.Event()  # not asked again once it is set: the answer counts all frozen objects


@dataclass(frozen=True)
class MemoryCount:
    """Bytes of live tensors of one rank.

    Args:
        peak: maximum during updates; in results of `predict_memory`, for ranks that run in lockstep.
        at_peak: bytes at the peak by category (see `engine.memory_by_category`).
        at_rest: bytes by category after an update.
        birth: maximum until the engine is created.
        disk: bytes of offloaded state on disk.
        parameters: elements of the model, over all ranks.
        held: elements of this rank's model slice, before ZeRO shards them.
        most: peak if other ranks lag as far behind as the engine allows, with more gradients in transit.
        host: part of `at_peak` in host memory, by category, if there is a device: offloaded state and buffers.
        measured: whether the figures are measured; else predicted.
        experts: elements of the model that are divided among the ranks of expert parallelism, over all ranks.
    """

    peak: int
    at_peak: dict[str, int]
    at_rest: dict[str, int]
    birth: int
    disk: int
    parameters: int
    most: int
    host: dict[str, int] = field(default_factory=dict)
    held: int = 0
    measured: bool = field(default=False, compare=False)
    experts: int = 0

    @property
    def on_host(self) -> int:
        """Return the bytes in host memory; only meaningful if there is a device."""
        return sum(self.host.values())

    def table(self) -> str:
        """Format the categories as lines of text."""
        names = sorted({*self.at_peak, *self.at_rest}, key=lambda name: -self.at_peak.get(name, 0))
        rows = [("measured" if self.measured else "predicted", "at peak", "at rest")]
        rows += [(name, _mib(self.at_peak.get(name, 0)), _mib(self.at_rest.get(name, 0))) for name in names]
        rows.append(("together", _mib(self.peak), _mib(sum(self.at_rest.values()))))
        lines = [f"{name:12s} {peak:>12s} {rest:>12s}" for name, peak, rest in rows]
        return "\n".join([*lines, f"making the engine takes {_mib(self.birth)}; on disk {_mib(self.disk)}"])


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def predict_memory(
    model: nn.Module | Callable[[], nn.Module],
    config: Any,
    world_size: int = 1,
    *,
    batch: Any,
    rank: int = 0,
    loss: Loss | None = None,
    optimizer: Any = None,
    updates: int = 3,
    expert_load: float = 1.0,
) -> MemoryCount:
    """Predict the memory of a CPU rank by running the engine on tensors without values.

    Args:
        model: a module, which is copied, or a callable that creates one; its module is created without memory.
        config: dict, path or base64 of the JSON.
        world_size: number of ranks of the run.
        batch: one micro-batch of a rank; see `Program`.
        rank: rank to simulate.
        loss: computes the loss from (output, batch); None: the output's loss, or the mean of its first tensor.
        optimizer: a callable that creates one from parameters; None: the JSON's optimizer.
        updates: number of updates to run; memory does not change after the third.
        expert_load: under expert parallelism, the choices (pairs of a token and an expert) that this rank's experts
            get, over the mean of all ranks; the most that is possible if that is less.

    Raises:
        ArgumentError: the rank does not exist, `expert_load` is negative, `model` returns no module, or the output has
            no loss.
        UsageError: this process is already a rank of a run.
        DeepSpeedConfigError: the configuration is invalid.
    """
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} of world_size {world_size}: ranks are 0 to {world_size - 1}")
    program = Program(model, config, batch, loss, optimizer, updates, expert_load)
    prediction = simulate(program, rank, world_size)
    if world_size == 1:
        return prediction
    return replace(prediction, most=max(prediction.peak, simulate(program, rank, world_size, late=True).peak))


def simulate(
    program: Program,
    rank: int,
    size: int,
    beside: Beside = contextlib.nullcontext,
    *,
    late: bool = False,
    device: bool = False,
    per_host: int = 0,
    stage_outputs: dict[int, Any] | None = None,
) -> MemoryCount:
    """Run a program as one rank of a simulated world.

    A pipeline stage needs the messages of earlier stages. If they are unknown, those stages run first, without
    `beside`.

    Args:
        program: the program to run.
        rank: rank to simulate.
        size: number of ranks.
        beside: creates a context around the updates, such as a clock; its value is `mark` of `Program.run`.
        late: whether other ranks lag as far behind as the engine allows.
        device: whether the rank has a device with its own memory; its messages then need buffers, while CPU ranks
            read each other's memory.
        per_host: ranks per host, for reductions that start within hosts; 0: `LOCAL_WORLD_SIZE`, or all.
        stage_outputs: outputs by pipeline part, from runs of other stages; the run adds its own to this dict.

    Raises:
        UnheardError: pipeline stages wait for each other's messages.
    """
    stage_outputs = {} if stage_outputs is None else stage_outputs

    def run(rank: int, beside: Beside) -> MemoryCount:
        kernels = device_kernels() if device else contextlib.nullcontext()
        how: dict[str, Any] = {"late": late, "device": device, "per_host": per_host, "stage_outputs": stage_outputs}
        world = simulated_world(rank, size, program.expert_load, **how)
        with _quiet(), kernels, world, Valueless() as valueless:
            return _counted(replace(program, batch=valueless.stand_ins(program.batch)), beside)

    waiting = [rank]  # each rank needs a message of the next one
    while True:
        known = len(stage_outputs)
        try:
            prediction = run(waiting[-1], beside if len(waiting) == 1 else contextlib.nullcontext)
        except UnheardError as unheard:
            if len(waiting) > 1 and len(stage_outputs) > known:
                waiting.pop()  # the rank that needs its message can continue
            elif unheard.rank in waiting:
                raise
            else:
                waiting.append(unheard.rank)
            continue
        if len(waiting) == 1:
            return prediction
        waiting.pop()


def measure_memory(
    model: nn.Module | Callable[[], nn.Module],
    config: Any,
    *,
    batch: Any,
    loss: Loss | None = None,
    optimizer: Any = None,
    updates: int = 3,
) -> MemoryCount:
    """Measure this rank's memory in a real run. All ranks must call this.

    Arguments as in `predict_memory`, and errors about these.
    """
    return replace(_counted(Program(model, config, batch, loss, optimizer, updates)), measured=True)


def _counted(program: Program, beside: Beside = contextlib.nullcontext) -> MemoryCount:
    with young_objects(), LiveMemory(category_of, _is_foreign) as live:
        model = program.made_model()
        trained = [param for param in model.parameters() if param.requires_grad]
        count, optimizer = sum(param.numel() for param in model.parameters()), program.optimizer
        engine, *_ = initialize(model=model, model_parameters=trained, optimizer=optimizer, config=program.settings())
        del model, trained
        try:
            live.mark(holdings(engine))
            gc.collect()
            birth = live.peak
            live.restart_peak()
            with beside() as mark:
                program.run(engine, lambda: live.mark(holdings(engine)), mark)
            gc.collect()
            at_peak, groups = live.at_peak(), engine._components.groups
            tiers = {id(tier): tier for group in groups for tier in vars(group.tiers).values()}
            disk = sum(tier.disk.nbytes for tier in tiers.values() if tier.name == "nvme")
            host = _with_host(engine, at_peak)
            held = sum(member.numel for group in groups for member in group.members)
            divided = [(param, placement_of(param).ep) for param in engine.module.parameters()]
            experts = sum(ep * getattr(param, "ds_numel", param.numel()) for param, ep in divided if ep > 1)
            return MemoryCount(
                live.peak, at_peak, live.now(), birth, disk, count, live.peak, host, held, experts=experts
            )
        finally:
            engine.destroy()


def _is_foreign(storage: torch.UntypedStorage) -> bool:
    return SharedMemory.is_of_a_peer(storage) or FakeMessage.owns(storage)


@contextlib.contextmanager
def young_objects() -> Iterator[None]:
    """Restrict garbage collection inside the context to new objects, since imports create about a million others.

    Many runs share one such context: entering it counts those objects, which takes as long as a small run.
    """
    if _restricted.get():
        yield
        return
    if not _frozen_by_caller.is_set() and gc.get_freeze_count():
        _frozen_by_caller.set()
    own = not _frozen_by_caller.is_set()  # those of the caller would be unfrozen too
    if own:
        gc.freeze()
    token = _restricted.set(True)
    try:
        yield
    finally:
        _restricted.reset(token)
        if own:
            gc.unfreeze()


def _with_host(engine: Any, at_peak: dict[str, int]) -> dict[str, int]:
    """Return the part of `at_peak` that is in host memory if there is a device, by category."""
    parts, totals = engine._components, Counter[str]()
    totals[POOLS] = at_peak.get(POOLS, 0)
    if any(group.tiers.optimizer is not RESIDENT for group in parts.groups):
        whole = sum(b.local.nbytes for b in parts.reducer.buckets if b.local is not None) if parts.reducer else 0
        totals[MASTERS], totals[OPTIMIZER] = at_peak.get(MASTERS, 0), at_peak.get(OPTIMIZER, 0)
        totals[GRADIENTS] = max(0, at_peak.get(GRADIENTS, 0) - whole)
    values = [g.values.memory for g in parts.groups if g.tiers.parameters is not RESIDENT]
    totals[PARAMETERS] = min(at_peak.get(PARAMETERS, 0), bytes_of(values))
    return {category: count for category, count in totals.items() if count}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages below warning level inside the context."""
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)
