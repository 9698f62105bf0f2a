"""Removes pruned units: shrinks parameters, modules and config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import TRANSPOSED, Family, ParameterSlice
from deepspeed.compression.pruning.transformers_groups import dense_class, on_meta
from deepspeed.compression.pruning.unwrap import inside
from deepspeed.errors import CompressionError
from deepspeed.foundation.transformers_model import config_of

_PLAIN = (int, float, str, bool, type(None))
# (module class name, attribute, parameter, axis): what torch's own modules know of their shapes.
_SIZES = (
    ("Linear", "out_features", "weight", 0), ("Linear", "in_features", "weight", 1), ("Conv1D", "nf", "weight", 1),
    ("Conv1D", "nx", "weight", 0), ("Embedding", "num_embeddings", "weight", 0),
    ("Embedding", "embedding_dim", "weight", 1), ("_NormBase", "num_features", "weight", 0),
    ("GroupNorm", "num_channels", "weight", 0),
)  # fmt: skip


class Plans(Protocol):
    """Which number of a config belongs to a family; see `plan.TensorParallelPlan`."""

    config: Any

    def shrink_of(self, family: Family) -> Any:
        """That number."""
        ...


@dataclass(eq=False)
class Removal:
    """What leaves a model; enough to do it again in a process that knows only the dense class.

    Args:
        cuts: by parameter or buffer, (axis, indices that stay: [n], or [experts, n] of a packed tensor).
        attributes: new values of attributes, by module.
        config: new values of the model's config.
        layers: by list of blocks, the indices that stay; a removal is of layers alone, or of units alone.
        rules: names of the rules that have ended with it.
        text: what it was, for reports.
    """

    cuts: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, list[int]] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    text: str = ""

    def cut(self, name: str, axis: int, indices: torch.Tensor) -> None:
        """Keep these indices of an axis; of one that is cut already, as after a concatenation, those of both."""
        rows = self.cuts.setdefault(name, [])
        for at, (other, before) in enumerate(rows):
            if other == axis and before.dim() == 1:
                rows[at] = (axis, before[torch.isin(before, indices)])
                return
        rows.append((axis, indices))
        rows.sort(key=lambda row: -row[1].dim())  # rows of their own per expert or output come before those leave

    def cut_slot(self, slot: ParameterSlice, keep: torch.Tensor) -> None:
        """Keep some of the units that a slot holds.

        Args:
            slot: of a family.
            keep: bool per unit.
        """
        if len(slot.axes) == 1:
            indices = slot.indices(keep)
        else:
            indices = torch.stack([slot.indices(keep, lead) for lead in range(slot.table.shape[0])])
        self.cut(slot.name, slot.axes[-1], indices)

    def select(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """What is left of a tensor of a parameter's shape."""
        for axis, indices in self.cuts.get(name, ()):
            where = indices.to(values.device)
            if where.dim() == 1:
                values = values.index_select(axis, where)
            else:
                rows = zip(values.unbind(0), where, strict=True)
                values = torch.stack([part.index_select(axis - 1, row) for part, row in rows])
        return values

    def shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape that is left of a parameter of that shape."""
        left = list(shape)
        for axis, indices in self.cuts.get(name, ()):
            left[axis] = indices.shape[-1]
        return torch.Size(left)

    def remap(self, family: Family) -> Family:
        """Another family, of a model from which this was removed."""
        slots = []
        for slot in family.slots:
            table = slot.table
            for axis, indices in self.cuts.get(slot.name, ()):
                if len(slot.axes) == 2 and axis == slot.axes[0]:
                    table = table[indices]
                elif axis == slot.axes[-1]:
                    table = table[indices] if indices.dim() == 1 and table.dim() == 1 else table.gather(-1, indices)
            slots.append(ParameterSlice(slot.name, slot.axes, table, slot.scored))
        return Family(family.kind, family.label, family.size, slots, family.blocks, family.config)

    def renamed(self, family: Family, names: Mapping[str, str]) -> Family | None:
        """Another family, of a model from which layers were removed; None when it was in one of them.

        Args:
            family: as it was.
            names: new names of parameters by their old ones, without those that left.
        """
        slots = [replace(slot, name=names[slot.name]) for slot in family.slots if slot.name in names]
        if not slots:
            return None
        return Family(family.kind, self.moved(family.label), family.size, slots, family.blocks, family.config)

    def moved(self, name: str) -> str:
        """A module's name after layers have left."""
        for prefix, keep in self.layers.items():
            home, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            if name.startswith(f"{prefix}.") and home.isdigit() and int(home) in keep:
                return f"{prefix}.{keep.index(int(home))}" + (f".{rest}" if rest else "")
        return name

    def follow(self, model: nn.Module) -> None:
        """Set attributes and config of a model whose parameters were cut."""
        for name, values in self.attributes.items():
            module = model.get_submodule(name)
            for key, value in values.items():
                setattr(module, key, value)
        config = config_of(inside(model)[1])
        for key, value in self.config.items():
            setattr(config, key, value)
        for name in {name.rpartition(".")[0] for name in self.cuts}:
            _resize(model.get_submodule(name))

    def to_json(self) -> dict[str, Any]:
        """Values and tensors for a checkpoint."""
        return {name: getattr(self, name) for name in ("cuts", "attributes", "config", "layers", "rules", "text")}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Removal:
        """Undo `to_json`."""
        cuts = {name: [(int(axis), index) for axis, index in rows] for name, rows in saved["cuts"].items()}
        layers, rules = saved.get("layers", {}), saved.get("rules", [])
        return cls(cuts, saved["attributes"], saved["config"], layers, rules, saved["text"])


