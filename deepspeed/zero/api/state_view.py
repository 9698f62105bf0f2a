"""Training state of an engine as named ranges of elements, for checkpoints.

Checkpoints access parameters, optimizer state and gradients through this module, which hides their storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.foundation.module_tree import own_state
from deepspeed.storage.tier import StoredTensor
from deepspeed.zero.gradients.buckets import Bucket
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.layout.layout import ShardLayout, by_first, by_group, by_owner
from deepspeed.zero.layout.placement import Relation, placement_of
from deepspeed.zero.layout.regions import Region
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.optimizer.optimizer_shard import Fragment, OptimizerShard
from deepspeed.zero.optimizer.update import all_gather_updated
from deepspeed.zero.parameters.parallel_groups import signature_of
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParameterGroup, ParamRecord
from deepspeed.zero.parameters.shard_group import ShardGroup

# Names of the layout rules in checkpoints.
BETWEEN_PARAMETERS = "between"
LAYOUT_RULES = {"equal": by_group, BETWEEN_PARAMETERS: by_owner, "first": by_first}

# Prefix of the keys that compression adds to the optimizer's state.
COMPRESSION = "compression."


class Hold:
    """Factory of contexts in which the offloaded state of a parameter group is in memory.

    Args:
        view: state of the engine.
        group: parameter group.
    """

    def __init__(self, view: StateView, group: ShardGroup) -> None:
        self._view, self._group = view, group

    @contextmanager
    def __call__(self, changed: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._group.updated.borrowed(changed))
            for shard in self._view.shards(self._group):
                stack.enter_context(shard.at_hand(changed))
                if shard.bucket.filled:
                    stack.enter_context(shard.bucket.total.borrowed(changed))
            yield


@dataclass(frozen=True)
class StateRange:
    """Elements [start, stop) of a parameter, buffer, gradient or state tensor on this rank.

    Args:
        name: name of the parameter or buffer.
        box: region of the global tensor that this rank's tensor covers; see `Region`.
        start: index of the first element in the flattened region.
        stop: index after the last element.
        dtype: dtype of the elements.
        values: returns the 1-D values without a copy, so that writes persist (but see `StateView.write_back`).
        hold: context in which `values` may be called and its result used; None: the values are in memory.
    """

    name: str
    box: Region
    start: int
    stop: int
    dtype: torch.dtype
    values: Callable[[], torch.Tensor]
    hold: Hold | None = None


class WindowView:
    """Access to the gradients that were accumulated since the last update; a base class of `StateView`."""

    members: dict[str, ParamRecord]
    reducer: Reducer | None

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients were accumulated since the last update."""
        return self.reducer is not None and not self.reducer.clean

    def bucket(self, group: ParameterGroup) -> Bucket:
        if self.reducer is None:
            raise RuntimeError(f"{group.name} has no gradients here")
        return self.reducer.bucket_of(group)

    def _buckets(self) -> list[Bucket]:
        return [] if self.reducer is None else self.reducer.buckets

    def settle_gradients(self, agree: Callable[[list[Any]], list[list[Any]]]) -> None:
        """Wait for reductions in progress. All ranks must call this.

        Gradients whose reduction has not started stay as they are, so that a checkpoint does not change the sums of the
        run; but if ranks have started different numbers of reductions, all gradients are reduced.

        Args:
            agree: function that all-gathers a list over the ranks.
        """
        if self.reducer is None:
            return
        # A rank whose micro-batches had no gradient takes part too: others may have some.
        rows = agree([self.reducer.clean, [list(bucket.launches) for bucket in self._buckets()]])
        self.reducer.clean = all(clean for clean, _ in rows)
        if self.reducer.clean:
            return
        if all(row[1] == rows[0][1] for row in rows):
            for order in dict.fromkeys(bucket.order for bucket in self._buckets()):
                if order is not None:
                    order.flush()
            self.reducer.reduce_scatter.settle()
        else:
            self.reducer.finish()

    def filled(self, group: ShardGroup) -> bool:
        """Return whether the group's accumulator contains reduced gradients."""
        return self.has_gradients and self.bucket(group).filled

    def touched(self) -> list[str]:
        """Return the names of parameters for which this rank had a gradient since the last update."""
        return [m.name for b in self._buckets() for m in b.group.members if b.touched[m.index]]

    def rounds(self) -> Iterator[tuple[ShardGroup, float, list[int], dict[str, torch.Tensor]]]:
        """Yield the gradients of which this rank has not started the reduction (open rounds), by group.

        Yields:
            Parameter group, factor to apply to the sum, indices of the parameters with a gradient from the current
            micro-batch, and flat gradients by parameter name (views of the round's buffer).
        """
        for bucket in self._buckets():
            current = bucket.round
            if current is not None:
                held = {m.name: current.buffer[m.offset : m.offset + m.numel] for m in bucket.group.members}
                names = {m.name for m in bucket.group.members if m.index in current.arrived}
                selected = {name: values for name, values in held.items() if name in names}
                yield bucket.group, current.post_reduce_scale, sorted(current.fresh), selected

    def open_round(
        self, group: ShardGroup, dtype: torch.dtype, at_owner: float, names: list[str], fresh: list[int]
    ) -> dict[str, torch.Tensor]:
        """Recreate an open round from a checkpoint; see `rounds`.

        Args:
            group: parameter group.
            dtype: dtype of the gradients.
            at_owner: factor to apply to the sum.
            names: names of the parameters with a gradient.
            fresh: indices of the parameters with a gradient from the current micro-batch.

        Returns:
            Flat tensors by name, into which the caller copies the gradients.
        """
        bucket = self.bucket(group)
        if self.reducer is None:
            return {}
        current = bucket.round = self.reducer._open(bucket, dtype, at_owner)
        self.reducer.revision += 1
        members = [self.members[name] for name in names]
        current.arrived, current.fresh = {m.index for m in members}, set(fresh)
        return {m.name: current.buffer[m.offset : m.offset + m.numel] for m in members}

    def fill(self, group: ShardGroup) -> None:
        """Zero the group's accumulator and mark it as filled; the caller then writes to the ranges of `gradient`."""
        bucket = self.bucket(group)
        if bucket.sum is None:  # no parameter is trained
            return
        if self.reducer is not None:
            for member in bucket.group.members:
                self.reducer.forget_reads(member)
        with bucket.total.borrowed(changed=True, read=False) as total:
            total.zero_()
        bucket.filled = True

    def resume_window(self, touched: list[str], deferred: bool) -> None:
        """Continue gradient accumulation after the gradients were restored.

        Args:
            touched: names of the parameters for which this rank had a gradient.
            deferred: value of `AccumulationWindow.deferred`.
        """
        if self.reducer is None:
            return
        for name in touched:
            member = self.members[name]
            self.bucket(member.group).touched[member.index] = 1
        self.reducer.clean, self.reducer.window.deferred = False, deferred
        self.reducer.revision += 1


