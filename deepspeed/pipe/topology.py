"""Process topology and pipeline grid, with the class names of upstream DeepSpeed."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from deepspeed.comm.process_groups.mesh import DATA, Mesh, current_mesh, mesh_for
from deepspeed.errors import ArgumentError, NotAvailableError


class ProcessTopology:
    """Cartesian grid of ranks in row-major order: consecutive ranks differ in the last axis.

    Args:
        axes: names, outermost first.
        dims: number of ranks along each axis.

    Raises:
        ArgumentError: names and sizes do not match, a name occurs twice, or a size is below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or min(dims, default=1) < 1:
            raise ArgumentError(f"a topology needs a size for each axis, and has {list(axes)} and {list(dims)}")
        self.axes, self.dims = list(axes), [int(dim) for dim in dims]
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)
        grid = itertools.product(*map(range, self.dims))
        self.mapping = {self.ProcessCoord(*coord): rank for rank, coord in enumerate(grid)}
        self._coords = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate; ArgumentError if an axis is missing or there is no such coordinate."""
        if sorted(coord_kwargs) != sorted(self.axes):
            raise ArgumentError(f"get_rank() needs {', '.join(self.axes)}; for some of them there is filter_match()")
        coord = self.ProcessCoord(**coord_kwargs)
        if coord not in self.mapping:
            raise ArgumentError(
                f"there is no rank at {coord}: the sizes are {dict(zip(self.axes, self.dims, strict=True))}"
            )
        return self.mapping[coord]

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank as a named tuple of the axes; ArgumentError if there is no such rank."""
        if not 0 <= rank < len(self._coords):
            raise ArgumentError(f"there is no rank {rank}: there are {len(self._coords)}")
        return self._coords[rank]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, outermost first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 for an unknown axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along an axis; [] for an unknown axis."""
        if axis not in self.axes:
            return []
        rows: dict[tuple[int, ...], list[int]] = {}
        place = self.axes.index(axis)
        for rank, coord in enumerate(self._coords):
            rows.setdefault(coord[:place] + coord[place + 1 :], []).append(rank)
        return list(rows.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with the given coordinates, such as `data=0`; axes that are not given may have any."""
        return [
            rank
            for rank, coord in enumerate(self._coords)
            if all(getattr(coord, k) == v for k, v in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks with index `idx` along an axis."""
        return self.filter_match(**{axis: idx})

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Describe a rank by its coordinates along axes other than `omit_axes`, such as "model_00".

        `inner_sep` is between name and index, `outer_sep` between axes.
        """
        coord = self.get_coord(rank)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in self.axes if axis not in omit_axes
        )

    def world_size(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Topology of `num_pp` pipeline stages, each with `num_dp` data-parallel ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Topology of `num_pp` pipeline stages, each with `num_dp` replicas of `num_mp` tensor-parallel ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


_DIMS = {"pipe": "pp", "data": "dp_shard", "model": "tp"}  # outermost first, like the ranks of a mesh


class PipelineParallelGrid:
    """Coordinates and process groups of this rank. All ranks must create the grid together.

    `get_{pipe,data,model,slice}_parallel_{rank,world_size,group}()` are those of a `Mesh`: "slice" is tensor
    parallelism, "model" is pipeline and tensor parallelism together.

    Args:
        topology: topology with the axes "pipe", "data" and "model", or some of them, in this order; None: that of the
            newest engine.
        process_group: must be None: a grid contains all ranks.

    Raises:
        ArgumentError: the topology has other axes.
        NotAvailableError: `process_group` is given.
        MeshError: the topology's ranks are not those that were started.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        if process_group is not None:
            raise NotAvailableError("PipelineParallelGrid(process_group=…) is not available: a grid is of all ranks")
        if topology is None:
            mesh = current_mesh()
            sizes = [mesh.size("pp"), mesh.size(*DATA), mesh.size("tp")]
            self._mesh, self._topo = mesh, ProcessTopology(list(_DIMS), sizes)
            return
        axes = topology.get_axis_names()
        if axes != [axis for axis in _DIMS if axis in axes]:
            raise ArgumentError(f"a grid has the axes {', '.join(_DIMS)}, in this order, and the topology has {axes}")
        self._topo = topology
        self._mesh: Mesh = mesh_for({_DIMS[axis]: topology.get_dim(axis) for axis in axes})

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("get_"):
            raise AttributeError(name)
        return getattr(self._mesh, name)

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_global_rank(self) -> int:
        return self._mesh.rank

    def get_stage_id(self) -> int:
        return self._mesh.coordinates["pp"]

    def get_data_parallel_id(self) -> int:
        """Return this rank's data-parallel index: its position among the ranks with the same stage and slice."""
        return self._mesh.axis(*DATA).rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage with the same coordinates along all other axes.

        Args:
            stage_id: index of the stage.
            kwargs: coordinates to change, by axis.
        """
        here = self._topo.get_coord(self.get_global_rank())._asdict()
        return self._topo.get_rank(**{**here, "pipe": stage_id, **kwargs})
