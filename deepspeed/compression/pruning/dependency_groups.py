"""Dependency groups: the elements of all coupled tensors that are removed together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_CHUNK = 1 << 20


def out_axis(module: nn.Module) -> int:
    """The axis of outputs of its weight: Transformers' `Conv1D` is stored the other way round."""
    return 1 if type(module).__name__ == "Conv1D" else 0


@dataclass(frozen=True, eq=False)
class ParameterSlice:
    """The elements of one parameter that belong to units of a family.

    Args:
        name: of the parameter.
        axes: the axes that are indexed: one, or for packed experts (expert axis, axis).
        table: int64, of the sizes of those axes: the unit there, or -1.
        scored: whether a magnitude criterion reads it.
        layouts: the tables of which verification picks one.
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
        """A slice over an axis of `size`, which holds `units` equal runs one after the other.

        `interleaved`: False: index = unit * run + offset (a head's channels); True: index = copy * units + unit.
        """
        index = torch.arange(size)
        return cls(name, (axis,), index % units if interleaved else index // (size // units), scored)

    def laid(self, layout: int) -> ParameterSlice:
        """The slice by another of its tables."""
        tables = self.layouts or (self.table,)
        return replace(self, table=tables[min(layout, len(tables) - 1)])

    def units(self, shape: torch.Size, low: int, high: int) -> torch.Tensor:
        """The unit of each of the elements [low, high) of the flattened parameter; int64."""
        units = torch.empty(max(high - low, 0), dtype=torch.int64)
        for start in range(low, high, _CHUNK):  # temporary tensors stay small
            flat = torch.arange(start, min(start + _CHUNK, high))
            index = torch.zeros_like(flat)
            for axis in self.axes:
                index = index * shape[axis] + (flat // shape[axis + 1 :].numel()) % shape[axis]
            units[start - low : start - low + flat.numel()] = self.table.reshape(-1)[index]
        return units

    def select(self, values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of the parameter's shape that stays, by flags of units."""
        axis = self.axes[-1]
        if len(self.axes) == 1:
            return values.index_select(axis, self.indices(keep).to(values.device))
        rows = [self.indices(keep, lead).to(values.device) for lead in range(self.table.shape[0])]
        return torch.stack([part.index_select(axis - 1, row) for part, row in zip(values.unbind(0), rows, strict=True)])

    def indices(self, keep: torch.Tensor, lead: int | None = None) -> torch.Tensor:
        """Positions along the axis that stay."""
        table = self.table if lead is None else self.table[lead]
        return torch.nonzero((table < 0) | keep[table.clamp(min=0)]).view(-1)


@dataclass(eq=False)
class Family:
    """Units of one layer that compete with each other.

    Args:
        kind: `ffn`, `heads`, `experts`, `rows` or `channels`.
        label: the layer, for reports.
        size: number of units.
        slots: all coupled elements.
        blocks: equal runs of units that keep equally many (packed experts).
        config: whether the model's own config can express the smaller size; None: the model has none.
    """

    kind: str
    label: str
    size: int
    slots: list[ParameterSlice]
    blocks: int = 1
    config: bool | None = None

    def laid(self, layout: int) -> Family:
        """The family by another layout of its axes."""
        return replace(self, slots=[slot.laid(layout) for slot in self.slots])

    def scored_by(self, names: Collection[str]) -> Family:
        """The family, with the magnitudes of these parameters only."""
        return replace(self, slots=[replace(slot, scored=slot.name in names) for slot in self.slots])

    def names(self) -> list[str]:
        """The coupled parameters, each once."""
        return list(dict.fromkeys(slot.name for slot in self.slots))

    def flags(self, name: str, shape: torch.Size, span: tuple[int, int], keep: torch.Tensor) -> torch.Tensor:
        """Which of the elements [low, high) of a flattened parameter stay, by flags of units; 1-D bool."""
        flags = torch.ones(span[1] - span[0], dtype=torch.bool)
        for slot in self.slots:
            if slot.name == name:
                unit = slot.units(shape, *span)
                flags &= (unit < 0) | keep[unit.clamp(min=0)]
        return flags

    def choose(self, scores: torch.Tensor, count: int) -> torch.Tensor:
        """Flags of the `count` units of the whole family with the highest scores, as many in every block."""
        from deepspeed.compression.pruning.distributed_topk import largest_units

        rows = scores.view(self.blocks, -1)
        return torch.cat([largest_units(row, count // self.blocks) for row in rows])
