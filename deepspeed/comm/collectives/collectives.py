"""Collectives over shared memory, point-to-point messages or the backend, with fp32 sums in rank order.

[Note: fixed table] The algorithm for each operation is fixed and never chosen by timing:

| operation          | one machine's CPU ranks   | tagged axis (gloo, CPU)       | other axes (NCCL)                |
|--------------------|---------------------------|-------------------------------|----------------------------------|
| reduce to owners   | post, owners sum in place | messages to the owners, which | reduce-scatter in fp32, else     |
|                    |                           | sum                           | all-to-all and sum in fp32; over |
|                    |                           |                               | hosts: `hierarchical.py`         |
| spread (all-gather)| stream through slots      | a message to each other rank  | all-gather, broadcasts if uneven |
| share (spread in   | post, others copy         | as spread                     | as spread                        |
| any order)         |                           |                               |                                  |
| all-reduce, fp32   | reduce to owners, share   | –                             | two ranks: the backend's own     |
| swap (two ranks)   | post, both read           | a message each way            | –                                |
| rows to all ranks  | post, each reads its rows | a message each way            | all-to-all of uneven splits      |

Ranks that share memory use the algorithms of the left column (`comm/shared_memory/transport.py` defines a post). All
results have the same bits, those of the fp32 sum in rank order, except the backend's own reductions, sums with
`any_order`, and hierarchical sums.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.shared_memory.transport import SharedMemory, Until, sum_natively
from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.collective_event import CollectiveEvent, MessageEvent
from deepspeed.foundation.spans import REDUCE, WAIT, now, recorder

# Sums run over pieces that stay in the second-level cache.
_BLOCK = 1 << 16


def sum_in_rank_order(
    parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, add: bool, any_order: bool = False
) -> None:
    """Compute out = scale * (parts[0] + parts[1] + …) in fp32, for 1-D tensors of any floating-point dtypes.

    Args:
        add: add the result to `out` instead.
        any_order: on a device, let one kernel add adjacent parts in its own, reproducible order. Otherwise each part
            needs a kernel, and memory traffic is several times higher.
    """
    if out.device.type != "cpu":
        _sum_on_device(parts, out, scale, add, any_order)
        return
    exact = out.dtype == torch.float32 and all(p.dtype == torch.float32 for p in parts)
    aliased = any(p.data_ptr() == out.data_ptr() for p in parts[2:])  # `out` may be the own part: read it first
    if not add and scale == 1.0 and exact and not aliased:
        if len(parts) == 1:
            out.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
        return
    if sum_natively(parts, out, scale, add):
        return
    total = torch.empty(min(_BLOCK, out.numel()), dtype=torch.float32, device=out.device)
    term = torch.empty_like(total)
    aliased = any(p.data_ptr() == out.data_ptr() for p in parts)
    in_place = not add and not aliased and out.dtype == torch.float32
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        o, u = out[start:stop], term[: stop - start]
        t = o if in_place else total[: stop - start]
        t.copy_(parts[0][start:stop])
        for part in parts[1:]:
            t.add_(u.copy_(part[start:stop]))
        if scale != 1.0:
            t.mul_(scale)
        if add:
            t.add_(u.copy_(o))
        if t is not o:
            o.copy_(t)


def _sum_on_device(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, add: bool, any_order: bool) -> None:
    """Do `sum_in_rank_order` on a device: a kernel per part, or with `any_order` one for parts adjacent in storage."""
    table, first, count = None, parts[0], parts[0].numel()
    if any_order and len(parts) > 1 and count and all(part.is_contiguous() and part.numel() == count for part in parts):
        places = [(part.untyped_storage()._cdata, part.storage_offset()) for part in parts]
        (storage, begin), rows = places[0], range(len(parts))
        if places == [(storage, begin + row * count) for row in rows]:  # adjacent in one storage
            table = first.as_strided((len(parts), count), (count, 1))
    if table is not None and not add and out.dtype == torch.float32:
        torch.sum(table, 0, dtype=torch.float32, out=out)
        if scale != 1.0:
            out.mul_(scale)
        return
    total = parts[0].to(torch.float32, copy=True) if table is None else table.sum(0, dtype=torch.float32)
    for part in parts[1:] if table is None else ():
        total.add_(part)
    if scale != 1.0:
        total.mul_(scale)
    if add:
        total.add_(out)
    out.copy_(total)


# Kinds of messages on one channel; with the channel and a sequence number they make the tag.
EXCHANGE, SPREAD, PULL, READ, SMALL = range(5)

# Set by tests to delay this rank; called with the label before each message, wait and hook.
PLANTED_DELAY: Callable[[str], None] | None = None

Scratch = Callable[[torch.Tensor], torch.Tensor]

# The newest name of each function of torch: newer versions warn about the older name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def delay(label: str) -> None:
    if PLANTED_DELAY is not None:
        PLANTED_DELAY(label)


class Handle:
    """Pending messages of a collective, and a function to call after their arrival.

    Args:
        axis: participating ranks.
        label: name of the collective in error reports.
        works: handles of the backend or of shared memory.
        then: called once after all messages have arrived; may return the handle of a next phase. None: nothing.
        payload: tensor whose size is logged; None: the collective is not logged.
        received: bytes that come from other ranks.
        began: start time in nanoseconds (`spans.now`); 0: now.
    """

    def __init__(
        self,
        axis: Axis,
        label: str,
        works: list[Any],
        then: Callable[[], Handle | None] | None = None,
        payload: torch.Tensor | None = None,
        received: int = 0,
        began: int = 0,
    ) -> None:
        self.axis, self.label, self.works, self.then = axis, label, works, then
        self.done = False
        self._event = MessageEvent(label, axis.ranks, payload, received, bool(works) and not axis.tagged, began)
        self._waiter: threading.Thread | None = None
        self._failure: RuntimeError | None = None

    def ready(self, patience: float) -> bool:
        """Wait up to `patience` seconds; returns whether `advance` would not wait for messages.

        gloo reports completion only to a blocking wait that cannot be repeated, so a thread waits and `advance` joins
        the thread.
        """
        if self.done or not self.works or not self.axis.tagged:
            return True  # NCCL: `advance` orders the current stream and does not block; it must not be another thread's
        if not patience:
            return self._ready(patience)
        with recorder.span(WAIT, self.label):
            return self._ready(patience)

    def _ready(self, patience: float) -> bool:
        if isinstance(self.works[0], Until):
            return self.works[0].within(patience)
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait_aside, name="deepspeed-wait", daemon=True)
            self._waiter.start()
        self._waiter.join(patience)
        return not self._waiter.is_alive()

    def _wait_aside(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            self._failure = error

    def advance(self) -> Handle | None:
        """Wait for the messages (NCCL: on the stream) and call `then`; returns the handle of the next phase or None.

        Raises:
            CommError: a message failed or timed out. The error has the last label of every rank of the axis.
        """
        if self.done:
            return None
        if self._waiter is None:
            delay(self.label)
            if self.works:
                with self._event:
                    for work in self.works:
                        work.wait()
        else:
            self._event.begin()
            self._waiter.join()
            self._event.end()
            if self._failure is not None:
                raise watchdog.failed(self.label, self._failure, self.axis.ranks) from self._failure
        self._event.arrive()
        self.done, self.works = True, []
        then, self.then = self.then, None
        if then is None or not recorder.on:
            following = None if then is None else then()
        else:
            with recorder.span(REDUCE, self.label):
                following = then()
        self._event.complete()
        return following

    def unrecorded(self) -> Handle:
        """Exclude this handle from the comms logger, which records the enclosing call; returns the handle."""
        self._event.unrecorded()
        return self

    def followed_by(self, then: Callable[[], Handle | None]) -> Handle:
        """Add a function that is called after the last phase and may return a next phase; returns this handle."""
        inner = self.then

        def next_phase() -> Handle | None:
            following = inner() if inner is not None else None
            return then() if following is None else following.followed_by(then)

        self.then = next_phase
        return self

    def wait(self) -> None:
        following = self.advance()
        while following is not None:
            following = following.advance()


def wait_all(axis: Axis, label: str, works: Sequence[Any]) -> None:
    """Call `wait` of every handle; if one fails, raises CommError with the last label of every rank of the axis."""
    delay(label)
    if works:
        with CollectiveEvent(label, axis.ranks, WAIT):
            for work in works:
                work.wait()


def post(axis: Axis, label: str, start: Callable[[], list[Any]]) -> list[Any]:
    """Call `start`, which starts messages; returns its handles, or raises CommError with the ranks' last labels."""
    delay(label)
    with CollectiveEvent(label, axis.ranks):
        return start()


