"""The save plan: which rank stores which shard; of equal copies the lowest rank's is stored.

Copies are told by name and box alone, so replicas of hybrid sharding, tied weights of two stages and copied key-value
heads need no rule of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from deepspeed.checkpoint.format.manifest import LEFT_OUT, CutGroup, ManifestEntry, StateRule, rank_file
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointError
from deepspeed.zero.api.state_view import StateView
from deepspeed.zero.layout.regions import Region, RegionRange, copies, uncovered


def join_slices(
    view: StateView, held: dict[str, torch.Tensor], ranks: Ranks
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Send every slice to the first rank, one tensor at a time. All ranks call together.

    Args:
        view: the model of this rank.
        held: this rank's tensors on the CPU, by name; empty on ranks whose slices another rank sends.
        ranks: all of them.

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
        rule: as in `CutGroup`.
        ranks: global ranks, in the order of the slices; the first speaks for all.
        filled: the window has a reduced part of their gradients.
        at: the mesh coordinates of the first rank.
        alone: by name, the mesh axes along which no other rank has a copy.
    """

    rows: list[ManifestEntry]
    boxes: list[Region]
    rule: str
    ranks: tuple[int, ...]
    filled: bool = False
    at: Mapping[str, int] = field(default_factory=dict)
    alone: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def leader(self) -> int:
        """The rank that speaks for all."""
        return self.ranks[0]


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

        Args:
            reports: of all ranks.
        """
        return _with_states(self, {key: report for rank_reports in reports for key, report in rank_reports.items()})


def take(offers: Sequence[LocalShards], numbers: Sequence[int]) -> SavePlan:
    """Decide what is stored; every rank finds the same.

    Args:
        offers: of all ranks, in rank order.
        numbers: the global ranks that save together; rank files are numbered by their position here.

    Raises:
        CheckpointError: offers of one name do not fit each other, or some elements are in none.
    """
    position = {rank: position_in_order for position_in_order, rank in enumerate(numbers)}
    plan, row_of, taken = SavePlan(), {}, {}
    for offer in offers:
        stored = []
        for row, box in zip(offer.rows, offer.boxes, strict=True):
            known = taken.setdefault(row.name, {})
            _check(row, offer, next(iter(known.values()), None), plan.rows[row_of[row.name]] if known else row)
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
    _check_covered(plan, taken)
    _in_order(plan, {name: next(iter(known.values())).leader for name, known in taken.items()})
    return plan


def _in_order(plan: SavePlan, ranks: Mapping[str, int]) -> None:
    """Rows as users list them: each rank's, in the order of the rank's module."""
    order = sorted(range(len(plan.rows)), key=lambda index: (ranks[plan.rows[index].name], plan.rows[index].place))
    place = {index: new for new, index in enumerate(order)}
    plan.rows = [plan.rows[index] for index in order]
    plan.groups = [replace(group, rows=tuple(place[index] for index in group.rows)) for group in plan.groups]


def _check(row: ManifestEntry, offer: LocalShards, other: LocalShards | None, first: ManifestEntry) -> None:
    """See that two offers of one name are of one tensor."""
    if other is None:
        return
    ranks = f"rank {other.leader} and rank {offer.leader}"
    if (row.shape, row.dtype) != (first.shape, first.dtype):
        raise CheckpointError(
            f"'{row.name}' is {first.shape} {first.dtype} on rank {other.leader} and {row.shape} {row.dtype} on rank "
            f"{offer.leader}: one name must mean one global tensor on all ranks"
        )
    apart = [axis for axis in offer.alone.get(row.name, ()) if offer.at.get(axis) != other.at.get(axis)]
    if apart:
        raise CheckpointError(
            f"{ranks} both have '{row.name}', whose placement says that no other rank along {apart[0]} does: names "
            f"must be those of the whole model, as a stage's layers numbered by their place in it"
        )


def _check_covered(plan: SavePlan, taken: Mapping[str, Mapping[Region, LocalShards]]) -> None:
    known: dict[tuple[Region, ...], tuple[int, ...] | None] = {}
    for row in plan.rows:
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


def _with_states(taken: SavePlan, reports: Reports) -> tuple[list[ManifestEntry], list[CutGroup], list[StateRule]]:
    numbers: dict[str, int] = {}
    rules: dict[int, tuple[int | None, int]] = {}
    groups = []
    for group, offer in zip(taken.groups, taken._by_group, strict=True):
        states: list[int | None] = []
        for index, row in enumerate(group.rows):
            text, number = reports.get((taken.rows[row].name, offer.leader), (None, -1))
            state = None if text is None else numbers.setdefault(text, len(numbers))
            if not group.stored or group.stored[index]:
                rules.setdefault(row, (state, number))
            states.append(state)
        groups.append((group, states))
    rows = [
        ManifestEntry(r.name, r.shape, r.dtype, r.kind, rules[row][0], r.order, rules[row][1])
        for row, r in enumerate(taken.rows)
    ]
    groups_with_rules = [_with_own(group, states, rows) for group, states in groups]
    return rows, groups_with_rules, [StateRule.from_json(json.loads(text)) for text in numbers]


def _with_own(group: CutGroup, states: list[int | None], rows: list[ManifestEntry]) -> CutGroup:
    """The group with its own states, where its boxes' are not those of the rows."""
    if all(state == rows[row].state for row, state in zip(group.rows, states, strict=True)):
        return group
    return CutGroup(group.rows, group.boxes, group.rule, group.files, group.stored, tuple(states))
