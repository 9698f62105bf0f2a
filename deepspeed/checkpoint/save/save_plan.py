"""A rank's snapshot of the state, and the save plan: the lowest rank stores a shard of which several ranks have copies.

Copies are found by name and box alone, so replicas of hybrid sharding, tied weights of two stages and copied key-value
heads need no special rule.
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
from deepspeed.zero.api.state_view import LAYOUT_RULES, StateRange, StateView, layout_rule
from deepspeed.zero.layout.regions import Region, RegionRange, copies, uncovered
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.parameters.record import ParamRecord


def join_slices(
    view: StateView, held: dict[str, torch.Tensor], ranks: Ranks
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Send every slice to the first rank, one tensor at a time. All ranks call together.

    Args:
        held: this rank's tensors on the CPU, by name; empty on ranks whose slices another rank sends.

    Returns:
        Whole tensors and all aliases on the first rank; nothing of use on the others.
    """
    local_slices = {name: (view.box(name), tensor.dtype) for name, tensor in held.items()}
    tensors_by_rank = ranks.gather((local_slices, view.aliases))
    whole: dict[str, torch.Tensor] = {}
    seen: set[tuple[str, Region]] = set()
    for rank, (listed, _) in enumerate(tensors_by_rank):
        for name, (box, dtype) in listed.items():
            if (name, box.packed) in seen:
                continue
            seen.add((name, box.packed))
            if ranks.rank == rank and rank:
                ranks.send(held[name].contiguous(), 0)
            if ranks.rank:
                continue
            values = held[name] if rank == 0 else torch.empty(box.local_shape, dtype=dtype)
            if rank:
                ranks.receive(values, rank)
            into = whole.setdefault(name, torch.zeros(box.shape, dtype=dtype))
            for copy in copies(RegionRange(box, 0, box.numel), RegionRange(Region(box.shape), 0, into.numel())):
                copy(values.reshape(-1), into.reshape(-1))
    return whole, {alias: name for _, aliases in reversed(tensors_by_rank) for alias, name in aliases.items()}


