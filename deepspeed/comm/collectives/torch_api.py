"""The functions of torch.distributed, labelled for the watchdog and timed for the comms logger.

A collective uses shared memory, this package's messages or the backend. On CPU, blocking `all_reduce` (SUM) and
`reduce_scatter_tensor` of contiguous fp32, bf16 and fp16 tensors compute fp32 sums in rank order. Without a process
group, the collectives raise UsageError; a failed collective raises CommError.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives.collectives import EXCHANGE, SPREAD, reduce_to_owners, spread, sum_in_rank_order
from deepspeed.comm.process_groups.axis import Axis, group_axis
from deepspeed.comm.process_groups.process_group import require_group
from deepspeed.comm.shutdown import Phase, released_in
from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.collective_event import ClientCollective
from deepspeed.comm.watchdog.comms_logger import comms_logger
from deepspeed.comm.watchdog.desync import trail
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.native import KINDS

# Arguments whose bytes are the size of the message; for operations not named here it is the first argument.
_MESSAGE = {"reduce_scatter": 1, "reduce_scatter_tensor": 1}
# Operations that all ranks of a group call in the same order, and those of them whose tensors may differ in size.
_ORDERED = {
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "monitored_barrier",
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
}  # fmt: skip
_UNEVEN = {"all_to_all", "all_to_all_single"}


class Pending:
    """Handle of a pending collective: torch's handle, whose `wait` reports errors with the collective's label."""

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
    """Wrap a function of torch.distributed so that its calls are labelled and timed.

    Args:
        func: function with the signature of its namesake in torch.distributed.

    Returns:
        The function with three more arguments: `prof` (time this call if timing is on), `log_name` (name in the label),
        `debug` (log the caller). Failures raise CommError or CommTimeoutError, wrong arguments torch's errors.
    """
    operation = func.__name__
    names = list(inspect.signature(func).parameters)
    place = _MESSAGE.get(operation, 0)  # position of the message in the arguments
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
                event.note_order(group, log_name or operation if operation in _UNEVEN else label)
        with event:
            result = func(*args, **kwargs)
        if isinstance(result, dist.Work):
            return Pending(result, event)
        event.complete()
        return result

    return call


def _shape(message: Any) -> str:
    """Describe a tensor or a list of tensors briefly: "float32[4, 8]", "2 x float32[8]"."""
    if isinstance(message, torch.Tensor):
        return _shape_of(message.dtype, message.shape)
    if isinstance(message, list) and message and isinstance(message[0], torch.Tensor):
        return f"{len(message)} x {_shape(message[0])}"
    return ""


@lru_cache(maxsize=1024)
def _shape_of(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


_SUM = dist.ReduceOp.SUM
# The newest name of each function of torch: newer versions warn about the older name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_axes: dict[int, tuple[Any, Axis]] = {}  # by process group: the group and its axis


def _route(group: Any, *tensors: torch.Tensor) -> Axis | None:
    """Return the axis of a CPU group, created by all its ranks; None if the backend must execute the collective."""
    for tensor in tensors:
        if not tensor.is_cpu or not tensor.is_contiguous():
            return None
    if group is None:
        group = dist.group.WORLD
    known = _axes.get(id(group))
    if known is None or known[0] is not group:
        if not isinstance(group, dist.ProcessGroup) or "gloo" not in dist.get_backend(group):
            return None
        known = _axes[id(group)] = (group, group_axis("public", group))
    return None if known[1].size == 1 else known[1]


@timed_op
def all_reduce(tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
    """All-reduce in place; arguments and result as in torch. The module says when sums are in fp32 in rank order."""
    plain = async_op or not (op is _SUM or op == _SUM) or tensor.dtype not in KINDS
    axis = None if plain else _route(group, tensor)
    if axis is None or (axis.shared is None and axis.size == 2 and tensor.dtype == torch.float32):
        return dist.all_reduce(tensor, op, group, async_op)
    if axis.shared is not None:
        axis.shared.all_reduce(tensor)
        return None
    label = watchdog.here.page.label
    flat, cuts = tensor.detach().view(-1), axis.even_cuts(tensor.numel())
    own = flat[cuts[axis.rank] : cuts[axis.rank + 1]]
    finish = lambda parts: sum_in_rank_order(parts, own, 1.0, add=False)  # noqa: E731
    reduce_to_owners(axis, flat, cuts, axis.public_tag(EXCHANGE), label, finish).unrecorded().wait()
    spread(axis, flat, cuts, axis.public_tag(SPREAD), label).unrecorded().wait()
    return None


@timed_op
def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Reduce-scatter; arguments and result as in torch. The module says when sums are in fp32 in rank order."""
    plain = async_op or not (op is _SUM or op == _SUM) or input.dtype not in KINDS or output.dtype != input.dtype
    axis = None if plain else _route(group, output, input)
    if axis is None or output.numel() * axis.size != input.numel():
        return _reduce_scatter(output, input, op, group, async_op)
    cuts, flat = axis.even_cuts(input.numel()), input.detach().view(-1)
    if axis.shared is not None:
        axis.shared.reduce_scatter(flat, cuts, output)
        return None
    out = output.detach().view(-1)
    finish = lambda parts: sum_in_rank_order(parts, out, 1.0, add=False)  # noqa: E731
    tag = axis.public_tag(EXCHANGE)
    reduce_to_owners(axis, flat, cuts, tag, watchdog.here.page.label, finish).unrecorded().wait()
    return None


