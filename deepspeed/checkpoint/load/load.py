"""Loading of a checkpoint into an engine's tensors, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.checkpoint.format.json_codec import Decoder
from deepspeed.checkpoint.format.manifest import (
    GRADIENT,
    LEFT_OUT,
    VALUE,
    ManifestEntry,
    entry_name,
    state_field,
)
from deepspeed.checkpoint.format.safetensors_file import DTYPES
from deepspeed.checkpoint.load.reader import ReadRequest, Source
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.zero.api.state_view import StateRange, StateView
from deepspeed.zero.layout.placement import Cut
from deepspeed.zero.layout.regions import Region, RegionRange, copies
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import ShardGroup


@dataclass
class Loaded:
    """Result of a load.

    Args:
        missing: names that only the model has.
        unexpected: names that only the checkpoint has.
        left_out: names of frozen parameters that were saved without values.
        elements: number of loaded elements, of the global tensors.
        total: number of elements of the global tensors of this rank's module.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    elements: int = 0
    total: int = 0


Slots = list[tuple[str, ManifestEntry, StateRange]]  # field, row in the checkpoint, destination


def _read(source: Source, slots: Slots) -> None:
    """Read elements into destinations that are in memory. Collective."""
    with torch.no_grad():
        wanted = [(field_, row, RegionRange(s.box, s.start, s.stop), s.values()) for field_, row, s in slots]
        source.read([ReadRequest(*arguments) for arguments in wanted])


def _read_all(
    view: StateView, source: Source, slots_of: Callable[[ShardGroup], Slots], more: Slots, rounded: bool = False
) -> None:
    """Read the elements of all groups: groups in memory together, offloaded groups one by one. Collective.

    Args:
        view: the engine's tensors.
        source: the checkpoint.
        slots_of: function that returns the destinations of a group, called while the group is in memory.
        more: destinations of tensors without a group.
        rounded: round master weights to the dtype of the parameters.
    """

    def read(groups: Iterable[ShardGroup], others: Slots) -> None:
        slots = [(group, slot) for group in groups for slot in slots_of(group)]
        _read(source, others + [slot for _, slot in slots])
        for group, (field_, _, slot) in slots if rounded else ():
            if field_ == VALUE:
                slot.values().copy_(slot.values().to(group.dtype))

    read((group for group in view.groups if view.hold_of(group) is None), more)
    elsewhere = [(group, hold) for group in view.groups if (hold := view.hold_of(group)) is not None]
    for group, hold in elsewhere:
        with hold(changed=True):
            read([group], [])
    for _ in range(source.most(len(elsewhere)) - len(elsewhere)):
        _read(source, [])  # another stage has more groups


def compare(
    view: StateView, source: Source, strict: bool, elsewhere: Collection[str] = ()
) -> tuple[dict[str, ManifestEntry], Loaded]:
    """Match names and shapes of the model and the checkpoint.

    Args:
        view: the engine's tensors.
        source: the checkpoint.
        strict: raise if names differ.
        elsewhere: names of parameters and buffers on all ranks (pipeline stages), which are not unexpected.

    Returns:
        Rows of the checkpoint by names in the model, and the result of the comparison.

    Raises:
        CheckpointError: a shape differs, or names differ and `strict` is True.
    """
    shapes = {name: view.box(name).shape for name in (*view.members, *view.plain, *view.buffers)}
    rows, loaded = {}, Loaded(total=sum(torch.Size(shape).numel() for shape in shapes.values()))
    wrong = []
    for name, shape in shapes.items():
        others = (alias for alias, of in view.aliases.items() if of == name)
        row = next((row for row in map(source.manifest.row, (name, *others)) if row is not None), None)
        if row is None:
            loaded.missing.append(name)
        elif row.kind == LEFT_OUT:
            loaded.left_out.append(name)
        elif row.shape != shape:
            wrong.append(f"{name}: {row.shape} in the checkpoint, {shape} in the model")
        else:
            rows[name] = row
            loaded.elements += row.numel
    known = {row.name for row in rows.values()} | set(loaded.left_out) | set(view.aliases) | set(elsewhere)
    loaded.unexpected = [row.name for row in source.manifest.rows if row.name not in known and row.name not in shapes]
    if wrong:
        raise CheckpointError(f"{source.path} does not fit the model: {'; '.join(wrong[:8])}")
    if strict and (loaded.missing or loaded.unexpected):
        raise CheckpointError(
            f"{source.path} and the model do not have the same parameters: missing in the checkpoint "
            f"{loaded.missing[:8]}, unknown to the model {loaded.unexpected[:8]}; without strict, what fits is loaded"
        )
    return rows, loaded


