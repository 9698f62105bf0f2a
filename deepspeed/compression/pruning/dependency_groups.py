"""Dependency groups (class `Family`): the elements of coupled tensors that must be removed together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_CHUNK = 1 << 20


def out_axis(module: nn.Module) -> int:
    """Return the output axis of a module's weight: 0, or 1 for Transformers' `Conv1D` [inputs, outputs]."""
    return 1 if type(module).__name__ == "Conv1D" else 0


@dataclass(frozen=True, eq=False)
class ParameterSlice:
    """Elements of one parameter that belong to the units of a dependency group.

    Args:
        name: name of the parameter.
        axes: the indexed axes: one, or (expert axis, axis) for packed experts.
        table: unit of each index of `axes`, or -1 for none; int64, with the sizes of these axes.
        scored: whether the parameter counts in magnitude scores.
        layouts: candidate tables; `prove` selects one of them.
    """

    name: str
    axes: tuple[int, ...]
    table: torch.Tensor
    scored: bool = True
    layouts: tuple[torch.Tensor, ...] = ()

    @classmethod
    def along_axis(
        cls, name: str, axis: int, size: int, units: int, *, scored: bool = True, interleaved: bool = False
    ) -> ParameterSlice:
        """Create a slice of one axis, with the same number of indices for each unit.

        Args:
            name: name of the parameter.
            axis: the axis.
            size: its size, a multiple of `units`.
            units: number of units.
            scored: as in `ParameterSlice`.
            interleaved: False: each unit has consecutive indices (channels of a head); True: index i belongs to unit
                i % units.
        """
        index = torch.arange(size)
        return cls(name, (axis,), index % units if interleaved else index // (size // units), scored)

    def laid(self, layout: int) -> ParameterSlice:
        """Return a copy with candidate table number `layout`, or the last one if there are fewer."""
        tables = self.layouts or (self.table,)
        return replace(self, table=tables[min(layout, len(tables) - 1)])

    def units(self, shape: torch.Size, low: int, high: int) -> torch.Tensor:
        """Return the unit (or -1) of each element [low, high) of the flattened parameter of this shape; int64."""
        units = torch.empty(max(high - low, 0), dtype=torch.int64)
        for start in range(low, high, _CHUNK):  # bounds temporary memory
            flat = torch.arange(start, min(start + _CHUNK, high))
            index = torch.zeros_like(flat)
            for axis in self.axes:
                index = index * shape[axis] + (flat // shape[axis + 1 :].numel()) % shape[axis]
            units[start - low : start - low + flat.numel()] = self.table.reshape(-1)[index]
        return units

    def select(self, values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return the kept elements of `values`, a tensor like the parameter; `keep`: bool [units], True: kept."""
        axis = self.axes[-1]
        if len(self.axes) == 1:
            return values.index_select(axis, self.indices(keep).to(values.device))
        rows = [self.indices(keep, lead).to(values.device) for lead in range(self.table.shape[0])]
        return torch.stack([part.index_select(axis - 1, row) for part, row in zip(values.unbind(0), rows, strict=True)])

    def indices(self, keep: torch.Tensor, lead: int | None = None) -> torch.Tensor:
        """Return the remaining indices of the last of `axes`, given bool flags `keep` [units].

        `lead` is the index of the expert in a packed tensor; None: the tensor is not packed.
        """
        table = self.table if lead is None else self.table[lead]
        return torch.nonzero((table < 0) | keep[table.clamp(min=0)]).view(-1)


@dataclass(eq=False)
class Family:
    """Dependency group of one layer: its units (such as heads), with all elements that must be removed with each.

    Args:
        kind: `ffn`, `heads`, `experts`, `rows` or `channels`.
        label: name of the layer, for messages.
        size: number of units.
        slots: slices of all coupled parameters.
        blocks: number of equal blocks of units (such as packed experts), which keep equal numbers of units.
        config: True: a config value is the size; None: no config value is; False: not all coupled parameters are known.
    """

    kind: str
    label: str
    size: int
    slots: list[ParameterSlice]
    blocks: int = 1
    config: bool | None = None

    def laid(self, layout: int) -> Family:
        """Return a copy with candidate layout number `layout` of all slices."""
        return replace(self, slots=[slot.laid(layout) for slot in self.slots])

    def scored_by(self, names: Collection[str]) -> Family:
        """Return a copy in which only the parameters `names` count for magnitude scores."""
        return replace(self, slots=[replace(slot, scored=slot.name in names) for slot in self.slots])

    def names(self) -> list[str]:
        """Return the names of the coupled parameters, without repetition."""
        return list(dict.fromkeys(slot.name for slot in self.slots))

    def flags(self, name: str, shape: torch.Size, span: tuple[int, int], keep: torch.Tensor) -> torch.Tensor:
        """Return bool flags of the kept elements of a flattened parameter.

        Args:
            name: name of the parameter.
            shape: its shape.
            span: range [low, high) of elements; the result has `high - low` flags.
            keep: bool flags of the kept units.
        """
        flags = torch.ones(span[1] - span[0], dtype=torch.bool)
        for slot in self.slots:
            if slot.name == name:
                unit = slot.units(shape, *span)
                flags &= (unit < 0) | keep[unit.clamp(min=0)]
        return flags

    def choose(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Return bool flags of the `count` units with the highest scores, with equal numbers in every block."""
        from deepspeed.compression.pruning.distributed_topk import largest_units

        rows = scores.view(self.blocks, -1)
        return torch.cat([largest_units(row, count // self.blocks) for row in rows])
