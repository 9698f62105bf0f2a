"""Memory of an engine by category, reports for out-of-memory errors, and a warning before the container's limit."""

from __future__ import annotations

import re
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import psutil
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.engine.build import Components
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.memory.categories import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    PARAMETERS,
    POOLS,
    TRANSIT,
    frames_of,
    innermost,
)
from deepspeed.engine.memory.suggestions import (
    Advice,
    Holding,
    Setting,
    advise_on_state,
    free_bytes,
    near_places,
    units_in,
)
from deepspeed.engine.state_size import bytes_of, state_bytes, state_tensors
from deepspeed.errors import MemoryExhaustedError
from deepspeed.foundation.cgroup import CgroupMemory
from deepspeed.foundation.log import logger
from deepspeed.foundation.malloc import limits_addresses, resident
from deepspeed.zero.api.memory_estimate import HOST
from deepspeed.zero.layout.units import repeated_blocks
from deepspeed.zero.optimizer.state_tensor import Away
from deepspeed.zero.out_of_memory import is_exhaustion

_ROOM = 0.8  # part of the computed size that is suggested
_AT_ONCE = 5  # tensors of the requested size that an operator and its gradient are assumed to need together
_LEAST, _SHARE = 64 << 20, 0.1  # free memory, in bytes and as a part of the limit, below which the watchdog warns
_PACE = 8 << 30  # bytes per second that a process is assumed to allocate at most
_LONGEST_S, _SHORTEST_S = 0.25, 0.004