def load_values(
    view: StateView,
    source: Source,
    rows: dict[str, ManifestEntry],
    settings: list[dict[str, Any]] | None = None,
    rounded: bool = False,
) -> None:
    """Load parameters and buffers, and update all copies of the master weights. Collective.

    Args:
        view: the engine's tensors.
        source: the checkpoint.
        rows: result of `compare`.
        settings: saved settings of each optimizer group, to load the optimizer too; None: no optimizer state is loaded.
        rounded: round the master weights to the dtype of the parameters.
    """

    def slots_of(group: ShardGroup) -> Slots:
        ranges = [range_ for range_ in view.held_ranges(group) if range_[0].name in rows]
        slots = [(VALUE, rows[m.name], view.value(m, start, stop)) for m, start, stop in ranges]
        return slots if settings is None else slots + _optimizer_slots(view, source, rows, group)

    if settings is not None:
        _take_settings(view, settings)
    plain = [(VALUE, rows[name], view.plain_value(name)) for name in (*view.plain, *view.buffers) if name in rows]
    _read_all(view, source, slots_of, plain, rounded)
    for _, _, slot in plain:
        view.write_back(slot)
    if settings is not None:
        view.share_counters()
    view.all_gather_masters()


# -- optimizer --------------------------------------------------------------------------------------------------------


def load_optimizer(
    view: StateView, source: Source, rows: dict[str, ManifestEntry], settings: list[dict[str, Any]]
) -> None:
    """Load optimizer state and settings of the optimizer groups only. Collective; arguments as in `load_values`."""
    _take_settings(view, settings)
    _read_all(view, source, lambda group: _optimizer_slots(view, source, rows, group), [])
    view.share_counters()


def _take_settings(view: StateView, settings: list[dict[str, Any]]) -> None:
    """Restore the settings of the optimizer groups; tensors (such as a learning rate) are updated in place."""
    groups = [] if view.optimizer is None else view.optimizer.param_groups
    for group, saved in zip(groups, settings, strict=True):
        for key, value in saved.items():
            there: Any = group.get(key)
            if isinstance(there, torch.Tensor) and isinstance(value, (torch.Tensor, float, int)):
                there.fill_(value)
            else:
                group[key] = value


def check_optimizer(
    view: StateView, source: Source, rows: dict[str, ManifestEntry], settings: list[dict[str, Any]]
) -> None:
    """Raise CheckpointError if the optimizer state cannot be loaded. Arguments as in `load_values`."""
    have = len(view.optimizer.param_groups) if view.optimizer is not None else 0
    advice = "build the optimizer as it was, or pass load_optimizer_states=False"
    if have != len(settings):
        raise CheckpointError(f"the checkpoint has {len(settings)} optimizer groups, the engine has {have}; {advice}")
    numbers = view.group_numbers()
    for name, row in rows.items():
        fragments = view.fragments_of(view.members[name]) if name in view.members else []
        for fragment in fragments:
            box = view.box(name)
            rule = source.manifest.state_of(row, box)
            whole = fragment.range.numel == box.numel and source.manifest.has_box(row, box)
            if rule is not None and rule.whole and not whole:
                raise CheckpointError(
                    f"the optimizer keeps {sorted(rule.whole)} of '{name}' in shapes that cannot be split, and here "
                    f"the parameter is split in another way; load with the optimizer and the model slices it was saved "
                    f"with, or pass load_optimizer_states=False"
                )
            now = numbers.get(id(fragment.leaf), -1)
            if row.group not in (-1, now):
                raise CheckpointError(
                    f"'{name}' was in optimizer group {row.group} and is in group {now} now; {advice}"
                )


def _optimizer_slots(view: StateView, source: Source, rows: dict[str, ManifestEntry], group: ShardGroup) -> Slots:
    """Create a group's optimizer states in the saved layout, and return the destinations of their tensors."""
    slots, decoder = [], Decoder(lambda _: torch.empty(0))
    for member in (member for member in group.members if member.name in rows):
        row = rows[member.name]
        rule = source.manifest.state_of(row, view.box(member.name))
        view.note_state(member, rule is not None)
        for fragment in view.fragments_of(member):
            if rule is None:
                view.set_state(fragment, {})
                continue
            rest: dict[str, Any] = {}
            for key, value in rule.values.items():
                if isinstance(value, dict) and set(value) == {"number", "dtype"}:
                    rest[key] = torch.tensor(decoder.decode(value["number"]), dtype=DTYPES[value["dtype"]])
                else:
                    rest[key] = decoder.decode(value)
            for key, (dtype, shape) in rule.whole.items():
                rest[key] = torch.zeros(shape, dtype=dtype, device=fragment.leaf.device)
            view.set_state(fragment, view.prepare_state(fragment, rule.sliced, rest))
            slots += [(state_field(key), row, view.whole_state(fragment, key)) for key in rule.whole]
            span = (fragment.range.start, fragment.range.stop)
            slots += [(state_field(key), row, view.state(fragment, key, *span)) for key in rule.sliced]
    return slots


