"""Initializes or adopts the default process group, and starts the watchdog."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups.launch_env import DEFAULT_PORT, World, discover
from deepspeed.comm.process_groups.rendezvous import meet
from deepspeed.comm.shutdown import wind_up, wind_up_with_the_groups
from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.comms_logger import configure
from deepspeed.errors import ArgumentError, CommError, CommTimeoutError, NotAvailableError
from deepspeed.foundation.log import log_once, log_rank0


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of this run, or adopt the one that torch.distributed already has.

    The place of this process comes from `rank` and `world_size`, else from the variables of torchrun, MPI (Open MPI,
    hydra, MVAPICH2, jsrun, PALS), SLURM, SageMaker, Azure ML, Kubernetes or from mpi4py; with none of them this process
    is a world of one. Whatever else says something of it must agree.

    Args:
        dist_backend: a torch.distributed backend; None takes the accelerator's. "nccl" without CUDA becomes "gloo".
        auto_mpi_discovery: look beyond RANK and WORLD_SIZE.
        distributed_port: where rank 0 listens when MASTER_PORT is not set.
        verbose: log one line on rank 0.
        timeout: longest time of one collective; None takes DEEPSPEED_TIMEOUT (minutes) or 10 minutes.
        init_method: a rendezvous URL of torch.distributed (tcp://, file://) in place of the MASTER_* variables.
        dist_init_required: False adopts an existing group and makes none.
        config: the DeepSpeed configuration, for its `comms_logger` block.
        rank: this process, with `world_size`.
        world_size: number of processes.

    Raises:
        ArgumentError: the environment or the arguments contradict themselves.
        NotAvailableError: the backend is not part of this build of torch.
        CommTimeoutError: not all ranks arrived in time.
    """
    if config is not None:
        configure(config)
    limit = _checked(timeout) if timeout is not None else default_timeout()
    if dist.is_initialized():
        _adopt(rank, world_size)
    elif dist_init_required is not False:
        world = discover(rank, world_size, distributed_port, auto_mpi_discovery)
        _bind_device(world)
        backend = choose_backend(dist_backend)
        _join(world, backend, limit, None if init_method == "env://" else init_method)
        if verbose:
            log_rank0(f"{world.size} rank(s) by {world.source}, backend {backend}, timeout {limit.total_seconds():g} s")


def default_timeout() -> timedelta:
    """DEEPSPEED_TIMEOUT in minutes (fractions allowed), else ten minutes."""
    text = os.environ.get("DEEPSPEED_TIMEOUT")
    if not text:
        return watchdog.DEFAULT_TIMEOUT
    try:
        return _checked(timedelta(minutes=float(text)))
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"DEEPSPEED_TIMEOUT={text!r} is not a positive number of minutes.") from error


def _checked(timeout: timedelta) -> timedelta:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ArgumentError(f"timeout={timeout!r} is not a positive datetime.timedelta.")
    return timeout


def choose_backend(asked: str | None) -> str:
    """The backend to use: `asked`, the accelerator's when None, gloo where NCCL is asked for without CUDA."""
    accelerator = get_accelerator()
    own = accelerator.communication_backend_name()
    backend = (asked or ("cpu:gloo,cuda:nccl" if own == "nccl" else own)).lower()
    if "nccl" in backend and accelerator.device_name() != "cuda":
        log_once(f"backend {backend!r} needs CUDA and this process runs on {accelerator.device_name()}: using gloo")
        return "gloo"
    for name in (part.split(":")[-1] for part in backend.split(",")):
        if not dist.is_backend_available(name):
            known = [known for known in dist.Backend.backend_list if dist.is_backend_available(known)]
            raise NotAvailableError(f"dist_backend {backend!r}: torch has no backend {name!r} here; it has {known}.")
    return backend


def _bind_device(world: World) -> None:
    """Make the device of the local rank the current one."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return
    devices = accelerator.device_count()
    if world.local_rank >= devices and not (devices == 1 and _one_per_task()):
        raise ArgumentError(
            f"LOCAL_RANK={world.local_rank} has no device: this process sees {devices} "
            f"{accelerator.device_name()} device(s). Start at most one rank per device."
        )
    accelerator.set_device(min(world.local_rank, devices - 1))


def _one_per_task() -> bool:
    """Whether the scheduler shows each process its own device, which is then device 0 for all of them."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return len(names) == 1 or os.environ.get("SLURM_GPUS_PER_TASK", "").split(":")[-1] == "1"


def _join(world: World, backend: str, limit: timedelta, init_method: str | None) -> None:
    """Meet the other ranks and make the group."""
    try:
        store = meet(world, limit, init_method)
        watchdog.start(store, world.rank, world.size, limit)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    except (RuntimeError, OSError) as error:
        wind_up()
        timed_out = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        kind = CommTimeoutError if timed_out else CommError
        where = init_method or f"{world.address}:{world.port}"
        raise kind(
            f"rank {world.rank} of {world.size} ({world.source}) could not join at {where} within "
            f"{limit.total_seconds():g} s: {str(error).strip().splitlines()[0]}. "
            "Check that every rank was started, that the address is rank 0's and that the port is free."
        ) from error
    watchdog.wait_for_peers()
    wind_up_with_the_groups()
    atexit.unregister(_leave)
    atexit.register(_leave)


def _adopt(rank: int, size: int) -> None:
    """Watch over a group that the caller made."""
    here, world = dist.get_rank(), dist.get_world_size()
    if (size > 0 and size != world) or (rank >= 0 and rank != here):
        raise ArgumentError(
            f"init_distributed(rank={rank}, world_size={size}) contradicts the existing group: rank {here} of {world}. "
            "Leave the arguments out to adopt it."
        )
    group = dist.distributed_c10d._get_default_group()
    backends = [group._get_backend(device) for device in group._device_types]
    if any(backend.name() != "fake" for backend in backends):  # which plans without communicating: no need of a watch
        limits = [_limit_of(backend) for backend in backends]
        watchdog.start(dist.distributed_c10d._get_default_store(), here, world, max(limits))
    wind_up_with_the_groups()


def _limit_of(backend: Any) -> timedelta:
    """How long a collective of a backend may take; the default where it does not say."""
    try:
        return backend.options._timeout
    except (AttributeError, RuntimeError):  # no options, none that Python sees, or a base class that refuses
        return default_timeout()


def _leave() -> None:
    """At exit: end the watch, and the group too unless an exception ends the process (others may be gone then)."""
    wind_up()
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
