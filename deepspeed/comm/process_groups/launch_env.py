"""Rank, world size and address from the environment variables of launchers, schedulers and platforms."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError

DEFAULT_PORT = 29500
RESOURCES = "opt/ml/input/config/resourceconfig.json"  # below the root folder: SageMaker's list of hosts

Environment = Mapping[str, str]


@dataclass(frozen=True)
class World:
    """Position of this process: rank, world size, local rank, address and port of rank 0, and their source."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    source: str = "no launcher"

    @classmethod
    def from_values(cls, values: Mapping[str, str], source: str, port: int) -> World:
        """Parse RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; `port` is the default of MASTER_PORT.

        Raises ArgumentError, which names `source`, if RANK or WORLD_SIZE is missing or a value is invalid.
        """

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
        return cls(rank, size, local, values.get("MASTER_ADDR") or "", listen, source)

    @classmethod
    def of_one(cls, env: Environment, port: int) -> World:
        """Return a world of this process alone; raises ArgumentError in a SLURM batch script for several tasks."""
        tasks = env.get("SLURM_NTASKS", "")
        in_step = any(name.startswith("SLURM_STEP") for name in env)
        if env.get("SLURM_PROCID") == "0" and not in_step and tasks.isdigit() and int(tasks) > 1:
            raise ArgumentError(
                f"SLURM_NTASKS={tasks}, and no SLURM_STEP_ID: this is the batch script itself, run once, not one of "
                f"{tasks} tasks. Start it by `srun python …` or by `deepspeed …`; RANK=0 WORLD_SIZE=1 runs it alone."
            )
        return cls(port=port)

    def meeting_address(self, env: Environment = os.environ) -> str:
        """Return rank 0's address; raises ArgumentError if none is set and ranks may run on several machines."""
        if self.address:
            return self.address
        local = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or ""
        if self.size == 1 or local == str(self.size) or self.source == "arguments":
            return "127.0.0.1"
        raise ArgumentError(
            f"MASTER_ADDR is not set, and WORLD_SIZE={self.size} ({self.source}) does not say where rank 0 is. Set "
            "MASTER_ADDR to the address of rank 0's machine on every rank (127.0.0.1 when they all run on this one)."
        )


@dataclass(frozen=True)
class Claim:
    """Rank, local rank, world size and address from one source of environment variables.

    Args:
        source: name of the source in messages.
        values: by torchrun's name (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
        names: the source's own variable for each of these names.
    """

    source: str
    values: dict[str, str]
    names: dict[str, str] = field(default_factory=dict[str, str])

    def describe(self, name: str) -> str:
        """Format a value with the name of its environment variable, for an error message."""
        return f"{self.names.get(name, name)}={self.values.get(name, '(not set)')}"

    def place(self) -> tuple[int, int] | None:
        """Return rank and world size if both are numbers, else None."""
        rank, size = self.values.get("RANK", ""), self.values.get("WORLD_SIZE", "")
        return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else None

    @classmethod
    def from_variables(cls, env: Environment, source: str, **names: str) -> Claim:
        values = {name: env[variable] for name, variable in names.items() if env.get(variable)}
        return cls(source, values, dict(names))

    def on_one_machine(self) -> Claim:
        """Set rank 0's address to this machine if all ranks run on it; returns this object."""
        if self.values.get("LOCAL_WORLD_SIZE") == self.values.get("WORLD_SIZE"):
            self.values["MASTER_ADDR"] = "127.0.0.1"
        return self

    def compare(self, others: list[Claim]) -> None:
        """Raise ArgumentError if one of `others` has several ranks, and another rank or world size than this source."""
        own = self.place()
        others = [
            other for other in others if (other.place() or (0, 1))[1] > 1
        ]  # a single task may itself start a world of any size
        for other in others:
            place = other.place()
            if own is None or place is None or place == own:
                continue
            name = "WORLD_SIZE" if place[1] != own[1] else "RANK"
            raise ArgumentError(
                f"{self.describe(name)} ({self.source}) contradicts {other.describe(name)} ({other.source}): "
                "this process cannot be both. Unset the wrong one, or start the script by one launcher only."
            )


