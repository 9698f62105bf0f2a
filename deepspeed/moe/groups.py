"""What scripts ask `deepspeed.utils.groups` about the ranks of experts, by the name `ep_size_<n>` of their groups."""

from __future__ import annotations

from typing import Any

from deepspeed.comm.process_groups.axis import Axis, get_own_group
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.foundation.log import warn_once

_SHARING = ("ep",)  # the ranks to which a token may go
_ALIKE = ("dp_replicate", "edp")  # the ranks that have the same experts
_sizes: dict[str, int] = {}  # ep by name


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Do nothing, with a warning: each `MoE` layer says its `ep_size`."""
    warn_once("groups.initialize does nothing: give MoE layers their ep_size, and deepspeed.initialize the mpu")


def _create_expert_and_data_parallel(
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: Any = None,
) -> None:
    """Make the groups of an ep size on the current mesh. All ranks call together.

    Args:
        expert_parallel_size_: ranks that share the experts of a layer out.
        mp_size, pp_size, mp_mode, folding_spec: the mesh has them.
        use_data_before_expert_parallel_: only False: neighbours share experts out.

    Raises:
        MeshError: the size does not divide the ranks.
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
    """As `_create_expert_and_data_parallel`; the current mesh has the ranks of `mpu`."""
    _create_expert_and_data_parallel(
        expert_parallel_size_, use_data_before_expert_parallel_=use_data_before_expert_parallel_
    )


def name_of(ep: int) -> str:
    """The name of the groups of an ep size."""
    return f"ep_size_{ep}"


def _axis(name: str, dims: tuple[str, ...]) -> Axis:
    if name not in _sizes:
        raise ArgumentError(f"there are no groups of experts named {name!r}; there are {sorted(_sizes)}")
    return current_mesh().axis(*dims, ep=_sizes[name])


def _group(name: str, dims: tuple[str, ...]) -> Any:
    axis = _axis(name, dims)
    return axis.group if axis.group is not None else get_own_group()


def _get_expert_parallel_group(group_name: str) -> Any:
    """The process group of the ranks that have the experts of a layer together."""
    return _group(group_name, _SHARING)


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    """Their global ranks."""
    return list(_axis(group_name, _SHARING).ranks)


def _get_expert_parallel_rank(group_name: str) -> int:
    """This rank's place among them."""
    return _axis(group_name, _SHARING).rank


def _get_expert_parallel_world_size(group_name: str) -> int:
    """How many they are."""
    return _axis(group_name, _SHARING).size


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    """Their process groups by name."""
    return {name: _group(name, _SHARING) for name in _sizes}


def _get_expert_data_parallel_group(group_name: str) -> Any:
    """The process group of the ranks that have the same experts."""
    return _group(group_name, _ALIKE)


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    """Their global ranks."""
    return list(_axis(group_name, _ALIKE).ranks)


def _get_expert_data_parallel_rank(group_name: str) -> int:
    """This rank's place among them."""
    return _axis(group_name, _ALIKE).rank


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    """How many they are."""
    return _axis(group_name, _ALIKE).size


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Their process groups by name."""
    return {name: _group(name, _ALIKE) for name in _sizes}


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """Global rank of the first of the ranks that have the same experts."""
    return _axis(group_name, _ALIKE).ranks[0]


def _get_max_expert_size() -> int:
    """The largest ep size.

    Raises:
        ArgumentError: there are no groups of experts.
    """
    if not _sizes:
        raise ArgumentError("there are no groups of experts: no layer has been divided")
    return max(_sizes.values())


def _get_max_expert_size_name() -> str:
    """The name of its groups."""
    return name_of(_get_max_expert_size())


def _get_max_expert_parallel_group() -> Any:
    """Its process group of the ranks that have the experts of a layer together."""
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """Ranks that share one expert: those along `tp`."""
    return current_mesh().size("tp")
