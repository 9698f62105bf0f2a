"""Process groups of `deepspeed.utils.groups`; those for expert-parallel size n have the name `ep_size_<n>`.

Functions with a `group_name` raise ArgumentError for a name without groups.
"""

from __future__ import annotations

from typing import Any

from deepspeed.comm.process_groups.axis import Axis, get_own_group
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.foundation.log import warn_once

_SHARING = ("ep",)  # dimensions of the expert-parallel group
_ALIKE = ("dp_replicate", "edp")  # dimensions of the expert-data-parallel group
_sizes: dict[str, int] = {}  # expert-parallel size by group name


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Do nothing but log a warning: each `MoE` layer has its own `ep_size`."""
    warn_once("groups.initialize does nothing: give MoE layers their ep_size, and deepspeed.initialize the mpu")


def _create_expert_and_data_parallel(
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: Any = None,
) -> None:
    """Create the process groups for an expert-parallel size on the current mesh. All ranks must call this.

    Args:
        expert_parallel_size_: number of ranks among which the experts of a layer are divided.
        mp_size, pp_size, mp_mode, folding_spec: no effect; the current mesh is used.
        use_data_before_expert_parallel_: must be False: experts are divided among consecutive ranks.

    Raises:
        MeshError: the size does not divide the number of data-parallel ranks.
        NotAvailableError: `use_data_before_expert_parallel_` is True.
    """
    if use_data_before_expert_parallel_:
        raise NotAvailableError(
            "use_data_before_expert_parallel is not available yet: neighbouring ranks share experts out; results are "
            "the same in either order, leave it out"
        )
    mesh = current_mesh()
    for dims in (_SHARING, _ALIKE):
        mesh.axis(*dims, ep=expert_parallel_size_)
    _sizes[name_of(expert_parallel_size_)] = expert_parallel_size_


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any = None, use_data_before_expert_parallel_: bool = False
) -> None:
    """Call `_create_expert_and_data_parallel`; `mpu` is ignored, the current mesh is used."""
    _create_expert_and_data_parallel(
        expert_parallel_size_, use_data_before_expert_parallel_=use_data_before_expert_parallel_
    )


def name_of(ep: int) -> str:
    """Return the name of the process groups for an expert-parallel size."""
    return f"ep_size_{ep}"


def _axis(name: str, dims: tuple[str, ...]) -> Axis:
    if name not in _sizes:
        raise ArgumentError(f"there are no groups of experts named {name!r}; there are {sorted(_sizes)}")
    return current_mesh().axis(*dims, ep=_sizes[name])


def _group(name: str, dims: tuple[str, ...]) -> Any:
    axis = _axis(name, dims)
    return axis.group if axis.group is not None else get_own_group()


def _get_expert_parallel_group(group_name: str) -> Any:
    """Return the expert-parallel group: the ranks among which a layer's experts are divided."""
    return _group(group_name, _SHARING)


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of the expert-parallel group."""
    return list(_axis(group_name, _SHARING).ranks)


def _get_expert_parallel_rank(group_name: str) -> int:
    """Return this rank's position in the expert-parallel group."""
    return _axis(group_name, _SHARING).rank


def _get_expert_parallel_world_size(group_name: str) -> int:
    """Return the number of ranks in the expert-parallel group."""
    return _axis(group_name, _SHARING).size


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Return all expert-parallel groups, keyed by name."""
    return {name: _group(name, _SHARING) for name in _sizes}


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """Return the expert-data-parallel group: the ranks with the same experts."""
    return _group(group_name, _ALIKE)


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of the expert-data-parallel group."""
    return list(_axis(group_name, _ALIKE).ranks)


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """Return this rank's position in the expert-data-parallel group."""
    return _axis(group_name, _ALIKE).rank


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """Return the number of ranks in the expert-data-parallel group."""
    return _axis(group_name, _ALIKE).size


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Return all expert-data-parallel groups, keyed by name."""
    return {name: _group(name, _ALIKE) for name in _sizes}


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """Return the global rank of the first member of the expert-data-parallel group."""
    return _axis(group_name, _ALIKE).ranks[0]


def _get_max_expert_size() -> int:
    """Return the largest expert-parallel size.

    Raises:
        ArgumentError: no expert groups exist.
    """
    if not _sizes:
        raise ArgumentError("there are no groups of experts: no layer has been divided")
    return max(_sizes.values())


def _get_max_expert_size_name() -> str:
    """Return the name of the groups with the largest expert-parallel size."""
    return name_of(_get_max_expert_size())


def _get_max_expert_parallel_group() -> Any:
    """Return the expert-parallel group with the largest size."""
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """Return the number of ranks over which a single expert is sliced: the size of the mesh dimension `tp`."""
    return current_mesh().size("tp")