# -- the middle of a window -------------------------------------------------------------------------------------------


def load_window(
    view: StateView, source: Source, rows: dict[str, ManifestEntry], ranks: Ranks, private: dict[str, Any]
) -> tuple[bool, list[str]]:
    """Restore the gradients of an unfinished gradient accumulation. Collective.

    On the topology of the save, each gradient buffer is restored; on another one, gradients not yet reduced are added
    to the reduced ones.

    Args:
        view: the engine's tensors.
        source: the checkpoint.
        rows: result of `compare`.
        ranks: ranks that load together.
        private: state that this rank itself saved; empty if the mesh differs.

    Returns:
        Whether the topology is that of the save, and the names of parameters with a gradient.
    """
    about = source.manifest.about
    if "groups" in private:
        same_here = private["groups"] == view.topology()
    else:  # format 1
        named = [[group.name, group.layout.ranks] for group in view.groups]
        same_here = bool(private) and named == about["group_names"] and not view.cut
    same = all(ranks.gather(same_here))
    filled = set(about["filled"])

    def slots_of(group: ShardGroup) -> Slots:
        ranges = [range_ for range_ in view.held_ranges(group) if range_[0].name in filled]
        return [(GRADIENT, rows[m.name], view.gradient(m, start, stop)) for m, start, stop in ranges]

    for group in view.groups:
        if not same or group.members[0].name in filled:
            view.fill(group)
    _read_all(view, source, slots_of, [])
    if same:
        groups, wanted = {group.name: group for group in view.groups}, dict[str, torch.Tensor]()
        # A pipeline stage without gradients has no rounds, though another stage had gradients.
        for saved_round in private.get("rounds", ()):
            group, dtype = groups[saved_round["group"]], DTYPES[saved_round["dtype"]]
            names = saved_round["names"]
            places = view.open_round(group, dtype, saved_round["at_owner"], names, saved_round["fresh"])
            wanted |= {entry_name("round", name): place for name, place in places.items()}
        source.private_tensors(ranks.rank, wanted)
        return True, private.get("touched", [])
    return False, _add_rounds(view, source)


def _add_rounds(view: StateView, source: Source) -> list[str]:
    """Add gradients that had not been reduced at the save to this rank's reduced gradients. Collective.

    Returns the names of this rank's parameters that had a gradient on any saving rank. Raises CheckpointCorruptError if
    the manifest lacks the parameter of a gradient.
    """
    touched: set[str] = set()
    for rank in range(source.manifest.about["ranks"]):
        own = source.private(rank)
        touched |= set(own.get("touched", ()))
        for saved_round in own.get("rounds", ()):
            added: dict[str, tuple[RegionRange, torch.Tensor]] = {}
            for name in saved_round["names"]:
                row = source.manifest.row(name)
                if row is None:
                    raise CheckpointCorruptError(
                        f"{source.path} holds a gradient of '{name}', which its manifest does not name"
                    )
                box = Region(row.shape, tuple(Cut(*cut) for cut in saved_round.get("cuts", {}).get(name, ())))
                gradient = torch.empty(box.numel, dtype=DTYPES[saved_round["dtype"]])
                added[name] = RegionRange(box, 0, box.numel), gradient
            source.private_tensors(rank, {entry_name("round", name): whole for name, (_, whole) in added.items()})
            for name, (saved, gradient) in added.items():
                if name in view.members and name in saved_round.get("once", saved_round["names"]):
                    _add(view, view.members[name], saved, gradient, saved_round["at_owner"])
    return sorted(touched & set(view.members))


def _add(view: StateView, member: ParamRecord, saved: RegionRange, gradient: torch.Tensor, factor: float) -> None:
    hold = view.hold_of(member.group)
    with hold(changed=True) if hold is not None else nullcontext():
        for other, start, stop in view.held_ranges(member.group):
            if other is member:
                slot = view.gradient(member, start, stop)
                here = slot.values()
                for copy in copies(saved, RegionRange(slot.box, start, stop)):
                    copy(gradient, here, add=factor)
