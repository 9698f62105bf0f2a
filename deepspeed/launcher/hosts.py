"""Hosts and device slots of a job: from the hostfile, SLURM, PBS, SageMaker, Kubeflow or MPI, or of this machine."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger

Hosts = dict[str, list[int]]
"""Host name to the indices of its device slots, in the order of the ranks."""

MOST_HOSTS = 1 << 16
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")
_USER = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?"
_NAME = re.compile(_USER + r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_RANGES = re.compile(r"\[([^\[\]]*)\]")


def check_name(name: str, where: str) -> str:
    """Return `name` if it is a valid host name or address, with an optional `user@`.

    Other characters would be syntax for pdsh, mpirun or srun (`exec:b`, `^file`, `h[0-1]`) or options for ssh (`-b`).

    Args:
        name: name to check.
        where: origin of the name, for the error message.

    Raises:
        LaunchError: the name is invalid.
    """
    if _NAME.fullmatch(name):
        return name
    user, separator, address = name.rpartition("@")
    try:
        ipaddress.IPv6Address(address)
        if not separator or _NAME.fullmatch(f"{user}@x"):
            return name
    except ValueError:
        pass
    raise LaunchError(
        f"{where}: {name!r} is not the name of a host: letters, digits, dots and hyphens, "
        "with a user before an @ if need be; ranges stand in brackets, like gpu[01-16]"
    )


def expand(name: str, where: str) -> list[str]:
    """Expand a host name with ranges: `h[01-03,7]` is h01, h02, h03 and h7.

    Args:
        name: name, with or without ranges.
        where: origin of the name, for the error message.

    Raises:
        LaunchError: a range or a name is malformed, or there are more than `MOST_HOSTS` hosts.
    """
    names = [""]
    position = 0
    for match in _RANGES.finditer(name):
        parts: list[str] = []
        for part in match[1].split(","):
            span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
            if span is None or first > last or last - first >= MOST_HOSTS:
                raise LaunchError(f"{where}: {part!r} in {name!r} is not a range of numbers like 01-16")
            parts += [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
        if len(names) * len(parts) > MOST_HOSTS:
            raise LaunchError(f"{where}: {name!r} names more than {MOST_HOSTS} hosts")
        names = [before + name[position : match.start()] + part for before in names for part in parts]
        position = match.end()
    return [check_name(before + name[position:], where) for before in names]


def read_hostfile(path: str | Path) -> Hosts:
    """Read a hostfile: lines `name slots=N`, with optional ranges (`gpu[01-16]`) and comments after `#`.

    Returns:
        Slots 0 to N - 1 of each host, in the order of the file.

    Raises:
        LaunchError: a line has another form, a host is named twice, or the file names no host.
        OSError: the file cannot be read.
    """
    hosts: Hosts = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise LaunchError(f"{path}:{number}: {text!r} is not of the form 'hostname slots=N'")
        for name in expand(match[1], f"{path}:{number}"):
            if name in hosts:
                raise LaunchError(f"{path}:{number}: host {name!r} is named twice; give it one line with all its slots")
            hosts[name] = list(range(int(match[2])))
    if not hosts:
        raise LaunchError(f"{path} names no host; add lines of the form 'hostname slots=N', or leave the file out")
    return hosts


def fetch_hostfile(hostfile_path: str | Path) -> dict[str, int] | None:
    """Return the number of slots of each host in a hostfile, in its order; None if there is no file.

    Raises:
        LaunchError: as in `read_hostfile`.
    """
    if not Path(hostfile_path).is_file():
        logger.info("there is no hostfile %s: this machine's own devices are used", hostfile_path)
        return None
    return {host: len(slots) for host, slots in read_hostfile(hostfile_path).items()}


def select(pool: Hosts, include: str = "", exclude: str = "") -> Hosts:
    """Return the slots of `pool` that are in `include`, or that are not in `exclude`, by host, without empty hosts.

    Args:
        pool: all hosts and slots.
        include: such as `host1@host2:0,2-3`: all slots of host1, and slots 0, 2 and 3 of host2; "": all.
        exclude: the same form; "": no slot.

    Raises:
        LaunchError: both are given, a host or slot is malformed or not in the pool, or nothing is left.
    """
    if include and exclude:
        raise LaunchError(f"--include {include!r} and --exclude {exclude!r} exclude each other; give one of them")
    if include:
        named = _parse_selection("--include", include, pool)
        chosen = {host: named.get(host, []) for host in pool}
    else:
        named = _parse_selection("--exclude", exclude, pool)
        chosen = {host: [slot for slot in slots if slot not in named.get(host, [])] for host, slots in pool.items()}
    hosts = {host: slots for host, slots in chosen.items() if slots}
    if not hosts:
        raise LaunchError(f"--include {include!r} --exclude {exclude!r} leave no slot of {_shown(pool)}")
    return hosts


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> Hosts:
    """Select hosts and slots; result and errors as of `select`.

    Args:
        resource_pool: number of slots by host, as from `fetch_hostfile`.
        inclusion: argument `include` of `select`.
        exclusion: argument `exclude` of `select`.
    """
    return select({host: list(range(slots)) for host, slots in resource_pool.items()}, inclusion, exclusion)


def _parse_selection(flag: str, text: str, pool: Hosts) -> Hosts:
    selection: Hosts = {}
    for part in _parts(text, pool):
        head, colon, listed = (part, "", "") if part in pool else part.rpartition(":")
        name = head if colon else part
        for host in [name] if name in pool else expand(name, f"{flag} {text!r}"):
            if host not in pool:
                raise LaunchError(f"{flag} {text!r}: there is no host {host!r}; there is {_shown(pool)}")
            slots = _slots(listed) if colon else pool[host]
            if not slots or not set(slots) <= set(pool[host]):
                raise LaunchError(f"{flag} {text!r}: {host!r} has no slots {listed!r}; there is {_shown(pool)}")
            selection[host] = sorted({*selection.get(host, []), *slots})
    return selection


def _parts(text: str, pool: Hosts) -> list[str]:
    """Split a selection at `@`, except within a `user@host` of the pool."""
    words = [word for word in text.split("@") if word]
    with_users = {name for name in pool if "@" in name}
    parts: list[str] = []
    while words:
        part = words.pop(0)
        joined = f"{part}@{words[0]}" if words else ""
        if joined in with_users or joined.rpartition(":")[0] in with_users:
            part = joined
            words.pop(0)
        parts.append(part)
    return parts


def _slots(listed: str) -> list[int]:
    """Return the slots of a list such as `0,2-5`; empty if the list is malformed."""
    slots: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            return []
        slots.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return slots


def _shown(pool: Hosts) -> str:
    shown = ", ".join(f"{host}:{','.join(map(str, slots))}" for host, slots in list(pool.items())[:16])
    return shown if len(pool) <= 16 else f"{shown} and {len(pool) - 16} more"


def is_this_machine(name: str) -> bool:
    """Whether a host name, with an optional `user@`, is this machine: by name, or by a local address."""
    host = name.rpartition("@")[2]
    own = socket.gethostname()
    if host in ("localhost", own, own.split(".")[0]):
        return True
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, place in places:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(place)
                return True
            except OSError:
                continue
    return False


DLTS_HOSTFILE = "/job/hostfile"
MPI_HOSTFILE = "/etc/mpi/hostfile"
RESOURCES = "opt/ml/input/config/resourceconfig.json"  # below the root folder


@dataclass(frozen=True)
class Pool:
    """Available hosts, and where they were found.

    Args:
        hosts: hosts with their slots.
        source: description of the source, for messages.
        launcher: default of --launcher for these hosts.
        own: index of this host if the command runs on every host; None if it runs on one host only.
        address: address of rank 0; "": the launcher chooses it.
    """

    hosts: Hosts
    source: str
    launcher: str = "ssh"
    own: int | None = None
    address: str = ""

    @classmethod
    def from_sagemaker(cls, env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
        """Return SageMaker's hosts; None outside of SageMaker. The command runs in every container.

        Args:
            env: environment variables.
            slots: slots per host, unless SM_NUM_GPUS is a positive number.
            root: folder with opt/ml.

        Raises:
            LaunchError: variables and resource file contradict each other or are no valid JSON, or the current host is
                not in the list.
        """
        named = _parsed(env["SM_HOSTS"], "SM_HOSTS") if env.get("SM_HOSTS") else []
        current = env.get("SM_CURRENT_HOST", "")
        try:
            resources = _parsed(Path(root, RESOURCES).read_text(), f"/{RESOURCES}")
        except OSError:
            resources = {}
        filed = resources.get("hosts", [])
        if named and filed and sorted(named) != sorted(filed):
            raise LaunchError(f"SM_HOSTS={named} contradicts the hosts of /{RESOURCES}: {filed}")
        own = resources.get("current_host", "")
        if current and own and current != own:
            raise LaunchError(f"SM_CURRENT_HOST={current} contradicts the current_host of /{RESOURCES}: {own}")
        # algo-2 before algo-10: the order in which all containers see them, whatever order the file has
        hosts = sorted(
            named or filed,
            key=lambda name: [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)],
        )
        current = current or own
        if not hosts:
            return None
        if current not in hosts:
            raise LaunchError(f"SageMaker: the current host {current!r} is none of {hosts}")
        number = int(env["SM_NUM_GPUS"]) if env.get("SM_NUM_GPUS", "").isdigit() else 0
        slots = list(range(number)) if number else slots
        return cls({host: slots for host in hosts}, "SageMaker", own=hosts.index(current), address=hosts[0])

    @classmethod
    def from_pods(cls, env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
        """Return the pods of Kubeflow's PyTorchJob or Trainer; None outside of Kubeflow. Each pod runs the command.

        `slots` are the slots per pod; `root` has no effect.
        """
        count, own, address = env.get("PET_NNODES", ""), env.get("PET_NODE_RANK", ""), env.get("PET_MASTER_ADDR", "")
        if not (count.isdigit() and own.isdigit() and (address or env.get("MASTER_ADDR"))):
            return None
        hosts = {f"pod{index}": slots for index in range(int(count))}
        return cls(hosts, "PET_NNODES", own=int(own), address=address or env["MASTER_ADDR"])

    @classmethod
    def from_slurm(cls, env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
        """Return the nodes of a SLURM allocation; None outside of one.

        Inside a step with several tasks, the command runs on every node; there must be one task per node.

        Args:
            env: environment variables.
            slots: slots per node, unless SLURM_GPUS_ON_NODE is a positive number.
            root: no effect.

        Raises:
            LaunchError: a step with several tasks does not have one per node, or a node list is malformed.
        """
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
            return cls({name: own for name in names}, "SLURM", own=index, address=names[0])
        return cls({name: own for name in nodes_of_slurm(nodes)}, "SLURM", "slurm")

    @classmethod
    def from_pbs(cls, env: Mapping[str, str], slots: list[int], root: str) -> Pool | None:
        """Return the hosts in the node file of PBS; None outside of PBS.

        A host has as many slots as this machine has devices or, without devices, `slots`; `root` has no effect.
        """
        path = env.get("PBS_NODEFILE", "")
        if not os.path.isfile(path):
            return None
        lines = filter(None, map(str.strip, Path(path).read_text().splitlines()))
        hosts = [host for line in lines for host in expand(line, path)]
        devices = len(visible_devices(env))  # a host with devices has a rank for each, whatever the count of its cores
        return cls({host: list(range(devices)) if devices else slots for host in dict.fromkeys(hosts)}, "PBS")


def _parsed(text: str, where: str) -> Any:
    """Parse JSON from the place `where`; LaunchError if it is invalid."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise LaunchError(f"SageMaker: {where} is not valid JSON: {error}") from error


