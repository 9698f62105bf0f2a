"""Records what a device is asked: streams, events, messages on a process group that moves nothing (torch's "fake").

What the package, FSDP2 and DDP ask of streams and events passes through the methods of `torch.cuda` that are wrapped
here. Messages pass torch's dispatch as operators of `c10d` and are answered here; their work orders the stream that
waits, as NCCL's does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.foundation.pytree import tensors_in
from deepspeed.ops.cpu_optimizer import HostOptimizer
from deepspeed.ops.triton.blocks import traffic
from deepspeed.ops.triton.variants import KernelForm
from deepspeed.simulator.trace import (
    DISK,
    EMPTIED,
    HOST,
    KERNEL,
    MESSAGE,
    NOTHING,
    HostEvent,
    MemoryEvent,
    Recording,
)  # fmt: skip
from deepspeed.simulator.trace_recorder import DTYPES, StepRecorder
from deepspeed.storage.simulated import SimulatedDisk
from deepspeed.storage.tensor_file import Transfer

# Operators of c10d: what they are, where the whole tensor stands (the larger of these arguments), and the group.
_MESSAGES = {
    "allreduce_": ("all_reduce", 1),
    "allgather_": ("all_gather", 2),
    "_allgather_base_": ("all_gather", 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 2),
    "reduce_scatter_": ("reduce_scatter", 2),
    "_reduce_scatter_base_": ("reduce_scatter", 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 2),
    "alltoall_": ("all_to_all", 2),
    "alltoall_base_": ("all_to_all", 2),
    "broadcast_": ("broadcast", 1),
    "send": ("send", 1),
    "recv_": ("send", 1),
}


class _Work(dist.Work):
    """A message of the recording: waiting orders the current stream, as NCCL's does."""

    def __init__(self, recorder: DeviceRecorder, number: int, out: list[torch.Tensor]) -> None:
        super().__init__()
        self._recorder, self._number, self._out = recorder, number, out

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.order(self._number)
        return True

    def synchronize(self) -> None:
        self._recorder.order(self._number)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        self._recorder.unawaited.append(self._number)
        future: Any = torch.futures.Future()
        future.set_result(self._out)
        return future