class PlacedView:
    """Regions of the unsharded tensors that this rank has; a base class of `StateView`."""

    groups: list[ShardGroup]
    members: dict[str, ParamRecord]
    buffers: dict[str, torch.Tensor]
    coordinates: dict[str, int]
    _tensors: dict[str, torch.Tensor]
    _boxes: dict[str, Region]

    def box(self, name: str) -> Region:
        """Return the region of a parameter or buffer that this rank has, given its name."""
        if name not in self._boxes:
            tensor = self._tensors[name]
            shape = self.members[name].shape if name in self.members else tensor.shape
            self._boxes[name] = Region.of(placement_of(tensor), shape)
        return self._boxes[name]

    @property
    def cut(self) -> bool:
        """Return whether this rank has only a slice of any parameter or buffer."""
        return any(not self.box(name).whole for name in self._tensors)

    def alone_along(self, name: str) -> frozenset[str]:
        """Return the names of the mesh axes along which no other rank has the parameter or buffer."""
        tensor = self._tensors[name]
        relations = dict(placement_of(tensor).relations)
        if name not in self.buffers:
            relations["tp"], relations["pp"] = signature_of(tensor, name)[0]
        return frozenset(axis for axis, relation in relations.items() if relation is Relation.ABSENT)

    def counts(self, name: str) -> bool:
        """Return whether this rank's gradient counts in a norm: of replicas, only the first along each axis does."""
        relations = zip(("tp", "pp"), signature_of(self._tensors[name], name)[0], strict=True)
        return not any(relation is Relation.REPLICATE and self.coordinates.get(axis) for axis, relation in relations)

    def topology(self) -> list[Any]:
        """Return groups, numbers of ranks and regions of this rank, for comparison.

        Per-rank state of another run can be loaded if its topology is equal.
        """
        return [
            [group.name, group.layout.ranks, [tuple(map(astuple, self.box(m.name).cuts)) for m in group.members]]
            for group in self.groups
        ]