def discover(rank: int, size: int, port: int, look_further: bool, root: str = "/") -> World:
    """Determine this process's rank, the world size and rank 0's address, and set the missing environment variables.

    Args:
        rank: rank; -1: from RANK, else from the variables of a launcher.
        size: world size; -1: as for `rank`.
        port: port of rank 0 if MASTER_PORT is not set.
        look_further: read and compare the variables of launchers and schedulers too.
        root: folder in which SageMaker's files are searched.

    Raises:
        ArgumentError: a value is missing or not a number, or two sources contradict each other.
    """
    env = os.environ
    claim = Claim("arguments", {"RANK": str(rank), "WORLD_SIZE": str(size)}) if rank >= 0 and size > 0 else None
    if claim is None and (env.get("RANK") or env.get("WORLD_SIZE")):
        claim = Claim("RANK and WORLD_SIZE", {})
    others = claims(env, root) if look_further else []
    if claim is not None:
        named = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if env.get(name)}
        claim = Claim(claim.source, {**named, **claim.values})
        # A launcher that runs inside of the scheduler's tasks assigns other ranks, and its ranks are the right ones.
        others = [] if env.get("TORCHELASTIC_RUN_ID") or env.get("DS_JOB_ID") else others
    elif others:
        claim, others = others[0], others[1:]
    if claim is None:
        return World.of_one(env if look_further else {}, port)
    claim.compare(others)
    for other in others:  # each fills in values that are still missing
        claim = Claim(claim.source, {**other.values, **claim.values}, {**other.names, **claim.names})
    place = World.from_values(
        {**claim.values, **{key: value for key, value in env.items() if value}}, claim.source, port
    )
    if place.size != size > 0 or (place.rank != rank >= 0):
        raise ArgumentError(
            f"init_distributed(rank={rank}, world_size={size}) contradicts the environment "
            f"({claim.source}: rank {place.rank} of {place.size}). Leave the arguments out or unset the variables."
        )
    env.update({key: value for key, value in claim.values.items() if value and not env.get(key)})
    return place


def claims(env: Environment, root: str = "/") -> list[Claim]:
    """Return the claims of the sources whose variables are set, most specific first; mpi4py's only without others."""
    probes: tuple[Callable[[Environment], Claim | None], ...] = (
        lambda e: from_sagemaker(e, root),
        from_open_mpi,
        from_mvapich,
        from_jsm,
        from_pmi,
        from_slurm,
        from_pods,
        from_indexed_job,
        from_mpi4py,
    )
    valid: list[Claim] = []
    for probe in probes:
        if probe is from_mpi4py and valid:
            continue
        claim = probe(env)
        if claim is not None:
            valid.append(claim)
    return valid


# -- sources -----------------------------------------------------------------------------------------------------------


