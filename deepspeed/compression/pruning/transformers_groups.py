"""Dependency groups of a Transformers model, read from its config.

The model is built twice on the meta device, as it is and with one number of the config made smaller. The parameters
whose shapes differ are the coupled ones, and the smaller model says which attributes of which modules follow. How an
axis is laid out (gate beside up, query, key and value in one matrix) is settled by the proof on a small twin.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import Family, ParameterSlice
from deepspeed.errors import CompressionError
from deepspeed.foundation.transformers_model import (
    FFN_KEYS,
    HEAD_DIM_KEYS,
    HEAD_KEYS,
    KEY_VALUE_HEAD_KEYS,
    WIDTH_KEYS,
    config_number,
)


@dataclass(eq=False)
class Shrink:
    """A smaller number in the config, and what follows from it.

    Args:
        kind: `ffn`, `heads` or `layers`.
        changes: config keys and the values they have now.
        unit: how many of the key's value are one unit (query heads of a key-value group).
        families: units by layer; their slots hold the layout that was proven.
    """

    kind: str
    changes: dict[str, Any]
    unit: dict[str, int] = field(default_factory=dict)
    families: list[Family] = field(default_factory=list)

    def config(self, config: Any, kept: int, of: int) -> Any:
        """A copy of the config that keeps `kept` of `of` units."""
        made = copy.deepcopy(config)
        for key, value in self.changes.items():
            setattr(made, key, value // of * kept if key in self.unit else value)
        return made


def on_meta(model_class: type[nn.Module], config: Any) -> nn.Module:
    """A model without memory.

    Raises:
        CompressionError: the class cannot be built from that config.
    """
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    except Exception as error:  # a config that a model class refuses says so in any way it likes
        raise CompressionError(f"{model_class.__name__} cannot be built so: {type(error).__name__}: {error}") from error


def dense_class(model: nn.Module) -> type[nn.Module]:
    """The class a model had before its modules learned of quantizers."""
    return getattr(type(model), "_plain", type(model))


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the parameters, each under its first name; true ones of sharded parameters too."""
    return {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def _smaller(value: int) -> int | None:
    return next((value // d for d in (2, 3, 5) if value % d == 0 and value >= d), None)


def _differences(large: nn.Module, small: nn.Module) -> dict[str, list[tuple[int, int, int]]]:
    """(axis, size, smaller size) of each parameter that changes."""
    one, two = shapes_of(large), shapes_of(small)
    if one.keys() != two.keys():
        raise CompressionError(f"other parameters appear: {sorted(one.keys() ^ two.keys())[:3]}")
    found = {}
    for name, shape in one.items():
        axes = [(axis, a, b) for axis, (a, b) in enumerate(zip(shape, two[name], strict=True)) if a != b]
        if axes:
            found[name] = axes
    return found


def _layer(name: str) -> str:
    """The repeated block a parameter is in: its name up to the last number."""
    numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", name))
    return name[: numbers[-1].end()] if numbers else ""


# -- FFN --------------------------------------------------------------------------------------------------------------


def ffn_shrinks(model: nn.Module, config: Any) -> list[Shrink]:
    """The FFN widths that the config can say."""
    base = on_meta(type(model), config)
    found = []
    for key in FFN_KEYS:
        value = getattr(config, key, None)
        value = _implied_ffn(base, config, key) if value is None else value
        if not isinstance(value, int) or (less := _smaller(value)) is None or key not in _keys(config):
            continue
        made = copy.deepcopy(config)
        setattr(made, key, less)
        try:
            axes = _differences(base, on_meta(type(model), made))
        except CompressionError:
            continue
        width = config_number(config, WIDTH_KEYS)
        if not axes or _touches_width(base, axes, width, value):
            continue
        found.append(Shrink("ffn", {key: value}, {key: 1}, _ffn_families(base, axes, value, less)))
    return found


def _keys(config: Any) -> set[str]:
    return set(config.to_dict()) | set(vars(config)) | set(getattr(config, "attribute_map", {}))


def _implied_ffn(base: nn.Module, config: Any, key: str) -> int | None:
    """`n_inner: None` stands for four times the width."""
    if key not in ("n_inner", "intermediate_size", "ffn_dim") or key not in _keys(config):
        return None
    width = config_number(config, WIDTH_KEYS) or 0
    return 4 * width or None


def _touches_width(base: nn.Module, axes: dict[str, Any], width: int | None, value: int) -> bool:
    """Whether embeddings or norms of the residual change too: then it is no FFN width."""
    return any("embed" in name and width == value for name in axes)


def _ffn_families(base: nn.Module, axes: dict[str, list[tuple[int, int, int]]], value: int, less: int) -> list[Family]:
    shapes = shapes_of(base)
    by_layer: dict[str, list[ParameterSlice]] = {}
    experts: dict[str, int] = {}
    for name, changed in axes.items():
        for axis, size, smaller in changed:
            if size * less != smaller * value:
                raise CompressionError(f"{name} changes from {size} to {smaller}, which is no multiple")
            packed = len(shapes[name]) == 3 and axis > 0 and shapes[name][0] > 1 and "conv" not in name
            layer = _layer(name)
            slot = _ffn_slot(name, shapes[name], axis, value, packed)
            by_layer.setdefault(layer, []).append(slot)
            if packed:
                experts[layer] = shapes[name][0]
    made = []
    for layer, slots in by_layer.items():
        blocks = experts.get(layer, 1)
        if blocks > 1 and any(len(slot.axes) == 1 for slot in slots):
            slots, blocks = [_unpacked(slot, value) for slot in slots], 1
        made.append(Family("ffn", layer, value * blocks, slots, blocks, True))
    return made


def _ffn_slot(name: str, shape: torch.Size, axis: int, value: int, packed: bool) -> ParameterSlice:
    index = torch.arange(shape[axis])
    tables = [index % value, index // (shape[axis] // value)]  # gate beside up, or in turns
    if not packed:
        return ParameterSlice(name, (axis,), tables[0], layouts=tuple(tables))
    rows = torch.arange(shape[0])[:, None] * value
    tables = [rows + table[None] for table in tables]
    return ParameterSlice(name, (0, axis), tables[0], layouts=tuple(tables))


def _unpacked(slot: ParameterSlice, value: int) -> ParameterSlice:
    """The same unit of all experts together, where something beside them has that width too."""
    if len(slot.axes) == 1:
        return slot
    tables = tuple(table[0] % value for table in slot.layouts)
    return ParameterSlice(slot.name, slot.axes[-1:], tables[0], layouts=tables)


def relaid(shrink: Shrink, layout: int) -> Shrink:
    """The shrink with another layout of axes that hold several copies of the units; 0 is the first.

    Layouts of FFN: copies one after the other, copies interleaved. Of heads: query, key, value one after the other;
    then group by group.
    """
    return Shrink(shrink.kind, shrink.changes, shrink.unit, [family.laid(layout) for family in shrink.families])


# -- heads ------------------------------------------------------------------------------------------------------------


def head_shrinks(model: nn.Module, config: Any) -> list[Shrink]:
    """Fewer heads of the same size, where the config can say that.

    Raises:
        CompressionError: it cannot; the text says why.
    """
    base = on_meta(type(model), config)
    reasons, found = [], []
    for key in HEAD_KEYS:
        heads = getattr(config, key, None)
        if not isinstance(heads, int) or key not in _keys(config) or heads < 2:
            continue
        shrink = _head_shrink(model, config, base, key, heads, reasons)
        if shrink is not None and not any(_same(shrink, other) for other in found):
            found.append(shrink)
    if not found:
        raise CompressionError(
            f"fewer heads cannot be said by {type(config).__name__}: "
            f"{'; '.join(dict.fromkeys(reasons)) or 'it has no number of heads of two or more'}; FFN units and layers "
            f"can be removed and exported"
        )
    return found


def _same(one: Shrink, two: Shrink) -> bool:
    names = {name for family in one.families for name in family.names()}
    return bool(names & {name for family in two.families for name in family.names()})


def _head_shrink(
    model: nn.Module, config: Any, base: nn.Module, key: str, heads: int, reasons: list[str]
) -> Shrink | None:
    group_key = next((k for k in KEY_VALUE_HEAD_KEYS if isinstance(getattr(config, k, None), int)), None)
    groups = min(getattr(config, group_key), heads) if group_key else heads
    width = config_number(config, WIDTH_KEYS)
    units = groups if groups > 1 else heads
    less = _smaller(units)
    if less is None:
        reasons.append(f"{units} key-value groups cannot be made fewer evenly")
        return None
    for dim_key in dict.fromkeys([*(k for k in HEAD_DIM_KEYS if hasattr(config, k)), "head_dim"]):
        size = getattr(config, dim_key, None) or (width // heads if width else None)
        if not isinstance(size, int):
            continue
        changes: dict[str, Any] = {key: heads, dim_key: size}
        unit = {key: heads // units}
        if group_key and groups > 1:
            changes[group_key], unit[group_key] = groups, 1
        shrink = Shrink("heads", changes, unit)
        try:
            same = _differences(base, on_meta(type(model), shrink.config(config, units, units)))
            axes = _differences(base, on_meta(type(model), shrink.config(config, less, units)))
        except (CompressionError, AttributeError) as error:  # a property without a setter
            reasons.append(str(error).splitlines()[0][:160])
            continue
        if same or not axes or not any(_is_projection(name, changed) for name, changed in axes.items()):
            reasons.append("its attention computes the size of a head from the width and the number of heads")
            continue
        try:
            shrink.families = _head_families(base, axes, _Heads(heads, groups, size, units), less)
        except CompressionError as error:
            reasons.append(str(error))
            continue
        return shrink
    return None


def _is_projection(name: str, changed: list[tuple[int, int, int]]) -> bool:
    return bool(changed) and name.endswith("weight")


@dataclass(frozen=True)
class _Heads:
    heads: int
    groups: int
    size: int
    units: int

    def tables(self, axis: int) -> list[torch.Tensor]:
        """The unit at each index of an axis of that size, by layout."""
        index = torch.arange(axis)
        q, kv = self.heads * self.size, self.groups * self.size
        per_unit = self.heads // self.units
        if axis == q:
            return [index // (self.size * per_unit)]
        if axis == kv:
            return [index // self.size if self.units == self.groups else torch.full((axis,), -1)]
        if axis in (self.heads, self.groups):
            return [index // (axis // self.units)]
        if axis == q + 2 * kv:
            return self._fused(q, kv, per_unit)
        if axis % (self.units * self.size) == 0:  # several copies, as of gated queries
            copies = axis // q if axis % q == 0 else 1
            one = torch.arange(axis // copies) // (axis // copies // self.units)
            return [one.repeat(copies), index // (axis // self.units)]
        raise CompressionError(f"an axis of {axis} is no number of heads")

    def _fused(self, q: int, kv: int, per_unit: int) -> list[torch.Tensor]:
        query = torch.arange(q) // (self.size * per_unit)
        other = torch.arange(kv) // self.size if self.units == self.groups else torch.full((kv,), -1)
        beside = torch.cat([query, other, other])
        if self.units != self.groups:
            return [beside]
        run = (per_unit + 2) * self.size
        return [beside, torch.arange(q + 2 * kv) // run]


def _head_families(
    base: nn.Module, axes: dict[str, list[tuple[int, int, int]]], counts: _Heads, less: int
) -> list[Family]:
    by_layer: dict[str, list[ParameterSlice]] = {}
    for name, changed in axes.items():
        for axis, size, _ in changed:
            tables = counts.tables(size)
            slot = ParameterSlice(name, (axis,), tables[0], layouts=tuple(tables))
            by_layer.setdefault(_attention(name), []).append(slot)
    return [Family("heads", layer, counts.units, slots, 1, True) for layer, slots in by_layer.items()]


def _attention(name: str) -> str:
    """The attention module of a parameter: a block of a decoder that looks at an encoder has two."""
    layer = _layer(name)
    rest = name[len(layer) :].strip(".").split(".")
    return f"{layer}.{rest[0]}" if layer and len(rest) > 2 else layer


def joined(shrink: Shrink) -> Shrink:
    """The shrink with one choice of units for all layers of a stack, as a bias that layers share needs."""
    stacks: dict[str, list[Family]] = {}
    for family in shrink.families:
        stacks.setdefault(re.split(r"\.\d+", family.label)[0] + _role(family.label), []).append(family)
    merged = [
        Family(parts[0].kind, parts[0].label, parts[0].size, [s for p in parts for s in p.slots], parts[0].blocks, True)
        for parts in stacks.values()
    ]
    whole = {slot.name for family in merged for slot in family.slots}
    return Shrink(shrink.kind, shrink.changes, shrink.unit, merged) if whole else shrink


def _role(label: str) -> str:
    """What stands after the last number, where two attentions of one block differ."""
    return re.split(r"\.\d+", label)[-1]
