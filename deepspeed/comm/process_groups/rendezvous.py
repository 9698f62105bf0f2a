"""Rendezvous: ranks check in with rank 0 and confirm the member list."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from deepspeed.comm.process_groups.launch_env import World, meeting_address
from deepspeed.comm.shutdown import Phase, released_in
from deepspeed.errors import CommError, CommTimeoutError

# [Note: the handshake]
# A store may outlive an attempt (torchrun's does), and two jobs may be told one port. So no key says what it was
# written for by a count: counts differ between hosts after a restart. Each rank writes `hello/<rank>`, a number it has
# just drawn. Rank 0 reads all of them and writes the roster: a name of its own and the numbers. A rank that finds its
# number there confirms under that name; when all have, rank 0 says `go`, and the name is the prefix of all later keys.
# A rank that was started anew changes its number, and rank 0 names another roster. A number of an earlier attempt is
# confirmed by nobody. All keys begin with the job's id, so that another job's ranks cannot be taken for ours.

Store: TypeAlias = Any  # a store of torch.distributed, whose type stubs lack `clone`, `append` and values in bytes

_POLL_S = (0.002, 0.05)  # seconds between two looks, at first and in the end
_JOB_NAMES = (
    "DS_JOB_ID", "TORCHELASTIC_RUN_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "LSB_JOBID",
    "PBS_JOBID", "TRAINING_JOB_NAME", "AZUREML_RUN_ID",
)  # fmt: skip


def job_id() -> str:
    """What tells this job from others: its launcher's or scheduler's name for it."""
    names = [os.environ[name] for name in _JOB_NAMES if os.environ.get(name) not in (None, "", "none")]
    return names[0] if names else "unnamed"


_stores: dict[str, Store] = {}  # by rendezvous URL, for as long as a group may ask there


def meet(world: World, limit: timedelta, init_method: str | None) -> Store:
    """The store of a new group, with keys of its own. A world of one needs no port.

    Args:
        world: this process's place.
        limit: how long the other ranks may take.
        init_method: a rendezvous URL in place of the address.

    Raises:
        CommTimeoutError: not all ranks arrived in time.
        CommError: see `shake`.
    """
    if world.size == 1 and init_method is None:
        return dist.HashStore()
    url = init_method or f"{world.address}:{world.port}"
    end = time.monotonic() + limit.total_seconds()
    while True:
        try:
            if url not in _stores:
                _stores[url] = open_store(world, limit, init_method)
            store = _stores[url]
            store.set_timeout(limit)
            return dist.PrefixStore(shake(store, world.rank, world.size, limit), store)
        except dist.DistNetworkError:
            # The server of the group before, which rank 0 had not ended yet: its next one comes to the same place.
            _stores.pop(url, None)
            if world.rank == 0 or time.monotonic() > end:
                raise
            time.sleep(_POLL_S[1])


@released_in(Phase.STORES)
def forget_stores() -> None:
    """The process groups are gone."""
    _stores.clear()


def open_store(world: World, limit: timedelta, init_method: str | None) -> Store:
    """The store of the run, before anything is agreed on.

    Args:
        world: this process's place.
        limit: how long to wait for the rank that keeps the store.
        init_method: a rendezvous URL in place of the address.
    """
    if init_method is not None and not init_method.startswith("tcp://"):
        return next(dist.rendezvous(init_method, world.rank, world.size, timeout=limit))[0]
    host, port = meeting_address(world), world.port
    if init_method is not None:
        host, _, number = init_method.removeprefix("tcp://").partition("?")[0].rpartition(":")
        host, port = host.strip("[]"), int(number)
    # torch's own way puts torchrun's restart count into the keys; it differs between hosts
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = world.rank == 0 and not agent
    return dist.TCPStore(host, port, is_master=keeps, timeout=limit, wait_for_workers=False, multi_tenant=True)


def shake(store: Store, rank: int, size: int, limit: timedelta) -> str:
    """Agree with the other ranks on who is there.

    Args:
        store: that all of them reach.
        rank: this process, of `size`.
        limit: how long the others may take to arrive.

    Returns:
        A name that these processes alone know, for the prefix of their keys.

    Raises:
        CommTimeoutError: not all ranks arrived; names the missing ones.
        CommError: two processes say that they are one rank, or the store belongs to another job.
    """
    job = job_id()
    own = dist.PrefixStore(f"deepspeed.meet/{job}", store)
    nonce = secrets.token_hex(8)
    _claim_store(store, rank, job)
    own.set(f"hello/{rank}", nonce)
    end = time.monotonic() + limit.total_seconds()
    pause, end_pause = _POLL_S
    look = _lead(own, rank, size) if rank == 0 else _follow(own, store, rank, nonce, job)
    while (agreed := look()) is None:
        if time.monotonic() > end:
            raise CommTimeoutError(_missing(own, rank, size, limit))
        time.sleep(pause)
        pause = min(pause * 1.5, end_pause)
    return agreed


def _claim_store(store: Store, rank: int, job: str) -> None:
    """Rank 0 writes whose store this is."""
    if rank == 0:
        store.set("deepspeed.meet.owner", job)


def _lead(own: Store, rank: int, size: int) -> Callable[[], str | None]:
    """Rank 0's look: names rosters until one is confirmed by all."""
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


def _follow(own: Store, store: Store, rank: int, nonce: str, job: str) -> Callable[[], str | None]:
    """Another rank's look: confirms the roster that has its number."""
    confirmed: set[str] = set()

    def look() -> str | None:
        if own.get(f"hello/{rank}").decode() != nonce:
            raise CommError(
                f"two processes say that they are rank {rank} of job {job!r}: two jobs on one port, or one started "
                "twice. Give each job a MASTER_PORT of its own."
            )
        if store.check(["deepspeed.meet.owner"]) and (owner := store.get("deepspeed.meet.owner").decode()) != job:
            raise CommError(f"job {owner!r} meets at this address and port, and this is job {job!r}: take another port")
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


def _missing(own: Store, rank: int, size: int, limit: timedelta) -> str:
    absent = [other for other in range(size) if not own.check([f"hello/{other}"])]
    shown = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    who = f"rank(s) {shown} did not arrive" if absent else "not all ranks confirmed"
    return f"timed out: {who} within {limit.total_seconds():g} s"