def find(hostfile: str, num_gpus: int, environment: Mapping[str, str] = os.environ, root: str = "/") -> Pool:
    """Return the hosts of the hostfile, else of a scheduler with several hosts or an MPI operator, else this machine.

    Args:
        hostfile: path of the hostfile.
        num_gpus: slots per host of Kubeflow, of SageMaker or SLURM without a number of their own, and of PBS or this
            machine without devices; not positive: the number of devices, at least one.
        environment: environment variables.
        root: folder with opt and etc.

    Raises:
        LaunchError: the hostfile or the scheduler's data are wrong.
    """
    if os.path.isfile(hostfile):
        return Pool(read_hostfile(hostfile), f"hostfile {hostfile}")
    if hostfile != DLTS_HOSTFILE:
        logger.warning("hostfile %s does not exist: using the hosts of the scheduler, or this machine alone", hostfile)
    devices = len(visible_devices(environment))
    slots = list(range(num_gpus if num_gpus > 0 else devices or 1))
    for probe in (Pool.from_sagemaker, Pool.from_pods, Pool.from_slurm, Pool.from_pbs):
        pool = probe(environment, slots, root)
        if pool is not None and len(pool.hosts) > 1:
            return pool
    operator = os.path.join(root, MPI_HOSTFILE.lstrip("/"))
    if os.path.isfile(operator):
        return Pool(read_hostfile(operator), operator)
    return Pool({"localhost": list(range(devices or max(num_gpus, 1)))}, "this machine")


