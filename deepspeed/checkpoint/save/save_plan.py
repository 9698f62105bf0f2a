"""Plan of a save: the shards of each rank (`Snapshot`), and the rank that stores each shard (`SavePlan`).

Shards with equal name and box (region of the global tensor) are copies; only the copy of the lowest rank is stored.
This covers replicas of hybrid sharding, tied weights of two pipeline stages, and replicated key-value heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from deepspeed.checkpoint.format.json_codec import Encoder
from deepspeed.checkpoint.format.manifest import (
    BUFFER,
    FROZEN,
    GRADIENT,
    LEFT_OUT,
    TRAINED,
    VALUE,
    CutGroup,
    ManifestEntry,
    StateRule,
    entry_name,
    rank_file,
    state_field,
)
from deepspeed.checkpoint.format.safetensors_file import DTYPES, NAMES, TensorToWrite, name_of
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointError
from deepspeed.zero.api.state_view import BETWEEN_PARAMETERS, LAYOUT_RULES, StateRange, StateView, layout_rule
from deepspeed.zero.layout.regions import Region, RegionRange, copies, uncovered
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.parameters.record import ParamRecord


def join_slices(
    view: StateView, held: dict[str, torch.Tensor], ranks: Ranks
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Gather tensor-parallel or pipeline slices into full tensors on the first rank. Collective.

    Args:
        view: the engine's tensors.
        held: this rank's slices on the CPU, by name; of equal slices, the first rank's is used.
        ranks: ranks with the slices.

    Returns:
        Full tensors by name (empty except on the first rank), and names of tied tensors by alias.

    Raises:
        CheckpointError: the slices do not cover a tensor.
    """
    local_slices = {name: (view.box(name), tensor.dtype) for name, tensor in held.items()}
    slices_by_rank = ranks.gather((local_slices, view.aliases))
    whole: dict[str, torch.Tensor] = {}
    boxes: dict[str, list[Region]] = {}
    for name, box in dict.fromkeys((name, box) for slices, _ in slices_by_rank for name, (box, _) in slices.items()):
        boxes.setdefault(name, []).append(box)
    check_covered(boxes)
    seen: set[tuple[str, Region]] = set()
    me, first = ranks.rank, 0
    for sender, (slices, _) in enumerate(slices_by_rank):
        for name, (box, dtype) in slices.items():
            if (name, box.packed) in seen:  # a copy
                continue
            seen.add((name, box.packed))
            if me == sender != first:
                ranks.send(held[name].contiguous(), first)
            if me != first:
                continue
            values = held[name] if sender == first else torch.empty(box.local_shape, dtype=dtype)
            if sender != first:
                ranks.receive(values, sender)
            if name not in whole:
                whole[name] = torch.zeros(box.shape, dtype=dtype)
            into = whole[name]
            for copy in copies(RegionRange(box, 0, box.numel), RegionRange(Region(box.shape), 0, into.numel())):
                copy(values.reshape(-1), into.reshape(-1))
    return whole, {alias: name for _, aliases in reversed(slices_by_rank) for alias, name in aliases.items()}


def check_covered(boxes_of: Mapping[str, Sequence[Region]]) -> None:
    """Raise CheckpointError unless the regions of each tensor, given by name, cover all of its elements."""
    gaps: dict[tuple[Region, ...], tuple[int, ...] | None] = {}
    for name, regions in boxes_of.items():
        boxes = tuple(regions)
        if any(box.whole for box in boxes):
            continue
        if boxes not in gaps:  # the layers of a model are cut alike, so this is looked up for most tensors
            gaps[boxes] = uncovered(boxes)
        gap = gaps[boxes]
        if gap is not None:
            raise CheckpointError(
                f"no rank has element {list(gap)} of '{name}' {boxes[0].shape}: the placements on {len(boxes)} rank(s) "
                f"leave it out, and a checkpoint without it could not be loaded"
            )


