"""What holds an engine's memory, by category; and running out of it, told with the category and the key that helps."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import CodeType, TracebackType
from typing import Any

import psutil
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.engine.build import Components
from deepspeed.engine.report import bytes_of, state_bytes
from deepspeed.engine.state import EngineState
from deepspeed.errors import MemoryExhaustedError
from deepspeed.zero.exhaustion import is_exhaustion
from deepspeed.zero.lifecycle import repeated_blocks
from deepspeed.zero.optimizer_shard import Away

ACTIVATIONS, TRANSIT, GATHERED, OPTIMIZER, GRADIENTS = "activations", "transit", "gathered", "optimizer", "gradients"
PARAMETERS, MASTERS, POOLS = "parameters", "masters", "pools"
_ROOM = 0.8  # of what seems to fit
# In which file memory ran out, innermost first: the category it was for.
_BY_FILE = (
    ("zero/aliases.py", GATHERED), ("zero/lifecycle.py", GATHERED), ("zero/prefetch.py", GATHERED),
    ("zero/wire.py", TRANSIT), ("deepspeed/comm/", TRANSIT), ("zero/buckets.py", GRADIENTS),
    ("zero/reducer.py", GRADIENTS), ("zero/waves.py", OPTIMIZER), ("zero/optimizer_shard.py", OPTIMIZER),
    ("zero/optimizer.py", OPTIMIZER), ("torch/optim/", OPTIMIZER), ("deepspeed/ops/", OPTIMIZER),
)  # fmt: skip


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on a device; on a CPU what the process has resident, which is more."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return get_accelerator().memory_allocated()


class MemoryReport:
    """Categories of an engine's memory.

    Args:
        state: of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        known = sum(self._known().values())
        self._before = allocated(state.device) - known  # what the process had besides

    def _known(self) -> dict[str, int]:
        parts = self._state.components
        found = state_bytes(parts)
        found[TRANSIT] = 0 if parts.reducer is None else bytes_of(parts.reducer.wire.buffers())
        return found

    def by_category(self) -> dict[str, int]:
        """Bytes on this rank now: the kinds of `state_bytes`, transit buffers, and the rest since the engine was made.

        The rest is called activations: between updates it is what the allocator keeps. On a CPU it is measured by what
        is resident, so it has what the C library keeps for later.
        """
        found = self._known()
        found[ACTIVATIONS] = max(0, allocated(self._state.device) - self._before - sum(found.values()))
        return found

    def guard(self, inner: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """`inner`, out of which running out of memory comes as an error with a report."""
        return _Guard(self, inner)

    def exhausted(self, error: BaseException) -> MemoryExhaustedError:
        """The error that says what held the memory, what it ran out for, and which key and value would help."""
        category = _category(error)
        rows = self.by_category()
        table = ", ".join(f"{name} {count / 2**20:,.1f} MiB" for name, count in rows.items())
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return MemoryExhaustedError(
            f"memory ran out for {category} ({first}). Held on this rank: {table}. {self._advice(category, error)}"
        )

    def _advice(self, category: str, error: BaseException) -> str:
        zero, parts, ranks = self._state.ds_config.zero, self._state.components, self._state.axes.same_slice.size
        if category == ACTIVATIONS:
            return self._smaller_batch(_progress(self._state.module, error))
        if category == GATHERED:
            largest = sorted(sum(m.numel for m in group.members) for group in parts.groups)[-2:]
            return (
                f'What would fit: "stage3_max_live_parameters": {sum(largest)}, "stage3_max_reuse_distance": 0, '
                f'"stage3_prefetch_bucket_size": 0 in zero_optimization: two groups at a time'
            )
        if category == TRANSIT:
            least = max(1, zero.reduce_bucket_size // 4)
            return f'What would fit: "reduce_bucket_size": {least} in zero_optimization: fewer gradients travel at once'
        if ranks > 1 and zero.stage < (2 if category == GRADIENTS else 1):
            stage = 2 if category == GRADIENTS else 1
            return f'What would fit: "zero_optimization": {{"stage": {stage}}} splits {category} over {ranks} ranks'
        return (
            'What would fit: "offload_optimizer": {"device": "cpu"} in zero_optimization where there is a device, and '
            '"device": "nvme" with an nvme_path on a CPU: masters, gradient sums and optimizer state leave memory'
        )

    def _smaller_batch(self, progress: float) -> str:
        window, config = self._state.window, self._state.ds_config
        micro, fits = window.micro, int(window.micro * progress * _ROOM)
        divisor = next((size for size in range(max(1, min(fits, micro - 1)), 0, -1) if micro % size == 0), 1)
        if micro > 1:
            return (
                f'What would fit: "train_micro_batch_size_per_gpu": {divisor}, "gradient_accumulation_steps": '
                f"{window.steps * micro // divisor}; the global batch stays"
            )
        if not config.top.activation_checkpointing.enabled:
            return 'What would fit: "activation_checkpointing": {"enabled": true}: backward computes blocks again'
        return "A micro-batch is one sample, and recomputed: cut the model (tensor_parallel, pipeline) or its input"


class _Guard:
    """See `MemoryReport.guard`."""

    __slots__ = ("_inner", "_report")

    def __init__(self, report: MemoryReport, inner: AbstractContextManager[Any]) -> None:
        self._report, self._inner = report, inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        if error is not None and (isinstance(error, MemoryExhaustedError) or is_exhaustion(error)):
            raise self._report.exhausted(error) from error


def holdings(engine: Any) -> list[tuple[str, list[torch.Tensor | None]]]:
    """The tensors of an engine's training state by category; where one lies over several, the first is meant."""
    parts: Components = engine._components
    groups, buckets = parts.groups, [] if parts.reducer is None else parts.reducer.buckets
    gathers = [group for group in groups if group.policy.gathers_before_use]
    states = [] if parts.optimizer is None else list(parts.optimizer.state.values())
    pools = {id(p): p for g in groups for p in (g.tiers.optimizer.pool, g.tiers.parameters.pool) if p is not None}
    sums = [bucket.sum.memory for bucket in buckets if bucket.sum is not None]
    return [
        (PARAMETERS, [*(group.values.memory for group in groups), *engine.module.buffers()]),
        (MASTERS, [group.master.memory for group in groups if group.master is not None]),
        (GRADIENTS, [*sums, *(bucket.local for bucket in buckets)]),
        (OPTIMIZER, [v for s in states for v in s.values() if isinstance(v, torch.Tensor) and not isinstance(v, Away)]),
        (GATHERED, [group.full for group in gathers]),
        (TRANSIT, [] if parts.reducer is None else list(parts.reducer.wire.buffers())),
        (POOLS, [buffer for pool in pools.values() for buffer in pool.buffers()]),
    ]


def _frames(error: BaseException) -> Iterator[Any]:
    """Frames of an error and of what caused it, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
    if error.__cause__ is not None:
        yield from _frames(error.__cause__)


def _category(error: BaseException) -> str:
    """What memory ran out for, by the innermost function of ours, or of torch's optimizers, that asked for it."""
    return next((found for frame in reversed(list(_frames(error))) if (found := _by_code(frame.f_code))), ACTIVATIONS)


def category_of(frame: Any) -> str:
    """What memory is for that the code of a frame, or of one of its callers, asks for."""
    while frame is not None:
        found = _by_code(frame.f_code)
        if found:
            return found
        frame = frame.f_back
    return ACTIVATIONS


@functools.cache
def _by_code(code: CodeType) -> str:
    file = code.co_filename.replace(os.sep, "/")
    if file.endswith("zero/shard_group.py") and "gather" in code.co_name:
        return GATHERED
    return next((category for part, category in _BY_FILE if part in file), "")


def _progress(model: torch.nn.Module, error: BaseException) -> float:
    """The part of forward that was over when an error came, by the blocks; a half where that is not known."""
    places = {block: at for at, block in enumerate(repeated_blocks(model))}
    for frame in _frames(error):
        at = places.get(frame.f_locals.get("self")) if isinstance(frame.f_locals.get("self"), torch.nn.Module) else None
        if at is not None:
            return max(at, 0.5) / len(places)
    return 0.5
