"""Dependency groups of Transformers models, also inside wrappers and with LoRA adapters.

The model is built twice on the meta device: with its config, and with a config of smaller values. Parameters with
different shapes are coupled. The layout of a fused axis (gate and up; query, key and value) is determined by
verification on a small copy (`prove`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import Family, ParameterSlice, out_axis
from deepspeed.errors import CompressionError
from deepspeed.foundation.transformers_model import (
    EXPERT_KEYS,
    EXPERTS_PER_TOKEN_KEYS,
    FFN_KEYS,
    HEAD_DIM_KEYS,
    HEAD_KEYS,
    KEY_VALUE_HEAD_KEYS,
    WIDTH_KEYS,
    config_number,
    pretrained_models,
)

ADAPTER = ".lora_"  # parts of LoRA parameter names
_BASE = "base_layer"


@dataclass(eq=False)
class Shrink:
    """Config value that can be reduced, with the dependency groups that become smaller by it.

    Args:
        kind: `ffn`, `heads` or `experts`.
        changes: config keys with their current values.
        unit: decrease per removed unit, by config key (such as the query heads of a key-value group).
        families: a dependency group for each layer, in the verified layout.
    """

    kind: str
    changes: dict[str, Any]
    unit: dict[str, int] = field(default_factory=dict)
    families: list[Family] = field(default_factory=list)

    def config(self, config: Any, kept_units: int, of: int) -> Any:
        """Return a copy of the config with `kept_units` of `of` units."""
        small = copy.deepcopy(config)
        for key, value in self.changes.items():
            setattr(small, key, value // of * kept_units if key in self.unit else value)
        return small

    def names(self) -> set[str]:
        """Return the names of the coupled parameters of all layers."""
        return {name for family in self.families for name in family.names()}

    def kept_per_block(self, ratio: float) -> int:
        """Return the number of units per block that a ratio keeps: rounded up, at least one."""
        width = self.families[0].size // self.families[0].blocks
        return max(1, min(width, -int(-round(width * ratio, 6) // 1)))

    @property
    def layouts(self) -> int:
        """Largest number of candidate layouts of a parameter slice; at least 1."""
        return max([1, *(len(slot.layouts) for family in self.families for slot in family.slots)])

    def laid(self, layout: int) -> Shrink:
        """Return a copy with another layout of fused axes.

        Args:
            layout: 0: concatenated (gate then up; query, key, value); 1: interleaved (gate and up of each unit; query,
                key and value of each key-value group).
        """
        return replace(self, families=[family.laid(layout) for family in self.families])

    def joined(self) -> Shrink:
        """Return a copy with one dependency group for all layers of a stack, which then remove the same units.

        Necessary if layers share a parameter, such as a bias.
        """
        stacks: dict[str, list[Family]] = {}
        for family in self.families:
            parts = re.split(r"\.\d+", family.label)  # the last part distinguishes two attentions of one block
            stacks.setdefault(parts[0] + parts[-1], []).append(family)
        merged = [
            replace(families[0], slots=[slot for family in families for slot in family.slots], config=True)
            for families in stacks.values()
        ]
        return replace(self, families=merged) if any(family.slots for family in merged) else self


def on_meta(model_class: type[nn.Module], config: Any) -> nn.Module:
    """Return a model on the meta device; CompressionError if the class cannot be built from this config."""
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    except Exception as error:  # any error of the model class
        raise CompressionError(f"{model_class.__name__} cannot be built so: {type(error).__name__}: {error}") from error


def dense_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a model before `compress_module`."""
    return getattr(type(model), "_plain", type(model))


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the unsharded shapes of the parameters, by name; tied parameters only under their first name."""
    return {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def inside(model: nn.Module, holding: str | None = None) -> tuple[str, Any]:
    """Return (name prefix, Transformers model) inside a wrapper; ("", model) if there is none, or several.

    Args:
        model: the wrapper or model.
        holding: name of a module; only Transformers models with this module count. None: all count.
    """
    models = pretrained_models(model)
    if "" in models:
        return "", model
    if holding is not None:
        models = {name: module for name, module in models.items() if holding.startswith(f"{name}.")}
    if len(models) != 1:
        return "", model
    name, module = next(iter(models.items()))
    return f"{name}.", module


def left_on(model: nn.Module, mark: str) -> Any:
    """Return the attribute `mark` of the first module in a model that has it (such as `CALLED`); None if none has."""
    return next((vars(module)[mark] for module in model.modules() if mark in vars(module)), None)


def plain_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state dict of the Transformers model in a wrapper: without name prefix, active LoRA weights merged.

    Args:
        model: the wrapper or model.
        state: state dict of `model`, unsharded.

    Raises:
        CompressionError: there are adapters other than LoRA of Linears.
    """
    prefix, _ = inside(model)
    plain = {}
    for name, value in state.items():
        if not name.startswith(prefix) or ADAPTER in name:
            continue
        short, (home, _, last) = name[len(prefix) :], name.rpartition(".")
        if home.endswith(f".{_BASE}"):
            short = short.replace(f".{_BASE}.", ".")
            home = home.removesuffix(f".{_BASE}")
            module: Any = model.get_submodule(home)
            added: Any = 0
            for adapter in module.active_adapters if last == "weight" else ():
                down, up = (state.get(f"{home}.lora_{side}.{adapter}.weight") for side in "AB")
                if down is None or up is None or down.dim() != 2 or len(getattr(module, "lora_magnitude_vector", ())):
                    raise CompressionError(
                        f"{home} has adapters that are no plain LoRA of a Linear: call merge_and_unload, then export"
                    )
                product = (up.float() @ down.float()) * module.scaling[adapter]
                added = added + (product.t() if getattr(module, "fan_in_fan_out", False) else product)
            if last == "weight":
                value = value + (added.to(value.dtype) if isinstance(added, torch.Tensor) else torch.zeros_like(value))
        plain[short] = value
    return plain