@dataclass(frozen=True)
class LocalShards:
    """Tensors that are sharded over some ranks, which offer to store them (an "offer").

    Args:
        rows: manifest rows of parameters or buffers, without their optimizer state.
        boxes: region of the global tensor that these ranks have together, for each row.
        rule: name of the layout rule that cuts the boxes into slices, as in `CutGroup`.
        ranks: global ranks, in the order of the slices.
        filled: whether reduced gradients of an unfinished accumulation exist.
        coordinates: mesh coordinates of the first rank.
        alone: mesh axes along which no other rank has a copy, by name of the parameter or buffer.
    """

    rows: list[ManifestEntry]
    boxes: list[Region]
    rule: str
    ranks: tuple[int, ...]
    filled: bool = False
    coordinates: Mapping[str, int] = field(default_factory=dict)
    alone: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def leader(self) -> int:
        """The first of `ranks`; it sends this offer to all other ranks."""
        return self.ranks[0]

    def check_same(self, row: ManifestEntry, other: LocalShards, first: ManifestEntry) -> None:
        """Raise CheckpointError if `row` and the row `first` of `other`, of the same name, are different tensors.

        They differ if shape or dtype differ, or if the placement excludes a copy on the other rank.
        """
        ranks = f"rank {other.leader} and rank {self.leader}"
        if (row.shape, row.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"'{row.name}' is {first.shape} {first.dtype} on rank {other.leader} and {row.shape} {row.dtype} on "
                f"rank {self.leader}: one name must mean one global tensor on all ranks"
            )
        apart = [
            axis for axis in self.alone.get(row.name, ()) if self.coordinates.get(axis) != other.coordinates.get(axis)
        ]
        if apart:
            raise CheckpointError(
                f"{ranks} both have '{row.name}', whose placement says that no other rank along {apart[0]} does: names "
                f"must be those of the whole model, as a stage's layers numbered by their place in it"
            )


# By name and leader of a parameter: its optimizer state as JSON (None: it has none) and its optimizer group. They are
# reported by the rank that holds the parameter's first element.
Reports = Mapping[tuple[str, int], tuple[str | None, int]]


@dataclass
class SavePlan:
    """Plan of the shards to store, equal on all ranks.

    Args:
        rows: every parameter and buffer once, sorted by rank and then by position in the rank's module.
        groups: sharding and files of the rows.
        leaders: first ranks of the stored offers (`LocalShards`), by name of the parameter or buffer.
        filled: names of parameters with reduced gradients of an unfinished accumulation.
    """

    rows: list[ManifestEntry] = field(default_factory=list)
    groups: list[CutGroup] = field(default_factory=list)
    leaders: dict[str, set[int]] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)
    _by_group: list[LocalShards] = field(default_factory=list)

    def with_states(self, reports: Iterable[Reports]) -> tuple[list[ManifestEntry], list[CutGroup], list[StateRule]]:
        """Combine rows and groups with the optimizer states in the reports of all ranks; the plan does not change.

        Returns:
            Rows with the state of the first stored shard; groups, with their own states if these differ from the states
            of the rows; and the list of distinct states.
        """
        report_of = {key: report for rank_reports in reports for key, report in rank_reports.items()}
        state_ids: dict[str, int] = {}  # by JSON: the index in the list of states
        first_report: dict[int, tuple[int | None, int]] = {}  # by row: state and optimizer group of its stored shard
        states_of_groups = []
        for group, offer in zip(self.groups, self._by_group, strict=True):
            states: list[int | None] = []
            for index, row in enumerate(group.rows):
                text, optimizer_group = report_of.get((self.rows[row].name, offer.leader), (None, -1))
                state = None if text is None else state_ids.setdefault(text, len(state_ids))
                if not group.stored or group.stored[index]:
                    first_report.setdefault(row, (state, optimizer_group))
                states.append(state)
            states_of_groups.append(tuple(states))
        rows = [
            ManifestEntry(r.name, r.shape, r.dtype, r.kind, first_report[row][0], r.order, first_report[row][1])
            for row, r in enumerate(self.rows)
        ]
        groups = [
            group if states == tuple(rows[row].state for row in group.rows) else replace(group, states=states)
            for group, states in zip(self.groups, states_of_groups, strict=True)
        ]
        return rows, groups, [StateRule.from_json(json.loads(text)) for text in state_ids]

    def check_covered(self, offer_of: Mapping[str, Mapping[Region, LocalShards]]) -> None:
        """Raise CheckpointError if stored boxes do not cover a row with values; `offer_of`: offers by name and box."""
        check_covered({row.name: tuple(offer_of[row.name]) for row in self.rows if row.kind != LEFT_OUT})

    def put_in_order(self, rank_of: Mapping[str, int]) -> None:
        """Sort the rows in place by rank, given by name in `rank_of`, and for one rank by position in its module."""
        order = sorted(range(len(self.rows)), key=lambda old: (rank_of[self.rows[old].name], self.rows[old].place))
        new_index = {old: new for new, old in enumerate(order)}
        self.rows = [self.rows[old] for old in order]
        self.groups = [replace(group, rows=tuple(new_index[old] for old in group.rows)) for group in self.groups]


