"""Messages with the rows of an embedding's gradient that are not zero (`sparse_gradients`).

[Note: rows in messages] A table whose gradients are sent by rows is a group of its own. Its buffers are dense like all
others, so accumulation, conversion, clipping and the update do not differ; only the messages of a round do:

1. Each rank counts the rows with an element that is not zero, and all ranks exchange these counts: one number per rank
   if every rank needs the sum (stage 0), else one for each owner.
2. From the counts, all ranks compute whether rows or whole buffers are fewer bytes. Rows have 8 bytes for their number
   and the elements in the dtype of the buffer. Whole buffers are sent as those of other groups, encoded too.
3. Ranks send row numbers and rows: to all ranks at stage 0, else to the owners. The receiver adds them in rank order in
   fp32, which gives the bits of the dense sum (but for the sign of a zero), since the elements of other ranks are zero.

Rows are found in the buffer, not in the indices of the batch, so it does not matter whether autograd returned a sparse
or a dense gradient, or whether the user has changed it. All phases have message tags of their own, so rounds may be
launched in different orders, as in [Note: rounds] of `buckets`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.comm.collectives.collectives import EXCHANGE, PULL, SMALL, Handle, share, start_rows
from deepspeed.comm.process_groups.axis import tag_of
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import log_once
from deepspeed.zero.parameters.shard_group import ShardGroup

_NUMBER = torch.int64.itemsize  # bytes of a row number
MIN_NUMEL = 1 << 12  # smaller tables share the message of a bucket, which costs less time than messages of their own
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)

Rows = tuple[torch.Tensor, torch.Tensor]
"""Row numbers (n,) int64, ascending, and the rows (n, width)."""


def find_tables(model: nn.Module, updated: set[Parameter]) -> frozenset[Parameter]:
    """Return the embeddings whose gradients can be sent by rows, and log which they are.

    Tables that another kind of module uses too, such as an output projection, have dense gradients and are left out, as
    are tables of less than `MIN_NUMEL` elements.

    Args:
        model: model, equal on all ranks that share a table.
        updated: parameters that the optimizer updates.
    """
    names: dict[Parameter, str] = {}
    others: dict[Parameter, str] = {}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and name == "weight":
                names.setdefault(param, f"{path}.{name}" if path else name)
            else:
                others.setdefault(param, path or type(module).__name__)
    for param in [param for param in names if param in others]:
        log_once(
            f"sparse_gradients: '{names.pop(param)}' is also a weight of '{others[param]}', so all of its rows have "
            f"gradients: they are sent whole"
        )
    tables = {
        param: name
        for param, name in names.items()
        if param in updated and param.requires_grad and param.numel() >= MIN_NUMEL
    }
    if tables:
        log_once(f"sparse_gradients: gradients are sent by rows of {', '.join(tables.values())}")
    else:
        log_once("sparse_gradients has no effect: no trained embedding has gradients of few rows")
    return frozenset(tables)


class RowExchange:
    """Exchange of a table's gradient by rows, over the ranks that share the table; see [Note: rows in messages].

    Args:
        group: parameter group of the table.
        whole: every rank needs the sum of all rows (stage 0); else each rank that of its shard.
    """

    def __init__(self, group: ShardGroup, whole: bool) -> None:
        self._group, self._whole = group, whole
        self._rows, self.width = group.members[0].shape
        # The rows of each owner: the boundary of two shards may be within a row, which then goes to both.
        spans = [(0, group.layout.numel)] if whole else itertools.pairwise(group.layout.cuts)
        self._owned = [self._rows_within(low, high) for low, high in spans]
        self._first = self._owned[0 if whole else group.axis.rank][0]
        self.lead = max(group.low - self._first * self.width, 0) if not whole else 0

    @classmethod
    def of(cls, group: ShardGroup, whole: bool) -> RowExchange | None:
        """Return the exchange for a group; None if its gradients are sent whole.

        These are groups that are no table, groups of one rank, and tables that several pipeline stages or replicas of
        shards share.
        """
        ranks = group.ranks
        alone = group.axis.size == 1 or ranks.copies is not None or ranks.across_stages
        return cls(group, whole) if group.by_rows and not alone else None

    def _rows_within(self, low: int, high: int) -> tuple[int, int]:
        """Return the first row with an element in [low, high) of the table, and the row after the last one."""
        high = min(high, self._group.layout.numel)
        return (low // self.width, -(-high // self.width)) if low < high else (self._rows, self._rows)

    def reduce(
        self,
        buffer: torch.Tensor,
        seq: int,
        whole_bytes: int,
        send_whole: Callable[[], Handle],
        take: Callable[[list[Rows]], Handle | None],
    ) -> Handle:
        """Start the reduction of a round. All ranks of the group must call this.

        Args:
            buffer: 1-D gradient of this rank, of the group's size; must not change until the handle is done.
            seq: number of the round, for message tags.
            whole_bytes: bytes that all ranks together receive if buffers are sent whole.
            send_whole: starts to send buffers whole; called on all ranks or on none.
            take: called with the rows of each rank, in rank order, numbered from the first row that this rank sums; may
                return the handle of a next phase.

        Returns:
            Handle of the exchange of counts; waiting for it starts the exchange of rows.
        """
        group, axis = self._group, self._group.axis.reductions
        table = buffer[: group.layout.numel].view(self._rows, self.width)
        numbers = nonzero_rows(table)
        spans = torch.searchsorted(numbers, torch.tensor(self._owned, device=numbers.device))
        own, n = spans.diff(dim=1).view(-1), len(self._owned)
        counts = axis.empty(axis.size * n, torch.int64, numbers.device)
        counts[axis.rank * n : (axis.rank + 1) * n] = own
        cuts = [rank * n for rank in range(axis.size + 1)]
        counting = share(axis, counts, cuts, tag_of(group.channel, SMALL, seq), f"count of rows of {group.name}")

        def counted() -> Handle | None:
            sent = counts.view(axis.size, n).tolist()
            if self.bytes_of(sent, buffer.itemsize) >= whole_bytes:
                log_once(
                    f"sparse_gradients: in a step, rows of {group.name} were not fewer bytes than the whole gradient, "
                    f"which was sent: up to {max(map(sum, sent))} of {self._rows} rows of a rank are not zero",
                    key=("rows", group.name),
                )
                return send_whole()
            if self._whole:
                return self._send_to_all(table, numbers, sent, seq, take)
            to_owners = torch.cat([numbers[low:high] for low, high in spans.tolist()])
            return self._send_to_owners(table, to_owners, sent, seq, take)

        return counting.followed_by(counted)

    def bytes_of(self, counts: Sequence[Sequence[int]], itemsize: int) -> int:
        """Return the bytes that all ranks together receive if rows are sent.

        Args:
            counts: counts[r][o] is the number of rows of rank r for owner o; at stage 0, o is 0 and means all ranks.
            itemsize: bytes of an element.
        """
        if self._whole:
            rows = sum(map(sum, counts)) * (len(counts) - 1)
        else:
            rows = sum(count for rank, row in enumerate(counts) for owner, count in enumerate(row) if owner != rank)
        return rows * (_NUMBER + self.width * itemsize)

    def _send_to_all(
        self,
        table: torch.Tensor,
        own: torch.Tensor,
        counts: list[list[int]],
        seq: int,
        take: Callable[[list[Rows]], Handle | None],
    ) -> Handle | None:
        """Start to send the rows `own` of `table` to all ranks; other arguments as in `reduce` and `bytes_of`."""
        group, axis, label = self._group, self._group.axis.reductions, f"rows of {self._group.name}"
        cuts = list(itertools.accumulate((row[0] for row in counts), initial=0))
        numbers = axis.empty(cuts[-1], torch.int64, table.device)
        flat = axis.empty(cuts[-1] * self.width, table.dtype, table.device)
        values = flat.view(-1, self.width)
        parts = [(numbers[low:high], values[low:high]) for low, high in itertools.pairwise(cuts)]
        if not cuts[-1]:
            return take(parts)
        parts[axis.rank][0].copy_(own)
        torch.index_select(table, 0, own, out=parts[axis.rank][1])
        first = share(axis, numbers, cuts, tag_of(group.channel, PULL, seq), label)
        spans = [cut * self.width for cut in cuts]
        second = share(axis, flat, spans, tag_of(group.channel, EXCHANGE, seq), label)
        return first.followed_by(lambda: second).followed_by(lambda: take(parts))

    def _send_to_owners(
        self,
        table: torch.Tensor,
        own: torch.Tensor,
        counts: list[list[int]],
        seq: int,
        take: Callable[[list[Rows]], Handle | None],
    ) -> Handle | None:
        """Start to send the rows `own` of `table` to their owners; other arguments as in `reduce` and `bytes_of`."""
        group, axis, label = self._group, self._group.axis.reductions, f"rows of {self._group.name}"
        rows = axis.empty(len(own) * self.width, table.dtype, table.device).view(-1, self.width)
        torch.index_select(table, 0, own, out=rows)
        numbers, first = start_rows(axis, own, counts, tag_of(group.channel, PULL, seq), label)
        values, second = start_rows(axis, rows, counts, tag_of(group.channel, EXCHANGE, seq), label)
        arrive, sent = [row[axis.rank] for row in counts], [own, rows]

        def arrived() -> Handle | None:
            sent.clear()  # until now, other ranks may have read these in place
            numbers.sub_(self._first)
            return take(list(zip(numbers.split(arrive), values.split(arrive), strict=True)))

        return first.followed_by(lambda: second).followed_by(arrived)


exchange_of: Replaceable[Callable[[ShardGroup, bool], RowExchange | None]] = Replaceable(RowExchange.of)


def nonzero_rows(table: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the rows of a contiguous 2-D tensor that have a bit which is not zero, ascending.

    So rows with NaN, and with -0.0, are among them.
    """
    nbytes = table.shape[1] * table.itemsize
    bits = table.view(next(kind for kind in _INTEGERS if nbytes % kind.itemsize == 0))
    least, largest = torch.aminmax(bits, dim=1)
    return torch.logical_or(least, largest).nonzero().view(-1)


