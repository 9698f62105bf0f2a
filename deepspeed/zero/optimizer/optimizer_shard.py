"""Leaves and optimizer state of one parameter group on one rank.

[Note: placeholders] If the optimizer's storage tier provides memory only temporarily (NVMe), leaf and state are
placeholders between updates: a leaf is one NaN, expanded to its shape, and a state tensor is a meta tensor of the right
shape. Inside of `OptimizerShard.at_hand`, both are real tensors.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from deepspeed.errors import UsageError
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import RESIDENT, Evicted
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.gradients.buckets import Bucket
from deepspeed.zero.layout.layout import ParamRange
from deepspeed.zero.optimizer.state_tensor import Away
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import ShardGroup


@dataclass(eq=False)
class Fragment:
    """Part of one parameter that this rank updates.

    Args:
        member: parameter.
        range: elements of the parameter.
        leaf: view of these elements in the master weights; the inner optimizer's parameter.
        bucket: bucket with the gradient.
    """

    member: ParamRecord
    range: ParamRange
    leaf: Parameter
    bucket: Bucket
    _view: tuple[torch.Tensor, torch.Tensor] | None = None  # cached gradient view, and its accumulator

    def gradient(self, total: torch.Tensor) -> torch.Tensor:
        """Return the view of this fragment's gradient, in the leaf's shape.

        Args:
            total: acquired memory of the bucket's accumulator.
        """
        if self._view is not None and self._view[1] is total:
            return self._view[0]
        view = total[self.span].view(self.leaf.shape)
        if self.bucket.total.memory is total:  # a temporary buffer must not be cached
            self._view = view, total
        return view

    @property
    def span(self) -> slice:
        """Return the fragment's slice of this rank's flat master weights, and of the accumulator."""
        start = self.range.group_start - self.bucket.low
        return slice(start, start + self.range.numel)

    def cut_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of this fragment's part of the optimizer state of the whole parameter.

        Args:
            state: entries by name; tensors of the parameter's shape are sliced, other tensors copied.
        """
        fragments = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == self.member.shape and value.dim():
                flat = value.detach().reshape(-1)[self.range.start : self.range.stop]
                fragments[key] = flat.clone().view(self.leaf.shape).to(self.leaf.device)
            else:
                fragments[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return fragments


# Alignment of state tensors in the buffer that they share, in bytes.
_ALIGN = 64


@dataclass(frozen=True, eq=False)
class _StateTensor:
    """Position of one state tensor in the buffer of its group; `start` is in bytes."""

    leaf: Parameter
    key: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def place(self) -> tuple[int, str, torch.Size, tuple[int, ...], torch.dtype, int]:
        return id(self.leaf), self.key, self.shape, self.stride, self.dtype, self.start

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        flat = buffer[self.start : self.start + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class _Moments:
    """State tensors of a group, packed into one tensor of an offload tier.

    Args:
        group: parameter group.
        optimizer: inner optimizer with the state.
        lend: weak reference to `OptimizerShard.lend`, with which placeholders load their values.
    """

    def __init__(self, group: ShardGroup, optimizer: torch.optim.Optimizer, lend: weakref.WeakMethod[Any]) -> None:
        self._group, self._optimizer, self._lend = group, optimizer, lend
        self._entries: list[_StateTensor] = []
        self._stored: StoredTensor | None = None
        self._buffer: torch.Tensor | None = None

    def prefetch(self) -> None:
        if self._stored is not None:
            self._stored.prefetch()

    def bring(self) -> None:
        """Replace placeholders in the optimizer's state by real tensors; entries that other code has set stay."""
        if self._stored is not None:
            self._buffer = self._stored.acquire()
            for entry in self._entries:
                state = self._optimizer.state.get(entry.leaf, {})
                if isinstance(there := state.get(entry.key), torch.Tensor) and there.device.type == "meta":
                    state[entry.key] = entry.view(self._buffer)

    def take_away(self, fragments: list[Fragment], changed: bool) -> None:
        """Store the optimizer's state in the tier, and replace it by placeholders.

        Args:
            fragments: fragments with the state.
            changed: whether values were written since `bring`.
        """
        wanted, states = [], []
        end = 0
        for fragment in fragments:
            for key, value in self._optimizer.state.get(fragment.leaf, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.device.type != "meta":
                    # Dense strides are preserved, since the last bits of matrix products depend on them.
                    strides = torch.empty_like(value, device="meta").stride()
                    wanted.append(_StateTensor(fragment.leaf, key, value.shape, strides, value.dtype, end))
                    states.append(value)
                    end = -(-(end + wanted[-1].nbytes) // _ALIGN) * _ALIGN
        old = self._stored
        if old is None or [e.place for e in wanted] != [e.place for e in self._entries]:
            self._entries, self._stored, changed = wanted, self._new(end), True
            self._buffer = self._stored.acquire(read=False) if self._stored is not None else None
        for entry, value in zip(wanted, states, strict=True):
            place = entry.view(self._buffer) if self._buffer is not None else value
            if place.data_ptr() != value.data_ptr():  # the tensor was replaced by the optimizer or by other code
                place.copy_(value)
                changed = True
            placeholder = Away.of(value, functools.partial(self._borrow, self._lend, entry.leaf, entry.key))
            self._optimizer.state[entry.leaf][entry.key] = placeholder
        if old is not None and old is not self._stored:
            old.release(changed=False)
            old.drop()
        if self._stored is not None:
            self._stored.release(changed)
        self._buffer = None

    @staticmethod
    def _borrow(
        lend: weakref.WeakMethod[Any], leaf: Parameter, key: str, changed: bool
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Return a context with the values of a placeholder; raises UsageError if its optimizer was deleted."""
        method = lend()
        if method is None:
            raise UsageError(
                f"optimizer state {key!r} was kept longer than its optimizer, which had it in another tier"
            )
        return method(leaf, key, changed)

    def _new(self, nbytes: int) -> StoredTensor | None:
        """Create the tensor in the tier; None if it is empty."""
        group = self._group
        if not nbytes:
            return None
        return group.tiers.optimizer.store(f"optimizer state of {group.name}", nbytes, torch.uint8, group.device)

    def drop(self) -> None:
        if self._stored is not None:
            self._stored.drop()
            self._stored = None
            self._entries = []


class OptimizerShard:
    """Leaves and optimizer state of one parameter group on this rank.

    Args:
        bucket: gradient bucket of the group.
        optimizer: inner optimizer.
        foreign: whether the optimizer's class is unknown, so that it may replace the data of leaves.
    """

    def __init__(self, bucket: Bucket, optimizer: torch.optim.Optimizer, foreign: bool = False) -> None:
        self.bucket, self.group = bucket, bucket.group
        self.members: list[ParamRecord] = []  # parameters that the optimizer updates, on this or other ranks
        self.fragments: list[Fragment] = []
        self._optimizer = optimizer
        self._moments = _Moments(self.group, optimizer, weakref.WeakMethod(self.lend))
        self._users, self._foreign = 0, foreign
        self._evicted: list[Evicted] = []

    @property
    def moves(self) -> bool:
        """Return whether master weights and state have memory only inside of `at_hand`."""
        under = self.group.under_leaves
        return under is not None and under.memory is None

    @property
    def rests_at_hand(self) -> bool:
        """Return whether `at_hand` has no effect, since all state is stored in the memory in which it is updated."""
        group = self.group
        if self._evicted or group.tiers.optimizer is not RESIDENT:
            return False
        under = group.values if group.master is None else group.master
        return under.memory is not None or not self.moves  # the first test is cheaper and nearly always sufficient

    def add(self, member: ParamRecord) -> list[Fragment]:
        """Create the leaf for this rank's part of a parameter.

        Returns:
            List with one fragment; empty if this rank has no elements of the parameter.
        """
        self.members.append(member)
        range_ = self.group.layout.range_of(member.index, self.group.low, self.group.high)
        if range_ is None:
            return []
        # A leaf of the whole parameter has its shape, for optimizers that depend on shapes.
        shape = member.shape if range_.numel == member.numel else torch.Size([range_.numel])
        values = self._rest(shape)
        # Integer parameters, as quantized weights are, may be listed; they never have a gradient.
        leaf = Parameter(values, requires_grad=values.is_floating_point())
        # Attributes that users have set on parameters (Muon's `use_muon`) are copied for the optimizer.
        vars(leaf).update({key: mark for key, mark in vars(member.param).items() if key != "_ds_member"})
        fragments = [Fragment(member, range_, leaf, self.bucket)]
        self.fragments += fragments
        self.point(fragments)
        return fragments

    def _rest(self, shape: torch.Size) -> torch.Tensor:
        """Return a placeholder of this shape for the data of a leaf."""
        group, dtype = self.group, self.group.updated.dtype
        nothing = float("nan") if dtype.is_floating_point else 0
        return torch.full((), nothing, dtype=dtype, device=group.tiers.optimizer.lends_on(group.device)).expand(shape)

    def point(self, fragments: list[Fragment] | None = None) -> None:
        """Set the data of leaves to views of the master weights if these are in memory, else to placeholders.

        Args:
            fragments: fragments with the leaves; None: all.
        """
        under = self.group.under_leaves
        memory = None if under is None else under.memory
        for fragment in self.fragments if fragments is None else fragments:
            shape = fragment.leaf.shape
            fragment.leaf.data = self._rest(shape) if memory is None else memory[fragment.span].view(shape)

    def adopt_replaced(self) -> None:
        """Copy the values of tensors that the update assigned to leaves (`p.data = ...`) into the master weights.

        Call this inside of `at_hand`.
        """
        if not self._foreign or self.group.under_leaves is None:
            return
        with self.group.updated.borrowed(changed=True) as master:
            for fragment in self.fragments:
                place, leaf = master[fragment.span], fragment.leaf
                if leaf.data_ptr() != place.data_ptr():
                    place.copy_(leaf.detach().reshape(-1))
                    leaf.data = place.view(leaf.shape)

    @property
    def writes(self) -> int:
        """Return the number of in-place writes to leaves; 0 if leaves are the model's parameters (stage 0 in fp32)."""
        group = self.group
        if group.master is None and not group.policy.owns_a_shard:
            return 0
        return sum(fragment.leaf._version for fragment in self.fragments)

    def prefetch(self) -> None:
        if self.moves:
            self.group.updated.prefetch()
            self._moments.prefetch()

    @contextlib.contextmanager
    def at_hand(self, changed: bool = False) -> Iterator[None]:
        """Load leaves and optimizer state into memory inside of the context; contexts can be nested.

        Args:
            changed: whether values are written, so that they must be stored at the end.

        Raises:
            UsageError: the state was moved by `engine.offload_states`.
        """
        if self._evicted:
            raise UsageError("optimizer state was moved by engine.offload_states(); call engine.reload_states() first")
        if not self.moves:
            yield
            return
        with self.group.updated.borrowed(changed) as master:
            self._users += 1
            if self._users == 1:
                for fragment in self.fragments:
                    fragment.leaf.data = master[fragment.span].view(fragment.leaf.shape)
                self._moments.bring()
            try:
                yield
            finally:
                self._users -= 1
                if self._users == 0:
                    self._moments.take_away(self.fragments, changed)
                    self.point()

    @contextlib.contextmanager
    def lend(self, leaf: Parameter, key: str, changed: bool) -> Iterator[torch.Tensor]:
        """Return a context with one state tensor in memory.

        Args:
            leaf: parameter of the inner optimizer.
            key: name of the state tensor.
            changed: whether the tensor is written.
        """
        with self.at_hand(changed):
            yield self._optimizer.state[leaf][key]

    def evict_state(self, pool: BufferPool) -> None:
        """Move state tensors from the device to host memory until `restore_state`; no effect on offloaded groups."""
        if self._evicted or self.group.tiers.optimizer is not RESIDENT:
            return
        for fragment in self.fragments:
            for value in self._optimizer.state.get(fragment.leaf, {}).values():
                if isinstance(value, torch.Tensor) and value.dim() and value.untyped_storage().resizable():
                    self._evicted.append(Evicted(value, pool))

    def restore_state(self, non_blocking: bool = False) -> None:
        for evicted in self._evicted:
            evicted.restore(non_blocking)
        self._evicted.clear()

    def store_state(self) -> None:
        """Move state tensors that were set in `optimizer.state`, such as loaded ones, to the storage tier."""
        if self.moves:
            self._moments.bring()
            self._moments.take_away(self.fragments, changed=True)

    def touched(self, marks: bytearray) -> tuple[list[ParamRecord], list[Fragment]]:
        """Return the parameters that have a gradient on any rank, and their fragments on this rank.

        Args:
            marks: one byte per parameter of the group; see `Reducer.marks`.
        """
        if all(marks):
            return self.members, self.fragments
        members = [member for member in self.members if marks[member.index]]
        return members, [fragment for fragment in self.fragments if marks[fragment.member.index]]

    def drop(self) -> None:
        self._moments.drop()