def take(offers: Sequence[LocalShards], saving_ranks: Sequence[int]) -> SavePlan:
    """Plan which offers are stored; every rank computes the same plan.

    Args:
        offers: offers of all ranks, in rank order.
        saving_ranks: global ranks that save together; rank files are numbered by position in this list.

    Raises:
        CheckpointError: one name has different tensors on two ranks, or the offers do not cover a tensor.
    """
    position = {rank: index for index, rank in enumerate(saving_ranks)}
    plan = SavePlan()
    index_of: dict[str, int] = {}  # of rows, by name
    offer_of: dict[str, dict[Region, LocalShards]] = {}  # what is stored, by name and box
    for offer in offers:
        stored = []
        for row, box in zip(offer.rows, offer.boxes, strict=True):
            stored_boxes = offer_of.setdefault(row.name, {})
            if stored_boxes:
                offer.check_same(row, next(iter(stored_boxes.values())), plan.rows[index_of[row.name]])
            stored.append(box.packed not in stored_boxes)
            if row.name not in index_of:
                index_of[row.name] = len(plan.rows)
                plan.rows.append(row)
            if stored[-1]:
                stored_boxes[box.packed] = offer
                plan.leaders.setdefault(row.name, set()).add(offer.leader)
        if not any(stored):
            continue
        plan.filled += [row.name for row, here in zip(offer.rows, stored, strict=True) if here and offer.filled]
        row_indexes = tuple(index_of[row.name] for row in offer.rows)
        files = tuple(rank_file(position[rank]) for rank in offer.ranks)
        group = CutGroup(row_indexes, tuple(offer.boxes), offer.rule, files, () if all(stored) else tuple(stored))
        plan.groups.append(group)
        plan._by_group.append(offer)
    plan.filled = list(dict.fromkeys(plan.filled))
    plan.check_covered(offer_of)
    plan.put_in_order({name: next(iter(boxes.values())).leader for name, boxes in offer_of.items()})
    return plan


def entry_of(name: str, tensor: torch.Tensor) -> TensorToWrite:
    """Return the file entry of a tensor in memory; the entry keeps a reference to the values."""
    values = tensor.detach().contiguous()
    return TensorToWrite(name, values.dtype, tuple(values.shape), lambda: values)


def _offer(
    view: StateView, rows: list[ManifestEntry], rule: str, ranks: tuple[int, ...], filled: bool = False
) -> LocalShards:
    """Return the offer of these rows, with boxes and placement from the view."""
    boxes = [view.box(row.name) for row in rows]
    alone = {row.name: axes for row in rows if (axes := view.alone_along(row.name))}
    return LocalShards(rows, boxes, rule, ranks, filled, view.coordinates, alone)


def _kind(param: torch.Tensor, leave_out_frozen: bool) -> str:
    """Return the manifest kind of a parameter."""
    return TRAINED if param.requires_grad else LEFT_OUT if leave_out_frozen else FROZEN


