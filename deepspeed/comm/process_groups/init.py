"""Creation or adoption of the default process group: rendezvous, handshake and start of the watchdog."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups.launch_env import DEFAULT_PORT, World, discover
from deepspeed.comm.shutdown import Phase, released_in, wind_up, wind_up_with_the_groups
from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.comms_logger import configure
from deepspeed.errors import ArgumentError, CommError, CommTimeoutError, NotAvailableError
from deepspeed.foundation.log import log_once, log_rank0

# [Note: the handshake]
# A store may exist longer than an attempt (torchrun's does), and two jobs may have been given the same port. Keys
# cannot contain a count of attempts, since counts differ between hosts after a restart. So each rank writes a random
# nonce to `hello/<rank>`. Rank 0 reads all nonces and writes the `roster`: a random id and the nonces. A rank that
# finds its nonce there writes `ack/<id>/<rank>`; when all have, rank 0 writes `go/<id>`, and the id is the prefix of
# all later keys. A restarted rank writes a new nonce, so rank 0 writes another roster; a roster with a nonce of an
# earlier attempt is never confirmed by all. All keys begin with the job's id, so that jobs cannot be mixed up.

Store: TypeAlias = Any  # a store of torch.distributed, whose type stubs lack `clone`, `append` and values in bytes

_POLL_S = (0.002, 0.05)  # seconds between two polls, at first and later
_JOB_NAMES = (
    "DS_JOB_ID", "TORCHELASTIC_RUN_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "LSB_JOBID",
    "PBS_JOBID", "TRAINING_JOB_NAME", "AZUREML_RUN_ID",
)  # fmt: skip


_stores: dict[str, Store] = {}  # by rendezvous URL, as long as a group uses them


released_in(Phase.STORES)(_stores.clear)


class _Rendezvous:
    """Rendezvous of one rank: connects to the store and agrees with the other ranks on the members of the group."""

    def __init__(self, world: World, limit: timedelta, init_method: str | None) -> None:
        self._world, self._limit, self._init_method = world, limit, init_method
        names = [os.environ[name] for name in _JOB_NAMES if os.environ.get(name) not in (None, "", "none")]
        self._job = names[0] if names else "unnamed"

    def meet(self) -> Store:
        """Return the store of the new group, with its own key prefix (one rank: a local store); errors: `_agree`."""
        world, limit = self._world, self._limit
        if world.size == 1 and self._init_method is None:
            return dist.HashStore()
        url = self._init_method or f"{world.address}:{world.port}"
        end = time.monotonic() + limit.total_seconds()
        while True:
            try:
                if url not in _stores:
                    _stores[url] = self._open_store()
                store = _stores[url]
                store.set_timeout(limit)
                return dist.PrefixStore(self._agree(store), store)
            except dist.DistNetworkError:
                # The server of the previous group, which rank 0 has stopped since; the next one has the same address.
                _stores.pop(url, None)
                if world.rank == 0 or time.monotonic() > end:
                    raise
                time.sleep(_POLL_S[1])

    def _open_store(self) -> Store:
        """Connect to the store; rank 0 starts the server, unless torchrun's agent runs one."""
        world, init_method = self._world, self._init_method
        if init_method is not None and not init_method.startswith("tcp://"):
            return next(dist.rendezvous(init_method, world.rank, world.size, timeout=self._limit))[0]
        host, port = world.meeting_address(), world.port
        if init_method is not None:
            host, _, number = init_method.removeprefix("tcp://").partition("?")[0].rpartition(":")
            host, port = host.strip("[]"), int(number)
        # torch's rendezvous would put torchrun's restart count into the keys, which differs between hosts
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = world.rank == 0 and not agent
        return dist.TCPStore(
            host, port, is_master=serves, timeout=self._limit, wait_for_workers=False, multi_tenant=True
        )

    def _agree(self, store: Store) -> str:
        """Agree with the other ranks on a unique prefix for the keys of this group.

        Raises:
            CommTimeoutError: not all ranks arrived in time. The message names the missing ones.
            CommError: two processes have the same rank, or the store belongs to another job.
        """
        rank, limit = self._world.rank, self._limit.total_seconds()
        own = dist.PrefixStore(f"deepspeed.meet/{self._job}", store)
        nonce = secrets.token_hex(8)
        if rank == 0:
            store.set("deepspeed.meet.owner", self._job)  # the job that uses this store
        own.set(f"hello/{rank}", nonce)
        end = time.monotonic() + limit
        pause, end_pause = _POLL_S
        look = self._lead(own) if rank == 0 else self._follow(own, store, nonce)
        while (agreed := look()) is None:
            if time.monotonic() > end:
                absent = [other for other in range(self._world.size) if not own.check([f"hello/{other}"])]
                shown = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
                who = f"rank(s) {shown} did not arrive" if absent else "not all ranks confirmed"
                raise CommTimeoutError(f"timed out: {who} within {limit:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, end_pause)
        return agreed

    def _lead(self, own: Store) -> Callable[[], str | None]:
        """Create rank 0's polling function: it proposes rosters until all ranks have confirmed one."""
        rank, size = self._world.rank, self._world.size
        hellos = [f"hello/{other}" for other in range(size)]
        named: dict[str, Any] = {"nonces": [], "id": ""}

        def look() -> str | None:
            if not own.check(hellos):
                return None
            nonces = [value.decode() for value in own.multi_get(hellos)] if own.has_extended_api() else []
            nonces = nonces or [own.get(key).decode() for key in hellos]
            if nonces != named["nonces"]:
                named.update(nonces=nonces, id=secrets.token_hex(8))
                own.set("roster", json.dumps(named))
            acks = [f"ack/{named['id']}/{other}" for other in range(size) if other != rank]
            if not own.check(acks):
                return None
            own.set(f"go/{named['id']}", "")
            return named["id"]

        return look

    def _follow(self, own: Store, store: Store, nonce: str) -> Callable[[], str | None]:
        """Create the polling function of the other ranks: it confirms a roster that contains this rank's nonce."""
        rank, job = self._world.rank, self._job
        confirmed: set[str] = set()

        def look() -> str | None:
            if own.get(f"hello/{rank}").decode() != nonce:
                raise CommError(
                    f"two processes say that they are rank {rank} of job {job!r}: two jobs on one port, or one started "
                    "twice. Give each job a MASTER_PORT of its own."
                )
            if store.check(["deepspeed.meet.owner"]) and (owner := store.get("deepspeed.meet.owner").decode()) != job:
                raise CommError(
                    f"job {owner!r} meets at this address and port, and this is job {job!r}: take another port"
                )
            if not own.check(["roster"]):
                return None
            roster = json.loads(own.get("roster").decode())
            if len(roster["nonces"]) <= rank or roster["nonces"][rank] != nonce:
                return None
            name = roster["id"]
            if name not in confirmed:
                own.set(f"ack/{name}/{rank}", "")
                confirmed.add(name)
            return name if own.check([f"go/{name}"]) else None

        return look


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
    """Join the process group of this run, or adopt the group of torch.distributed. All ranks must call this.

    Rank and world size come from `rank` and `world_size`, else from the variables of torchrun, MPI (Open MPI,
    hydra, MVAPICH2, jsrun, PALS), SLURM, SageMaker, Azure ML, Kubernetes or from mpi4py. Without any, this process
    is a world of one. Sources must not contradict each other; torchrun and the `deepspeed` launcher have priority.

    Args:
        dist_backend: a torch.distributed backend; None: the accelerator's default. "nccl" without CUDA becomes "gloo".
        auto_mpi_discovery: also read the variables of other launchers, besides RANK and WORLD_SIZE.
        distributed_port: port on which rank 0 listens if MASTER_PORT is not set.
        verbose: log one line on rank 0.
        timeout: maximum time of one collective in a new group; None: DEEPSPEED_TIMEOUT (minutes) or 10 minutes.
        init_method: a rendezvous URL of torch.distributed (tcp://, file://) in place of the MASTER_* variables.
        dist_init_required: False adopts an existing group and does not create one; None and True create a missing one.
        config: the DeepSpeed configuration (dict or parsed), for its `comms_logger` block.
        rank: rank of this process, together with `world_size`; -1: from the environment.
        world_size: number of processes; -1: from the environment.

    Raises:
        ArgumentError: the environment or the arguments are invalid or contradictory.
        NotAvailableError: the backend is not part of this build of torch.
        CommTimeoutError: not all ranks arrived in time.
        CommError: the rendezvous failed otherwise, for example because two processes have the same rank.
    """
    if config is not None:
        configure(config)
    limit = default_timeout(timeout)
    if dist.is_initialized():
        _adopt(rank, world_size)
    elif dist_init_required is not False:
        world = discover(rank, world_size, distributed_port, auto_mpi_discovery)
        _bind_device(world)
        backend = choose_backend(dist_backend)
        _join(world, backend, limit, None if init_method == "env://" else init_method)
        if verbose:
            log_rank0(f"{world.size} rank(s) by {world.source}, backend {backend}, timeout {limit.total_seconds():g} s")


def default_timeout(timeout: timedelta | None = None) -> timedelta:
    """Return `timeout`, else DEEPSPEED_TIMEOUT in minutes (fractions allowed), else ten minutes.

    Raises:
        ArgumentError: the value is not a positive time.
    """
    text = os.environ.get("DEEPSPEED_TIMEOUT")
    if timeout is None and not text:
        return watchdog.DEFAULT_TIMEOUT
    limit: Any = timeout
    if timeout is None:
        with suppress(ValueError, OverflowError):
            limit = timedelta(minutes=float(text or ""))
    if isinstance(limit, timedelta) and limit > timedelta(0):
        return limit
    if timeout is None:
        raise ArgumentError(f"DEEPSPEED_TIMEOUT={text!r} is not a positive number of minutes.")
    raise ArgumentError(f"timeout={timeout!r} is not a positive datetime.timedelta.")


def choose_backend(asked: str | None) -> str:
    """Return the backend to use: `asked`, or by default the accelerator's; gloo instead of NCCL without CUDA.

    Raises:
        NotAvailableError: this build of torch does not have the backend.
    """
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
    """Select the local rank's device (0 if the process sees only its own); ArgumentError if there is none."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return
    devices = accelerator.device_count()
    # The scheduler may show each process its own device, which is then device 0 for all of them.
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    one_per_task = len(names) == 1 or os.environ.get("SLURM_GPUS_PER_TASK", "").split(":")[-1] == "1"
    if world.local_rank >= devices and not (devices == 1 and one_per_task):
        raise ArgumentError(
            f"LOCAL_RANK={world.local_rank} has no device: this process sees {devices} "
            f"{accelerator.device_name()} device(s). Start at most one rank per device."
        )
    accelerator.set_device(min(world.local_rank, devices - 1))


def _join(world: World, backend: str, limit: timedelta, init_method: str | None) -> None:
    try:
        store = _Rendezvous(world, limit, init_method).meet()
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
    watchdog.here.wait_for_peers()
    wind_up_with_the_groups()
    atexit.unregister(_leave)
    atexit.register(_leave)


def _adopt(rank: int, size: int) -> None:
    here, world = dist.get_rank(), dist.get_world_size()
    if (size > 0 and size != world) or (rank >= 0 and rank != here):
        raise ArgumentError(
            f"init_distributed(rank={rank}, world_size={size}) contradicts the existing group: rank {here} of {world}. "
            "Leave the arguments out to adopt it."
        )
    group = dist.distributed_c10d._get_default_group()
    backends = [group._get_backend(device) for device in group._device_types]
    if any(backend.name() != "fake" for backend in backends):  # a fake backend does not communicate: no watchdog
        limits = [_limit_of(backend) for backend in backends]
        watchdog.start(dist.distributed_c10d._get_default_store(), here, world, max(limits))
    wind_up_with_the_groups()


def _limit_of(backend: Any) -> timedelta:
    """Return the timeout of a backend's collectives; `default_timeout()` if the backend has none."""
    try:
        return backend.options._timeout
    except (AttributeError, RuntimeError):  # no options, or none that Python can read
        return default_timeout()


def _leave() -> None:
    """Do `wind_up` at exit, and destroy the group unless an exception ends the process (peers may have ended)."""
    wind_up()
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