def allocated(device: torch.device) -> int:
    """Return the allocated bytes on a device; on a CPU the resident set size of the process, which is larger."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return get_accelerator().memory_allocated()


class MemoryReport:
    """Memory of an engine by category.

    Attributes:
        left_by_forward: bytes of activations after the first forward; negative before it.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        known = sum(self._known().values())
        # Memory of the process besides training state. On a CPU, gradient sums have no pages before the first gradient.
        self._unwritten = known - self._resident() if state.device.type == "cpu" else 0
        self._before = allocated(state.device) - known + self._unwritten
        self._mapped = psutil.Process().memory_info().vms - known
        self.left_by_forward = -1

    def _known(self) -> dict[str, int]:
        parts = self._state.components
        sizes = state_bytes(parts)
        sizes[TRANSIT] = 0 if parts.reducer is None else bytes_of(parts.reducer.reduce_scatter.buffers())
        return sizes

    def _resident(self) -> int:
        """Return the resident bytes of the known state."""
        parts = self._state.components
        state_parts = [t for tensors in state_tensors(parts).values() for t in tensors if not isinstance(t, Away)]
        return resident([*state_parts, *([] if parts.reducer is None else parts.reducer.reduce_scatter.buffers())])

    def by_category(self) -> dict[str, int]:
        """Return this rank's bytes by category: those of `state_bytes`, "transit" (message buffers) and "activations".

        Activations are all other memory allocated since the engine was created; on a CPU, where they are derived from
        the resident set, also memory that the C library caches.
        """
        sizes = self._known()
        known = sum(sizes.values())
        if self._unwritten > 0:  # until all state has been written once
            self._unwritten = max(0, known - self._resident())
        sizes[ACTIVATIONS] = max(0, allocated(self._state.device) - self._before - known + self._unwritten)
        return sizes

    def note_forward(self) -> None:
        self.left_by_forward = self._live()

    def _live(self) -> int:
        """Return the bytes of activations; if the address space is limited, the mapped bytes, resident or not."""
        if self._state.device.type == "cpu" and limits_addresses():
            return max(0, psutil.Process().memory_info().vms - self._mapped - sum(self._known().values()))
        return self.by_category()[ACTIVATIONS]

    def exhausted(self, error: BaseException) -> MemoryExhaustedError:
        """Create the error to raise instead of out-of-memory `error`, with memory by category and suggested keys."""
        frames = list(frames_of(error))
        category = innermost(frames)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        rows, advice = self.by_category(), self._advice(category, frames, self._requested_bytes(error))
        exhausted_error = MemoryExhaustedError(
            f"memory ran out for {category} ({first}). {self._table(rows)}. {advice}"
        )
        exhausted_error.category, exhausted_error.suggestion = category, advice.settings
        return exhausted_error

    def running_out(self, frames: Sequence[Any], free: int) -> str:
        """Format the warning that `free` bytes of the container are left; `frames`: call stack, outermost first."""
        category = innermost(frames)
        advice = self._advice(category, frames, 0)
        left = f"memory of the container runs out for {category} ({free / 2**20:,.0f} MiB are left)"
        return f"{left}. {self._table(self.by_category())}. {advice}"

    @staticmethod
    def _requested_bytes(error: BaseException) -> int:
        """Return the bytes of the failed allocation; 0 if the error does not contain them."""
        match = re.search(r"allocate (\d+) bytes|allocate ([\d.]+) ([KMG])iB", str(error))
        if match is None:
            return 0
        return int(match[1]) if match[1] else int(float(match[2]) * 1024 ** (" KMG".index(match[3])))

    @staticmethod
    def _progress(model: torch.nn.Module, frames: Sequence[Any]) -> float:
        """Return the fraction of the model's blocks whose forward had run when memory ran out; 0.5 if unknown."""
        places = {block: index for index, block in enumerate(repeated_blocks(model))}
        for frame in frames:
            module = frame.f_locals.get("self")
            index = places.get(module) if isinstance(module, torch.nn.Module) else None
            if index is not None:
                return max(index, 0.5) / len(places)
        return 0.5

    @staticmethod
    def _table(rows: dict[str, int]) -> str:
        return "Held on this rank: " + ", ".join(f"{name} {count / 2**20:,.1f} MiB" for name, count in rows.items())

    def _advice(self, category: str, frames: Sequence[Any], requested: int) -> Advice:
        """Return the first suggestion that frees enough memory, else the reason; `requested`: bytes, 0 if unknown."""
        held, free = self._known(), free_bytes(self._state.device)
        # Optimizer state that the first updates will still create needs a part of the free memory.
        needs = self.holding().needs(Setting.of(self._state.ds_config))
        coming = needs - sum(held.values())
        later = max(0, free - int(max(0.0, coming)))
        if category == TRANSIT and (suggestion := self._smaller_buckets(held[TRANSIT] + free)):
            return suggestion
        if category == POOLS and HOST not in near_places(self._state.device) and (suggestion := self._fewer_buffers()):
            return suggestion
        room = self._state.components.room or sum(held.values()) + free
        # If the training state alone does not fit, it must become smaller, whatever the last allocation was for.
        fits = needs <= room
        if category == ACTIVATIONS and fits:
            suggestion = self._less_activations(self._progress(self._state.module, frames), later, requested)
            if suggestion:
                return suggestion
        # The training state must leave room for the activations.
        activations = max(0, self.left_by_forward)
        if category == ACTIVATIONS and (fits or self.left_by_forward < 0):
            activations = self._live() + _AT_ONCE * requested
        pipes = self._state.axes.mesh.size("pp") > 1
        return advise_on_state(self._state.ds_config, self.holding(), room - activations, not pipes, category)

    def _smaller_buckets(self, room: int) -> Advice | None:
        """Suggest a smaller `reduce_bucket_size` for `room` bytes, or return None if that does not help."""
        bucket, groups = self._state.ds_config.zero.reduce_bucket_size, self._state.components.groups
        width = max((group.dtype.itemsize for group in groups), default=4)
        tensors = [member.numel for group in groups for member in group.members]
        whole = [g.numel for g in groups if g.policy.gathers_before_use]
        least = max([*whole, max(tensors, default=1)])  # elements that are always sent together, at any bucket size
        fits = int(_ROOM * room / (3 * width))
        if fits < least or bucket <= least:
            return None
        then = max(least, min(fits, min(bucket, sum(tensors)) // 4))
        why = f"at most {3 * then * width / 2**20:,.0f} MiB of gradients travel at once, of {room / 2**20:,.0f}"
        return Advice({"zero_optimization": {"reduce_bucket_size": then}}, why)

    def _fewer_buffers(self) -> Advice | None:
        zero, keys = self._state.ds_config.zero, dict[str, Any]()
        for name, part in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
            if part.device == "nvme" and part.buffer_count > 1:
                keys[name] = {"buffer_count": 1}
        return Advice({"zero_optimization": keys}, "one slice is read ahead, and one written behind") if keys else None

    def _less_activations(self, progress: float, free: int, requested: int) -> Advice | None:
        window, config = self._state.window, self._state.ds_config
        micro, live = window.micro, self._live()
        needed = max(live / progress, live + 3 * requested) + 2 * requested  # the last term is for backward
        fits = int(micro * _ROOM * min(1.0, (live + free) / max(needed, 1)))
        divisor = next((size for size in range(min(fits, micro - 1), 0, -1) if micro % size == 0), 0)
        keys: dict[str, Any] = {"train_micro_batch_size_per_gpu": divisor or 1}
        keys["gradient_accumulation_steps"] = window.steps * micro // (divisor or 1)
        if divisor:
            return Advice(keys, f"of {micro} samples {fits} fitted; the global batch stays")
        blocks = len(repeated_blocks(self._state.module))
        # Activations of one block at a time, and the inputs of all blocks.
        if blocks > 1 and not config.top.activation_checkpointing.enabled:
            if 2 * needed / micro / blocks <= _ROOM * (live + free):
                again = {"activation_checkpointing": {"enabled": True}}
                return Advice(again | (keys if micro > 1 else {}), "backward computes blocks again")
        return None

    def holding(self) -> Holding:
        """Return the sizes of this engine's model that determine the memory of its training state."""
        state, parts = self._state, self._state.components
        updated = [] if parts.optimizer is None else parts.optimizer.fragments
        members = [member for group in parts.groups for member in group.members]
        sizes = {id(member.param): member.numel for member in members}
        shapes = [(member.numel, member.uid in updated) for member in members]
        units, ranks = units_in(state.module, sizes), state.axes.dp_sp_group.size
        return Holding.of(state.ds_config, shapes, units, parts.model_bytes, ranks, state.basic_optimizer, state.device)


def holdings(engine: Any) -> list[tuple[str, list[torch.Tensor | None]]]:
    """Return (category, tensors) of an engine's training state; count a tensor of several categories in the first."""
    parts: Components = engine._components
    groups, buckets = parts.groups, [] if parts.reducer is None else parts.reducer.buckets
    gathers = [group for group in groups if group.policy.gathers_before_use]
    states = [] if parts.optimizer is None else parts.optimizer.state.of_leaves()
    pools = {id(p): p for g in groups for p in (g.tiers.optimizer.pool, g.tiers.parameters.pool) if p is not None}
    sums = [bucket.sum.memory for bucket in buckets if bucket.sum is not None]
    return [
        (PARAMETERS, [*(group.values.memory for group in groups), *engine.module.buffers()]),
        (MASTERS, [group.master.memory for group in groups if group.master is not None]),
        (GRADIENTS, [*sums, *(bucket.local for bucket in buckets)]),
        (OPTIMIZER, [v for s in states for v in s.values() if isinstance(v, torch.Tensor) and not isinstance(v, Away)]),
        (GATHERED, [group.full for group in gathers]),
        (TRANSIT, [] if parts.reducer is None else list(parts.reducer.reduce_scatter.buffers())),
        (POOLS, [buffer for pool in pools.values() for buffer in pool.buffers()]),
    ]


class MemoryGuard:
    """Context that turns out-of-memory errors inside into MemoryExhaustedError with a memory report.

    Args:
        inner: context that is entered too.
        measures: record the activations at the end, after a forward.
    """

    __slots__ = ("_inner", "_measures", "_report")

    def __init__(self, report: MemoryReport, inner: AbstractContextManager[Any], measures: bool = False) -> None:
        self._report, self._inner, self._measures = report, inner, measures

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)
        if error is not None and (isinstance(error, MemoryExhaustedError) or is_exhaustion(error)):
            raise self._report.exhausted(error) from error
        if self._measures and error is None:
            self._report.note_forward()


class MemoryWatchdog:
    """Background thread that warns before the container's memory limit is reached; without a limit, no thread runs.

    The thread polls the free memory, more often as it decreases, and logs one warning for each shortage, with the
    memory by category and suggested keys of the JSON.

    Args:
        container: source of limit and usage; None: the cgroup of this process.
    """

    def __init__(self, report: MemoryReport, container: CgroupMemory | None = None) -> None:
        self._container = container or CgroupMemory()
        self._limit = self._container.limit()
        self._ended, self._thread = threading.Event(), None
        if self._limit:
            arguments = (weakref.ref(self), weakref.ref(report), threading.get_ident(), self._ended)
            self._thread = threading.Thread(target=self._look, args=arguments, name="deepspeed-pressure", daemon=True)
            self._thread.start()

    @property
    def left(self) -> int:
        return self._limit - self._container.used()

    @property
    def scarce(self) -> float:
        """Return the free bytes below which the warning is logged."""
        return max(_LEAST, _SHARE * self._limit)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    @staticmethod
    def _look(
        watch: weakref.ref[MemoryWatchdog], report: weakref.ref[MemoryReport], trains: int, ended: threading.Event
    ) -> None:
        """Poll until `ended` is set or the engine is freed; `trains` is the id of the training thread."""
        warned = False
        while True:
            here, held = watch(), report()
            if here is None or held is None:
                return
            left, scarce = here.left, here.scarce
            if left < scarce and not warned:
                warned = True
                frame = sys._current_frames().get(trains)
                frames = [] if frame is None else [frame for frame, _ in traceback.walk_stack(frame)]
                logger.warning(held.running_out(frames[::-1], left))
                del frame, frames
            warned = warned and left < 2 * scarce
            del here, held
            if ended.wait(min(_LONGEST_S, max(_SHORTEST_S, (left - scarce) / _PACE))):
                return