class StateView(WindowView, PlacedView):
    """Access to all parameters, buffers, gradients and optimizer state of an engine.

    Args:
        module: model of the engine.
        groups: parameter groups.
        world: process group of all ranks with the same model slice; None: a single rank.
        optimizer: ZeRO optimizer; None without one.
        reducer: gradient reducer; None without one.
        coordinates: this rank's index on each mesh axis; None: 0 on all.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: list[ShardGroup],
        world: Axis | None,
        optimizer: ZeroOptimizer | None,
        reducer: Reducer | None,
        coordinates: Mapping[str, int] | None = None,
    ) -> None:
        self.module, self.groups, self.world = module, groups, world
        self.coordinates = dict(coordinates or {})
        self.optimizer, self.reducer = optimizer, reducer
        if reducer is not None:
            reducer.replaced.settle()
        self._holds = {id(group): Hold(self, group) for group in groups if self._moves(group)}
        self.members = {member.name: member for group in groups for member in group.members}
        named = dict(module.named_parameters())
        own = own_state(module)
        self.plain = {name: param for name, param in named.items() if not is_managed(param) and param not in own}
        self.buffers = {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, child in module.named_modules()
            for name, buffer in child._buffers.items()
            if buffer is not None and name not in child._non_persistent_buffers_set
        } | {name: param for name, param in named.items() if param in own}
        first = {id(tensor): name for name, tensor in named.items()}
        every = module.named_parameters(remove_duplicate=False)
        self.aliases = {name: first[id(param)] for name, param in every if first[id(param)] != name}
        self._tensors = {name: member.param for name, member in self.members.items()} | self.plain | self.buffers
        self._boxes: dict[str, Region] = {}

    def shards(self, group: ShardGroup) -> list[OptimizerShard]:
        """Return the optimizer's shard of a parameter group, as a list that is empty without an optimizer."""
        return [] if self.optimizer is None else [h for h in self.optimizer.shards if h.group is group]

    def _moves(self, group: ShardGroup) -> bool:
        sums = [h.bucket.sum for h in self.shards(group) if h.bucket.sum is not None]
        return any(stored.memory is None for stored in (group.updated, *sums))

    def hold_of(self, group: ParameterGroup) -> Hold | None:
        """Return the factory of contexts in which a group's values are in memory; None if they always are."""
        return self._holds.get(id(group))

    # -- contents -----------------------------------------------------------------------------------------------------

    def trained(self, member: ParamRecord) -> bool:
        return self.optimizer is not None and member.uid in self.optimizer.fragments

    def written_ranges(self, group: ShardGroup) -> list[tuple[ParamRecord, int, int]]:
        """Return the ranges of a group that this rank writes to a checkpoint, as (parameter, start, stop)."""
        ranges = group.layout.ranges(group.axis.rank)
        return [(group.members[range_.index], range_.start, range_.stop) for range_ in ranges]

    def held_ranges(self, group: ParameterGroup) -> list[tuple[ParamRecord, int, int]]:
        """Return the ranges of a group of which this rank has the master weights, as (parameter, start, stop)."""
        ranges = group.layout.ranges_within(group.low, group.high)
        return [(group.members[range_.index], range_.start, range_.stop) for range_ in ranges]

    def fragments_of(self, member: ParamRecord) -> list[Fragment]:
        return [] if self.optimizer is None else self.optimizer.fragments.get(member.uid, [])

    def state_of(self, fragment: Fragment) -> dict[str, Any]:
        """Return the optimizer state of a fragment by name, including the tensors of pruning masks."""
        if self.optimizer is None:
            return {}
        state, masks = self.optimizer.state.get(fragment.leaf, {}), self.optimizer.masks
        return state if masks is None else {**state, **(masks.arriving(fragment) or masks.fragment_state(fragment))}

    def group_numbers(self) -> dict[int, int]:
        """Return the index of the optimizer group of each leaf on this rank, by `id(leaf)`."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {id(leaf): number for number, group in enumerate(groups) for leaf in group["params"]}

    def optimizer_order(self) -> dict[int, int]:
        """Return the position of each parameter in the optimizer, by `ParamRecord.uid`."""
        return {} if self.optimizer is None else {uid: i for i, uid in enumerate(self.optimizer.fragments)}

    def optimizer_names(self) -> list[str]:
        order = self.optimizer_order()
        names = {order[member.uid]: name for name, member in self.members.items() if member.uid in order}
        return [names[place] for place in sorted(names)]

    # -- ranges -------------------------------------------------------------------------------------------------------

    def value(self, member: ParamRecord, start: int, stop: int) -> StateRange:
        """Return elements [start, stop) of a flattened parameter's master weights, which must be on this rank."""
        group, shard_offset = member.group, member.offset - member.group.low
        span = slice(shard_offset + start, shard_offset + stop)
        return self._slot(member, (start, stop), group.updated.dtype, lambda: self._peek(group.updated)[span])

    @staticmethod
    def _peek(stored: StoredTensor) -> torch.Tensor:
        """Return the memory of values that are in memory or already acquired (nested calls return the same memory)."""
        if stored.memory is not None:
            return stored.memory
        lent = stored.acquire()
        stored.release(changed=False)
        return lent

    def _slot(
        self, member: ParamRecord, span: tuple[int, int], dtype: torch.dtype, values: Callable[[], torch.Tensor]
    ) -> StateRange:
        return StateRange(member.name, self.box(member.name), *span, dtype, values, self.hold_of(member.group))

    def plain_value(self, name: str) -> StateRange:
        """Return all elements of a buffer, or of a parameter outside of all groups, by name."""
        flat = (self.plain[name] if name in self.plain else self.buffers[name]).detach().reshape(-1)
        return StateRange(name, self.box(name), 0, flat.numel(), flat.dtype, lambda: flat)

    def write_back(self, slot: StateRange) -> None:
        """Copy values that were written to a `plain_value` back to its tensor, if they are not a view of it."""
        tensor = self._tensors[slot.name]
        if not tensor.is_contiguous():  # transposed or channels last: the flattened tensor is a copy
            with torch.no_grad():
                tensor.copy_(slot.values().view(tensor.shape))

    def state(self, fragment: Fragment, key: str, start: int, stop: int) -> StateRange:
        """Return a range of a state tensor that is sharded like the parameter.

        Args:
            fragment: this rank's part of the parameter.
            key: name of the state tensor.
            start: index of the first element in the flattened parameter.
            stop: index after the last element.
        """
        low, high = start - fragment.range.start, stop - fragment.range.start

        def values() -> torch.Tensor:
            return self.state_of(fragment)[key].detach().reshape(-1)[low:high]

        return self._slot(fragment.member, (start, stop), self.state_of(fragment)[key].dtype, values)

    def whole_state(self, fragment: Fragment, key: str) -> StateRange:
        """Return all elements of a state tensor whose shape is not that of the parameter.

        Args:
            fragment: this rank's part of the parameter.
            key: name of the state tensor.
        """
        tensor = self.state_of(fragment)[key]
        values = lambda: self.state_of(fragment)[key].detach().reshape(-1)  # noqa: E731
        return self._slot(fragment.member, (0, tensor.numel()), tensor.dtype, values)

    def gradient(self, member: ParamRecord, start: int, stop: int) -> StateRange:
        """Return a range of a parameter's accumulated, reduced gradient; see `value` for the arguments."""
        bucket = self.bucket(member.group)
        bucket_offset = member.offset - bucket.low
        span = slice(bucket_offset + start, bucket_offset + stop)
        return self._slot(member, (start, stop), bucket.dtype, lambda: self._peek(bucket.total)[span])

    # -- before a save and after a load -------------------------------------------------------------------------------

    def settle(self) -> None:
        """Copy the user's in-place changes of parameters into the master weights."""
        for member in self.members.values():
            if self.optimizer is not None:
                self.optimizer.import_edits(member)

    def prepare_state(self, fragment: Fragment, sliced: dict[str, torch.dtype], rest: dict[str, Any]) -> dict[str, Any]:
        """Create the optimizer state of a fragment, reusing present tensors of the right shape.

        Args:
            fragment: this rank's part of a parameter.
            sliced: dtypes, by name, of the tensors with the fragment's shape.
            rest: all other entries, by name.

        Returns:
            State by name; the caller sets the values of the tensors in `sliced`.
        """
        old = self.state_of(fragment)

        def live(key: str, shape: torch.Size) -> torch.Tensor | None:
            there = old.get(key)
            return there if isinstance(there, torch.Tensor) and there.shape == shape else None

        state: dict[str, Any] = {}
        for key, dtype in sliced.items():
            there = live(key, fragment.leaf.shape)
            state[key] = (
                torch.zeros(fragment.leaf.shape, dtype=dtype, device=fragment.leaf.device) if there is None else there
            )
        for key, value in rest.items():
            there = live(key, value.shape) if isinstance(value, torch.Tensor) else None
            # A meta tensor is the placeholder of offloaded state.
            state[key] = value if there is None or there.device.type == "meta" else there.copy_(value)
        return state

    def set_state(self, fragment: Fragment, state: dict[str, Any]) -> None:
        """Set the optimizer state of a fragment, and its pruning masks if there are any; an empty dict removes it."""
        if self.optimizer is None:
            return
        masks = self.optimizer.masks
        if masks is not None:
            state = masks.take_fragment_state(fragment, state)
        else:
            state = {key: value for key, value in state.items() if not key.startswith(COMPRESSION)}
        if state:
            self.optimizer.state[fragment.leaf] = state
        else:
            self.optimizer.state.pop(fragment.leaf, None)

    def note_state(self, member: ParamRecord, exists: bool) -> None:
        """Record whether other ranks have optimizer state of a parameter of which this rank has no elements."""
        view = None if self.optimizer is None else self.optimizer.state.view(member.param)
        if view is not None and view.leaf is None:
            view.note(exists)

    def share_counters(self) -> None:
        """Share step counters over all ranks, which must call this; see `ZeroOptimizer.share_counters`."""
        if self.optimizer is not None:
            self.optimizer.share_counters()

    def all_gather_masters(self) -> None:
        """Round loaded master weights to the model's dtype and all-gather them. All ranks must call this."""
        all_gather_updated(self.groups)
        for group in self.groups:
            for member in group.members:
                member.version, member.exposed = member.current_version, False
            group.advance()
        for group in self.groups:
            group.refresh()


def layout_rule(layout: ShardLayout) -> str:
    """Return the name of the rule by which a layout divides a group: a key of `LAYOUT_RULES`.

    Raises:
        ValueError: the layout follows none of the rules.
    """
    for name, rule in LAYOUT_RULES.items():
        if rule(layout.numels, layout.ranks) == layout:
            return name
    raise ValueError(f"the layout {layout.cuts} follows none of the rules {', '.join(LAYOUT_RULES)}")
