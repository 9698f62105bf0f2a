"""The functions of torch.distributed, labelled for the watchdog and timed for the comms logger."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives import dispatch
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.process_group import require_group
from deepspeed.comm.watchdog.collective_event import ClientCollective
from deepspeed.comm.watchdog.comms_logger import comms_logger
from deepspeed.comm.watchdog.desync import trail
from deepspeed.foundation.fake_mode import Replaceable

# Arguments whose bytes are the size of the message; for operations not named here it is the first argument.
_MESSAGE = {"reduce_scatter": 1, "reduce_scatter_tensor": 1}
# What all ranks of a group call in one order, and of these those whose tensors may differ from rank to rank.
_ORDERED = {
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "monitored_barrier",
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
}  # fmt: skip
_UNEVEN = {"all_to_all", "all_to_all_single"}


class Pending:
    """A collective in flight; `wait` ends it with its label, everything else is torch's handle."""

    def __init__(self, work: Any, event: ClientCollective) -> None:
        self._work, self._event = work, event

    def wait(self, *args: Any) -> Any:
        """Block until the collective is complete (on a device: until the current stream may use the result)."""
        with ClientCollective(f"wait for {self._event.label}"):
            result = self._work.wait(*args)
        self._event.complete()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def timed_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Label and time a collective.

    Args:
        func: takes what the function of the same name in torch.distributed takes.

    Returns:
        The same function, which also takes `prof` (time this call), `log_name` (what the label calls it) and `debug`
        (add the caller to the log line), and raises CommError or CommTimeoutError with every rank's last label.
    """
    operation = func.__name__
    names = list(inspect.signature(func).parameters)
    place = _MESSAGE.get(operation, 0)  # of the message among the arguments
    name = names[place] if names else ""
    group_place = names.index("group") if "group" in names else len(names)

    @wraps(func)
    def call(*args: Any, prof: bool = False, log_name: str | None = None, debug: Any = None, **kwargs: Any) -> Any:
        require_group()
        message = args[place] if len(args) > place else kwargs.get(name)
        label = f"{log_name or operation} {_shape(message)}".rstrip()
        event = ClientCollective(label)
        if comms_logger.enabled or trail.interval:
            group = args[group_place] if len(args) > group_place else kwargs.get("group")
            if comms_logger.wants(operation, prof):
                caller = sys._getframe(1) if debug or comms_logger.debug else None
                where = "" if caller is None else f" from {caller.f_code.co_filename}:{caller.f_lineno}"
                event.time(operation, message, group, label + where)
            if operation in _ORDERED:
                _note_order(event, group, log_name or operation if operation in _UNEVEN else label)
        with event:
            result = func(*args, **kwargs)
        if isinstance(result, dist.Work):
            return Pending(result, event)
        event.complete()
        return result

    return call


def _note_order(event: ClientCollective, group: Any, label: str) -> None:
    """Note a call in this rank's desync trail; a rank outside the group takes no part."""
    group = dist.group.WORLD if group is None else group
    if isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1:
        event.order("public", group, 0, label)


def _shape(message: Any) -> str:
    """A tensor, or a list of them, in a few characters: "float32[4, 8]", "2 x float32[8]"."""
    if isinstance(message, torch.Tensor):
        return _shape_of(message.dtype, message.shape)
    if isinstance(message, list) and message and isinstance(message[0], torch.Tensor):
        return f"{len(message)} x {_shape(message[0])}"
    return ""


@lru_cache(maxsize=1024)
def _shape_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


