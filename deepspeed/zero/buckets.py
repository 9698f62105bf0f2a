"""Gradients on their way: from the hooks of autograd into a group's bucket, over the wire, into the accumulator.

[Note: rounds] A bucket collects one gradient per parameter of its group: a round. A full round is launched at once
where the policy reduces as gradients arrive (or in the boundary micro-batch), and closed by `finish` otherwise. Ranks
may run different branches, so a rank may have launched fewer rounds of a group than others; `finish`, which all ranks
enter in `step`, compares the counts, and a rank that is behind contributes zeros. Messages carry the group and the
round in their tag, so the order of launches need not agree.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.comm import collectives
from deepspeed.comm.axis import Axis
from deepspeed.comm.collectives import EXCHANGE, READ, SMALL, SPREAD, Handle, sum_in_rank_order, tag_of
from deepspeed.foundation.log import warn_once
from deepspeed.zero.layout import by_group
from deepspeed.zero.param import clear_raw_grad, raw_grad
from deepspeed.zero.shard_group import Member, ShardGroup

# How long a rank waits for a buffer to come back before it takes a fresh one: ranks whose branches differ may
# complete a round only in `finish`, so waiting for ever would be a deadlock.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class ReduceSettings:
    """How gradients are summed.

    Args:
        mean_over: number the sum over micro-batches and ranks is divided by, per micro-batch of weight one.
        accumulates: windows have several micro-batches (`gradient_accumulation_steps` > 1).
        accumulator: dtype of the accumulators (`data_types.grad_accum_dtype`).
        wire: dtype gradients travel in (`communication_data_type`); None: as they are.
        overlap: send while backward still runs (`zero_optimization.overlap_comm`).
        in_flight: elements that may be on the wire at once (`reduce_bucket_size`).
        prescale: factor applied before the wire to low-precision gradients (`prescale_gradients`); None: after it.
        watch_ranks: remember which rank sent non-finite values.
    """

    mean_over: float
    accumulates: bool = False
    accumulator: torch.dtype = torch.float32
    wire: torch.dtype | None = None
    overlap: bool = True
    in_flight: int = 500_000_000
    prescale: float | None = None
    watch_ranks: bool = False


@dataclass
class Round:
    """Gradients of one group that have not been sent yet."""

    buffer: torch.Tensor
    at_owner: float  # factor still to be applied to the sum
    pooled: bool
    expected: int = 0  # gradients that make it complete
    arrived: set[int] = field(default_factory=set)


class Bucket:
    """The gradient side of one group.

    Args:
        group: the parameters.
        accumulator: dtype of the accumulated sum.
        sums_locally: several micro-batches are summed here before they travel.
    """

    def __init__(self, group: ShardGroup, accumulator: torch.dtype, sums_locally: bool) -> None:
        self.group = group
        self.whole = not group.policy.owns_a_slice
        self.low, self.high = group.low, group.high
        self.dtype = accumulator
        self.sums_locally = self.whole or (sums_locally and not group.policy.reduces_as_gradients_arrive)
        self.local: torch.Tensor | None = None
        self.sum = torch.empty(0, dtype=accumulator, device=group.device)
        self.filled = False  # whether `sum` holds anything
        self.round: Round | None = None
        self.launches = [0, 0]  # rounds sent in low precision, in the accumulator's precision
        self.touched = bytearray(len(group.members))
        self.suspects: list[tuple[int, torch.Tensor]] = []  # (rank, sum of what it sent)

    def prepare(self) -> None:
        """Allocate the accumulators: a group that is all frozen has none until one of its parameters is unfrozen."""
        if self.sum.numel() == self.high - self.low:
            return
        device = self.group.device
        if self.sums_locally:
            # Where gradients are summed before they travel, the reduced sum takes the place of the own part.
            self.local = torch.zeros(self.group.numel, dtype=self.dtype, device=device)
            self.sum = self.local[self.low : self.high]
        else:
            self.sum = torch.zeros(self.high - self.low, dtype=self.dtype, device=device)

    def own(self) -> torch.Tensor:
        """This rank's share of the sum; at stage 0, where everybody has everything, an equal part of it."""
        rank, cuts = self.group.axis.rank, self.group.layout.cuts
        return self.sum[cuts[rank] - self.low : cuts[rank + 1] - self.low]

    def clear(self) -> None:
        """Forget the window."""
        self.filled = False
        self.launches = [0, 0]
        self.touched = bytearray(len(self.group.members))
        self.suspects = []