@timed_op
def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """All-gather; arguments and result as in torch. CPU ranks of one machine use shared memory unless `async_op`."""
    axis = None if async_op or output_tensor.dtype != input_tensor.dtype else _route(group, output_tensor, input_tensor)
    if axis is None or input_tensor.numel() * axis.size != output_tensor.numel():
        return _all_gather(output_tensor, input_tensor, group, async_op)
    cuts, full = axis.even_cuts(output_tensor.numel()), output_tensor.detach().view(-1)
    if axis.shared is not None:
        axis.shared.all_gather(full, cuts, input_tensor)
        return None
    full[cuts[axis.rank] : cuts[axis.rank + 1]] = input_tensor.detach().view(-1)
    spread(axis, full, cuts, axis.public_tag(SPREAD), watchdog.here.page.label).unrecorded().wait()
    return None


@timed_op
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """All-to-all; arguments and result as in torch. CPU ranks of one machine use shared memory for even splits."""
    even = not (async_op or output_split_sizes or input_split_sizes) and output.dtype == input.dtype
    axis = _route(group, output, input) if even else None
    if axis is None or output.numel() != input.numel() or input.numel() % axis.size:
        return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op)
    cuts, flat = axis.even_cuts(input.numel()), input.detach().view(-1)
    slots = output.detach().view(axis.size, -1)

    def finish(parts: list[torch.Tensor]) -> None:
        for slot, part in zip(slots, parts, strict=True):
            slot.copy_(part)

    reduce_to_owners(axis, flat, cuts, axis.public_tag(EXCHANGE), watchdog.here.page.label, finish).unrecorded().wait()
    return None


@timed_op
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """Broadcast; arguments and result as in torch. CPU ranks of one machine use shared memory unless `async_op`."""
    axis = None if async_op else _route(group, tensor)
    shared = None if axis is None else axis.shared
    if axis is None or shared is None or (src is None) == (group_src is None):
        return dist.broadcast(tensor, src, group, async_op, group_src)
    ranks = axis.ranks
    if group_src is None and src not in ranks:
        return dist.broadcast(tensor, src, group, async_op)  # raises torch's error
    shared.broadcast(tensor, ranks.index(src) if group_src is None else group_src)
    return None


@released_in(Phase.ROUTES)
def forget_routes() -> None:
    _axes.clear()


reduce = timed_op(dist.reduce)
all_gather = timed_op(dist.all_gather)
reduce_scatter = timed_op(dist.reduce_scatter)
all_to_all = timed_op(dist.all_to_all)
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
    """All-gather of pickled objects; a simulation replaces it."""

    def gather(self, axis: Axis, local: Any) -> list[Any]:
        everyone: list[Any] = [local] * axis.size
        if axis.size > 1:
            all_gather_object(everyone, local, group=axis.group)
        return everyone

    def gather_present(self, axis: Axis, local: Any) -> dict[int, Any]:
        """Gather the objects of all ranks that exist (in a simulation, one), by position on the axis; a collective."""
        return dict(enumerate(self.gather(axis, local)))


object_exchange = Replaceable(ObjectExchange())


def all_gather_objects(axis: Axis, local: Any) -> list[Any]:
    """Gather a picklable object from each rank of an axis, in rank order. All ranks must call this."""
    return object_exchange.current.gather(axis, local)


allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce


class P2POp(dist.P2POp):
    """torch's P2POp that also accepts `isend` and `irecv` of this module."""

    def __new__(cls, op: Callable[..., Any], *args: Any, **kwargs: Any) -> P2POp:
        return super().__new__(cls, inspect.unwrap(op), *args, **kwargs)

    def __init__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(inspect.unwrap(op), *args, **kwargs)


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Pending]:
    """Start all sends and receives at once; returns one handle per operation (NCCL: one handle for all)."""
    require_group()
    label = f"batch_isend_irecv {len(p2p_op_list)} x {_shape(p2p_op_list[0].tensor)}"
    event = ClientCollective(label)
    with event:
        return [Pending(work, event) for work in dist.batch_isend_irecv(p2p_op_list)]


class _All:
    """Handle of several pending collectives."""

    def __init__(self, pending: list[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for work in self._pending:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._pending)

    @classmethod
    def start(cls, starts: list[Callable[[], Pending]], async_op: bool) -> _All | None:
        pending = cls([start() for start in starts])
        if async_op:
            return pending
        pending.wait()
        return None


def all_reduce_coalesced(
    tensors: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **labels: Any,
) -> _All | None:
    """All-reduce every tensor in place by the backend; returns a handle if `async_op`. `labels`: see `timed_op`."""
    return _All.start([partial(all_reduce, tensor, op, group, True, **labels) for tensor in tensors], async_op)


def all_gather_coalesced(
    output_tensors: list[torch.Tensor],
    input_tensors: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    **labels: Any,
) -> _All | None:
    """Run `all_gather_into_tensor` for every pair of output and input; see `all_reduce_coalesced`."""
    start = partial(all_gather_into_tensor, group=group, async_op=True, **labels)
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _All.start([partial(start, output, tensor) for output, tensor in pairs], async_op)


class TorchBackend:
    """Class with the getters of DeepSpeed's `TorchBackend` that programs call; it needs no instance."""

    @classmethod
    def get_all_gather_function(cls) -> Any:
        """Return `all_gather_into_tensor`."""
        return all_gather_into_tensor

    @classmethod
    def get_reduce_scatter_function(cls) -> Any:
        """Return `reduce_scatter_tensor`."""
        return reduce_scatter_tensor


def all_gather_dp_groups(
    groups_flat: Sequence[torch.Tensor] | None,
    partitioned_param_groups: Sequence[Sequence[torch.Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """All-gather the shards of each parameter group in place. All ranks must call this.

    Args:
        groups_flat: flat buffers that contain the shards, or None; not used.
        partitioned_param_groups: for each group, the shards by rank: 1-D, equal sizes. Each rank sends its own shard.
        dp_process_group: process group of each parameter group; None: all ranks.
        start_alignment_factor: accepted, without effect: shards are sent unaligned.
        allgather_bucket_size: maximum number of elements that one all-gather returns.
    """
    for shards, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        length = max(1, allgather_bucket_size // size)
        for start in range(0, shards[rank].numel() if size > 1 else 0, length):
            pieces = [shard.detach().view(-1)[start : start + length] for shard in shards]
            all_gather(pieces, pieces[rank].clone(), group=group)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log a table of the timed collectives on rank 0: operation, bytes, count, time, speeds in Gbit/s.

    Args:
        show_straggler: add a table of the time lost to waiting for the slowest rank; makes the call collective.
        return_dict: also return the figures.

    Returns:
        With `return_dict`, the result of `CommsLogger.log_all`, else None. `comms_logger.summary()` has the figures by
        group size and in bytes per second.
    """
    with ClientCollective("log_summary"):
        return comms_logger.log_all(True, show_straggler, return_dict)


def get_logged_comm_ops() -> list[str]:
    """Return the names of the timed operations."""
    comms_logger.settle()
    return sorted(comms_logger.times)


def get_comm_operation_count(op_name: str | None = None) -> int:
    """Return the number of timed calls of the operation `op_name`; None: of all operations."""
    comms_logger.settle()
    names = comms_logger.times if op_name is None else {op_name} & comms_logger.times.keys()
    return sum(times.calls for name in names for times in comms_logger.times[name].values())


def has_comm_data() -> bool:
    """Return whether any call was timed."""
    comms_logger.settle()
    return bool(comms_logger.times)


def reset_log() -> None:
    """Delete the recorded times and byte counts."""
    comms_logger.reset()