all_reduce = timed_op(dispatch.all_reduce)
broadcast = timed_op(dispatch.broadcast)
reduce = timed_op(dist.reduce)
all_gather = timed_op(dist.all_gather)
all_gather_into_tensor = timed_op(dispatch.all_gather_into_tensor)
reduce_scatter = timed_op(dist.reduce_scatter)
reduce_scatter_tensor = timed_op(dispatch.reduce_scatter_tensor)
all_to_all = timed_op(dist.all_to_all)
all_to_all_single = timed_op(dispatch.all_to_all_single)
gather = timed_op(dist.gather)
scatter = timed_op(dist.scatter)
barrier = timed_op(dist.barrier)
monitored_barrier = timed_op(dist.monitored_barrier)
send = timed_op(dist.send)
recv = timed_op(dist.recv)
isend = timed_op(dist.isend)
irecv = timed_op(dist.irecv)
broadcast_object_list = timed_op(dist.broadcast_object_list)
all_gather_object = timed_op(dist.all_gather_object)
gather_object = timed_op(dist.gather_object)
scatter_object_list = timed_op(dist.scatter_object_list)


class ObjectExchange:
    """How ranks exchange pickled objects."""

    def gather(self, axis: Axis, local: Any) -> list[Any]:
        """The object of each rank, by position."""
        everyone: list[Any] = [local] * axis.size
        if axis.size > 1:
            all_gather_object(everyone, local, group=axis.group)
        return everyone

    def gather_present(self, axis: Axis, local: Any) -> dict[int, Any]:
        """The same by position, of the ranks that exist."""
        return dict(enumerate(self.gather(axis, local)))


object_exchange = Replaceable(ObjectExchange())


def all_gather_objects(axis: Axis, local: Any) -> list[Any]:
    """The object of each rank of an axis, by position; all call together. Objects are pickled."""
    return object_exchange.current.gather(axis, local)


allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce


class P2POp(dist.P2POp):
    """torch's P2POp, for `isend` and `irecv` of this module too."""

    def __new__(cls, op: Callable[..., Any], *args: Any, **kwargs: Any) -> P2POp:
        return super().__new__(cls, inspect.unwrap(op), *args, **kwargs)

    def __init__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(inspect.unwrap(op), *args, **kwargs)


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Pending]:
    """Start all sends and receives at once; returns a handle for each (NCCL: one for all)."""
    require_group()
    label = f"batch_isend_irecv {len(p2p_op_list)} x {_shape(p2p_op_list[0].tensor)}"
    event = ClientCollective(label)
    with event:
        return [Pending(work, event) for work in dist.batch_isend_irecv(p2p_op_list)]


class _All:
    """Several collectives in flight, waited for together."""

    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for work in self._pending:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._pending)


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **labels: Any,
) -> _All | None:
    """`all_reduce` of every tensor, in place."""
    return _together([partial(all_reduce, tensor, op, group, True, **labels) for tensor in tensors], async_op)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **labels: Any,
) -> _All | None:
    """`all_gather_into_tensor` for every pair of output and input."""
    start = partial(all_gather_into_tensor, group=group, async_op=True, **labels)
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together([partial(start, output, tensor) for output, tensor in pairs], async_op)


def _together(starts: list[Callable[[], Pending]], async_op: bool) -> _All | None:
    pending = _All([start() for start in starts])
    if async_op:
        return pending
    pending.wait()
    return None


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log a table of what was timed on rank 0: operation, bytes, count, time, speeds in Gbit/s.

    Args:
        show_straggler: a second table, of the time lost to waiting for the slowest rank; then all ranks must call.
        return_dict: also return the figures.

    Returns:
        With `return_dict`, what `CommsLogger.log_all` gives; `comms_logger.summary()` has them by group size and in
        bytes per second.
    """
    with ClientCollective("log_summary"):
        return comms_logger.log_all(True, show_straggler, return_dict)


def get_logged_comm_ops() -> list[str]:
    """Names of the operations that were timed."""
    comms_logger.settle()
    return sorted(comms_logger.times)


def get_comm_operation_count(op_name: str | None = None) -> int:
    """How many calls were timed, of one operation or of all."""
    names = comms_logger.times if op_name is None else {op_name} & comms_logger.times.keys()
    comms_logger.settle()
    return sum(times.calls for name in names for times in comms_logger.times[name].values())


def has_comm_data() -> bool:
    """Whether any call was timed."""
    comms_logger.settle()
    return bool(comms_logger.times)


def reset_log() -> None:
    """Forget what was timed."""
    comms_logger.reset()