def exchange(
    axis: Axis, flat: torch.Tensor, cuts: Sequence[int], tag: int, label: str, scratch: Scratch = torch.empty_like
) -> tuple[list, list]:
    """Start to send flat[cuts[r] : cuts[r + 1]] to each rank r. All ranks call this; see `reduce_to_owners`.

    Returns:
        (handles, received slices in rank order). The entry of this rank is its slice of `flat` or a copy of the slice.
    """
    own, group = flat[cuts[axis.rank] : cuts[axis.rank + 1]], axis.group
    if group is not None and not axis.tagged and own.numel() and axis.is_even(cuts):
        parts = list(scratch(flat[: cuts[-1]]).split(own.numel()))  # one buffer, which one kernel can sum
    else:
        parts = [own if r == axis.rank else scratch(own) for r in range(axis.size)]
    if group is None:
        return [], parts

    def start() -> list[Any]:
        if not axis.tagged:
            sends = [flat[cuts[r] : cuts[r + 1]] for r in range(axis.size)]
            if parts[axis.rank] is own:
                parts[axis.rank] = scratch(own)  # the backend writes every output
            return [dist.all_to_all(parts, sends, group=group, async_op=True)]
        works = [group.recv([parts[r]], r, tag) for r in axis.peers if own.numel()]
        sends = [(flat[cuts[r] : cuts[r + 1]], r) for r in axis.peers]
        return works + [group.send([part], r, tag) for part, r in sends if part.numel()]

    return post(axis, label, start), parts


def reduce_to_owners(
    axis: Axis,
    flat: torch.Tensor,
    cuts: Sequence[int],
    tag: int,
    label: str,
    finish: Callable[[list], Handle | None],
    scratch: Scratch = torch.empty_like,
    in_rank_order: bool = False,
) -> Handle:
    """Send every rank's contribution to each slice to the owner of the slice. All ranks of the axis must call this.

    Args:
        flat: 1-D contribution of this rank; must not change until the handle is done. The own slice may be overwritten.
        cuts: slice boundaries: rank r owns flat[cuts[r] : cuts[r + 1]].
        tag: message tag (`tag_of`), equal on all ranks; unused on axes without tags.
        label: name of the collective in error reports.
        finish: called with the list of contributions in rank order, to sum them (`sum_in_rank_order`), or of one sum if
            the backend has added them; may return the handle of a next phase.
        scratch: allocates a receive buffer of the shape and dtype of its argument.
        in_rank_order: sum in rank order instead of the backend's own reduction, whose order is undefined.
    """
    if axis.shared is not None:
        return _reduce_in_place(axis, axis.shared, flat, cuts, tag, label, finish)
    native = not in_rank_order and not axis.tagged and axis.group is not None
    if native and flat.dtype == torch.float32 and axis.is_even(cuts):
        own = flat[cuts[axis.rank] : cuts[axis.rank + 1]]
        flat = flat[: cuts[-1]]
        works = post(axis, label, lambda: [_reduce_scatter(own, flat, group=axis.group, async_op=True)])  # in place
        return Handle(axis, label, works, lambda: finish([own]), flat, own.nbytes * (axis.size - 1))
    works, parts = exchange(axis, flat, cuts, tag, label, scratch)
    return Handle(axis, label, works, lambda: finish(parts), flat, parts[axis.rank].nbytes * (axis.size - 1))


def _reduce_in_place(
    axis: Axis,
    shared: SharedMemory,
    flat: torch.Tensor,
    cuts: Sequence[int],
    tag: int,
    label: str,
    finish: Callable[[list], Handle | None],
) -> Handle:
    """Do `reduce_to_owners` in shared memory: each owner sums its slice directly from all ranks' buffers."""
    low, high = cuts[axis.rank], cuts[axis.rank + 1]
    takers = [r for r in axis.peers if cuts[r + 1] > cuts[r]]
    givers = axis.peers if high > low else []

    def arrived() -> Handle:
        parts = [flat if r == axis.rank or not givers else shared.read(r, tag, flat.dtype) for r in range(axis.size)]
        following = finish([part[low:high] for part in parts])
        shared.acknowledge(tag, givers)
        return Handle(axis, label, [shared.acknowledged(tag, takers)], lambda: following)

    works = post(axis, label, lambda: shared.post(tag, flat, takers) or [shared.posted(tag, givers)])
    return Handle(axis, label, works, arrived, flat, len(givers) * (high - low) * flat.itemsize)


