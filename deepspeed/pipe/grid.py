"""The process groups of a topology, by the names of old scripts."""

from __future__ import annotations

from typing import Any

from deepspeed.comm.mesh import DATA, Mesh, current_mesh, mesh_for
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.pipe.topology import ProcessTopology

_DIMS = {"pipe": "pp", "data": "dp_shard", "model": "tp"}  # outermost first, as the ranks of a mesh are


class PipelineParallelGrid:
    """Answers where this rank stands, and which ranks it works with. All ranks make one together.

    `get_{pipe,data,model,slice}_parallel_{rank,world_size,group}()` are those of a `Mesh`; model means stages and
    slices together, slice the ranks that share matrices.

    Args:
        topology: with axes of "pipe", "data" and "model" in this order; None: that of the newest engine.
        process_group: None, for all ranks.

    Raises:
        ArgumentError: a topology with other axes.
        MeshError: it has other ranks than were started.
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
        """Ranks by axis."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank."""
        return self._mesh.rank

    def get_stage_id(self) -> int:
        """The stage of this rank."""
        return self._mesh.coordinates["pp"]

    def get_data_parallel_id(self) -> int:
        """Which replica of its stage this rank is."""
        return self._mesh.axis(*DATA).rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage that stands as this one does along all other axes.

        Args:
            stage_id: of the stage.
            kwargs: coordinates, by axis, that are to be others.
        """
        here = self._topo.get_coord(self.get_global_rank())._asdict()
        return self._topo.get_rank(**{**here, "pipe": stage_id, **kwargs})
