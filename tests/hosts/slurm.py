"""SLURM on the hosts of a cluster: munged, slurmctld on the first, slurmd on all."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.hosts.cluster import Cluster

_CONFIG = """
ClusterName=hosts
SlurmctldHost={first}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=10
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
_CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def start(cluster: Cluster) -> dict[str, str]:
    """Start SLURM; it ends with the cluster.

    Returns:
        The variables that its commands need.
    """
    folder = cluster.folder / "slurm"
    (folder / "state").mkdir(parents=True)
    nodes = "\n".join(f"NodeName={name} CPUs=2 RealMemory=1000 State=UNKNOWN" for name in cluster.names)
    values = {"first": cluster.names[0], "folder": folder, "nodes": nodes, "names": ",".join(cluster.names)}
    (folder / "slurm.conf").write_text(_CONFIG.format(**values))
    (folder / "cgroup.conf").write_text(_CGROUPS)
    key, socket = folder / "munge.key", folder / "munge.sock"
    key.write_bytes(bytes(range(128)))
    key.chmod(0o600)
    folder.chmod(0o711)
    cluster.folder.chmod(0o711)
    munge = ["munged", "-F", "-f", "--num-threads=2", f"--key-file={key}", f"--socket={socket}"]
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    cluster.lasting(subprocess.Popen([*munge, *files], stderr=subprocess.DEVNULL))
    _wait(socket)
    first = cluster.names[0]
    cluster.lasting(_daemon(cluster, first, ["slurmctld", "-D"], environment))
    for name in cluster.names:
        cluster.lasting(_daemon(cluster, name, ["slurmd", "-D", "-N", name], environment))
    _until_idle(cluster, environment)
    return environment


def settle(cluster: Cluster, environment: dict[str, str]) -> None:
    """End the allocations of srun commands that were killed: SLURM keeps those (`InactiveLimit` is off by default)."""
    cancel = ["env", *_words(environment), "scancel", "--user=root"]
    cluster.on(cluster.names[0], cancel, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(timeout=20)
    _until_idle(cluster, environment)


def _until_idle(cluster: Cluster, environment: dict[str, str]) -> None:
    first, folder = cluster.names[0], cluster.folder / "slurm"
    end = time.monotonic() + 30
    while time.monotonic() < end:
        asked = cluster.on(first, ["env", *_words(environment), "sinfo", "-h", "-o", "%T"], stdout=subprocess.PIPE)
        states = asked.communicate(timeout=20)[0].split()
        if set(states) == {b"idle"}:
            return
        time.sleep(0.1)
    raise RuntimeError(f"SLURM did not start: {(folder / 'ctld.log').read_text()[-2000:]}")


def _words(variables: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


def _daemon(cluster: Cluster, name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    line = ["env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *_words(environment), *command]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return cluster.on(name, line, **quiet)


def _wait(path: Path) -> None:
    end = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"{path} did not appear")
        time.sleep(0.02)