def from_sagemaker(env: Environment, root: str = "/") -> Claim | None:
    """Read the variables of SageMaker: MPI's ranks under MPI, else one process per host; None without hosts.

    The first host (in numeric order) is the master. Containers with custom entry points have only a file under `root`.

    Raises:
        ArgumentError: the variables contradict each other or the file.
    """
    named: list[str] = json.loads(env["SM_HOSTS"]) if env.get("SM_HOSTS") else []
    try:
        filed = json.loads(Path(root, RESOURCES).read_text())
    except (OSError, ValueError):
        filed = {}
    hosts = named or filed.get("hosts", [])
    parts = {host: re.split(r"(\d+)", host) for host in hosts}
    numbered = {h: [(int(part), "") if part.isdigit() else (-1, part) for part in parts[h]] for h in hosts}
    hosts = sorted(hosts, key=numbered.__getitem__)  # algo-2 before algo-10
    current = env.get("SM_CURRENT_HOST") or filed.get("current_host", "")
    if not hosts:
        return None
    if named and filed.get("hosts") and sorted(named) != sorted(filed["hosts"]):
        raise ArgumentError(f"SM_HOSTS={named} contradicts the hosts of /{RESOURCES}: {filed['hosts']}.")
    mpi = from_open_mpi(env)
    if mpi is not None:
        return Claim("SageMaker", {**mpi.values, "MASTER_ADDR": hosts[0]}, mpi.names)
    if current not in hosts:
        raise ArgumentError(f"SM_CURRENT_HOST={current!r} is none of SM_HOSTS={hosts}.")
    names = {"RANK": "SM_CURRENT_HOST", "WORLD_SIZE": "SM_HOSTS"}
    if not named:
        names = {"RANK": f"current_host of /{RESOURCES}", "WORLD_SIZE": f"hosts of /{RESOURCES}"}
    place = {"RANK": str(hosts.index(current)), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0"}
    return Claim("SageMaker", {**place, "MASTER_ADDR": hosts[0]}, names)


def from_open_mpi(env: Environment) -> Claim | None:
    """Read the variables of Open MPI's mpirun, and Azure ML's master node; None without mpirun."""
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    prefix = "OMPI_COMM_WORLD_"
    claim = Claim.from_variables(
        env, "Open MPI", RANK=f"{prefix}RANK", WORLD_SIZE=f"{prefix}SIZE", LOCAL_RANK=f"{prefix}LOCAL_RANK",
        LOCAL_WORLD_SIZE=f"{prefix}LOCAL_SIZE",
    )  # fmt: skip
    local = claim.values.get("LOCAL_WORLD_SIZE")
    master, single = env.get("AZ_BATCH_MASTER_NODE"), env.get("AZ_BATCHAI_MPI_MASTER_NODE")
    if master:
        claim.values["MASTER_ADDR"], _, port = master.partition(":")
        claim.values["MASTER_PORT"] = port or str(DEFAULT_PORT)
    elif single:
        claim.values["MASTER_ADDR"] = "127.0.0.1" if single == "localhost" else single
    elif local == claim.values.get("WORLD_SIZE") or local is None:
        claim.values["MASTER_ADDR"] = "127.0.0.1"
    elif "MASTER_ADDR" not in env:
        asked = from_mpi4py(env)
        claim.values.update({} if asked is None else asked.values)
    return claim


def from_mvapich(env: Environment) -> Claim | None:
    """Read the variables of MVAPICH2's mpirun; None if they are not set."""
    if "MV2_COMM_WORLD_SIZE" not in env:
        return None
    prefix = "MV2_COMM_WORLD_"
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
    names = {name: prefix + variable for name, variable in names.items()}
    return Claim.from_variables(env, "MVAPICH2", **names).on_one_machine()


def from_jsm(env: Environment) -> Claim | None:
    """Read the variables of LSF's jsrun; None if not set. The master is the first host that is not a launch node."""
    if "JSM_NAMESPACE_SIZE" not in env:
        return None
    prefix = "JSM_NAMESPACE_"
    claim = Claim.from_variables(
        env, "jsrun", RANK=f"{prefix}RANK", WORLD_SIZE=f"{prefix}SIZE", LOCAL_RANK=f"{prefix}LOCAL_RANK"
    )
    words = env.get("LSB_MCPU_HOSTS", "").split()
    hosts = list(zip(words[::2], words[1::2], strict=False))
    compute = [name for name, slots in hosts if slots != "1"] or [name for name, _ in hosts]
    if compute:
        claim.values["MASTER_ADDR"] = compute[0]
    return claim


def from_pmi(env: Environment) -> Claim | None:
    """Read the variables of the hydra launcher (MPICH, Intel MPI) and of Cray PALS; None if they are not set."""
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    local = "PALS_LOCAL_RANKID" if "PALS_LOCAL_RANKID" in env else "MPI_LOCALRANKID"
    source = "PALS" if "PALS_RANKID" in env else "hydra"
    names = {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE", "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS"}
    return Claim.from_variables(env, source, **names).on_one_machine()


def from_slurm(env: Environment) -> Claim | None:
    """Read the variables of SLURM's srun, with one process per task; None if not set, or in the batch script itself.

    The master is the first node of the node list, for example gpu003 of "gpu[003-007]".
    """
    size = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if "SLURM_PROCID" not in env or size not in env:
        return None
    if size == "SLURM_NTASKS" and env["SLURM_PROCID"] == "0" and not any(n.startswith("SLURM_STEP") for n in env):
        return None  # the batch script itself
    claim = Claim.from_variables(env, "SLURM", RANK="SLURM_PROCID", WORLD_SIZE=size, LOCAL_RANK="SLURM_LOCALID")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    first = re.match(r"([^,\[]+)(?:\[(\d+))?(?:[^\]]*\]([^,\[]*))?", nodes)
    if first:
        claim.values["MASTER_ADDR"] = first[1] + (first[2] or "") + ((first[3] or "") if first[2] else "")
    return claim


def from_pods(env: Environment) -> Claim | None:
    """Read the variables of Kubeflow's PyTorchJob and Trainer, with one process per pod; None if they are not set."""
    if not (env.get("PET_NNODES", "").isdigit() and env.get("PET_NODE_RANK")):
        return None
    names = {"RANK": "PET_NODE_RANK", "WORLD_SIZE": "PET_NNODES"}
    names |= {"MASTER_ADDR": "PET_MASTER_ADDR", "MASTER_PORT": "PET_MASTER_PORT"}
    claim = Claim.from_variables(env, "PyTorchJob", **names)
    claim.values["LOCAL_RANK"] = "0"
    return claim


def from_indexed_job(env: Environment) -> Claim | None:
    """Read the variables of a Kubernetes Indexed Job; None outside of one.

    Kubernetes sets the index, and the manifest WORLD_SIZE; raises ArgumentError without WORLD_SIZE. Pods are named
    <job>-<index>, so rank 0's host name is known if a headless service exists.
    """
    index = env.get("JOB_COMPLETION_INDEX", "")
    if not index:
        return None
    if not env.get("WORLD_SIZE"):
        raise ArgumentError(
            f"JOB_COMPLETION_INDEX={index} says that this is one pod of a job, and WORLD_SIZE is not set: only the "
            "manifest knows how many there are. Set WORLD_SIZE there to `completions` (1 to run alone)."
        )
    claim = Claim.from_variables(env, "Kubernetes", RANK="JOB_COMPLETION_INDEX", WORLD_SIZE="WORLD_SIZE")
    claim.values["LOCAL_RANK"] = "0"
    name, dot, domain = socket.getfqdn().partition(".")
    if name.endswith(f"-{index}"):
        claim.values["MASTER_ADDR"] = name[: -len(index)] + "0" + dot + domain
    return claim


def from_mpi4py(env: Environment) -> Claim | None:
    """Read ranks, size and host from mpi4py, a collective of MPI; None without mpi4py or without variables of MPI."""
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
    return Claim("mpi4py", {**{name: str(value) for name, value in place.items()}, "MASTER_ADDR": host})
