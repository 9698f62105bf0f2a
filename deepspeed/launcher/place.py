"""The place of a host in the world of ranks, and the variables that tell each rank its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed.errors import LaunchError

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
class Node:
    """The place of a host in the world.

    Args:
        index: which host this is.
        nodes: how many there are.
        first_rank: global rank of local rank 0.
        world_size: ranks on all hosts.
        slots: device slots of this host, one per local rank.
    """

    index: int
    nodes: int
    first_rank: int
    world_size: int
    slots: list[int] = field(default_factory=list[int])

    def to_json(self) -> dict[str, Any]:
        """The fields, for a message."""
        return asdict(self)

    def variables(self, local_rank: int) -> dict[str, str]:
        """What tells a rank its place: the names of this launcher, of torchrun and of its clients."""
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


def nodes_of(slots: Mapping[str, list[int]]) -> dict[str, Node]:
    """The place of each host of a run, in the order given."""
    world, first, placed = sum(map(len, slots.values())), 0, {}
    for index, (name, own) in enumerate(slots.items()):
        placed[name] = Node(index, len(slots), first, world, list(own))
        first += len(own)
    return placed


def without_starter(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, less those by which MPI, SLURM or torchrun told the agent a rank of its own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in STARTER_NAMES and not name.startswith(STARTER_PREFIXES)
    }


def parse_cores(text: str) -> list[int]:
    """The cores of a list such as `0-3,8`; an empty text means those this process may use."""
    if not text:
        return sorted(os.sched_getaffinity(0))
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise LaunchError(f"--bind_core_list {text!r}: {part!r} is neither a core nor a range like 0-7")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores
