"""Gradient buckets: transfer buffer, accumulator, and cached sum of squares.

[Note: rounds] A round is one reduce-scatter of a bucket, with at most one gradient per parameter of the group. A
complete round is launched at once in the last micro-batch of a window (in each micro-batch if the sharding stage
reduces gradients as they arrive), and all other rounds are launched by `Reducer.finish`. Ranks may take different
branches of the model, so a rank may launch fewer rounds of a group than others. All ranks call `finish` before an
update; it compares the numbers of rounds, and a rank with fewer rounds sends zeros. Message tags contain group and
round, so the order of launches may differ between ranks.

[Note: known norm] `gradient_norms` computes the sums of squares and exchanges them. If no rank has changed a gradient
since, the update can use this norm and skip its own exchange. Each rank reports whether that holds in the row that
ranks exchange before the update (`accumulation.AccumulationWindow.row`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from deepspeed.comm.collectives.collectives import Handle
from deepspeed.comm.collectives.encoded import Layout, Wire
from deepspeed.storage.async_copy import mover_of
from deepspeed.storage.device_tier import RESIDENT, Resident
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.gradients.encoded_gradients import EncodedGradients, sum_parts
from deepspeed.zero.gradients.row_exchange import Rows, exchange_of, sum_rows, write_rows
from deepspeed.zero.parameters.collective_order import LaunchOrder
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import ShardGroup

_ROW = struct.Struct("<qqd")  # launches in low precision and exact, the factor


@dataclass(frozen=True)
class ReduceSettings:
    """Settings of gradient reduction.

    Args:
        accumulates: whether an update has several micro-batches (`gradient_accumulation_steps` > 1).
        accumulator: dtype of the accumulators (`data_types.grad_accum_dtype`).
        comm_dtype: dtype of gradients in collectives (`communication_data_type`); None: no conversion.
        overlap: reduce while backward runs (`zero_optimization.overlap_comm`).
        in_flight: maximum number of elements in collectives in progress; a single bucket may exceed it.
        prescale: factor on low-precision gradients before the reduction (`prescale_gradients`); None: 1.
        in_rank_order: sum in rank order, also where the backend has a faster reduction (`deterministic_reduction`).
        watch_ranks: keep a checksum of each sent round, with which `explain_overflow` names the rank that sent
            non-finite values.
        wire: codecs of the messages.
    """

    accumulates: bool = False
    accumulator: torch.dtype = torch.float32
    comm_dtype: torch.dtype | None = None
    overlap: bool = True
    in_flight: int = 500_000_000
    prescale: float | None = None
    in_rank_order: bool = False
    watch_ranks: bool = False
    wire: Wire = Wire()


@dataclass(slots=True)
class ReductionRound:
    """Gradients of one group for one reduce-scatter; see [Note: rounds].

    Args:
        buffer: flat tensor of the group's padded size with the gradients.
        post_reduce_scale: factor to apply to the sum over ranks.
        pooled: whether `buffer` is from the pool of transfer buffers; else it is the bucket's accumulator.
        expected: number of gradients of a complete round (the trained parameters of the group).
        arrived: indices of the parameters whose gradient is in `buffer`.
        shared: whether the sum over ranks is complete and its all-gather has started (stage 0).
        payloads: encoded messages, which are in use until the round is released.
        fresh: indices of the parameters whose gradient arrived in the micro-batch that launches the round.
        late: whether backward no longer waits for the round (`overlap_comm` false); `Reducer.finish` does.
    """

    buffer: torch.Tensor
    post_reduce_scale: float
    pooled: bool
    expected: int = 0
    arrived: set[int] = field(default_factory=set)
    shared: bool = False
    payloads: list[torch.Tensor] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    late: bool = False


class BucketRow(NamedTuple):
    """State of a bucket on one rank, as exchanged before an update."""

    launches: tuple[int, int]  # rounds launched in low precision and in the accumulator's; -1: frozen on that rank
    factor: float  # `Bucket.factor`
    touched: bytes  # per parameter: 1 if it had a gradient

    @classmethod
    def unpack(cls, row: bytes, members: int) -> BucketRow:
        low, exact, factor = _ROW.unpack_from(row)
        return cls((low, exact), factor, row[_ROW.size : _ROW.size + members])


class Bucket:
    """Gradient bucket of one parameter group: its open round and its accumulator.

    Args:
        group: parameters, which are reduced together.
        accumulator: dtype of the accumulator.
        sums_locally: allow an accumulator of the whole group, which sums micro-batches before the reduction.
        any_order: allow the backend to sum over ranks in any order.
        wire: codecs of the messages.
    """

    def __init__(
        self,
        group: ShardGroup,
        accumulator: torch.dtype,
        sums_locally: bool,
        any_order: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.group, self._any_order = group, any_order
        self.whole = not group.policy.owns_a_shard
        self._wire = wire or Wire()
        self.encoded: EncodedGradients | None = None  # made by `prepare`
        self.rows = exchange_of.current(group, self.whole)  # None: the group is no table whose rows are sent
        self.unit = (
            1.0  # of this window's gradients: 1 / (items of this rank in its first round), where they are counted
        )
        self.low, self.high = group.low, group.high
        self.dtype = accumulator
        self.kind = (group.dtype, group.policy.reduces_as_gradients_arrive)  # buckets of a kind are entered alike
        here = group.axis.size == 1 and group.tiers.optimizer is RESIDENT  # the local sum needs no reduction
        self._alone = here and group.ranks.copies is None  # nor is it summed with copies on other ranks
        self.sums_locally = self.whole or here or (sums_locally and not group.policy.reduces_as_gradients_arrive)
        self.local: torch.Tensor | None = None
        self._places: list[torch.Tensor] | None = None  # views of `local`, one for each parameter
        self.sum: StoredTensor | None = None  # allocated by `prepare`
        self.filled = False  # whether `sum` contains gradients; else its values are undefined
        self._leaving: Handle | None = None  # copy of the last round to the host, while in progress
        self.round: ReductionRound | None = None
        self.order: LaunchOrder | None = None  # fixed order of launches, if messages have no tags
        self.launches = [0, 0]  # rounds sent in low precision, in the accumulator's precision
        self.factor = 0.0  # of low-precision rounds, applied to their sum; 0: none yet; below 0: a hash of several
        self.touched = bytearray(len(group.members))
        self.sent: list[torch.Tensor] = []  # sum of each round this rank sent: not finite if one of its elements is not

    def prepare(self) -> None:
        """Allocate the accumulators, if not done yet."""
        if self.sum is not None:
            return
        group, label = self.group, f"gradients of {self.group.name}"
        tier = group.tiers.optimizer
        self._encode()
        if self.sums_locally:
            self.local = group.axis.empty(group.numel, self.dtype, group.device).zero_()
        if self.local is not None and tier is RESIDENT:
            # The reduced sum overwrites this rank's part of the local sum.
            self.sum = Resident(label, self.local[self.low : self.high])
        else:
            self.sum = tier.store(label, self.high - self.low, self.dtype, group.device)

    def set_wire(self, wire: Wire) -> None:
        """Change the codec of messages between hosts, between two windows. All ranks must call this."""
        self._wire = replace(self._wire, between_hosts=wire.between_hosts)
        if self.sum is not None:
            self._encode()

    def _encode(self) -> None:
        encoded = EncodedGradients(self.group, self._wire, self.whole, self.dtype)
        self.encoded = encoded if encoded.slices is not None or encoded.copies is not None else None

    @property
    def takes_gradients(self) -> bool:
        """Return whether gradients can be copied into the empty accumulator itself, since nothing is communicated."""
        return self._alone and not self.filled

    @property
    def total(self) -> StoredTensor:
        """Return the accumulator for the elements that this rank updates; RuntimeError if the group is frozen."""
        if self.sum is None:
            raise RuntimeError(f"no parameter of {self.group.name} is trained")
        return self.sum

    def add(self, parts: list[torch.Tensor], scale: float, layout: Layout | None = None) -> Handle | None:
        """Add `scale` times the sum of `parts` to the accumulator, or overwrite an empty one.

        Args:
            parts: flat tensors of the accumulator's size.
            scale: factor on the sum.
            layout: form of the encoded ones among `parts`; None: none is encoded.

        Returns:
            Handle of the copy to the host if the accumulator is offloaded, else None.
        """
        if self._leaving is not None:
            self._leaving.wait()
        total = self.total.acquire(read=self.filled)
        if total.device != self.group.device:
            self._leaving = self.leave_device(parts, scale, total, layout)
        else:
            sum_parts(parts, total, scale, self.filled, self._any_order, layout)
            self.total.release(changed=True)
            self._leaving = None
        self.filled = True
        return self._leaving

    def add_rows(self, parts: Sequence[Rows], scale: float, buffer: torch.Tensor) -> Handle | None:
        """Add `scale` times the sum of rows to the accumulator of a table; all other rows get zeros if it is empty.

        Args:
            parts: numbers, relative to the first row of the accumulator, and rows of each rank.
            scale: factor on the sum.
            buffer: buffer of the round, of which the accumulator may be a part.

        Returns:
            As `add`.
        """
        rows = sum_rows(parts, scale)
        if self._leaving is not None:
            self._leaving.wait()
        target, lead = self.total.acquire(read=self.filled), 0 if self.rows is None else self.rows.lead
        if target.device != self.group.device:
            dense = torch.zeros(target.numel(), dtype=torch.float32, device=self.group.device)
            write_rows(rows, dense, lead, add=False)
            self._leaving = self.leave_device([dense], 1.0, target)
        else:
            if not self.filled and target.data_ptr() != buffer[self.low :].data_ptr():
                target.zero_()  # as a part of the buffer, it has zeros in all other rows already
            write_rows(rows, target, lead, add=self.filled)
            self.total.release(changed=True)
            self._leaving = None
        self.filled = True
        return self._leaving

    def leave_device(
        self, parts: list[torch.Tensor], scale: float, total: torch.Tensor, layout: Layout | None = None
    ) -> Handle:
        """Sum `parts` on the device and start the copy of the sum to an offloaded accumulator.

        Args:
            parts: see `add`.
            scale: see `add`.
            total: acquired memory of the accumulator; released when the returned handle has finished.
            layout: see `add`.
        """
        gone = torch.empty(total.numel(), dtype=total.dtype, device=self.group.device)
        sum_parts(parts, gone, scale, False, self._any_order, layout)
        pool = self.group.tiers.optimizer.pool
        staged = pool.take(total.nbytes).view(total.dtype) if self.filled and pool is not None else None
        copied = mover_of(self.group.device).copy(total if staged is None else staged, gone)

        def landed() -> None:
            if staged is not None and pool is not None:
                total.add_(staged)
                pool.put(staged)
            self.total.release(changed=True)

        return Handle(self.group.axis, f"gradients of {self.group.name} to the host", [copied], landed)

    def place(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return the view of a round's buffer for the gradient of parameter `index`, in the parameter's shape."""
        if buffer is self.local:
            if self._places is None:
                self._places = [self._view(buffer, member) for member in self.group.members]
            return self._places[index]
        return self._view(buffer, self.group.members[index])

    @staticmethod
    def _view(buffer: torch.Tensor, member: ParamRecord) -> torch.Tensor:
        return buffer.as_strided(member.shape, member.strides, buffer.storage_offset() + member.offset)

    def own(self, total: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the accumulator's values: the shard, or an equal part of the whole at stage 0."""
        rank, cuts = self.group.axis.rank, self.group.layout.cuts
        low, high = cuts[rank] - self.low, cuts[rank + 1] - self.low
        return total if low == 0 and high == total.numel() else total[low:high]

    @property
    def counted(self) -> bool:
        """Return whether this rank's part of the bucket counts in the gradient norm (one rank of its copies does)."""
        return self.filled and self.group.ranks.counted

    def is_finite(self, member: ParamRecord) -> bool:
        """Return whether this rank's part of a parameter's gradient sum is finite."""
        low, high = max(member.offset, self.low), min(member.offset + member.numel, self.high)
        if not self.filled or low >= high:
            return True
        with self.total.borrowed() as total:
            return bool(torch.isfinite(total[low - self.low : high - self.low]).all())

    def note_factor(self, factor: float) -> None:
        """Record the factor that is applied to the sum of a low-precision round, for comparison over ranks."""
        if self.factor in (0.0, factor):
            self.factor = factor
        else:
            self.factor = -1.0 - hash((self.factor, self.launches[0], factor)) % (1 << 40)

    @property
    def row_bytes(self) -> int:
        return _ROW.size + -(-len(self.touched) // 8) * 8

    def row(self) -> bytes:
        """Return the state that ranks compare before an update, packed; see `BucketRow`."""
        launches = self.launches if self.sum is not None else (-1, -1)
        return _ROW.pack(*launches, self.factor) + self.touched + bytes(-len(self.touched) % 8)

    def clear(self) -> None:
        if self.encoded is not None and any(self.launches):
            self.encoded.end_update()
        self.filled = False
        self.launches, self.factor = [0, 0], 0.0
        self.touched = bytearray(len(self.group.members))
        self.sent = []


class SumOfSquaresCache:
    """Cache of the gradients' sums of squares: this rank's, and the total over ranks; see [Note: known norm]."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []  # buckets of which an update computes the norm
        self.lends_views = False  # users have views of the sums, and writes through `.data` cannot be detected
        self.total: float | None = None  # sum over all ranks of one model copy; None: not exchanged
        self._revision = -1  # revision of the gradients for which `_read` was computed
        self._read: dict[int, tuple[tuple[int, int] | None, float]] = {}  # by bucket: state of its sum, own part

    def begin(self, revision: int) -> None:
        self._revision, self._read, self.total = revision, {}, None

    def note(self, bucket: Bucket, own: float) -> None:
        self._read[id(bucket)] = self._state(bucket), own

    def own(self, revision: int) -> float | None:
        """Return this rank's sum of squares; None if it was not computed or gradients have changed since."""
        if revision != self._revision:
            return None
        parts = []
        for bucket in self.buckets:
            if not bucket.counted:
                continue
            state, own = self._read.get(id(bucket), (None, 0.0))
            if state is None or state != self._state(bucket):
                return None
            parts.append(own)
        return math.fsum(parts) if parts else None

    def hold(self, revision: int) -> bool:
        """Return whether `total` is known and no gradient of this rank has changed since."""
        return self.total is not None and self.own(revision) is not None

    def _state(self, bucket: Bucket) -> tuple[int, int] | None:
        """Return address and version counter of the sum; None if writes to it cannot be detected."""
        memory = bucket.total.memory
        if memory is None or memory.is_inference() or self.lends_views:
            return None
        return memory.data_ptr(), memory._version