def nodes_of_slurm(text: str) -> list[str]:
    """Return the node names of SLURM's compressed list, such as `gpu[003-007,12],login1`.

    Raises:
        LaunchError: the list is malformed.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return [name for part in parts for name in expand(part, f"SLURM's list of nodes {text!r}")]


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the devices that a CUDA program would see, in this order; empty without accelerator.

    `CUDA_VISIBLE_DEVICES` may contain indices, UUIDs and MIG names; as in CUDA, an invalid index or an empty entry
    hides itself and all later entries. `DS_ACCELERATOR=cpu` hides every device.
    """
    count = 0 if environment.get("DS_ACCELERATOR") == "cpu" else _installed()
    if count == 0 or VISIBLE not in environment:
        return [str(index) for index in range(count)]
    names: list[str] = []
    for name in (entry.strip() for entry in environment[VISIBLE].split(",")):
        is_index = name.lstrip("-").isdigit()
        if not name or (is_index and not 0 <= int(name) < count):
            break
        names.append(name)
    return names


def _installed() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def device_variable(slots: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the chosen devices, as a dict; empty if no device is visible.

    Args:
        slots: indices into `visible_devices`.
        environment: environment variables.

    Raises:
        LaunchError: a slot is out of range.
    """
    names = visible_devices(environment)
    if not names:
        return {}
    if slots and max(slots) >= len(names):
        raise LaunchError(
            f"device slots {list(slots)} were asked for, and this machine shows {len(names)}: {','.join(names)}; "
            f"lower --num_gpus, or name others by --include or {VISIBLE}"
        )
    return {VISIBLE: ",".join(names[slot] for slot in slots)}
