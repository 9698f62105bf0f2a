"""Gradient buckets: the open round, the accumulator, a cache of its sum of squares, and row-sparse gradients.

[Note: rounds] A bucket collects one gradient per parameter of its group: a round. A full round is launched immediately
if the policy reduces as gradients arrive (or in the boundary micro-batch), and closed by `finish` otherwise. Ranks may
run different branches, so a rank may have launched fewer rounds of a group than others; `finish`, which all ranks call
in `step`, compares the counts, and a rank that is behind contributes zeros. Message tags contain the group and the
round, so the order of launches may differ.

The dense gradient of a table with a large vocabulary is as large as the table, and nearly all of it is zeros. If a
driver knows the rows that are looked up (as a pipeline does), autograd returns only these rows, and they are added to
the accumulator at their positions. Gradients summed in their own precision are first summed by row and then added once:
in fp32, with one lookup of the table in a micro-batch, sums have the bits of dense gradients. If the accumulator is
wider, every row is added to it separately, without rounding.

[Note: known norm] `gradient_norms` reads every sum, and its ranks exchange the squares. If no rank has added or written
anything since, all ranks know the norm of the update. Each rank reports this in the row of the agreement with which the
update begins (`accumulation.AccumulationWindow.row`), which saves a message.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.comm.collectives.collectives import Handle, sum_in_rank_order
from deepspeed.foundation.pytree import tensors_in
from deepspeed.storage.async_copy import mover_of
from deepspeed.storage.device_tier import RESIDENT, Resident
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.parameters.collective_order import LaunchOrder
from deepspeed.zero.parameters.parameter import ManagedParameter
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import ShardGroup

_ROW = struct.Struct("<qqd")  # launches in low precision and exact, the factor


@dataclass(frozen=True)
class ReduceSettings:
    """Settings of gradient reduction.

    Args:
        accumulates: windows have several micro-batches (`gradient_accumulation_steps` > 1).
        accumulator: dtype of the accumulators (`data_types.grad_accum_dtype`).
        comm_dtype: dtype of gradients in collectives (`communication_data_type`); None: the gradients' dtype.
        overlap: reduce while backward runs (`zero_optimization.overlap_comm`).
        in_flight: maximum number of elements in flight.
        prescale: factor on low-precision gradients before the reduction (`prescale_gradients`); None: after it.
        in_rank_order: sum fp32 in rank order even if the backend has its own reduction (`deterministic_reduction`).
        watch_ranks: allow finding the rank that sent non-finite values.
    """

    accumulates: bool = False
    accumulator: torch.dtype = torch.float32
    comm_dtype: torch.dtype | None = None
    overlap: bool = True
    in_flight: int = 500_000_000
    prescale: float | None = None
    in_rank_order: bool = False
    watch_ranks: bool = False


@dataclass(slots=True)
class ReductionRound:
    """Gradients of one group that have not been sent yet."""

    buffer: torch.Tensor
    post_reduce_scale: float  # factor still to be applied to the sum
    pooled: bool
    expected: int = 0  # gradients that make it complete
    arrived: set[int] = field(default_factory=set)
    shared: bool = False  # the sum is formed, and goes to everybody
    fresh: set[int] = field(default_factory=set)  # of the micro-batch that sends it; `expected` of them complete it


class BucketRow(NamedTuple):
    """One rank's row of numbers for a bucket, for comparison."""

    launches: tuple[int, int]  # below 0: frozen there
    factor: float
    touched: bytes

    @classmethod
    def unpack(cls, row: bytes, members: int) -> BucketRow:
        low, exact, factor = _ROW.unpack_from(row)
        return cls((low, exact), factor, row[_ROW.size : _ROW.size + members])


