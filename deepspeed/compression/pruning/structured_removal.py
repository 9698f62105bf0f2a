"""Removal of pruned units from parameters, buffers, module attributes and config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import TRANSPOSED, Family, ParameterSlice
from deepspeed.compression.pruning.transformers_groups import inside
from deepspeed.foundation.transformers_model import config_of

_PLAIN = (int, float, str, bool, type(None))
# (class name, attribute, parameter, axis): size attributes of torch's own modules.
_SIZES = (
    ("Linear", "out_features", "weight", 0), ("Linear", "in_features", "weight", 1), ("Conv1D", "nf", "weight", 1),
    ("Conv1D", "nx", "weight", 0), ("Embedding", "num_embeddings", "weight", 0),
    ("Embedding", "embedding_dim", "weight", 1), ("_NormBase", "num_features", "weight", 0),
    ("GroupNorm", "num_channels", "weight", 0),
)  # fmt: skip


@dataclass(eq=False)
class Removal:
    """Removal of either units or layers from a model; stored in checkpoints, to be repeated on the original model.

    Args:
        cuts: by parameter or buffer: (axis, kept indices); the indices are [n], or [experts, n] for a packed tensor.
        attributes: new values of attributes, by module.
        config: new values of the model's config.
        layers: indices of the kept layers, by list of blocks.
        rules: names of the rules that end with this removal.
        text: description for messages.
    """

    cuts: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, list[int]] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    text: str = ""

    def cut(self, name: str, axis: int, indices: torch.Tensor) -> None:
        """Keep only these indices of an axis; if the axis is already cut, keep the intersection."""
        rows = self.cuts.setdefault(name, [])
        for place, (other, before) in enumerate(rows):
            if other == axis and before.dim() == 1:
                rows[place] = (axis, before[torch.isin(before, indices)])
                return
        rows.append((axis, indices))
        rows.sort(key=lambda row: -row[1].dim())  # per-expert indices are applied before whole experts are removed

    def cut_slot(self, slot: ParameterSlice, keep: torch.Tensor) -> None:
        """Keep only the units of a slice that have a True flag in `keep`, bool [units]."""
        if len(slot.axes) == 1:
            indices = slot.indices(keep)
        else:
            indices = torch.stack([slot.indices(keep, lead) for lead in range(slot.table.shape[0])])
        self.cut(slot.name, slot.axes[-1], indices)

    def cut_running_statistics(self, model: nn.Module) -> None:
        """Add the running statistics of batch norms to `cuts`, with the indices of their weights."""
        for name, rows in list(self.cuts.items()):
            home, _, last = name.rpartition(".")
            module = model.get_submodule(home)
            if last == "weight" and isinstance(module, nn.modules.batchnorm._NormBase):
                for buffer in ("running_mean", "running_var"):
                    if module._buffers.get(buffer) is not None:
                        self.cuts[f"{home}.{buffer}"] = rows

    def select(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the kept elements of `values`, a tensor with the shape of the parameter or buffer `name`."""
        for axis, indices in self.cuts.get(name, ()):
            indices = indices.to(values.device)
            if indices.dim() == 1:
                values = values.index_select(axis, indices)
            else:
                rows = zip(values.unbind(0), indices, strict=True)
                values = torch.stack([part.index_select(axis - 1, row) for part, row in rows])
        return values

    def shape(self, name: str, shape: torch.Size) -> torch.Size:
        """Return the shape of a parameter after the removal, given the shape before."""
        sizes = list(shape)
        for axis, indices in self.cuts.get(name, ()):
            sizes[axis] = indices.shape[-1]
        return torch.Size(sizes)

    def remap(self, family: Family) -> Family:
        """Return a dependency group of other units as it is after this removal of units."""
        slots = []
        for slot in family.slots:
            table = slot.table
            for axis, indices in self.cuts.get(slot.name, ()):
                if len(slot.axes) == 2 and axis == slot.axes[0]:
                    table = table[indices]
                elif axis == slot.axes[-1]:
                    table = table[indices] if indices.dim() == 1 and table.dim() == 1 else table.gather(-1, indices)
            slots.append(ParameterSlice(slot.name, slot.axes, table, slot.scored))
        return replace(family, slots=slots)

    def renamed(self, family: Family, names: Mapping[str, str]) -> Family | None:
        """Return a dependency group of other units as it is after this removal of layers.

        Args:
            family: dependency group before the removal.
            names: new names of the remaining parameters, by their old names.

        Returns:
            The renamed group; None if it was in a removed layer.
        """
        slots = [replace(slot, name=names[slot.name]) for slot in family.slots if slot.name in names]
        if not slots:
            return None
        return replace(family, label=self.moved(family.label), slots=slots)

    def moved(self, name: str) -> str:
        """Return a module's name after this removal of layers, given its name before."""
        for prefix, keep in self.layers.items():
            home, _, rest = name.removeprefix(f"{prefix}.").partition(".")
            if name.startswith(f"{prefix}.") and home.isdigit() and int(home) in keep:
                return f"{prefix}.{keep.index(int(home))}" + (f".{rest}" if rest else "")
        return name

    def follow(self, model: nn.Module) -> None:
        """Update module attributes and config of a model with parameters that were already cut."""
        for name, values in self.attributes.items():
            module = model.get_submodule(name)
            for key, value in values.items():
                setattr(module, key, value)
        config = config_of(inside(model)[1])
        for key, value in self.config.items():
            setattr(config, key, value)
        for name in {name.rpartition(".")[0] for name in self.cuts}:
            self._resize(model.get_submodule(name))

    @staticmethod
    def _resize(module: Any) -> None:
        """Set the size attributes of torch's own modules to the sizes of their parameters."""
        kinds = {kind.__name__ for kind in type(module).__mro__}
        for kind, attribute, name, axis in _SIZES:
            param = module._parameters.get(name)
            if kind in kinds and param is not None and hasattr(module, attribute):
                setattr(module, attribute, getattr(param, "ds_shape", param.shape)[axis])
        if "LayerNorm" in kinds and getattr(module, "elementwise_affine", False):
            weight: Any = module._parameters["weight"]
            module.normalized_shape = tuple(getattr(weight, "ds_shape", weight.shape))
        if "_ConvNd" in kinds:
            shape = getattr(module.weight, "ds_shape", module.weight.shape)
            if module.groups > 1 and module.groups == module.in_channels:  # depthwise: as many groups as inputs
                module.groups = shape[0] * module.groups // module.out_channels
            sizes = (shape[1] * module.groups, shape[0])
            module.in_channels, module.out_channels = sizes[::-1] if isinstance(module, TRANSPOSED) else sizes

    def cut_buffers(self, model: nn.Module) -> None:
        """Cut the buffers of a model, in place."""
        for name in self.cuts:
            home, _, last = name.rpartition(".")
            buffers = model.get_submodule(home)._buffers
            buffer = buffers.get(last)
            if buffer is not None:
                buffers[last] = self.select(name, buffer).clone()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict for a checkpoint; it contains tensors."""
        return {name: getattr(self, name) for name in ("cuts", "attributes", "config", "layers", "rules", "text")}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Removal:
        cuts = {name: [(int(axis), index) for axis, index in rows] for name, rows in saved["cuts"].items()}
        layers, rules = saved.get("layers", {}), saved.get("rules", [])
        return cls(cuts, saved["attributes"], saved["config"], layers, rules, saved["text"])


def changed_attributes(before: nn.Module, after: nn.Module) -> dict[str, Any]:
    """Return the attributes of `after` that differ from `before`: numbers, strings, and lists of these.

    Both are modules of one class; attributes of their children are not compared.
    """
    old = {key: value for key, value in vars(before).items() if _is_plain(value)}
    return {k: v for k, v in vars(after).items() if _is_plain(v) and k in old and old[k] != v}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value))


def remove_from(model: nn.Module, removal: Removal) -> None:
    """Remove units from a model that is not sharded, in place; parameters stay the same objects, without gradients."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        for name in removal.cuts:
            if name in tensors:
                tensors[name].grad = None
                reshape(tensors[name], removal.select(name, tensors[name].data).clone())
    removal.cut_buffers(model)
    removal.follow(model)


def reshape(param: torch.Tensor, values: torch.Tensor) -> None:
    """Set a parameter to `values` of another shape, in place.

    While a graph with the parameter exists, such as that of the last loss, autograd rejects another shape; a temporary
    change of the dtype avoids this.
    """
    other = torch.float64 if values.dtype != torch.float64 else torch.float32
    param.data = torch.empty(0, dtype=other, device=values.device)
    param.data = values
