"""The hosts there are, when no hostfile names them: what SLURM, PBS, SageMaker or an MPI operator says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.devices import visible_devices
from deepspeed.launcher.hostfile import Hosts, expand, read_hostfile

DLTS_HOSTFILE = "/job/hostfile"
MPI_HOSTFILE = "/etc/mpi/hostfile"
RESOURCES = "opt/ml/input/config/resourceconfig.json"  # below the root folder


@dataclass(frozen=True)
class Pool:
    """Hosts and who named them.

    Args:
        hosts: with their slots.
        source: who named them.
        launcher: what starts agents there unless the user says otherwise.
        own: index of this host where every host runs this very command; None where one command starts all.
        counted: the slots are known; otherwise --num_gpus says how many there are.
    """

    hosts: Hosts
    source: str
    launcher: str = "ssh"
    own: int | None = None
    counted: bool = True
    address: str = ""
    names: dict[str, str] = field(default_factory=dict[str, str])


def find(hostfile: str, num_gpus: int, environment: Mapping[str, str] = os.environ, root: str = "/") -> Pool:
    """The hosts of the hostfile, else of the scheduler this runs under, else this machine.

    Args:
        hostfile: path; a missing one means none, with a warning when the user named it.
        num_gpus: ranks per host where nothing else tells; not positive for none.
        environment: variables.
        root: folder of /opt and /etc.
    """
    if os.path.isfile(hostfile):
        return Pool(read_hostfile(hostfile), f"hostfile {hostfile}")
    if hostfile != DLTS_HOSTFILE:
        logger.warning("hostfile %s does not exist: using what the scheduler says, or this machine alone", hostfile)
    devices = len(visible_devices(environment))
    slots = list(range(num_gpus if num_gpus > 0 else devices or 1))
    for probe in (_sagemaker, _pods, _slurm, _pbs):
        found = probe(environment, slots, root)
        if found is not None and len(found.hosts) > 1:
            return found
    operator = os.path.join(root, MPI_HOSTFILE.lstrip("/"))
    if os.path.isfile(operator):
        return Pool(read_hostfile(operator), operator)
    return Pool({"localhost": list(range(devices or max(num_gpus, 1)))}, "this machine")


def _sagemaker(env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
    """SageMaker runs the command in every container: the first host leads."""
    hosts, current = sagemaker_hosts(env, root)
    if not hosts:
        return None
    if current not in hosts:
        raise LaunchError(f"SageMaker: the current host {current!r} is none of {hosts}")
    number = int(env["SM_NUM_GPUS"]) if env.get("SM_NUM_GPUS", "").isdigit() else 0
    own = list(range(number)) if number else slots
    # every name in the order in which all containers see it, whatever order the file has
    return Pool({host: own for host in hosts}, "SageMaker", own=hosts.index(current), address=hosts[0], counted=False)


def sagemaker_hosts(env: Mapping[str, str], root: str = "/") -> tuple[list[str], str]:
    """All hosts of a SageMaker job, sorted, and this one; empty elsewhere. Variables and file are compared.

    Raises:
        LaunchError: they contradict each other.
    """
    named = json.loads(env["SM_HOSTS"]) if env.get("SM_HOSTS") else []
    current = env.get("SM_CURRENT_HOST", "")
    try:
        resources = json.loads(Path(root, RESOURCES).read_text())
    except OSError:
        resources = {}
    filed = resources.get("hosts", [])
    if named and filed and sorted(named) != sorted(filed):
        raise LaunchError(f"SM_HOSTS={named} contradicts the hosts of /{RESOURCES}: {filed}")
    own = resources.get("current_host", "")
    if current and own and current != own:
        raise LaunchError(f"SM_CURRENT_HOST={current} contradicts the current_host of /{RESOURCES}: {own}")
    return sorted(named or filed, key=_natural), current or own


def _natural(name: str) -> list[tuple[int, str]]:
    """algo-2 before algo-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _pods(env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
    """Kubeflow's PyTorchJob and Trainer count in pods, each of which runs the command."""
    count, own, address = env.get("PET_NNODES", ""), env.get("PET_NODE_RANK", ""), env.get("PET_MASTER_ADDR", "")
    if not (count.isdigit() and own.isdigit() and (address or env.get("MASTER_ADDR"))):
        return None
    hosts = {f"pod{index}": slots for index in range(int(count))}
    return Pool(hosts, "PET_NNODES", own=int(own), address=address or env["MASTER_ADDR"], counted=False)


def _slurm(env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
    """The nodes of a SLURM allocation; inside a step of several tasks every node runs the command."""
    nodes = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not nodes:
        return None
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    own = list(range(int(gpus))) if gpus.isdigit() and int(gpus) else slots
    tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        names = nodes_of_slurm(env.get("SLURM_STEP_NODELIST") or nodes)
        if int(tasks) != len(names):
            raise LaunchError(
                f"SLURM_STEP_NUM_TASKS={tasks} on {len(names)} nodes: start the command once per node "
                "(srun --ntasks-per-node=1 deepspeed …), or the script itself once per rank (srun python …)"
            )
        index = int(env.get("SLURM_NODEID", "0"))
        return Pool({name: own for name in names}, "SLURM", own=index, address=names[0], counted=False)
    return Pool({name: own for name in nodes_of_slurm(nodes)}, "SLURM", "slurm", counted=False)


def nodes_of_slurm(text: str) -> list[str]:
    """The names of a compressed list such as `gpu[003-007,12],login1`."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return [name for part in parts for name in expand(part, f"SLURM's list of nodes {text!r}")]


def _pbs(env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
    """PBS names each host once per slot in a file."""
    path = env.get("PBS_NODEFILE", "")
    if not os.path.isfile(path):
        return None
    names = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    counts: dict[str, int] = {}
    for name in names:
        [host] = expand(name, path)
        counts[host] = counts.get(host, 0) + 1
    devices = len(visible_devices(env))  # a host with devices has a rank for each, whatever the count of its cores
    return Pool({host: list(range(devices)) if devices else slots for host in counts}, "PBS", counted=False)
