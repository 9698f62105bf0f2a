"""Makes or adopts the process group: reads what the launcher left in the environment and starts the watch."""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import fetch, watch
from deepspeed.comm.logging import configure
from deepspeed.errors import ArgumentError, CommError, CommTimeoutError, NotAvailableError
from deepspeed.foundation.log import say, say_once

DEFAULT_PORT = 29500
_stores: dict[str, tuple[Any, Iterator[int]]] = {}  # by rendezvous URL, with the count of groups made there


@dataclass(frozen=True)
class World:
    """This process's place: rank of size, rank on its machine, where rank 0 listens, and who said so."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    source: str = "no launcher"


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

    The place of this process comes from `rank` and `world_size`, else from the variables of torchrun, SageMaker,
    Open MPI, SLURM or from mpi4py; with none of them this process is a world of one.

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
            say(f"{world.size} rank(s) by {world.source}, backend {backend}, timeout {limit.total_seconds():g} s")


def default_timeout() -> timedelta:
    """DEEPSPEED_TIMEOUT in minutes (fractions allowed), else ten minutes."""
    text = os.environ.get("DEEPSPEED_TIMEOUT")
    if not text:
        return watch.DEFAULT_TIMEOUT
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
        say_once(f"backend {backend!r} needs CUDA and this process runs on {accelerator.device_name()}: using gloo")
        return "gloo"
    for name in (part.split(":")[-1] for part in backend.split(",")):
        if not dist.is_backend_available(name):
            known = [known for known in dist.Backend.backend_list if dist.is_backend_available(known)]
            raise NotAvailableError(f"dist_backend {backend!r}: torch has no backend {name!r} here; it has {known}.")
    return backend


def discover(rank: int, size: int, port: int, look_further: bool) -> World:
    """This process's place, from the arguments, else from the first launcher that left its variables.

    Args:
        rank: the caller's, or negative.
        size: the caller's, or not positive.
        port: where rank 0 listens when no variable says so.
        look_further: ask SageMaker, Open MPI, SLURM and mpi4py too.

    Raises:
        ArgumentError: a value is not a number, is missing, or rank and size do not fit.
    """
    env = os.environ
    found = {"RANK": str(rank), "WORLD_SIZE": str(size), "source": "arguments"} if rank >= 0 and size > 0 else None
    if found is None and (env.get("RANK") or env.get("WORLD_SIZE")):
        found = {"source": "RANK and WORLD_SIZE"}
    if found is None and look_further:
        found = next((values for values in (probe(env) for probe in _PROBES) if values), None)
    if found is None:
        return World(port=port)
    source = found.pop("source")
    place = _check({**found, **{key: value for key, value in env.items() if value}}, source, port)
    if place.size != size > 0 or (place.rank != rank >= 0):
        raise ArgumentError(
            f"init_distributed(rank={rank}, world_size={size}) contradicts the environment "
            f"({source}: rank {place.rank} of {place.size}). Leave the arguments out or unset the variables."
        )
    env.update({key: value for key, value in found.items() if value and not env.get(key)})
    return place


def _check(values: Mapping[str, str], source: str, port: int) -> World:
    """Turn the words RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT into a World that makes sense."""

    def number(name: str, default: int | None) -> int:
        text = values.get(name) or (None if default is None else str(default))
        if text is None:
            raise ArgumentError(f"{name} is not set ({source}). Set it, or unset RANK and WORLD_SIZE to run alone.")
        if not re.fullmatch(r"\s*\d+\s*", text):
            raise ArgumentError(f"{name}={text!r} is not a whole number from 0 up ({source}).")
        return int(text)

    rank, size = number("RANK", None), number("WORLD_SIZE", None)
    if rank >= size:
        raise ArgumentError(f"RANK={rank} does not exist in WORLD_SIZE={size} ({source}): ranks are 0 to size - 1.")
    listen = number("MASTER_PORT", port)
    if listen > 65535:
        raise ArgumentError(f"MASTER_PORT={listen} is not a port ({source}): ports end at 65535.")
    local = number("LOCAL_RANK", rank % max(1, get_accelerator().device_count()))
    return World(rank, size, local, values.get("MASTER_ADDR") or "127.0.0.1", listen, source)


def from_sagemaker(env: Mapping[str, str]) -> dict[str, str] | None:
    """SageMaker: Open MPI's ranks, and the first of SM_HOSTS as the meeting point."""
    found = from_open_mpi(env) if "SM_TRAINING_ENV" in env else None
    if found is not None:
        found["source"] = "SageMaker"
        hosts = re.findall(r'"([^"]+)"', env.get("SM_HOSTS", ""))
        if hosts:
            found["MASTER_ADDR"] = hosts[0]
    return found


