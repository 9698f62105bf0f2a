"""Dependency groups: the elements of all coupled tensors that are removed together."""

from __future__ import annotations

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
        scored: whether a magnitude criterion looks at it.
        layouts: the tables among which a proof decides.
    """

    name: str
    axes: tuple[int, ...]
    table: torch.Tensor
    scored: bool = True
    layouts: tuple[torch.Tensor, ...] = ()

    def laid(self, layout: int) -> ParameterSlice:
        """The slot by another of its tables."""
        tables = self.layouts or (self.table,)
        return replace(self, table=tables[min(layout, len(tables) - 1)])

    def units(self, shape: torch.Size, low: int, high: int) -> torch.Tensor:
        """The unit of each of the elements [low, high) of the flattened parameter; int64."""
        return torch.cat([self._units(shape, at, min(at + _CHUNK, high)) for at in range(low, high, _CHUNK)] or [_NONE])

    def _units(self, shape: torch.Size, low: int, high: int) -> torch.Tensor:
        flat = torch.arange(low, high)
        index = torch.zeros_like(flat)
        for axis in self.axes:
            inner = shape[axis + 1 :].numel()
            index = index * shape[axis] + (flat // inner) % shape[axis]
        return self.table.reshape(-1)[index]

    def select(self, values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """What is left of a tensor of the parameter's shape.

        Args:
            values: of the parameter's shape.
            keep: bool per unit.
        """
        axis = self.axes[-1]
        if len(self.axes) == 1:
            return values.index_select(axis, self.indices(keep).to(values.device))
        rows = [self.indices(keep, lead).to(values.device) for lead in range(self.table.shape[0])]
        return torch.stack([part.index_select(axis - 1, rows[at]) for at, part in enumerate(values.unbind(0))])

    def indices(self, keep: torch.Tensor, lead: int | None = None) -> torch.Tensor:
        """Positions along the axis that stay."""
        table = self.table if lead is None else self.table[lead]
        return torch.nonzero((table < 0) | keep[table.clamp(min=0)]).view(-1)


_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class Family:
    """Units of one layer that are chosen among each other.

    Args:
        kind: `ffn`, `heads`, `rows` or `channels`.
        label: the layer, for reports.
        size: how many units.
        slots: all coupled elements.
        blocks: equal runs of units that keep equally many (packed experts).
        config: whether the model's own config can say the smaller size; None: the model has none.
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

    def names(self) -> list[str]:
        """The coupled parameters, each once."""
        return list(dict.fromkeys(slot.name for slot in self.slots))

    def flags(self, name: str, shape: torch.Size, span: tuple[int, int], keep: torch.Tensor) -> torch.Tensor:
        """Which of the elements [low, high) of a parameter stay.

        Args:
            name: of the parameter.
            shape: its shape.
            span: (low, high) in the flattened parameter.
            keep: bool per unit.

        Returns:
            1-D bool.
        """
        flags = torch.ones(span[1] - span[0], dtype=torch.bool)
        for slot in self.slots:
            if slot.name == name:
                unit = slot.units(shape, *span)
                flags &= (unit < 0) | keep[unit.clamp(min=0)]
        return flags

    def choose(self, scores: torch.Tensor, kept: int) -> torch.Tensor:
        """Flags of the `kept` best units, as many in every block.

        Args:
            scores: float64 per unit.
            kept: of the whole family.
        """
        from deepspeed.compression.pruning.distributed_topk import largest_units

        rows = scores.view(self.blocks, -1)
        return torch.cat([largest_units(row, kept // self.blocks) for row in rows])


def axis_slot(
    name: str, axis: int, size: int, units: int, *, scored: bool = True, inner: bool = False
) -> ParameterSlice:
    """A slot over an axis of `size`, which holds `units` equal runs one after the other.

    Args:
        name: of the parameter.
        axis: which.
        size: of the axis; a multiple of `units`.
        units: how many.
        scored: see `ParameterSlice`.
        inner: False: index = unit * run + offset (a head's channels); True: index = copy * units + unit (gate and up).
    """
    index = torch.arange(size)
    return ParameterSlice(name, (axis,), index % units if inner else index // (size // units), scored)