class Reducer:
    """Collects, sends and accumulates the gradients of an engine.

    Args:
        world: all ranks whose gradients are summed; they enter `finish` together.
        groups: the engine's groups.
        settings: how to sum.
        replicas: ranks that hold the same slice (hybrid sharding); None when every slice exists once.
    """

    def __init__(
        self, world: Axis, groups: list[ShardGroup], settings: ReduceSettings, replicas: Axis | None = None
    ) -> None:
        self.world, self.settings, self.replicas = world, settings, replicas
        self.buckets = [Bucket(group, settings.accumulator, settings.accumulates) for group in groups]
        self._of = {id(b.group): b for b in self.buckets}
        self.reduce_now = True  # this micro-batch ends the window
        self.deferred = settings.accumulates  # the window holds micro-batches that are summed before they travel
        self.factor = 1.0 / settings.mean_over  # of the running backward pass
        self.clean = True
        self.on_complete: Callable[[ShardGroup], None] | None = None  # all gradients of a group are here
        self._in_flight: deque[tuple[Handle, Bucket, Round]] = deque()
        self._pool: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._largest = max((g.numel for g in groups), default=0)
        self._channel, self._finishes = world.channel(), 0
        self._touched_anywhere: dict[int, list[bool]] = {}
        self._handed_out: list[tuple[Member, torch.Tensor, int]] = []
        self._hooks: dict[int, Any] = {}
        for group in groups:
            for member in group.members:
                member.reducer = self
                self.listen(member)

    # -- arrival --------------------------------------------------------------------------------------------------

    def listen(self, member: Member) -> None:
        """Take the gradients of `member` from now on (again, when it was unfrozen)."""
        if member.param.requires_grad and member.uid not in self._hooks:
            self._of[id(member.group)].prepare()
            self._hooks[member.uid] = member.param.register_post_accumulate_grad_hook(
                lambda _param, member=member: self.arrived(member)
            )

    def arrived(self, member: Member) -> None:
        """Autograd has finished the gradient of `member` for this pass."""
        gradient = raw_grad(member.param)
        if gradient is None:
            return
        collectives.delay(f"gradient of {member.name}")
        clear_raw_grad(member.param)
        self.clean = False
        bucket = self._of[id(member.group)]
        bucket.touched[member.index] = 1
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self._enter(bucket, member, gradient)
        current = bucket.round
        if current is not None and len(current.arrived) >= current.expected:
            if self.on_complete is not None:
                self.on_complete(bucket.group)
            if self._sends_now(bucket):
                self._launch(bucket)

    def _sends_now(self, bucket: Bucket) -> bool:
        return self.reduce_now or bucket.group.policy.reduces_as_gradients_arrive

    def _sums_before_travel(self, bucket: Bucket) -> bool:
        return self.deferred and not bucket.group.policy.reduces_as_gradients_arrive

    def _enter(self, bucket: Bucket, member: Member, gradient: torch.Tensor) -> None:
        """Copy or add one gradient into the open round."""
        dtype = self._travel_dtype(bucket)
        exact = dtype == self.settings.accumulator
        entry, at_owner = (self.factor, 1.0) if exact else (1.0, self.factor)
        if not exact and self.settings.prescale is not None:
            entry, at_owner = self.settings.prescale, self.factor / self.settings.prescale
        current = bucket.round
        if current is not None:
            again = member.index in current.arrived and not exact  # a sum in low precision would round
            if again or current.buffer.dtype != dtype or current.at_owner != at_owner:
                self._launch(bucket)
                current = None
        if current is None:
            current = bucket.round = self._open(bucket, dtype, at_owner)
        place = current.buffer[member.offset : member.offset + member.numel].view(member.shape)
        if member.index in current.arrived:
            place.add_(gradient.to(dtype), alpha=entry)
        else:
            current.arrived.add(member.index)
            if entry == 1.0 or gradient.dtype != dtype:
                place.copy_(gradient)
                if entry != 1.0:
                    place.mul_(entry)
            else:
                torch.mul(gradient, entry, out=place)

    def _travel_dtype(self, bucket: Bucket) -> torch.dtype:
        if self._sums_before_travel(bucket):
            return self.settings.accumulator
        return self.settings.wire or bucket.group.dtype

    def _open(self, bucket: Bucket, dtype: torch.dtype, at_owner: float) -> Round:
        expected = sum(m.param.requires_grad for m in bucket.group.members)
        local = bucket.local
        if local is not None and local.dtype == dtype and not bucket.filled and self._lone_round(bucket):
            return Round(local, at_owner, False, expected)
        return Round(self._acquire(dtype, bucket.group.numel), at_owner, True, expected)

    def _lone_round(self, bucket: Bucket) -> bool:
        return all(b is not bucket for _, b, _ in self._in_flight)

    def _acquire(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A transit buffer; waits for one to come back when too much is in flight."""
        self._settle_ready()
        limit = max(self.settings.in_flight, numel)
        started = time.monotonic()
        while self._in_flight and sum(r.buffer.numel() for *_, r in self._in_flight) + numel > limit:
            if self._in_flight[0][0].ready():
                self._settle(*self._in_flight.popleft())
            elif time.monotonic() - started > _PATIENCE_S:
                warn_once("gradients wait for a rank that runs another branch (or is slow); taking a fresh buffer")
                break
            else:
                time.sleep(2e-5)
        free = self._pool[dtype]
        for index, buffer in enumerate(free):
            if buffer.numel() >= numel:
                return free.pop(index)[:numel]
        device = self.buckets[0].group.device
        return torch.empty(self._largest, dtype=dtype, device=device)[:numel]

    def _release(self, round_: Round) -> None:
        if round_.pooled:
            base = round_.buffer._base
            self._pool[round_.buffer.dtype].append(round_.buffer if base is None else base)

    # -- the wire -------------------------------------------------------------------------------------------------

    def _launch(self, bucket: Bucket) -> None:
        """Send the open round of a bucket."""
        current, group = bucket.round, bucket.group
        if current is None:
            return
        bucket.round = None
        end = 0
        for member in group.members:
            if member.index not in current.arrived:
                current.buffer[member.offset : member.offset + member.numel].zero_()
            end = member.offset + member.numel
        current.buffer[end:].zero_()
        exact = int(current.buffer.dtype == self.settings.accumulator)
        seq = 2 * bucket.launches[exact] + exact
        bucket.launches[exact] += 1
        self._in_flight.append((self._send(bucket, current, seq), bucket, current))
        if not self.settings.overlap:
            self._settle_all()

    def _send(self, bucket: Bucket, current: Round, seq: int) -> Handle:
        group, buffer, axis = bucket.group, current.buffer, bucket.group.axis
        label = f"reduce of {group.name}"
        tag = tag_of(group.channel, EXCHANGE, seq)
        if not bucket.whole:
            return collectives.reduce_to_owners(
                axis, buffer, group.layout.cuts, tag, label, lambda parts: self._add(bucket, parts, current, seq)
            )
        if axis.size == 2 and buffer.dtype == torch.float32 and current.at_owner == 1.0:
            return collectives.all_reduce_sum(axis, buffer, label, lambda: self._take(bucket, buffer))
        if axis.size == 2 and axis.tagged:
            return collectives.swap(axis, buffer, tag, label, lambda parts: self._add(bucket, parts, current, seq))
        return collectives.reduce_to_owners(
            axis, buffer, group.layout.cuts, tag, label, lambda parts: self._share(bucket, parts, current, seq)
        )

    def _add(self, bucket: Bucket, parts: list[torch.Tensor], current: Round, seq: int) -> Handle | None:
        """The owner has all contributions: sum them into the accumulator."""
        self._watch(bucket, parts)
        if self.replicas is not None and self.replicas.size > 1:
            total = torch.empty(bucket.sum.numel(), dtype=torch.float32, device=bucket.sum.device)
            sum_in_rank_order(parts, total, current.at_owner, add=False)
            return self._across_replicas(bucket, total, seq)
        sum_in_rank_order(parts, bucket.sum, current.at_owner, add=bucket.filled)
        bucket.filled = True
        return None

    def _across_replicas(self, bucket: Bucket, total: torch.Tensor, seq: int) -> Handle:
        """Hybrid sharding: the same slice lives on several ranks; every one of them sums all of their totals."""
        axis, channel = self.replicas, bucket.group.channel
        if axis is None:
            raise RuntimeError("no replicate axis")
        n, label = total.numel(), f"reduce across replicas of {bucket.group.name}"
        table = total.new_empty(axis.size * n)
        table[axis.rank * n : (axis.rank + 1) * n] = total

        def then() -> None:
            parts = [table[r * n : (r + 1) * n] for r in range(axis.size)]
            sum_in_rank_order(parts, bucket.sum, 1.0, add=bucket.filled)
            bucket.filled = True

        handle = collectives.spread(
            axis, table, [r * n for r in range(axis.size + 1)], tag_of(channel, SPREAD, seq), label
        )
        handle.then = then
        return handle

    def _share(self, bucket: Bucket, parts: list[torch.Tensor], current: Round, seq: int) -> Handle:
        """Stage 0 on more than two ranks: the owner's sum goes to everybody."""
        self._watch(bucket, parts)
        group = bucket.group
        total = torch.empty(group.numel, dtype=bucket.sum.dtype, device=group.device)
        low, high = group.layout.cuts[group.axis.rank], group.layout.cuts[group.axis.rank + 1]
        sum_in_rank_order(parts, total[low:high], current.at_owner, add=False)
        handle = collectives.spread(
            group.axis, total, group.layout.cuts, tag_of(group.channel, SPREAD, seq), f"share of {group.name}"
        )
        handle.then = lambda: self._take(bucket, total)
        return handle

    def _take(self, bucket: Bucket, total: torch.Tensor) -> None:
        """Everybody has the whole sum of a round."""
        if total.data_ptr() != bucket.sum.data_ptr():
            sum_in_rank_order([total], bucket.sum, 1.0, add=bucket.filled)
        bucket.filled = True

    def _watch(self, bucket: Bucket, parts: list[torch.Tensor]) -> None:
        if self.settings.watch_ranks:
            ranks = bucket.group.axis.ranks
            bucket.suspects += [(ranks[r], part.sum(dtype=torch.float32)) for r, part in enumerate(parts)]

    def _settle(self, handle: Handle, bucket: Bucket, current: Round) -> None:
        following = handle.advance()
        if following is None:
            self._release(current)
        else:
            self._in_flight.append((following, bucket, current))

    def _settle_ready(self) -> None:
        for _ in range(len(self._in_flight)):
            if not self._in_flight[0][0].ready():
                break
            self._settle(*self._in_flight.popleft())

    def _settle_all(self) -> None:
        while self._in_flight:
            self._settle(*self._in_flight.popleft())

    # -- the end of a window --------------------------------------------------------------------------------------

    def finish(self, extra: list[float] | None = None) -> torch.Tensor:
        """Send what is left, bring all ranks to the same number of rounds, wait. All ranks call together.

        Args:
            extra: numbers every rank adds to the exchange.

        Returns:
            (ranks, len(extra)) table of everybody's numbers, float64.
        """
        for bucket in self.buckets:
            self._launch(bucket)
        numbers = list(extra or [])
        row: list[float] = [*numbers]
        for bucket in self.buckets:
            row += [*bucket.launches, *bucket.touched]
        self._finishes += 1
        tag = tag_of(self._channel, SMALL, self._finishes)
        mine = torch.tensor(row, dtype=torch.float64)
        table = collectives.all_gather_small(self.world, self._on_wire(mine), tag, "agreement on gradients").cpu()
        at = len(numbers)
        for bucket in self.buckets:
            most = table[:, at : at + 2].amax(0).tolist()
            for exact in (0, 1):
                while bucket.launches[exact] < most[exact]:
                    self._send_zeros(bucket, exact)
            at += 2
            count = len(bucket.touched)
            self._touched_anywhere[id(bucket)] = (table[:, at : at + count].amax(0) > 0).tolist()
            at += count
        self._settle_all()
        return table[:, : len(numbers)]

    def _on_wire(self, row: torch.Tensor) -> torch.Tensor:
        on_device = not self.world.tagged and self.world.size > 1
        return row.to(self.buckets[0].group.device) if on_device and self.buckets else row

    def _send_zeros(self, bucket: Bucket, exact: int) -> None:
        low = self.settings.wire or bucket.group.dtype
        dtype = self.settings.accumulator if exact else low
        # The factor must be the one the other ranks use: with a two-rank swap both sides sum.
        at_owner = 1.0 if exact else self.factor / (self.settings.prescale or 1.0)
        bucket.round = Round(self._acquire(dtype, bucket.group.numel), at_owner, pooled=True)
        self._launch(bucket)

    def touched(self, bucket: Bucket, member: Member) -> bool:
        """Whether any rank had a gradient for `member` in the window; valid after `finish`."""
        marks = self._touched_anywhere.get(id(bucket))
        return bool(marks and marks[member.index])

    def adopt_edits(self) -> None:
        """Take over in-place changes of gradients that were handed out."""
        for member, tensor, version in self._handed_out:
            if tensor._version != version:
                self._write(member, tensor)
        self._handed_out.clear()

    def clear(self) -> None:
        """Forget the window; its sums are overwritten by the next gradients."""
        for bucket in self.buckets:
            bucket.clear()
        self._touched_anywhere.clear()
        self._handed_out.clear()
        self.clean = True
        self.deferred = self.settings.accumulates

    def drop(self) -> None:
        """Throw the gradients of the window away (`zero_grad`). All ranks call together."""
        if not self.clean:
            self.finish()
            self.clear()

    def set_accumulates(self, accumulates: bool) -> None:
        """The number of micro-batches per window has changed, between windows."""
        self.settings = replace(self.settings, accumulates=accumulates)
        self.deferred = accumulates

    def detach(self) -> None:
        """Stop listening."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._pool.clear()

    # -- what users see -------------------------------------------------------------------------------------------

    def bucket_of(self, member: Member) -> Bucket:
        """The bucket of a member's group."""
        return self._of[id(member.group)]

    def grad_of(self, member: Member) -> torch.Tensor | None:
        """The mean gradient of the window so far, in the parameter's shape; see `ManagedParameter.grad`."""
        if self.clean:
            return None
        bucket = self.bucket_of(member)
        if self._sums_before_travel(bucket) and not self.reduce_now:
            current = bucket.round
            if current is None or member.index not in current.arrived:
                return None
            return current.buffer[member.offset : member.offset + member.numel].view(member.shape)
        self.finish()
        if not self.touched(bucket, member):
            return None
        if bucket.whole:
            return bucket.sum[member.offset : member.offset + member.numel].view(member.shape)
        label = f"gradient of {member.name}"
        tensor = member.group.assemble(member, bucket.sum, READ, label).view(member.shape)
        self._handed_out.append((member, tensor, tensor._version))
        return tensor

    def set_grad(self, member: Member, value: torch.Tensor | None) -> None:
        """Replace the window's gradient of `member` by `value` (None: as if it had none). All ranks call together."""
        if value is None and self.clean:
            return
        self.clean = False
        self.finish()
        bucket = self.bucket_of(member)
        bucket.touched[member.index] = int(value is not None)
        self._touched_anywhere[id(bucket)][member.index] = value is not None
        if value is not None:
            self._write(member, value)

    def _write(self, member: Member, value: torch.Tensor) -> None:
        bucket = self.bucket_of(member)
        if not bucket.filled:
            bucket.sum.zero_()
            bucket.filled = True
        flat = value.detach().reshape(-1)
        for piece in member.group.layout.pieces_within(bucket.low, bucket.high):
            if piece.index == member.index:
                at = piece.at - bucket.low
                bucket.sum[at : at + piece.numel].copy_(flat[piece.start : piece.stop])