@dataclass(frozen=True)
class LocalShards:
    """Tensors that some ranks hold together, cut by one rule.

    Args:
        rows: parameters or buffers, without their optimizer state.
        boxes: of each, on these ranks.
        ranks: global ranks, in the order of the slices; the first speaks for all.
        filled: the window has a reduced part of their gradients.
        coordinates: the mesh coordinates of the first rank.
        alone: by name, the mesh axes along which no other rank has a copy.
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
        """The rank that speaks for all."""
        return self.ranks[0]

    def check_same(self, row: ManifestEntry, other: LocalShards, first: ManifestEntry) -> None:
        """See that two offers of one name are of one tensor; `first` is the row of the other."""
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


# From the rank of a parameter's first element: its optimizer state (JSON) and its optimizer group, by name and leader.
Reports = Mapping[tuple[str, int], tuple[str | None, int]]


@dataclass
class SavePlan:
    """What is stored of all offers.

    Args:
        rows: every parameter and buffer once, in the order of the ranks, and of a rank's module.
        groups: how they are cut and where they lie.
        leaders: by name, the leaders whose boxes are stored.
        filled: parameters whose window has a reduced part.
    """

    rows: list[ManifestEntry] = field(default_factory=list)
    groups: list[CutGroup] = field(default_factory=list)
    leaders: dict[str, set[int]] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)
    _by_group: list[LocalShards] = field(default_factory=list)

    def with_states(self, reports: Iterable[Reports]) -> tuple[list[ManifestEntry], list[CutGroup], list[StateRule]]:
        """Rows and groups with their optimizer states, and the different states.

        `reports` are those of all ranks. A group has states of its own where its boxes' are not those of the rows.
        """
        report_of = {key: report for rank_reports in reports for key, report in rank_reports.items()}
        numbers: dict[str, int] = {}
        rules: dict[int, tuple[int | None, int]] = {}
        states_of_groups = []
        for group, offer in zip(self.groups, self._by_group, strict=True):
            states: list[int | None] = []
            for index, row in enumerate(group.rows):
                text, number = report_of.get((self.rows[row].name, offer.leader), (None, -1))
                state = None if text is None else numbers.setdefault(text, len(numbers))
                if not group.stored or group.stored[index]:
                    rules.setdefault(row, (state, number))
                states.append(state)
            states_of_groups.append(tuple(states))
        rows = [
            ManifestEntry(r.name, r.shape, r.dtype, r.kind, rules[row][0], r.order, rules[row][1])
            for row, r in enumerate(self.rows)
        ]
        groups = [
            group if states == tuple(rows[row].state for row in group.rows) else replace(group, states=states)
            for group, states in zip(self.groups, states_of_groups, strict=True)
        ]
        return rows, groups, [StateRule.from_json(json.loads(text)) for text in numbers]

    def check_covered(self, taken: Mapping[str, Mapping[Region, LocalShards]]) -> None:
        """See that every element is in one of the boxes."""
        known: dict[tuple[Region, ...], tuple[int, ...] | None] = {}
        for row in self.rows:
            boxes = tuple(taken[row.name])
            if any(box.whole for box in boxes) or row.kind == LEFT_OUT:
                continue
            if boxes not in known:  # layers repeat
                known[boxes] = uncovered(boxes)
            gap = known[boxes]
            if gap is not None:
                raise CheckpointError(
                    f"no rank has element {list(gap)} of '{row.name}' {row.shape}: the placements on "
                    f"{len(boxes)} rank(s) leave it out, and a checkpoint without it could not be loaded"
                )

    def put_in_order(self, ranks: Mapping[str, int]) -> None:
        """Order rows as users list them: each rank's, in the order of the rank's module."""
        order = sorted(range(len(self.rows)), key=lambda index: (ranks[self.rows[index].name], self.rows[index].place))
        place = {index: new for new, index in enumerate(order)}
        self.rows = [self.rows[index] for index in order]
        self.groups = [replace(group, rows=tuple(place[index] for index in group.rows)) for group in self.groups]


def take(offers: Sequence[LocalShards], numbers: Sequence[int]) -> SavePlan:
    """Decide what is stored; every rank finds the same.

    Args:
        offers: of all ranks, in rank order.
        numbers: the global ranks that save together; rank files are numbered by their position here.
    """
    position = {rank: position_in_order for position_in_order, rank in enumerate(numbers)}
    plan, row_of, taken = SavePlan(), {}, {}
    for offer in offers:
        stored = []
        for row, box in zip(offer.rows, offer.boxes, strict=True):
            known = taken.setdefault(row.name, {})
            if known:
                offer.check_same(row, next(iter(known.values())), plan.rows[row_of[row.name]])
            stored.append(box.packed not in known)
            if row.name not in row_of:
                row_of[row.name] = len(plan.rows)
                plan.rows.append(row)
            if stored[-1]:
                known[box.packed] = offer
                plan.leaders.setdefault(row.name, set()).add(offer.leader)
        if not any(stored):
            continue
        plan.filled += [row.name for row, here in zip(offer.rows, stored, strict=True) if here and offer.filled]
        rows = tuple(row_of[row.name] for row in offer.rows)
        files = tuple(rank_file(position[rank]) for rank in offer.ranks)
        plan.groups.append(CutGroup(rows, tuple(offer.boxes), offer.rule, files, () if all(stored) else tuple(stored)))
        plan._by_group.append(offer)
    plan.filled = list(dict.fromkeys(plan.filled))
    plan.check_covered(taken)
    plan.put_in_order({name: next(iter(known.values())).leader for name, known in taken.items()})
    return plan


def fixed(name: str, tensor: torch.Tensor) -> TensorToWrite:
    """An entry of a tensor that stays where it is."""
    values = tensor.detach().contiguous()
    return TensorToWrite(name, values.dtype, tuple(values.shape), lambda: values)


def _offer(
    view: StateView, rows: list[ManifestEntry], rule: str, ranks: tuple[int, ...], filled: bool = False
) -> LocalShards:
    boxes = [view.box(row.name) for row in rows]
    alone = {row.name: axes for row in rows if (axes := view.alone_along(row.name))}
    return LocalShards(rows, boxes, rule, ranks, filled, view.coordinates, alone)


def _kind(param: torch.Tensor, leave_out_frozen: bool) -> str:
    return TRAINED if param.requires_grad else LEFT_OUT if leave_out_frozen else FROZEN


@dataclass
class Snapshot:
    """What one rank contributes to a checkpoint.

    Args:
        offers: what it holds, together with others.
        entries: what it writes of that where its offer is taken, as (name, entry).
        reports: optimizer states and groups of the parameters whose first element it holds.
        own: what it writes in any case.
        private: its own state; tensors are allowed.
    """

    offers: list[LocalShards] = field(default_factory=list)
    entries: list[tuple[str, TensorToWrite]] = field(default_factory=list)
    reports: dict[tuple[str, int], tuple[str | None, int]] = field(default_factory=dict)
    own: list[TensorToWrite] = field(default_factory=list)
    private: dict[str, Any] = field(default_factory=dict)

    def taken(self, leaders: Mapping[str, set[int]]) -> list[TensorToWrite]:
        leader_of = {row.name: offer.leader for offer in self.offers for row in offer.rows}
        return [entry for name, entry in self.entries if leader_of[name] in leaders.get(name, ())] + self.own

    def add(self, field_: str, slot: StateRange) -> None:
        """Add what files hold of a slot: its elements that are no padding."""
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
        buffer = torch.empty(padded.real_numel, dtype=values.dtype, device=values.device)
        for copy in copies(padded, packed):
            copy(values.detach(), buffer)
        return buffer

    def add_state(self, view: StateView, member: ParamRecord, range_: tuple[int, int], numbers: dict[int, int]) -> None:
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
                self.reports[member.name, member.group.axis.ranks[0]] = (text, numbers.get(id(fragment.leaf), -1))

    @staticmethod
    def _rule_of(view: StateView, fragment: Fragment) -> StateRule | None:
        """The rule of a part's optimizer state."""
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
        """Parameters no group has, each in the file of one rank, and the first rank's buffers."""
        rank, ranks = (0, (0,)) if view.world is None else (view.world.rank, view.world.ranks)

        def row_of(name: str, tensor: torch.Tensor, kind: str) -> ManifestEntry:
            return ManifestEntry(name, view.box(name).shape, tensor.dtype, kind, place=places.get(name, -1))

        rows = [row_of(name, param, _kind(param, leave_out_frozen)) for name, param in view.plain.items()]
        buffers = [row_of(name, buffer, BUFFER) for name, buffer in view.buffers.items()]
        for group_rows, together in ((rows, ranks), (buffers, ranks[:1])):
            if not group_rows:
                continue
            self.offers.append(_offer(view, group_rows, "between", together))
            layout = LAYOUT_RULES["between"]([view.box(row.name).numel for row in group_rows], len(together))
            for range_ in layout.ranges(rank) if rank < len(together) else ():
                row = group_rows[range_.index]
                if row.kind != LEFT_OUT:
                    self.add(VALUE, view.plain_value(row.name))

    def add_rounds(self, view: StateView) -> None:
        """Gradients of this rank that have not travelled yet."""
        self.private["groups"] = view.topology()
        if not view.has_gradients:
            return
        rounds = []
        for group, at_owner, fresh, held in view.rounds():
            dtype = next((NAMES[values.dtype] for values in held.values()), "F32")
            # Copies with equal gradients stand in one of them when they are added up elsewhere.
            once = [name for name in held if view.counts(name)]
            cuts = {name: tuple(map(astuple, view.box(name).cuts)) for name in held}
            named = {"group": group.name, "at_owner": at_owner, "fresh": fresh, "names": list(held), "dtype": dtype}
            rounds.append({**named, "once": once, "cuts": {name: cut for name, cut in cuts.items() if cut}})
            self.own += [fixed(entry_name("round", name), values) for name, values in held.items()]
        self.private["rounds"], self.private["touched"] = rounds, view.touched()


def capture(view: StateView, leave_out_frozen: bool) -> Snapshot:
    """Describe an engine's state and what this rank is to write of it; nothing is copied."""
    snapshot = Snapshot()
    order, numbers = view.optimizer_order(), view.group_numbers()
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
            kind, dtype = _kind(member.param, leave_out_frozen), view.value_dtype(member)
            place = order.get(member.uid, -1), -1, places.get(member.name, -1)
            rows.append(ManifestEntry(member.name, view.box(member.name).shape, dtype, kind, None, *place))
        offer = _offer(view, rows, layout_rule(group.layout), group.axis.ranks, view.filled(group))
        snapshot.offers.append(offer)
        for member, start, stop in view.written_ranges(group):
            if _kind(member.param, leave_out_frozen) != LEFT_OUT:
                snapshot.add(VALUE, view.value(member, start, stop))
            if offer.filled:
                snapshot.add(GRADIENT, view.gradient(member, start, stop))
            snapshot.add_state(view, member, (start, stop), numbers)
    snapshot.add_rest(view, leave_out_frozen, places)
    snapshot.add_rounds(view)
    return snapshot
