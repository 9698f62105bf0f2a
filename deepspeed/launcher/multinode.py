"""Command lines that start the ranks of several nodes through pdsh, MPI or SLURM."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed.errors import LaunchError
from deepspeed.launcher.hostfile import Hosts

PDSH_MAX_FAN_OUT = 1024


@dataclass(frozen=True)
class Job:
    """What is to run where.

    Args:
        hosts: hosts with their device slots, in the order of the ranks.
        exports: environment variables that every rank gets, MASTER_ADDR and MASTER_PORT among them.
        supervisor: arguments of `deepspeed.launcher.launch` without the node's rank.
        program: the command line of one rank, for launchers that start the ranks themselves.
        launcher_args: further arguments for the launcher's command.
        ssh_port: port for ssh; None is the default one.
        venv_script: shell script sourced on each node.
    """

    hosts: Hosts
    exports: dict[str, str]
    supervisor: list[str]
    program: list[str]
    launcher_args: list[str]
    ssh_port: int | None = None
    venv_script: str = ""


Command = tuple[list[str], dict[str, str]]
"""A command line and the variables to set for it."""


def build(launcher: str, job: Job) -> Command:
    """The command that starts `job` on all of its nodes.

    Raises:
        LaunchError: the launcher is unknown, or cannot do what the job asks.
    """
    if launcher not in BUILDERS:
        raise LaunchError(f"--launcher {launcher!r} is not known; there is {', '.join(BUILDERS)}")
    if launcher != "pdsh":
        _check_whole_nodes(launcher, job)
    return BUILDERS[launcher](job)


def _check_whole_nodes(launcher: str, job: Job) -> None:
    """The launchers that start the ranks themselves have no supervisor that could choose devices or sources scripts."""
    if any(slots != list(range(len(slots))) for slots in job.hosts.values()):
        raise LaunchError(f"--launcher {launcher} takes devices from 0 up; {job.hosts} needs --launcher pdsh")
    if job.venv_script:
        raise LaunchError(f"--venv_script {job.venv_script!r} works with --launcher pdsh only, not {launcher}")


def _pdsh(job: Job) -> Command:
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in job.exports.items())
    source = f"source {shlex.quote(job.venv_script)}; " if job.venv_script else ""
    # pdsh puts the node's number where %n stands, so a % of the user's is doubled
    arguments = shlex.join(job.supervisor).replace("%", "%%")
    python = shlex.quote(sys.executable)
    on_node = (
        f"{exports}cd {shlex.quote(os.getcwd())}; {source}"
        f"{python} -u -m deepspeed.launcher.launch --node_rank=%n {arguments}"
    )
    variables = {"PDSH_RCMD_TYPE": "ssh"}
    if job.ssh_port is not None:
        variables["PDSH_SSH_ARGS_APPEND"] = f"-p {job.ssh_port}"
    fan_out = str(min(PDSH_MAX_FAN_OUT, len(job.hosts)))
    return ["pdsh", "-S", "-f", fan_out, "-w", ",".join(job.hosts), *job.launcher_args, on_node], variables


def _openmpi(job: Job) -> Command:
    places = ",".join(f"{host}:{len(slots)}" for host, slots in job.hosts.items())
    exports = [word for name, value in job.exports.items() for word in ("-x", f"{name}={value}")]
    return ["mpirun", "-n", str(_ranks(job)), "--host", places, *job.launcher_args, *exports, *job.program], {}


def _hydra(job: Job) -> Command:
    """One segment per rank: Hydra's ranks do not otherwise know which they are in a way common to its flavours."""
    exports = [word for name, value in job.exports.items() for word in ("-genv", name, value)]
    segments = [word for segment in _hydra_segments(job) for word in (":", *segment)]
    return ["mpirun", *job.launcher_args, *exports, *segments[1:]], {}


def _hydra_segments(job: Job) -> Iterator[list[str]]:
    rank = 0
    for cross_rank, (host, slots) in enumerate(job.hosts.items()):
        for local_rank in range(len(slots)):
            place = {
                "RANK": rank,
                "WORLD_SIZE": _ranks(job),
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": len(slots),
                "CROSS_RANK": cross_rank,
                "CROSS_SIZE": len(job.hosts),
            }
            variables = [word for name, value in place.items() for word in ("-env", name, str(value))]
            yield ["-n", "1", "-host", host, *variables, *job.program]
            rank += 1


def _mvapich(job: Job) -> Command:
    command, variables = _hydra(job)
    # its own pinning would put the threads of every local rank on one core
    return command, {**variables, "MV2_ENABLE_AFFINITY": "0"}


def _slurm(job: Job) -> Command:
    per_node = {len(slots) for slots in job.hosts.values()}
    if len(per_node) != 1:
        raise LaunchError(f"--launcher slurm needs the same number of slots on every host, not {job.hosts}")
    counts = ["-n", str(_ranks(job)), "--nodes", str(len(job.hosts)), "--ntasks-per-node", str(per_node.pop())]
    # values with commas would break --export=NAME=VALUE, so the variables travel in srun's own environment
    where = ["--nodelist", ",".join(job.hosts), "--export=ALL"]
    return ["srun", *counts, *where, *job.launcher_args, *job.program], job.exports


def _ranks(job: Job) -> int:
    return sum(map(len, job.hosts.values()))


BUILDERS: dict[str, Callable[[Job], Command]] = {
    "pdsh": _pdsh,
    "openmpi": _openmpi,
    "mpich": _hydra,
    "impi": _hydra,
    "mvapich": _mvapich,
    "slurm": _slurm,
}