def sum_rows(parts: Sequence[Rows], scale: float) -> Rows:
    """Return scale * (sum of rows with equal numbers), in fp32 and in the order of `parts`; numbers are ascending."""
    numbers, places = torch.unique(torch.cat([numbers for numbers, _ in parts]), return_inverse=True)
    total = torch.zeros(len(numbers), parts[0][1].shape[1], dtype=torch.float32, device=numbers.device)
    for place, (_, values) in zip(places.split([len(each) for each, _ in parts]), parts, strict=True):
        total.index_add_(0, place, values.to(torch.float32))
    if scale != 1.0:
        total.mul_(scale)
    return numbers, total


def write_rows(rows: Rows, flat: torch.Tensor, lead: int, add: bool) -> None:
    """Copy rows into a part of a table, which may begin and end within a row.

    Args:
        rows: row numbers, where 0 is the row in which the part begins, and rows in fp32, which are changed.
        flat: 1-D part of the table.
        lead: elements of row 0 before the part.
        add: add the rows to the values of `flat`, in fp32.
    """
    numbers, values = rows
    width = values.shape[1]
    head = min(-lead % width, flat.numel())  # elements before the first row that begins in the part
    first, count = int(head > 0), (flat.numel() - head) // width
    low, high = torch.searchsorted(numbers, torch.tensor([first, first + count], device=numbers.device)).tolist()
    table = flat[head : head + count * width].view(-1, width)
    inside = numbers[low:high] - first
    if add:
        values[low:high] += table.index_select(0, inside)
    table.index_copy_(0, inside, values[low:high].to(flat.dtype))
    tail = flat[head + count * width :]
    for place, row in ((flat[:head], values[:low, lead:]), (tail, values[high : high + 1])):
        if len(row) and len(place):
            place.copy_(row[0, : len(place)] + place if add else row[0, : len(place)])