def from_open_mpi(env: Mapping[str, str]) -> dict[str, str] | None:
    """Open MPI's mpirun, Azure ML's use of it included."""
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK"}
    theirs = {ours: env.get(f"OMPI_COMM_WORLD_{name}") for ours, name in names.items()}
    found = {ours: value for ours, value in theirs.items() if value is not None}
    master = env.get("AZ_BATCH_MASTER_NODE")
    if master:
        found["MASTER_ADDR"], _, found["MASTER_PORT"] = master.partition(":")
    elif "MASTER_ADDR" not in env and env.get("OMPI_COMM_WORLD_LOCAL_SIZE", found["WORLD_SIZE"]) != found["WORLD_SIZE"]:
        found.update(from_mpi4py(env) or {})
    return {**found, "source": "Open MPI"}


def from_slurm(env: Mapping[str, str]) -> dict[str, str] | None:
    """srun: one process per task; rank 0 runs on the first node of the list ("gpu[003-007,12]" begins at gpu003)."""
    if "SLURM_PROCID" not in env or not ("SLURM_NTASKS" in env or "SLURM_STEP_NUM_TASKS" in env):
        return None
    found = {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]}
    if "SLURM_LOCALID" in env:
        found["LOCAL_RANK"] = env["SLURM_LOCALID"]
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if first:
        found["MASTER_ADDR"] = first[1] + (first[2] or "")
    return {**found, "source": "SLURM"}


def from_mpi4py(env: Mapping[str, str]) -> dict[str, str] | None:
    """Any MPI that has started this process, asked through mpi4py where that is installed."""
    if not any(name.startswith(("PMI_", "PMIX_", "OMPI_")) for name in env):
        return None
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError:
        return None
    everyone = mpi.COMM_WORLD
    host = everyone.bcast(mpi.Get_processor_name(), root=0)
    local = everyone.Split_type(mpi.COMM_TYPE_SHARED).Get_rank()
    place = {"RANK": everyone.Get_rank(), "WORLD_SIZE": everyone.Get_size(), "LOCAL_RANK": local}
    return {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": host, "source": "mpi4py"}


_PROBES = (from_sagemaker, from_open_mpi, from_slurm, from_mpi4py)


def _bind_device(world: World) -> None:
    """Make the device of the local rank the current one."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return
    if world.local_rank >= accelerator.device_count():
        raise ArgumentError(
            f"LOCAL_RANK={world.local_rank} has no device: this process sees {accelerator.device_count()} "
            f"{accelerator.device_name()} device(s). Start at most one rank per device."
        )
    accelerator.set_device(world.local_rank)


def _join(world: World, backend: str, limit: timedelta, init_method: str | None) -> None:
    """Meet the other ranks and make the group."""
    try:
        store = _meet(world, limit, init_method)
        watch.start(store, world.rank, world.size, limit)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    except (RuntimeError, OSError) as error:
        watch.stop()
        timed_out = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        kind = CommTimeoutError if timed_out else CommError
        where = init_method or f"{world.address}:{world.port}"
        raise kind(
            f"rank {world.rank} of {world.size} ({world.source}) could not join at {where} within "
            f"{limit.total_seconds():g} s: {str(error).strip().splitlines()[0]}. "
            "Check that every rank was started, that the address is rank 0's and that the port is free."
        ) from error
    watch.settle()
    atexit.register(_leave)


def _meet(world: World, limit: timedelta, init_method: str | None) -> dist.Store:
    """The store of the run, kept for a later group. A world of one needs no port.

    Every group gets keys of its own: by the restart of torchelastic (whose store outlives the attempt), and by how many
    groups this process made there before.
    """
    if world.size == 1 and init_method is None:
        return dist.HashStore()
    host = f"[{world.address}]" if ":" in world.address else world.address  # IPv6
    url = init_method or f"tcp://{host}:{world.port}"
    if url not in _stores:
        _stores[url] = next(dist.rendezvous(url, world.rank, world.size, timeout=limit))[0], itertools.count()
    store, earlier = _stores[url]
    store.set_timeout(limit)
    return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(earlier)}", store)


def _adopt(rank: int, size: int) -> None:
    """Watch over a group that the caller made."""
    here, world = dist.get_rank(), dist.get_world_size()
    if (size > 0 and size != world) or (rank >= 0 and rank != here):
        raise ArgumentError(
            f"init_distributed(rank={rank}, world_size={size}) contradicts the existing group: rank {here} of {world}. "
            "Leave the arguments out to adopt it."
        )
    group = dist.distributed_c10d._get_default_group()
    options = [group._get_backend(device).options for device in group._device_types]
    limits = [option._timeout for option in options if option is not None]
    if limits:  # a fake group, which plans without communicating, has none and needs no watch
        watch.start(dist.distributed_c10d._get_default_store(), here, world, max(limits))


def _leave() -> None:
    """At exit: end the watch, and the group too unless an exception ends the process (others may be gone then)."""
    fetch.close_all()
    watch.stop()
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
    _stores.clear()