def slots_under_adapters(model: nn.Module, slot: ParameterSlice) -> list[ParameterSlice]:
    """Return the slices for a parameter in a layer with LoRA: of the parameter itself, and of the LoRA matrices.

    Units removed from a weight are also removed from its LoRA product: rows of `lora_B`, columns of `lora_A`.

    Args:
        model: model with adapters.
        slot: slice of the parameter in the model without adapters.

    Raises:
        CompressionError: there are adapters other than LoRA, or the parameter does not exist.
    """
    home, _, last = slot.name.rpartition(".")
    module: Any = dict(model.named_modules()).get(home, nn.Module())
    base = getattr(module, _BASE, None)
    other = [name for name, _ in module.named_parameters() if not name.startswith(f"{_BASE}.")]
    if base is None or len(slot.axes) != 1 or not all(name.startswith(("lora_A.", "lora_B.")) for name in other):
        raise CompressionError(
            f"{slot.name} is not in {type(model).__name__}, nor under plain LoRA adapters: leave adapters of other "
            f"kinds off what is pruned, or prune before they are added"
        )
    slots = [replace(slot, name=f"{home}.{_BASE}.{last}")]
    if last == "weight":
        side = "lora_B" if slot.axes[-1] == out_axis(base) else "lora_A"
        axis = 0 if side == "lora_B" else 1
        slots += [
            ParameterSlice(f"{home}.{name}", (axis,), slot.table, scored=False)
            for name in other
            if name.startswith(f"{side}.")
        ]
    return slots


# -- differences of two models ----------------------------------------------------------------------------------------


