"""Environment variables of a job: exported ones, and those that describe each rank."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.job import Export

STARTER_PREFIXES = (
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_", "MV2_COMM_WORLD_", "PALS_",
    "JSM_NAMESPACE_", "SLURM_STEP", "TORCHELASTIC_", "PET_",
)  # fmt: skip
STARTER_NAMES = {
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASK_PID", "SLURM_GTIDS",
    "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT",
    "SLURM_LAUNCH_NODE_IPADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK",
    "JOB_COMPLETION_INDEX", "DS_AGENT_CALL", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE",
}  # fmt: skip


@dataclass(frozen=True)
class NodePlacement:
    """Placement of a host in the job.

    Args:
        index: index of the host.
        nodes: number of hosts.
        first_rank: global rank of local rank 0.
        world_size: number of ranks on all hosts.
        slots: device slot of each local rank.
    """

    index: int
    nodes: int
    first_rank: int
    world_size: int
    slots: list[int] = field(default_factory=list[int])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables of a rank, with the names of DeepSpeed and torchrun, such as RANK and LOCAL_RANK."""
        size = str(len(self.slots))
        return {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "CROSS_RANK": str(self.index),
            "CROSS_SIZE": str(self.nodes),
            "GROUP_RANK": str(self.index),
            "NODE_RANK": str(self.index),
        }


def nodes_of(slots: Mapping[str, list[int]]) -> dict[str, NodePlacement]:
    world, first, placed = sum(map(len, slots.values())), 0, {}
    for index, (name, own) in enumerate(slots.items()):
        placed[name] = NodePlacement(index, len(slots), first, world, list(own))
        first += len(own)
    return placed


def parse_cores(text: str) -> list[int]:
    """Return the CPU cores of a list such as `0-3,8`; for "", all cores that this process may use.

    Raises:
        LaunchError: the text has another form.
    """
    if not text:
        return sorted(os.sched_getaffinity(0))
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise LaunchError(f"--bind_core_list {text!r}: {part!r} is neither a core nor a range like 0-7")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]
"""Prefixes of variables that are exported to every node."""
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""File in the home or the current directory with NAME=VALUE lines to export to every node."""

_DECLARED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:@([^=\s]+))?")


def declared(options: Sequence[str], several_hosts: bool, hosts: Collection[str] | None = None) -> list[Export]:
    """Return the variables to export to the ranks: by prefix, by environment files, by options.

    Args:
        options: values of --export: `NAME` (this environment's value), `NAME=VALUE`, `NAME@HOST=VALUE`.
        several_hosts: include variables with prefixes in `EXPORT_ENVS`; on one host, ranks inherit all variables.
        hosts: hosts of the job; lines for other hosts in environment files are ignored. None: all lines are used.

    Returns:
        (name, value, host or None for all hosts); later entries override earlier ones.

    Raises:
        LaunchError: a name or line is malformed, a variable is not set, or a value has a zero byte.
    """
    variables: dict[tuple[str, str | None], str] = {}
    if several_hosts:
        taken = (name for name in os.environ if name.startswith(tuple(EXPORT_ENVS)))
        if "AISC_JOB_NAME" in os.environ:  # its nodes have their own
            taken = (name for name in taken if name not in ("NCCL_IB_HCA", "UCX_NET_DEVICES"))
        variables.update({(name, None): os.environ[name] for name in taken})
    for path in environment_files():
        variables.update(_for_hosts(_read_environment_file(path), hosts, path))
    for text in options:
        name, host, value = _declaration(text, f"--export {text.partition('=')[0]!r}")
        if value is None and name not in os.environ:
            raise LaunchError(f"--export {text!r}: {name} is not set here; give it a value: {name}=…")
        variables[name, host] = os.environ[name] if value is None else value
    for (name, _), value in variables.items():
        if "\0" in value:
            raise LaunchError(f"the value of {name} holds a zero byte, which no environment can")
    exports: list[Export] = [(name, value, host) for (name, host), value in variables.items()]
    return sorted(exports, key=lambda export: export[2] is not None)  # what is for one host wins


def _for_hosts(
    variables: dict[tuple[str, str | None], str], hosts: Collection[str] | None, path: Path
) -> dict[tuple[str, str | None], str]:
    """Return an environment file's variables without those for hosts that are not in `hosts` (None: all variables).

    In a job on `localhost`, lines for this machine's name also count.
    """
    if hosts is None:
        return variables
    own = socket.gethostname()
    renamed = dict.fromkeys((own, own.partition(".")[0]), "localhost") if set(hosts) == {"localhost"} else {}
    placed = {(name, renamed.get(host, host) if host else None): value for (name, host), value in variables.items()}
    others = sorted({host for _, host in placed if host is not None and host not in hosts})
    if others:
        logger.info("%s: lines for %s are ignored: these hosts are not in this job", path, ", ".join(others))
    return {(name, host): value for (name, host), value in placed.items() if host is None or host in hosts}


def exported_variables() -> dict[str, str]:
    """Return the variables to export to every node: by prefix from this environment, and from environment files.

    Raises:
        LaunchError: a line of an environment file is malformed, or a value has a zero byte.
    """
    return {name: value for name, value, host in declared((), True) if host is None}


def environment_files() -> list[Path]:
    """Return the readable environment files: that of the home directory, then that of the current one (priority)."""
    folders: list[Path] = []
    home = os.environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(home):
        folders.append(Path(home))
    folders.append(Path.cwd())
    return [
        path for folder in dict.fromkeys(folders) if os.access(path := folder / DEEPSPEED_ENVIRONMENT_NAME, os.R_OK)
    ]


def _read_environment_file(path: Path) -> dict[tuple[str, str | None], str]:
    variables: dict[tuple[str, str | None], str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, host, value = _declaration(text, f"{path}:{number}")
        if value is None:
            raise LaunchError(f"{path}:{number}: {text!r} is not of the form NAME=VALUE")
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        variables[name, host] = value[1:-1] if quoted else value  # written for a shell; nothing else of one is done
    return variables


def _declaration(text: str, where: str) -> tuple[str, str | None, str | None]:
    head, equals, value = text.partition("=")
    match = _DECLARED.fullmatch(head)
    if match is None:
        shown = text if where.startswith("--") or not equals else f"{head}=…"
        raise LaunchError(f"{where}: {shown!r} is not of the form NAME=VALUE or NAME@HOST=VALUE")
    return match[1], match[2], value if equals else None