def _resize(module: Any) -> None:
    kinds = {kind.__name__ for kind in type(module).__mro__}
    for kind, attribute, name, axis in _SIZES:
        param = module._parameters.get(name)
        if kind in kinds and param is not None and hasattr(module, attribute):
            shape = getattr(param, "ds_shape", param.shape)
            setattr(module, attribute, shape[axis])
    if "_ConvNd" in kinds:
        _resize_convolution(module)
    if "LayerNorm" in kinds and getattr(module, "elementwise_affine", False):
        weight: Any = module._parameters["weight"]
        module.normalized_shape = tuple(getattr(weight, "ds_shape", weight.shape))


def _resize_convolution(module: Any) -> None:
    shape = getattr(module.weight, "ds_shape", module.weight.shape)
    if module.groups > 1 and module.groups == module.in_channels:  # depthwise: as many groups as there are inputs
        module.groups = shape[0] * module.groups // module.out_channels
    one, two = (shape[1] * module.groups, shape[0])
    transposed = isinstance(module, TRANSPOSED)
    module.in_channels, module.out_channels = (two, one) if transposed else (one, two)


def removal_of(
    model: nn.Module, plan: Plans, chosen: list[tuple[Family, torch.Tensor]], buffers: bool = True
) -> Removal:
    """What removing the dropped units of families comes to.

    Args:
        model: plain or sharded.
        plan: knows which config number a family belongs to.
        chosen: families and flags of the units that stay.
        buffers: cut buffers of the sizes of cut parameters too (running statistics).

    Raises:
        CompressionError: the config cannot say it.
    """
    made = Removal(text=", ".join(f"{int((~k).sum())} {f.kind} of {f.label}" for f, k in chosen[:4]))
    for family, keep in chosen:
        for slot in family.slots:
            made.cut_slot(slot, keep)
    if buffers:
        cut_with_buffers(model, made)
        for family, keep in chosen:
            _cut_router_buffers(model, family, keep, made)
    if plan.config is not None:
        _follow_config(model, plan, chosen, made)
    return made