@dataclass
class Snapshot:
    """One rank's contribution to a checkpoint.

    Args:
        offers: shards of which this rank has a slice.
        entries: slices of this rank: (name of the parameter or buffer, file entry); written if the offer is stored.
        reports: optimizer state and group (`Reports`) of each parameter whose first element is on this rank.
        always_written: file entries that are always written.
        private_state: state that only this rank has, in plain values and tensors.
    """

    offers: list[LocalShards] = field(default_factory=list)
    entries: list[tuple[str, TensorToWrite]] = field(default_factory=list)
    reports: dict[tuple[str, int], tuple[str | None, int]] = field(default_factory=dict)
    always_written: list[TensorToWrite] = field(default_factory=list)
    private_state: dict[str, Any] = field(default_factory=dict)

    def taken(self, leaders: Mapping[str, set[int]]) -> list[TensorToWrite]:
        """Return the file entries that this rank writes, given `SavePlan.leaders`."""
        leader_of = {row.name: offer.leader for offer in self.offers for row in offer.rows}
        stored = [entry for name, entry in self.entries if leader_of[name] in leaders.get(name, ())]
        return stored + self.always_written

    def add(self, field_: str, slot: StateRange) -> None:
        """Add the file entry of the range `slot` without padding, as the field `field_` of its parameter."""
        name, values, numel = entry_name(field_, slot.name), slot.values, slot.stop - slot.start
        box = slot.box.packed
        if box is not slot.box:
            padded = RegionRange(slot.box, slot.start, slot.stop)
            packed = RegionRange(box, slot.box.packed_index(slot.start), slot.box.packed_index(slot.stop))
            numel, values = padded.real_numel, lambda: Snapshot._packed(padded, packed, slot.values())
        if numel:
            self.entries.append((slot.name, TensorToWrite(name, slot.dtype, (numel,), values, slot.hold)))

    @staticmethod
    def _packed(padded: RegionRange, packed: RegionRange, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of `values` without the padding of the range `padded`."""
        buffer = torch.empty(padded.real_numel, dtype=values.dtype, device=values.device)
        for copy in copies(padded, packed):
            copy(values.detach(), buffer)
        return buffer

    def add_state(
        self, view: StateView, member: ParamRecord, range_: tuple[int, int], optimizer_group_of: dict[int, int]
    ) -> None:
        """Add the optimizer state of a range of a parameter; unsharded state belongs to the range from element 0.

        Args:
            view: the engine's tensors.
            member: the parameter.
            range_: first element and one past the last.
            optimizer_group_of: optimizer group by the id of the tensor that the optimizer updates.
        """
        start, stop = range_
        for fragment in view.fragments_of(member):
            if not fragment.range.start <= start < fragment.range.stop:
                continue
            rule = self._rule_of(view, fragment)
            if rule is not None:
                for key in rule.sliced:
                    self.add(state_field(key), view.state(fragment, key, start, stop))
            if start == 0:
                for key in rule.whole if rule is not None else ():
                    slot = view.whole_state(fragment, key)
                    entry = TensorToWrite(
                        entry_name(state_field(key), slot.name), slot.dtype, (slot.stop,), slot.values, slot.hold
                    )
                    self.entries.append((slot.name, entry))
                text = None if rule is None else json.dumps(rule.to_json())
                optimizer_group = optimizer_group_of.get(id(fragment.leaf), -1)
                self.reports[member.name, member.group.axis.ranks[0]] = (text, optimizer_group)

    @staticmethod
    def _rule_of(view: StateView, fragment: Fragment) -> StateRule | None:
        """Return the layout of a fragment's optimizer state; None if it has none.

        Raises:
            CheckpointError: a tensor has another shape than a sharded parameter, or a value cannot be stored.
        """
        state = view.state_of(fragment)
        if not state:
            return None
        rule = StateRule({}, {}, {})
        encoder = Encoder([])
        for key, value in state.items():
            name = f"optimizer state {key!r} of {fragment.member.name}"
            if not isinstance(value, torch.Tensor):
                rule.values[key] = encoder.encode(value, name)
            elif value.shape == fragment.leaf.shape:
                rule.sliced[key] = DTYPES[name_of(value.dtype, name)]
            elif value.dim() == 0:
                rule.values[key] = {"number": encoder.encode(value.item(), name), "dtype": NAMES[value.dtype]}
            elif fragment.range.numel == fragment.member.numel:
                rule.whole[key] = (DTYPES[name_of(value.dtype, name)], tuple(value.shape))
            else:
                raise CheckpointError(
                    f"{name} has shape {tuple(value.shape)}, but this rank holds {fragment.range.numel} of the "
                    f"parameter's {fragment.member.numel} elements: it cannot be loaded anywhere else. Use an "
                    f"optimizer whose state has the shape of the parameter, or stage 0"
                )
        if encoder.tensors:
            raise CheckpointError(f"the optimizer state of {fragment.member.name} holds tensors inside of containers")
        return rule

    def add_rest(self, view: StateView, leave_out_frozen: bool, places: Mapping[str, int]) -> None:
        """Add parameters that are not sharded, divided among the ranks, and the buffers, on the first rank.

        Args:
            view: the engine's tensors.
            leave_out_frozen: do not store frozen parameters.
            places: position in the module, by name.
        """
        rank, ranks = (0, (0,)) if view.world is None else (view.world.rank, view.world.ranks)

        def row_of(name: str, tensor: torch.Tensor, kind: str) -> ManifestEntry:
            return ManifestEntry(name, view.box(name).shape, tensor.dtype, kind, place=places.get(name, -1))

        rows = [row_of(name, param, _kind(param, leave_out_frozen)) for name, param in view.plain.items()]
        buffers = [row_of(name, buffer, BUFFER) for name, buffer in view.buffers.items()]
        for group_rows, together in ((rows, ranks), (buffers, ranks[:1])):
            if not group_rows:
                continue
            self.offers.append(_offer(view, group_rows, BETWEEN_PARAMETERS, together))
            layout = LAYOUT_RULES[BETWEEN_PARAMETERS]([view.box(row.name).numel for row in group_rows], len(together))
            for range_ in layout.ranges(rank) if rank < len(together) else ():
                row = group_rows[range_.index]
                if row.kind != LEFT_OUT:
                    self.add(VALUE, view.plain_value(row.name))

    def add_rounds(self, view: StateView) -> None:
        """Add gradients whose reduction has not started, and the topology, as state that only this rank has.

        A round is one reduction of a group's bucket, from the first gradient in the bucket until the reduction starts.
        """
        self.private_state["groups"] = view.topology()
        if not view.has_gradients:
            return
        rounds = []
        for group, at_owner, fresh, held in view.rounds():
            dtype = next((NAMES[values.dtype] for values in held.values()), "F32")
            # Where several ranks have equal gradients, only one is added when another number of ranks loads them.
            once = [name for name in held if view.counts(name)]
            cuts = {name: tuple(map(astuple, view.box(name).cuts)) for name in held}
            named = {"group": group.name, "at_owner": at_owner, "fresh": fresh, "names": list(held), "dtype": dtype}
            rounds.append({**named, "once": once, "cuts": {name: cut for name, cut in cuts.items() if cut}})
            self.always_written += [entry_of(entry_name("round", name), values) for name, values in held.items()]
        self.private_state["rounds"], self.private_state["touched"] = rounds, view.touched()


def capture(view: StateView, leave_out_frozen: bool) -> Snapshot:
    """Return this rank's contribution to a checkpoint of an engine, without copies of tensors.

    Args:
        view: the engine's tensors.
        leave_out_frozen: do not store frozen parameters.
    """
    snapshot = Snapshot()
    order, optimizer_group_of = view.optimizer_order(), view.group_numbers()
    # Names of parameters and buffers in the order of the module's `state_dict()`.
    names = (
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in view.module.named_modules()
        for name in (*submodule._parameters, *submodule._buffers)
    )
    places = {name: place for place, name in enumerate(names)}
    for group in view.groups:
        rows = []
        for member in group.members:
            # the dtype of the master values, where there is a master
            kind, dtype = _kind(member.param, leave_out_frozen), member.group.updated.dtype
            place = order.get(member.uid, -1), -1, places.get(member.name, -1)
            rows.append(ManifestEntry(member.name, view.box(member.name).shape, dtype, kind, None, *place))
        offer = _offer(view, rows, layout_rule(group.layout), group.axis.ranks, view.filled(group))
        snapshot.offers.append(offer)
        for member, start, stop in view.written_ranges(group):
            if _kind(member.param, leave_out_frozen) != LEFT_OUT:
                snapshot.add(VALUE, view.value(member, start, stop))
            if offer.filled:
                snapshot.add(GRADIENT, view.gradient(member, start, stop))
            snapshot.add_state(view, member, (start, stop), optimizer_group_of)
    snapshot.add_rest(view, leave_out_frozen, places)
    snapshot.add_rounds(view)
    return snapshot
