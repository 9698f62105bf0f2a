"""Ranks by named axes, as pipelined scripts ask for them: the names of old scripts, over plain arithmetic."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from deepspeed.errors import ArgumentError


class ProcessTopology:
    """A grid of ranks, the last axis fastest.

    Args:
        axes: names, outermost first.
        dims: ranks along each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or min(dims, default=1) < 1:
            raise ArgumentError(f"a topology needs a size for each axis, and has {list(axes)} and {list(dims)}")
        self.axes, self.dims = list(axes), [int(dim) for dim in dims]
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)
        grid = itertools.product(*map(range, self.dims))
        self.mapping = {self.ProcessCoord(*at): rank for rank, at in enumerate(grid)}
        self._coords = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a coordinate, of which every axis is given."""
        if sorted(coord_kwargs) != sorted(self.axes):
            raise ArgumentError(f"get_rank() needs {', '.join(self.axes)}; for some of them there is filter_match()")
        at = self.ProcessCoord(**coord_kwargs)
        if at not in self.mapping:
            raise ArgumentError(
                f"there is no rank at {at}: the sizes are {dict(zip(self.axes, self.dims, strict=True))}"
            )
        return self.mapping[at]

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank, with the axes as attributes."""
        if not 0 <= rank < len(self._coords):
            raise ArgumentError(f"there is no rank {rank}: there are {len(self._coords)}")
        return self._coords[rank]

    def get_axis_names(self) -> list[str]:
        """Names of the axes, outermost first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The rows of ranks that differ along an axis only."""
        if axis not in self.axes:
            return []
        rows: dict[tuple[int, ...], list[int]] = {}
        place = self.axes.index(axis)
        for rank, at in enumerate(self._coords):
            rows.setdefault(at[:place] + at[place + 1 :], []).append(rank)
        return list(rows.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Ranks whose coordinate has these values."""
        return [
            rank for rank, at in enumerate(self._coords) if all(getattr(at, k) == v for k, v in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks with index `idx` on an axis."""
        return self.filter_match(**{axis: idx})

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank in words, such as "model_00"."""
        at = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(at, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages of data-parallel neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of data-parallel rows of ranks that share matrices."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
