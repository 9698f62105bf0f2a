"""From an engine's state to what this rank writes: rows, rules and entries."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed.checkpoint.codec import Encoder
from deepspeed.checkpoint.manifest import (
    BUFFER,
    FROZEN,
    GRADIENT,
    LEFT_OUT,
    TRAINED,
    VALUE,
    CutGroup,
    Row,
    StateRule,
    entry_name,
    state_field,
)
from deepspeed.checkpoint.tensorfile import DTYPES, NAMES, Entry, name_of
from deepspeed.errors import CheckpointError
from deepspeed.zero.fragment import Fragment
from deepspeed.zero.member import Member
from deepspeed.zero.state_view import Slot, StateView, layout_rule


@dataclass
class Captured:
    """What one rank contributes to a checkpoint.

    Args:
        rows: parameters and buffers, the same on all ranks; states and groups come with the reports.
        groups: how they are cut.
        entries: what this rank writes.
        reports: by parameter, its optimizer state as JSON and its optimizer group; from the rank of its first element.
        filled: parameters whose window has a reduced fragment.
        private: this rank's own state; tensors are allowed.
    """

    rows: list[Row]
    groups: list[CutGroup]
    entries: list[Entry]
    reports: dict[str, tuple[dict[str, Any] | None, int]]
    filled: list[str] = field(default_factory=list)
    private: dict[str, Any] = field(default_factory=dict)


def capture(view: StateView, leave_out_frozen: bool) -> Captured:
    """Describe an engine's state and what this rank is to write of it; nothing is copied.

    Args:
        view: the state.
        leave_out_frozen: values of parameters that do not require a gradient are not stored.

    Raises:
        CheckpointError: the optimizer keeps state that cannot be cut.
    """
    made = Captured([], [], [], {})
    order, numbers = view.optimizer_order(), view.group_numbers()
    for group in view.groups:
        made.groups.append(CutGroup(len(group.members), layout_rule(group.layout), group.layout.ranks))
        for member in group.members:
            kind = _kind(member.param, leave_out_frozen)
            dtype = view.value_dtype(member)
            made.rows.append(Row(member.name, tuple(member.shape), dtype, kind, None, order.get(member.uid, -1)))
        filled = view.filled(group)
        if filled:
            made.filled += [member.name for member in group.members]
        for member, start, stop in view.written_ranges(group):
            if _kind(member.param, leave_out_frozen) != LEFT_OUT:
                made.entries.append(_entry(VALUE, view.value(member, start, stop)))
            if filled:
                made.entries.append(_entry(GRADIENT, view.gradient(member, start, stop)))
            _add_state(made, view, member, (start, stop), numbers)
    _add_rest(made, view, leave_out_frozen)
    _add_rounds(made, view)
    return made


def _kind(param: torch.Tensor, leave_out_frozen: bool) -> str:
    return TRAINED if param.requires_grad else LEFT_OUT if leave_out_frozen else FROZEN


def _entry(field_: str, slot: Slot) -> Entry:
    return Entry(entry_name(field_, slot.name), slot.dtype, (slot.stop - slot.start,), slot.values, slot.hold)


def _add_state(
    made: Captured, view: StateView, member: Member, range_: tuple[int, int], numbers: dict[int, int]
) -> None:
    start, stop = range_
    for fragment in view.fragments_of(member):
        if not fragment.range.start <= start < fragment.range.stop:
            continue
        rule = _rule_of(view, fragment)
        if rule is not None:
            for key in rule.sliced:
                made.entries.append(_entry(state_field(key), view.state(fragment, key, start, stop)))
        if start == 0:
            for key in rule.whole if rule is not None else ():
                made.entries.append(_entry(state_field(key), view.whole_state(fragment, key)))
            made.reports[member.name] = (rule and rule.to_json(), numbers.get(id(fragment.leaf), -1))


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


def fixed(name: str, tensor: torch.Tensor) -> Entry:
    """An entry of a tensor that stays where it is."""
    values = tensor.detach().contiguous()
    return Entry(name, values.dtype, tuple(values.shape), lambda: values)


def _add_rest(made: Captured, view: StateView, leave_out_frozen: bool) -> None:
    """Parameters no group has, each in the file of one rank, and rank 0's buffers."""
    rank, world = (0, 1) if view.world is None else (view.world.rank, view.world.size)
    ranks = view.groups[0].layout.ranks if view.groups else world
    rows = [Row(n, tuple(p.shape), p.dtype, _kind(p, leave_out_frozen)) for n, p in view.plain.items()]
    buffers = [Row(n, tuple(b.shape), b.dtype, BUFFER) for n, b in view.buffers.items()]
    for group_rows, count in ((rows, ranks), (buffers, 1)):
        if not group_rows:
            continue
        group = CutGroup(len(group_rows), "between", count)
        made.groups.append(group)
        made.rows += group_rows
        if rank < count:
            for index in group.layout([row.numel for row in group_rows]).ranges(rank):
                row = group_rows[index.index]
                if row.kind != LEFT_OUT:
                    made.entries.append(_entry(VALUE, view.plain_value(row.name)))


def _add_rounds(made: Captured, view: StateView) -> None:
    """Gradients of this rank that have not travelled yet."""
    if not view.has_gradients:
        return
    rounds = []
    for group, at_owner, fresh, held in view.rounds():
        dtype = next((NAMES[values.dtype] for values in held.values()), "F32")
        named = {"group": group.name, "at_owner": at_owner, "fresh": fresh, "names": list(held), "dtype": dtype}
        rounds.append(named)
        made.entries += [fixed(entry_name("round", name), values) for name, values in held.items()]
    made.private["rounds"], made.private["touched"] = rounds, view.touched()


def merge(captured: Captured, reports: Iterable[dict[str, Any]]) -> tuple[list[Row], list[StateRule]]:
    """The rows with their optimizer states and groups, and the different states.

    Args:
        captured: of this rank.
        reports: `Captured.reports` of all ranks.
    """
    told = {name: report for one in reports for name, report in one.items()}
    states: dict[str, int] = {}
    rows = []
    for row in captured.rows:
        state, group = told.get(row.name, (None, -1))
        number = None if state is None else states.setdefault(json.dumps(state), len(states))
        rows.append(replace(row, state=number, group=group))
    return rows, [StateRule.from_json(json.loads(text)) for text in states]