def spread(axis: Axis, full: torch.Tensor, cuts: Sequence[int], tag: int, label: str, ordered: bool = True) -> Handle:
    """Send every owner's slice of the 1-D `full` to all other ranks (an in-place all-gather); returns a handle.

    All ranks must call this in the same order; other arguments as in `reduce_to_owners`.

    Args:
        ordered: record the call for the detection of desynchronized ranks.
    """
    if ordered:
        CollectiveEvent(label).order("internal", axis, full.numel())
    group = axis.group
    if group is None:
        return Handle(axis, label, [])
    slices = [full[cuts[r] : cuts[r + 1]] for r in range(axis.size)]
    own, shared = slices[axis.rank], axis.shared

    def start() -> list[Any]:
        if shared is not None:
            shared.all_gather(full, cuts, own, tag)
            return []
        if axis.tagged:
            works = [group.recv([slices[r]], r, tag) for r in axis.peers if slices[r].numel()]
            return works + [group.send([own], r, tag) for r in axis.peers if own.numel()]
        if len({s.numel() for s in slices}) == 1:
            # In place, except for the small host tables that gloo gathers.
            return [_all_gather(full[: cuts[-1]], own if full.is_cuda else own.clone(), group=group, async_op=True)]
        return [
            dist.broadcast(s, src=axis.ranks[r], group=group, async_op=True) for r, s in enumerate(slices) if s.numel()
        ]

    began = now()
    return Handle(
        axis, label, post(axis, label, start), None, full, sum(part.nbytes for part in slices) - own.nbytes, began
    )


def share(axis: Axis, full: torch.Tensor, cuts: Sequence[int], tag: int, label: str) -> Handle:
    """Do `spread`; on axes with tags or shared memory, ranks may call this in different orders."""
    shared = axis.shared
    if shared is None:
        return spread(axis, full, cuts, tag, label, ordered=False)
    slices = [full[cuts[r] : cuts[r + 1]] for r in range(axis.size)]
    own = slices[axis.rank]
    givers = [r for r in axis.peers if slices[r].numel()]
    takers = axis.peers if own.numel() else []

    def arrived() -> Handle:
        for r in givers:
            slices[r].copy_(shared.read(r, tag, full.dtype))
        shared.acknowledge(tag, givers)
        return Handle(axis, label, [shared.acknowledged(tag, takers)])

    works = post(axis, label, lambda: shared.post(tag, own, takers) or [shared.posted(tag, givers)])
    return Handle(axis, label, works, arrived, full, sum(part.nbytes for part in slices) - own.nbytes)


def all_to_all_rows(
    axis: Axis, parts: Sequence[tuple[str, torch.Tensor]], table: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Send each rank some of the rows of every tensor, in one exchange. All ranks must call this in the same order.

    Args:
        parts: (label, tensor of shape (S, …)): the rows for rank 0, then those for rank 1, and so on.
        table: table[r][p] is the number of rows of each tensor that rank r sends to rank p.

    Returns:
        Tensors of shape (R, …): the rows from all ranks, in rank order.
    """
    started = [start_rows(axis, rows.contiguous(), table, axis.public_tag(EXCHANGE), label) for label, rows in parts]
    pending = [handle for _, handle in started]
    while pending:  # messages of all tensors are pending together
        pending = [following for handle in pending if (following := handle.advance()) is not None]
    return [received for received, _ in started]


def start_rows(
    axis: Axis, rows: torch.Tensor, table: Sequence[Sequence[int]], tag: int, label: str
) -> tuple[torch.Tensor, Handle]:
    """Start to send each rank some of the rows of one tensor. All ranks must call this.

    Args:
        rows: contiguous tensor of shape (S, …); must not change until the handle is done.
        table: see `all_to_all_rows`.
        tag: message tag (`tag_of`), equal on all ranks; unused on axes without tags.
        label: name of the collective in error reports.

    Returns:
        Tensor for the received rows, see `all_to_all_rows`, and a handle.
    """
    me, peers, shared, group = axis.rank, axis.peers, axis.shared, axis.group
    cuts = [list(itertools.accumulate(row, initial=0)) for row in table]
    arrive = [row[me] for row in table]
    received = rows.new_empty(sum(arrive), *rows.shape[1:])
    slots = list(received.split(arrive))
    sent = [rows[cuts[me][r] : cuts[me][r + 1]] for r in range(axis.size)]
    if axis.tagged or group is None:
        slots[me].copy_(sent[me])
    if group is None:
        return received, Handle(axis, label, [])
    takers, givers = [r for r in peers if sent[r].numel()], [r for r in peers if slots[r].numel()]
    nbytes = sum(slots[r].nbytes for r in givers)
    if shared is not None:

        def arrived() -> Handle:
            for r in givers:
                slots[r].copy_(shared.read(r, tag, rows.dtype).view(-1, *rows.shape[1:])[cuts[r][me] : cuts[r][me + 1]])
            shared.acknowledge(tag, givers)
            return Handle(axis, label, [shared.acknowledged(tag, takers)])

        works = post(axis, label, lambda: shared.post(tag, rows, takers) or [shared.posted(tag, givers)])
        return received, Handle(axis, label, works, arrived, rows, nbytes)

    def start() -> list[Any]:
        if not axis.tagged:
            lengths = [len(part) for part in sent]
            return [dist.all_to_all_single(received, rows, arrive, lengths, group=group, async_op=True)]
        works = [group.recv([slots[r]], r, tag) for r in givers]
        return works + [group.send([sent[r]], r, tag) for r in takers]

    return received, Handle(axis, label, post(axis, label, start), None, rows, nbytes)


def swap(
    axis: Axis,
    flat: torch.Tensor,
    tag: int,
    label: str,
    finish: Callable[[list], Handle | None],
    scratch: Scratch = torch.empty_like,
) -> Handle:
    """Exchange all of `flat` between the two ranks of an axis with tags or shared memory.

    Both ranks must call this. `finish` gets both tensors in rank order; other arguments as in `reduce_to_owners`.
    """
    group, peer, shared = axis.group, 1 - axis.rank, axis.shared
    if shared is not None:

        def arrived() -> Handle:
            received = shared.read(peer, tag, flat.dtype)
            following = finish([flat, received] if axis.rank == 0 else [received, flat])
            shared.acknowledge(tag, [peer])
            return Handle(axis, label, [shared.acknowledged(tag, [peer])], lambda: following)

        posted = post(axis, label, lambda: shared.post(tag, flat, [peer]) or [shared.posted(tag, [peer])])
        return Handle(axis, label, posted, arrived, flat, flat.nbytes)
    other = scratch(flat)
    parts = [flat, other] if axis.rank == 0 else [other, flat]
    if group is None:
        raise RuntimeError("swap needs two ranks")
    works = post(axis, label, lambda: [group.recv([other], peer, tag), group.send([flat], peer, tag)])
    return Handle(axis, label, works, lambda: finish(parts), flat, flat.nbytes)


def all_reduce_sum(
    axis: Axis,
    flat: torch.Tensor,
    cuts: Sequence[int],
    tags: tuple[int, int],
    label: str,
    then: Callable[[], Handle | None],
) -> Handle:
    """Start to all-reduce `flat` in place, on an axis with `Axis.can_all_reduce`. All ranks of the axis must call this.

    `tags`: for `reduce_to_owners` and `share`; `then` is called after the sum; other arguments: `reduce_to_owners`.
    """
    if axis.shared is not None:
        # In place: a rank's slice is read by that rank alone until it contains the sum.
        def add(parts: list[torch.Tensor]) -> Handle:
            sum_in_rank_order(parts, flat[cuts[axis.rank] : cuts[axis.rank + 1]], 1.0, add=False)
            return share(axis, flat, cuts, tags[1], label).followed_by(then)

        return reduce_to_owners(axis, flat, cuts, tags[0], label, add)
    works = post(axis, label, lambda: [dist.all_reduce(flat, group=axis.group, async_op=True)])
    return Handle(axis, label, works, then, flat, flat.nbytes)


def broadcast(axis: Axis, flat: torch.Tensor, src: int, label: str) -> None:
    """Broadcast 1-D `flat` in place from the rank at position `src` of the axis. All ranks call this in one order."""
    shared, group = axis.shared, axis.group
    CollectiveEvent(label).order("internal", axis, flat.numel())
    if shared is not None:
        post(axis, label, lambda: shared.broadcast(flat, src, zlib.crc32(label.encode())) or [])
    elif group is not None:
        works = post(axis, label, lambda: [dist.broadcast(flat, src=axis.ranks[src], group=group, async_op=True)])
        Handle(axis, label, works, None, flat).unrecorded().wait()


def broadcast_tensors(axis: Axis, tensors: Sequence[torch.Tensor], label: str, chunk: int = 1 << 23) -> None:
    """Copy the values of the axis's first rank to all ranks, in place. All ranks must call this in the same order.

    Tensors below chunk / 16 elements are packed into buffers of at most `chunk` elements.
    """
    if axis.size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for same in by_dtype.values():
        large = [tensor for tensor in same if tensor.numel() >= chunk // 16]
        batches, filled = [[tensor] for tensor in large], chunk + 1
        for tensor in same:
            if tensor.numel() >= chunk // 16:
                continue
            if filled + tensor.numel() > chunk:
                batches.append([])
                filled = 0
            batches[-1].append(tensor)
            filled += tensor.numel()
        for batch in batches:
            # No copy of a single contiguous tensor; it may be contiguous on some ranks only.
            flat = batch[0].reshape(-1) if len(batch) == 1 else torch.cat([tensor.reshape(-1) for tensor in batch])
            broadcast(axis, flat, 0, label)
            if axis.rank and flat.data_ptr() != batch[0].data_ptr():
                for tensor, part in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
