"""Creation and destruction of process groups, and queries of ranks, world sizes and the backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups import init, launch_env
from deepspeed.comm.process_groups.axis import make_group, require_group
from deepspeed.comm.shutdown import wind_up
from deepspeed.comm.watchdog import watchdog
from deepspeed.errors import NotAvailableError
from deepspeed.foundation.log import log_rank0


def is_available() -> bool:
    """Return whether torch.distributed is available."""
    return dist.is_available()


def is_initialized() -> bool:
    """Return whether a default process group exists."""
    return dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank in `group` (None: the world); -1: not a member. UsageError without a process group."""
    require_group()
    return dist.get_rank(group)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the size of `group` (None: the world); -1: not a member. Raises UsageError without a process group."""
    require_group()
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Return this process's rank on its machine: LOCAL_RANK, else the index of its current device."""
    return int(os.environ.get("LOCAL_RANK") or get_accelerator().current_device())


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of rank `group_rank` of `group` (None: the world); UsageError without a process group."""
    require_group()
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_world_group() -> dist.ProcessGroup:
    """Return the default process group, of all processes; raises UsageError if there is none."""
    require_group()
    return dist.distributed_c10d._get_default_group()


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of `group` (None: the world), in the group's order; UsageError if there is no group."""
    require_group()
    return list(dist.get_process_group_ranks(group))


def get_backend(group: dist.ProcessGroup | None = None) -> str:
    """Return torch's name of the backend of `group` (None: the world); raises UsageError without a process group."""
    require_group()
    return dist.get_backend(group)


def new_group(
    ranks: Sequence[int] | None = None, timeout: timedelta | None = None, backend: str | None = None, **options: Any
) -> Any:
    """Create a process group. All ranks of the world must call this, in the same order.

    Args:
        ranks: members of the group; None: all ranks.
        timeout: maximum time of one collective; None: the watchdog's, which a longer timeout replaces.
        backend: backend of the group; None: the world's backend.
        options: further arguments of torch.distributed.new_group.

    Returns:
        The group, or torch's placeholder for a non-member.

    Raises:
        UsageError: there is no default process group.
    """
    require_group()
    limit = timeout or watchdog.timeout()
    watchdog.here.allow(limit)
    return make_group(None if ranks is None else list(ranks), limit, backend, **options)


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy `group`; None destroys all groups and stops the watchdog. Without a process group, does nothing."""
    if group is None or group == dist.group.WORLD:
        wind_up()
    if dist.is_initialized():
        dist.destroy_process_group(group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Create torch's DeviceMesh, for example of shape (2, 4) with dims ("replicate", "shard"). All ranks call this.

    Raises:
        UsageError: there is no process group.
    """
    require_group()
    return init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def set_backend(backend: str) -> None:
    """Raise NotAvailableError if the world does not use `backend`, since a process group cannot change its backend."""
    if backend not in get_backend():
        raise NotAvailableError(
            f"set_backend({backend!r}): the process group runs on {get_backend()!r}. Name the backend in "
            "init_distributed(dist_backend=...)."
        )


def init_deepspeed_backend(
    ds_backend: str | None = None, timeout: timedelta | None = None, init_method: str | None = None
) -> None:
    """Call `init_distributed` with the backend `ds_backend`; arguments and errors as there."""
    init.init_distributed(ds_backend, timeout=timeout, init_method=init_method)


def in_aml() -> bool:
    """Return whether Azure ML started this process."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return whether SageMaker started this process."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Return whether a DLTS cluster started this process."""
    return "DLTS_JOB_ID" in os.environ


def mpi_discovery(distributed_port: int = launch_env.DEFAULT_PORT, verbose: bool = True) -> None:
    """Set the environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from MPI.

    Args:
        distributed_port: MASTER_PORT, if it is not set.
        verbose: log the variables on rank 0.

    Raises:
        NotAvailableError: MPI did not start this process.
    """
    _export((launch_env.from_open_mpi, launch_env.from_mpi4py), distributed_port, verbose)


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Do `mpi_discovery` from Open MPI's and Azure ML's variables; arguments and errors as there."""
    _export((launch_env.from_open_mpi,), master_port, verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Do `mpi_discovery` in SageMaker, with the first of SM_HOSTS as the master; arguments and errors as there."""
    _export((launch_env.from_sagemaker,), launch_env.DEFAULT_PORT, verbose)


def _export(probes: Sequence[Callable[..., launch_env.Claim | None]], port: int, verbose: bool) -> None:
    claim = next((claim for claim in (probe(os.environ) for probe in probes) if claim), None)
    if claim is None:
        raise NotAvailableError("no variables of Open MPI or SageMaker are set: this process was not started by them.")
    variables = {name: claim.values[name] for name in claim.values.keys() - {"LOCAL_WORLD_SIZE"}}
    defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({**{k: v for k, v in defaults.items() if k not in os.environ}, **variables})
    if verbose:
        log_rank0(f"environment set from {claim.source}: {variables}")


def has_all_gather_into_tensor() -> bool:
    """Return True: every supported version of torch has `all_gather_into_tensor`."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True: every supported version of torch has `reduce_scatter_tensor`."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Return True: `all_reduce_coalesced` calls `all_reduce` for each tensor."""
    return True


def has_coalescing_manager() -> bool:
    """Return whether torch can merge collectives into one launch."""
    return hasattr(dist.distributed_c10d, "_coalescing_manager")