def _smaller(value: int) -> int | None:
    return next((value // d for d in (2, 3, 5) if value % d == 0 and value >= d), None)


def _differences(large: nn.Module, small: nn.Module, buffers: bool = False) -> dict[str, list[tuple[int, int, int]]]:
    """Return {name: [(axis, size, smaller)]} of changed parameters and `buffers`; CompressionError if names differ."""
    shapes, smaller = shapes_of(large), shapes_of(small)
    if buffers:
        shapes |= {name: buffer.shape for name, buffer in large.named_buffers()}
        smaller |= {name: buffer.shape for name, buffer in small.named_buffers()}
    if shapes.keys() != smaller.keys():
        raise CompressionError(f"other parameters appear: {sorted(shapes.keys() ^ smaller.keys())[:3]}")
    changes = {}
    for name, shape in shapes.items():
        axes = [(axis, a, b) for axis, (a, b) in enumerate(zip(shape, smaller[name], strict=True)) if a != b]
        if axes:
            changes[name] = axes
    return changes


def _keys(config: Any) -> set[str]:
    return set(config.to_dict()) | set(vars(config)) | set(getattr(config, "attribute_map", {}))


def _layer(name: str) -> str:
    """Return the name of the layer with a parameter: the parameter's name up to the last number; "" without one."""
    numbers = list(re.finditer(r"(?<=\.)\d+(?=\.)", name))
    return name[: numbers[-1].end()] if numbers else ""


# -- FFN --------------------------------------------------------------------------------------------------------------


def ffn_shrinks(model: nn.Module, config: Any) -> list[Shrink]:
    """Return a `Shrink` for each FFN width in the config that can be reduced; layouts are not verified yet."""
    base, width = on_meta(type(model), config), config_number(config, WIDTH_KEYS)
    shrinks = []
    for key in (key for key in FFN_KEYS if key in _keys(config)):
        value = getattr(config, key, None)
        if value is None and key in ("n_inner", "intermediate_size", "ffn_dim"):
            value = 4 * (width or 0) or None  # None means four times the width
        if not isinstance(value, int) or (less := _smaller(value)) is None:
            continue
        small = copy.deepcopy(config)
        setattr(small, key, less)
        try:
            axes = _differences(base, on_meta(type(model), small))
        except CompressionError:
            continue
        if axes and not (width == value and any("embed" in name for name in axes)):  # else it is the model's width
            shrinks.append(Shrink("ffn", {key: value}, {key: 1}, _ffn_families(base, axes, value, less)))
    return shrinks


def _ffn_families(base: nn.Module, axes: dict[str, list[tuple[int, int, int]]], value: int, less: int) -> list[Family]:
    shapes = shapes_of(base)
    by_layer: dict[str, list[ParameterSlice]] = {}
    experts: dict[str, int] = {}
    for name, changes in axes.items():
        shape, layer = shapes[name], _layer(name)
        for axis, size, smaller in changes:
            if size * less != smaller * value:
                raise CompressionError(f"{name} changes from {size} to {smaller}, which is no multiple")
            index, indexed = torch.arange(size), (axis,)
            tables = [index % value, index // (size // value)]  # gate next to up, or interleaved
            if len(shape) == 3 and axis > 0 and shape[0] > 1 and "conv" not in name:  # packed experts
                experts[layer], indexed = shape[0], (0, axis)
                tables = [torch.arange(shape[0])[:, None] * value + table for table in tables]
            by_layer.setdefault(layer, []).append(ParameterSlice(name, indexed, tables[0], layouts=tuple(tables)))
    families = []
    for layer, slots in by_layer.items():
        blocks = experts.get(layer, 1)
        if blocks > 1 and any(len(slot.axes) == 1 for slot in slots):
            # Another module has the same width: a unit is removed from it and from all experts together.
            for place, slot in enumerate(slots):
                if len(slot.axes) == 2:
                    tables = tuple(table[0] % value for table in slot.layouts)
                    slots[place] = ParameterSlice(slot.name, slot.axes[-1:], tables[0], layouts=tables)
            blocks = 1
        families.append(Family("ffn", layer, value * blocks, slots, blocks, True))
    return families


# -- heads ------------------------------------------------------------------------------------------------------------


def head_shrinks(model: nn.Module, config: Any) -> list[Shrink]:
    """Return a `Shrink` for each number of heads in the config that can be reduced with an unchanged head size.

    Raises:
        CompressionError: there is none; the message has the reason.
    """
    base = on_meta(type(model), config)
    reasons, shrinks = [], []
    for key in HEAD_KEYS:
        heads = getattr(config, key, None)
        if not isinstance(heads, int) or key not in _keys(config) or heads < 2:
            continue
        shrink = _head_shrink(model, config, base, key, heads, reasons)
        if shrink is not None and not any(shrink.names() & other.names() for other in shrinks):
            shrinks.append(shrink)
    if not shrinks:
        raise CompressionError(
            f"fewer heads cannot be expressed by {type(config).__name__}: "
            f"{'; '.join(dict.fromkeys(reasons)) or 'it has no number of heads of two or more'}; FFN units and layers "
            f"can be removed and exported"
        )
    return shrinks


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
        if same or not any(name.endswith("weight") for name in axes):
            reasons.append("its attention computes the size of a head from the width and the number of heads")
            continue
        try:
            shrink.families = _HeadCounts(heads, groups, size, units).families(axes)
        except CompressionError as error:
            reasons.append(str(error))
            continue
        return shrink
    return None


@dataclass(frozen=True)
class _HeadCounts:
    """Numbers of query heads, key-value groups, channels per head, and units (heads that are removed together)."""

    heads: int
    groups: int
    size: int
    units: int

    def families(self, axes: dict[str, list[tuple[int, int, int]]]) -> list[Family]:
        """Return a dependency group for each attention module, given the changed axes of `_differences`.

        A decoder block with cross-attention has two attention modules.
        """
        by_module: dict[str, list[ParameterSlice]] = {}
        for name, changes in axes.items():
            layer = _layer(name)
            path = name[len(layer) :].strip(".").split(".")
            module = f"{layer}.{path[0]}" if layer and len(path) > 2 else layer
            for axis, size, _ in changes:
                tables = self.tables(size)
                by_module.setdefault(module, []).append(ParameterSlice(name, (axis,), tables[0], layouts=tuple(tables)))
        return [Family("heads", module, self.units, slots, 1, True) for module, slots in by_module.items()]

    def tables(self, axis: int) -> list[torch.Tensor]:
        """Return the unit (-1: none) at each index of an axis, by layout; CompressionError for an unknown axis size."""
        index = torch.arange(axis)
        q, kv = self.heads * self.size, self.groups * self.size
        per_unit = self.heads // self.units
        if axis == q:
            return [index // (self.size * per_unit)]
        if axis == kv:
            return [index // self.size if self.units == self.groups else torch.full((axis,), -1)]
        if axis in (self.heads, self.groups):
            return [index // (axis // self.units)]
        if axis == q + 2 * kv:  # one matrix for all three
            query = torch.arange(q) // (self.size * per_unit)
            if self.units != self.groups:
                return [torch.cat([query, torch.full((2 * kv,), -1)])]
            key = torch.arange(kv) // self.size
            return [torch.cat([query, key, key]), index // ((per_unit + 2) * self.size)]
        if axis % (self.units * self.size) == 0:  # several copies, as for gated queries
            copies = axis // q if axis % q == 0 else 1
            copy_of_units = torch.arange(axis // copies) // (axis // copies // self.units)
            return [copy_of_units.repeat(copies), index // (axis // self.units)]
        raise CompressionError(f"an axis of {axis} is no number of heads")


# -- experts ----------------------------------------------------------------------------------------------------------


def experts_per_token(config: Any) -> int:
    """Return the number of experts per token (top-k) in the config; 1 if it has none."""
    return config_number(config, EXPERTS_PER_TOKEN_KEYS) or 1


def expert_shrinks(model: nn.Module, config: Any) -> list[Shrink]:
    """Return the number of experts in the config as a `Shrink`, with router buffers; [] if it cannot be reduced.

    Raises:
        CompressionError: a parameter changes by another amount, or other parameters appear.
    """
    base = on_meta(type(model), config)
    dims = {name: tensor.dim() for name, tensor in [*base.named_parameters(), *base.named_buffers()]}
    for key in EXPERT_KEYS:
        count = getattr(config, key, None)
        less = max(experts_per_token(config), (count or 0) // 2) if isinstance(count, int) else 0
        if key not in {*config.to_dict(), *vars(config)} or not isinstance(count, int) or less >= count:
            continue
        small = copy.deepcopy(config)
        setattr(small, key, less)
        families: dict[str, Family] = {}
        for name, changes in _differences(base, on_meta(type(model), small), buffers=True).items():
            layer = name.rpartition(".")[0].rpartition(".")[0]  # the block with router and experts
            family = families.setdefault(layer, Family("experts", layer, count, [], 1, True))
            for axis, size, left in changes:
                if (size, left) != (count, less):
                    raise CompressionError(f"{name} changes from {size} to {left} with {less} of {count} experts")
                family.slots.append(ParameterSlice.along_axis(name, axis, count, count, scored=dims[name] == 3))
        if families:
            return [Shrink("experts", {key: count}, {key: 1}, list(families.values()))]
    return []