class Bucket:
    """Gradients of one group."""

    def __init__(
        self, group: ShardGroup, accumulator: torch.dtype, sums_locally: bool, any_order: bool = False
    ) -> None:
        self.group, self._any_order = group, any_order
        self.whole = not group.policy.owns_a_shard
        self.low, self.high = group.low, group.high
        self.dtype = accumulator
        self.kind = (group.dtype, group.policy.reduces_as_gradients_arrive)  # buckets of a kind are entered alike
        here = group.axis.size == 1 and group.tiers.optimizer is RESIDENT  # the sum is what this rank collects
        self.sums_locally = self.whole or here or (sums_locally and not group.policy.reduces_as_gradients_arrive)
        self.local: torch.Tensor | None = None
        self._places: list[torch.Tensor] | None = None  # views of it, one for each parameter
        self.sum: StoredTensor | None = None  # made when the first parameter of the group is listened to
        self.filled = False  # whether `sum` holds anything
        self._leaving: Handle | None = None  # the last round, while it leaves the device
        self.round: ReductionRound | None = None
        self.order: LaunchOrder | None = None  # where messages carry no tags
        self.launches = [0, 0]  # rounds sent in low precision, in the accumulator's precision
        self.factor = 0.0  # of low-precision rounds, applied to their sum; 0: none yet; below 0: a hash of several
        self.touched = bytearray(len(group.members))
        self.sent: list[torch.Tensor] = []  # sum of each round this rank sent: not finite if one of its elements is not

    def prepare(self) -> None:
        """Allocate the accumulators. A frozen group has none until one of its parameters is unfrozen."""
        if self.sum is not None:
            return
        group, label = self.group, f"gradients of {self.group.name}"
        tier = group.tiers.optimizer
        if self.sums_locally:
            self.local = group.axis.empty(group.numel, self.dtype, group.device).zero_()
        if self.local is not None and tier is RESIDENT:
            # Where gradients are summed before they travel, the reduced sum takes the place of the own part.
            self.sum = Resident(label, self.local[self.low : self.high])
        else:
            self.sum = tier.store(label, self.high - self.low, self.dtype, group.device)

    @property
    def total(self) -> StoredTensor:
        """Return the accumulator of a trained group."""
        if self.sum is None:
            raise RuntimeError(f"no parameter of {self.group.name} is trained")
        return self.sum

    def add(self, parts: list[torch.Tensor], scale: float) -> Handle | None:
        """Add scale * (the sum of `parts` in rank order) to the accumulator; returns a pending copy to the host."""
        if self._leaving is not None:
            self._leaving.wait()
        total = self.total.acquire(read=self.filled)
        if total.device != self.group.device:
            self._leaving = self.leave_device(parts, scale, total)
        else:
            sum_in_rank_order(parts, total, scale, self.filled, self._any_order)
            self.total.release(changed=True)
            self._leaving = None
        self.filled = True
        return self._leaving

    def leave_device(self, parts: list[torch.Tensor], scale: float, total: torch.Tensor) -> Handle:
        """Sum on the device and copy the sum to the borrowed accumulator, which is released after the copy."""
        gone = torch.empty(total.numel(), dtype=total.dtype, device=self.group.device)
        sum_in_rank_order(parts, gone, scale, False, self._any_order)
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
        """Return the slice of a round's buffer for a parameter's gradient, in the parameter's shape."""
        if buffer is self.local:
            if self._places is None:
                self._places = [self._view(buffer, member) for member in self.group.members]
            return self._places[index]
        return self._view(buffer, self.group.members[index])

    @staticmethod
    def _view(buffer: torch.Tensor, member: ParamRecord) -> torch.Tensor:
        return buffer.as_strided(member.shape, member.strides, buffer.storage_offset() + member.offset)

    def own(self, total: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the borrowed sum; at stage 0, where every rank has all of it, an equal part."""
        rank, cuts = self.group.axis.rank, self.group.layout.cuts
        low, high = cuts[rank] - self.low, cuts[rank + 1] - self.low
        return total if low == 0 and high == total.numel() else total[low:high]

    @property
    def counted(self) -> bool:
        """Return whether this rank adds its part of the bucket to the norm."""
        return self.filled and self.group.ranks.counted

    def is_finite(self, member: ParamRecord) -> bool:
        """Return whether this rank's part of a parameter's gradient sum is finite."""
        low, high = max(member.offset, self.low), min(member.offset + member.numel, self.high)
        if not self.filled or low >= high:
            return True
        with self.total.borrowed() as total:
            return bool(torch.isfinite(total[low - self.low : high - self.low]).all())

    def note_factor(self, factor: float) -> None:
        """Record the factor of a low-precision round, which the owner applies to the sum."""
        if self.factor in (0.0, factor):
            self.factor = factor
        else:
            self.factor = -1.0 - hash((self.factor, self.launches[0], factor)) % (1 << 40)

    @property
    def row_bytes(self) -> int:
        return _ROW.size + -(-len(self.touched) // 8) * 8

    def row(self) -> bytes:
        """Return the values that ranks compare before using gradients: launches, factor, parameters with a gradient."""
        launches = self.launches if self.sum is not None else (-1, -1)
        return _ROW.pack(*launches, self.factor) + self.touched + bytes(-len(self.touched) % 8)

    def clear(self) -> None:
        self.filled = False
        self.launches, self.factor = [0, 0], 0.0
        self.touched = bytearray(len(self.group.members))
        self.sent = []


class SumOfSquaresCache:
    """Sums of squares of a window's gradients: this rank's, and the exchanged total; see [Note: known norm]."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []  # whose norm an update forms
        self.lends_views = False  # of the sums: what is written through their `.data` no counter shows
        self.total: float | None = None  # of all ranks that hold one copy of the model; None: not exchanged
        self._revision = -1  # of the gradients when they were read
        self._read: dict[int, tuple[tuple[int, int] | None, float]] = {}  # by bucket: state of its sum, own part

    def begin(self, revision: int) -> None:
        self._revision, self._read, self.total = revision, {}, None

    def note(self, bucket: Bucket, own: float) -> None:
        self._read[id(bucket)] = self._state(bucket), own

    def own(self, revision: int) -> float | None:
        """Return this rank's part of the norm; None if gradients have changed since or were not read."""
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
        """Return whether `total` is still valid as far as this rank knows."""
        return self.total is not None and self.own(revision) is not None

    def _state(self, bucket: Bucket) -> tuple[int, int] | None:
        """Return address and version of the sum, which change with a write; None if a write would not be detected."""
        memory = bucket.total.memory
        if memory is None or memory.is_inference() or self.lends_views:
            return None
        return memory.data_ptr(), memory._version


_FEW = 4  # a table is large if it has more than this many times the rows looked up


def tables(model: nn.Module) -> list[nn.Embedding]:
    """Return the embedding tables on the host whose gradient could be row-sparse."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        and module.weight.device.type == "cpu"
    ]


@contextmanager
def by_rows(embeddings: Sequence[nn.Embedding], batch: Any) -> Iterator[None]:
    """Make tables that are large compared with the batch return row-sparse gradients inside the context.

    Tables with a user's gradient hook keep dense gradients.
    """
    most = max((t.numel() for t in tensors_in(batch) if not t.is_floating_point()), default=0)
    large = []
    for table in embeddings:
        weight = table.weight
        if not most or table.num_embeddings <= _FEW * most:
            continue
        if isinstance(weight, ManagedParameter) and weight.requires_grad:
            hooks = getattr(weight, "_post_accumulate_grad_hooks", None)  # one of them is the reducer's
            if not weight._backward_hooks and hooks is not None and len(hooks) == 1:
                large.append(table)
    for table in large:
        table.sparse = True
    try:
        yield
    finally:
        for table in large:
            table.sparse = False


def can_add(gradient: torch.Tensor, dtype: torch.dtype, padded: bool) -> bool:
    """Return whether `add_rows` accepts this gradient for an accumulator of `dtype`."""
    fits = dtype in (gradient.dtype, torch.float32)
    return gradient.is_sparse and gradient.sparse_dim() == 1 and fits and not padded


def add_rows(place: torch.Tensor, gradient: torch.Tensor, factor: float, again: bool) -> None:
    """Add the rows of a gradient to `place`; `again=False` overwrites it."""
    if not again:
        place.zero_()
    rows = gradient if place.dtype.itemsize > gradient.dtype.itemsize else gradient.coalesce()
    place.index_add_(0, rows._indices()[0], rows._values().to(place.dtype), alpha=factor)
