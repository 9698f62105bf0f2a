"""The snapshot of an engine's state that this rank writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.format.json_codec import Encoder
from deepspeed.checkpoint.format.manifest import (
    BUFFER,
    FROZEN,
    GRADIENT,
    LEFT_OUT,
    TRAINED,
    VALUE,
    ManifestEntry,
    StateRule,
    entry_name,
    state_field,
)
from deepspeed.checkpoint.format.safetensors_file import DTYPES, NAMES, TensorToWrite, name_of
from deepspeed.checkpoint.save.save_plan import LocalShards
from deepspeed.errors import CheckpointError
from deepspeed.zero.api.state_view import LAYOUT_RULES, StateRange, StateView, layout_rule
from deepspeed.zero.layout.regions import RegionRange, copies
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.parameters.record import ParamRecord


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
        """What this rank writes.

        Args:
            leaders: as in `SavePlan`.
        """
        leader_of = {row.name: offer.leader for offer in self.offers for row in offer.rows}
        return [entry for name, entry in self.entries if leader_of[name] in leaders.get(name, ())] + self.own


def capture(view: StateView, leave_out_frozen: bool) -> Snapshot:
    """Describe an engine's state and what this rank is to write of it; nothing is copied.

    Args:
        view: the state.
        leave_out_frozen: values of parameters that do not require a gradient are not stored.

    Raises:
        CheckpointError: the optimizer keeps state that cannot be cut.
    """
    snapshot = Snapshot()
    order, numbers, places = view.optimizer_order(), view.group_numbers(), _places(view.module)
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
                _add(snapshot, VALUE, view.value(member, start, stop))
            if offer.filled:
                _add(snapshot, GRADIENT, view.gradient(member, start, stop))
            _add_state(snapshot, view, member, (start, stop), numbers)
    _add_rest(snapshot, view, leave_out_frozen, places)
    _add_rounds(snapshot, view)
    return snapshot


def _places(module: nn.Module) -> dict[str, int]:
    """Names of parameters and buffers in the order of the module's `state_dict()`."""
    names = (
        f"{prefix}.{name}" if prefix else name
        for prefix, submodule in module.named_modules()
        for name in (*submodule._parameters, *submodule._buffers)
    )
    return {name: place for place, name in enumerate(names)}


def _offer(
    view: StateView, rows: list[ManifestEntry], rule: str, ranks: tuple[int, ...], filled: bool = False
) -> LocalShards:
    boxes = [view.box(row.name) for row in rows]
    alone = {row.name: axes for row in rows if (axes := view.alone_along(row.name))}
    return LocalShards(rows, boxes, rule, ranks, filled, view.coordinates, alone)


def _kind(param: torch.Tensor, leave_out_frozen: bool) -> str:
    return TRAINED if param.requires_grad else LEFT_OUT if leave_out_frozen else FROZEN


def _add(snapshot: Snapshot, field_: str, slot: StateRange) -> None:
    """Add what files hold of a slot: its elements that are no padding."""
    name, values, numel = entry_name(field_, slot.name), slot.values, slot.stop - slot.start
    box = slot.box.packed
    if box is not slot.box:
        padded = RegionRange(slot.box, slot.start, slot.stop)
        packed = RegionRange(box, slot.box.packed_index(slot.start), slot.box.packed_index(slot.stop))
        numel, values = padded.real_numel, lambda: _packed(padded, packed, slot.values())
    if numel:
        snapshot.entries.append((slot.name, TensorToWrite(name, slot.dtype, (numel,), values, slot.hold)))


def _packed(padded: RegionRange, packed: RegionRange, values: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(padded.real_numel, dtype=values.dtype, device=values.device)
    for copy in copies(padded, packed):
        copy(values.detach(), buffer)
    return buffer


def _add_state(
    snapshot: Snapshot, view: StateView, member: ParamRecord, range_: tuple[int, int], numbers: dict[int, int]
) -> None:
    start, stop = range_
    for fragment in view.fragments_of(member):
        if not fragment.range.start <= start < fragment.range.stop:
            continue
        rule = _rule_of(view, fragment)
        if rule is not None:
            for key in rule.sliced:
                _add(snapshot, state_field(key), view.state(fragment, key, start, stop))
        if start == 0:
            for key in rule.whole if rule is not None else ():
                slot = view.whole_state(fragment, key)
                entry = TensorToWrite(
                    entry_name(state_field(key), slot.name), slot.dtype, (slot.stop,), slot.values, slot.hold
                )
                snapshot.entries.append((slot.name, entry))
            text = None if rule is None else json.dumps(rule.to_json())
            snapshot.reports[member.name, member.group.axis.ranks[0]] = (text, numbers.get(id(fragment.leaf), -1))


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
                f"parameter's {fragment.member.numel} elements: it cannot be loaded anywhere else. Use an optimizer "
                f"whose state has the shape of the parameter, or stage 0"
            )
    if encoder.tensors:
        raise CheckpointError(f"the optimizer state of {fragment.member.name} holds tensors inside of containers")
    return rule


def fixed(name: str, tensor: torch.Tensor) -> TensorToWrite:
    """An entry of a tensor that stays where it is."""
    values = tensor.detach().contiguous()
    return TensorToWrite(name, values.dtype, tuple(values.shape), lambda: values)


def _add_rest(snapshot: Snapshot, view: StateView, leave_out_frozen: bool, places: Mapping[str, int]) -> None:
    """Parameters no group has, each in the file of one rank, and the first rank's buffers."""
    rank, ranks = (0, (0,)) if view.world is None else (view.world.rank, view.world.ranks)

    def row_of(name: str, tensor: torch.Tensor, kind: str) -> ManifestEntry:
        return ManifestEntry(name, view.box(name).shape, tensor.dtype, kind, place=places.get(name, -1))

    rows = [row_of(name, param, _kind(param, leave_out_frozen)) for name, param in view.plain.items()]
    buffers = [row_of(name, buffer, BUFFER) for name, buffer in view.buffers.items()]
    for group_rows, together in ((rows, ranks), (buffers, ranks[:1])):
        if not group_rows:
            continue
        snapshot.offers.append(_offer(view, group_rows, "between", together))
        layout = LAYOUT_RULES["between"]([view.box(row.name).numel for row in group_rows], len(together))
        for range_ in layout.ranges(rank) if rank < len(together) else ():
            row = group_rows[range_.index]
            if row.kind != LEFT_OUT:
                _add(snapshot, VALUE, view.plain_value(row.name))


def _add_rounds(snapshot: Snapshot, view: StateView) -> None:
    """Gradients of this rank that have not travelled yet."""
    snapshot.private["groups"] = view.topology()
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
        snapshot.own += [fixed(entry_name("round", name), values) for name, values in held.items()]
    snapshot.private["rounds"], snapshot.private["touched"] = rounds, view.touched()