class RecordedKernels:
    """The package's kernels of messages, which enter a recording with their bytes and compute nothing.

    Their arithmetic is not counted: 20 operations for each of some bytes are hidden by memory.
    """

    def __init__(self, recorder: DeviceRecorder) -> None:
        self._recorder = recorder

    def has(self, variant: KernelForm) -> bool:
        """All are there."""
        return True

    def prepare(self, variants: Iterable[KernelForm]) -> None:
        """Do nothing."""

    def launch(self, variant: KernelForm, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Record a launch."""
        nbytes = traffic(variant, tuple(arguments))
        self._recorder.add(HostEvent(KERNEL, variant.kernel, self._recorder.current(), nbytes=nbytes, dtype="fp32"))


class DeviceRecorder(StepRecorder):
    """See the module.

    Args:
        recording: that is filled.

    Attributes:
        unawaited: messages of which a future was asked; `order_all` waits for them.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording, "cuda")
        self._lanes: dict[str, int] = {}
        self.unawaited: list[int] = []

    def current(self) -> int:
        """The stream that is current in this thread."""
        return torch.cuda.current_stream().stream_id

    def watch(self, undo: contextlib.ExitStack) -> None:
        """Also what is asked of streams and events."""
        super().watch(undo)

        def wrap(owner: Any, name: str, made: Callable[..., Any]) -> None:
            plain, own = getattr(owner, name), name in vars(owner)
            setattr(owner, name, made)
            undo.callback(*((setattr, owner, name, plain) if own else (delattr, owner, name)))

        _watch_streams(self, wrap)
        _watch_host(self, wrap)

    def order_all(self) -> None:
        """The current stream goes on behind what C++ waits for by itself (DDP's buckets)."""
        for number in self.unawaited:
            self.order(number)
        self.unawaited.clear()

    def message(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note it, and answer with its work."""
        if name == "barrier":
            return _Work(self, NOTHING, []).boxed()
        kind, tensors = _MESSAGES[name]
        there = [list(tensors_in(args[at])) for at in range(tensors)]
        number = NOTHING
        if self.on and self.here(there[0][0]):
            nbytes = max(sum(t.numel() * t.itemsize for t in each) for each in there)
            entry = HostEvent(
                MESSAGE, kind, self.current(), nbytes=float(nbytes), dtype=DTYPES.get(there[0][0].dtype, "")
            )
            found = (v for v in args if isinstance(v, torch.ScriptObject) and "ProcessGroup" in str(v._type()))
            group = dist.ProcessGroup.unbox(next(found))
            entry.group = tuple(dist.get_process_group_ranks(group))
            entry.lane = self._lanes.setdefault(group.group_name, len(self._lanes))
            self.add(entry)
            number = len(self.recording.entries) - 1
        # The package counts who holds its memory: tensors are kept for those alone who may ask for a future.
        self._work = _Work(self, number, there[0] if kind == "all_reduce" else [])  # held until the caller holds it
        answer = self._work.boxed()
        return answer if len(func._schema.returns) == 1 else (args[0], answer)


def _emptied(recorder: DeviceRecorder) -> MemoryEvent:
    return MemoryEvent(len(recorder.recording.entries), EMPTIED, 0, 0)


def _watch_streams(recorder: DeviceRecorder, wrap: Callable[..., None]) -> None:
    events: dict[int, tuple[Any, int]] = {}  # by identity, with the object: an identity is not used again meanwhile

    def record(event: Any, stream: Any = None) -> None:
        events[id(event)] = (event, recorder.behind(None if stream is None else stream.stream_id))

    def behind(event: Any) -> int:
        return events.get(id(event), (None, NOTHING))[1]

    def wait(event: Any, stream: Any = None) -> None:
        recorder.order(behind(event), None if stream is None else stream.stream_id)

    def record_event(stream: Any, event: Any = None) -> Any:
        event = torch.cuda.Event() if event is None else event
        record(event, stream)
        return event

    event_type, stream_type = torch.cuda.Event, torch.cuda.Stream
    wrap(event_type, "record", record)
    wrap(event_type, "wait", wait)
    wrap(event_type, "query", lambda event: True)
    wrap(event_type, "synchronize", lambda event: recorder.wait(behind(event)))
    wrap(stream_type, "wait_event", lambda stream, event: wait(event, stream))
    wrap(stream_type, "wait_stream", lambda stream, o: recorder.order(recorder.behind(o.stream_id), stream.stream_id))
    wrap(stream_type, "record_event", record_event)
    wrap(stream_type, "synchronize", lambda stream: recorder.wait(recorder.behind(stream.stream_id)))
    wrap(torch.cuda, "empty_cache", lambda: recorder.recording.blocks.append(_emptied(recorder)))
    wrap(torch.cuda, "synchronize", lambda device=None: recorder.wait_all())


class _Moving(Transfer):
    """A transfer of the recording: waiting is the host's."""

    def __init__(self, recorder: DeviceRecorder, kind: str, nbytes: int) -> None:
        self._recorder, self._number = recorder, NOTHING
        if recorder.on:
            recorder.add(HostEvent(DISK, kind, nbytes=float(nbytes)))
            self._number = len(recorder.recording.entries) - 1

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._recorder.wait(self._number)
        self._number = NOTHING


def _watch_host(recorder: DeviceRecorder, wrap: Callable[..., None]) -> None:
    """The optimizer's native pass over host memory, and the disk."""

    def step_natively(_optimizer: Any, _group: Any, param: torch.Tensor, fold: Any, state: Any) -> bool:
        both = [param, *(each for each in state.values() if isinstance(each, torch.Tensor) and each.dim())]
        once = [fold.gradient, *([] if fold.out is None else [fold.out])]
        recorder.add(
            HostEvent(HOST, "adam", nbytes=float(2 * sum(t.nbytes for t in both) + sum(t.nbytes for t in once)))
        )
        return True

    wrap(HostOptimizer, "_step_natively", step_natively)
    wrap(SimulatedDisk, "read", lambda _disk, _extent, into: _Moving(recorder, "read", into.nbytes))
    wrap(SimulatedDisk, "write", lambda _disk, _extent, source: _Moving(recorder, "write", source.nbytes))