def cut_with_buffers(model: nn.Module, made: Removal) -> None:
    """Add running statistics to the parameters that are cut."""
    for name, rows in list(made.cuts.items()):
        home, _, last = name.rpartition(".")
        module = model.get_submodule(home)
        if last == "weight" and isinstance(module, nn.modules.batchnorm._NormBase):
            for buffer in ("running_mean", "running_var"):
                if module._buffers.get(buffer) is not None:
                    made.cuts[f"{home}.{buffer}"] = rows


def _cut_router_buffers(model: nn.Module, family: Family, keep: torch.Tensor, made: Removal) -> None:
    """Whole experts take their places in their router's buffers along, as corrections of its scores."""
    for home in dict.fromkeys(slot.name.rpartition(".")[0] for slot in family.slots if family.kind == "experts"):
        for last, buffer in model.get_submodule(home).named_buffers(recurse=False):
            if buffer.shape == (family.size,):
                made.cut(f"{home}.{last}", 0, torch.nonzero(keep).view(-1))


def _follow_config(model: nn.Module, plan: Plans, chosen: list[tuple[Family, torch.Tensor]], made: Removal) -> None:
    config = copy.deepcopy(plan.config)
    counts: dict[int, tuple[Any, set[tuple[int, int]]]] = {}
    for family, keep in chosen:
        shrink = plan.shrink_of(family)
        if shrink is not None:
            numbers = counts.setdefault(id(shrink), (shrink, set()))[1]
            numbers.add((int(keep.sum()) // family.blocks, family.size // family.blocks))
    for shrink, numbers in counts.values():
        if len(numbers) > 1 or sum(plan.shrink_of(f) is shrink for f, _ in chosen) != len(shrink.families):
            raise CompressionError(
                f"{type(config).__name__} says one number of {shrink.kind} for all layers: prune all layers alike "
                f"(scope layer, modules of every layer), which is the nearest plan that can be exported"
            )
        kept, of = next(iter(numbers))
        config = shrink.config(config, kept, of)
        made.config |= {key: getattr(config, key) for key in shrink.changes}
    if counts:
        prefix, inner = inside(model)
        kind = dense_class(inner)
        changes = attribute_changes(on_meta(kind, plan.config), on_meta(kind, config))
        made.attributes = {(prefix + name).removesuffix("."): values for name, values in changes.items()}


def attribute_changes(before: nn.Module, after: nn.Module) -> dict[str, dict[str, Any]]:
    """Plain attributes of modules that differ between two models of one class."""
    found: dict[str, dict[str, Any]] = {}
    known = dict(before.named_modules())
    for name, module in after.named_modules():
        old = vars(known[name]) if name in known else {}
        changed = {k: v for k, v in vars(module).items() if _is_plain(v) and k in old and _differs(old[k], v)}
        if changed:
            found[name] = changed
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value))


def _differs(old: Any, new: Any) -> bool:
    return _is_plain(old) and old != new


def remove_from(model: nn.Module, removal: Removal) -> None:
    """Take units out of a plain model, in place: parameters stay the objects they are."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        for name in removal.cuts:
            if name in tensors:
                tensors[name].grad = None
                reshape(tensors[name], removal.select(name, tensors[name].data).clone())
    cut_buffers(model, removal)
    removal.follow(model)


def reshape(param: torch.Tensor, values: torch.Tensor) -> None:
    """Give a parameter values of another shape.

    Autograd remembers the shape a parameter had for as long as a graph with it lives, as that of the last loss does;
    it forgets it when the dtype changes.
    """
    other = torch.float64 if values.dtype != torch.float64 else torch.float32
    param.data = torch.empty(0, dtype=other, device=values.device)
    param.data = values


def cut_buffers(model: nn.Module, removal: Removal) -> None:
    """The buffers of a removal."""
    for name in removal.cuts:
        home, _, last = name.rpartition(".")
        module = model.get_submodule(home)
        buffer = module._buffers.get(last)
        if buffer is not None:
            module._buffers[last] = removal.select(name, buffer).clone()
