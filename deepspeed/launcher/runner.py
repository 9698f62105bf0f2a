"""The `deepspeed` command: finds hosts and devices, then starts the ranks here or on all nodes."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deepspeed.errors import DeepSpeedError, LaunchError, NotAvailableError
from deepspeed.foundation.log import logger
from deepspeed.launcher import launch, multinode
from deepspeed.launcher.devices import visible_devices
from deepspeed.launcher.hostfile import Hosts, read_hostfile, select
from deepspeed.launcher.multinode import PDSH_MAX_FAN_OUT
from deepspeed.launcher.options import DLTS_HOSTFILE, parse, program, rank_options, set_log_level

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "PDSH_MAX_FAN_OUT", "main"]

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]
"""Variables whose names begin so go to every node."""
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""File of NAME=VALUE lines, in the home or the current directory, that go to every node."""
MULTI_NODE_PORT = 29500


def main(args: Sequence[str] | None = None) -> int:
    """Run the `deepspeed` command.

    Args:
        args: command line; None takes the process's own.

    Returns:
        The exit code: that of the rank that failed first, or 2 when nothing could be started.
    """
    try:
        return run(parse(args))
    except DeepSpeedError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Start what the options ask for.

    Returns:
        The exit code of the rank of this node that failed first, or 0.

    Raises:
        LaunchError: the options, the hostfile or the machine do not allow it.
        NotAvailableError: the options ask for what this version does not have.
    """
    _check(options)
    set_log_level(options)
    hosts = choose_hosts(options)
    here = options.no_ssh or (len(hosts) == 1 and not options.force_multi)
    port = options.master_port
    if port < 0:
        port = free_port() if len(hosts) == 1 else MULTI_NODE_PORT
    addr = options.master_addr or ("127.0.0.1" if here else _address_of_first_host(hosts, options))
    place = [f"--master_addr={addr}", f"--master_port={port}", f"--world_info={launch.encode_world(hosts)}"]
    supervisor = [*place, *rank_options(options), options.user_script, *options.user_args]
    if here:
        return launch.main([f"--node_rank={max(options.node_rank, 0)}", *supervisor])
    job = multinode.Job(
        hosts=hosts,
        exports={**exported_variables(), "MASTER_ADDR": addr, "MASTER_PORT": str(port)},
        supervisor=supervisor,
        program=program(options, options.user_args),
        launcher_args=shlex.split(options.launcher_args),
        ssh_port=options.ssh_port,
        venv_script=options.venv_script,
    )
    _replace_process(*multinode.build(options.launcher, job))


def _check(options: argparse.Namespace) -> None:
    if options.elastic_training or options.min_elastic_nodes >= 0 or options.max_elastic_nodes >= 0:
        raise NotAvailableError("--elastic_training is not available yet; start again from a checkpoint instead")
    if options.autotuning:
        raise NotAvailableError(f"--autotuning {options.autotuning} is not available yet; leave the flag out")
    if options.user_script is None:
        raise LaunchError("no script was given; usage: deepspeed [options] script.py [its arguments]")
    runs_a_file = not options.module and not options.no_python
    if runs_a_file and not Path(options.user_script).exists():
        raise LaunchError(f"script {options.user_script!r} does not exist in {Path.cwd()}")
    if (options.include or options.exclude) and (options.num_nodes > 0 or options.num_gpus > 0):
        raise LaunchError("--include and --exclude already say how many; leave --num_nodes and --num_gpus out")
    if options.no_ssh and (options.node_rank < 0 or not options.master_addr):
        raise LaunchError("--no_ssh needs --node_rank N and --master_addr ADDRESS of node 0, on every node")


def choose_hosts(options: argparse.Namespace) -> Hosts:
    """The hosts and slots that the options and the hostfile name; without hostfile those of this machine."""
    if os.path.isfile(options.hostfile):
        pool = read_hostfile(options.hostfile)
    else:
        if options.hostfile != DLTS_HOSTFILE:
            logger.warning("hostfile %s does not exist: using this machine alone", options.hostfile)
        pool = {"localhost": _local_slots(options.num_gpus)}
    hosts = select(pool, options.include, options.exclude)
    if options.num_nodes > len(hosts):
        raise LaunchError(f"--num_nodes {options.num_nodes}, but the hostfile {options.hostfile} gives {list(hosts)}")
    if options.num_nodes > 0:
        hosts = dict(list(hosts.items())[: options.num_nodes])
    if options.num_gpus > 0:
        short = {host: len(slots) for host, slots in hosts.items() if len(slots) < options.num_gpus}
        if short:
            raise LaunchError(f"--num_gpus {options.num_gpus}, but there are only {short}")
        hosts = {host: slots[: options.num_gpus] for host, slots in hosts.items()}
    return hosts


def _local_slots(num_gpus: int) -> list[int]:
    devices = len(visible_devices())
    return list(range(devices or max(num_gpus, 1)))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _address_of_first_host(hosts: Hosts, options: argparse.Namespace) -> str:
    """What the first host says its address is; this also shows early whether ssh works."""
    host = next(iter(hosts))
    if options.no_ssh_check:
        return host
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    command = ["ssh", "-o", "PasswordAuthentication=no", *port, host, "hostname", "-I"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise LaunchError(
            f"{shlex.join(command)} does not work: {str(reason).strip()}; set up ssh without password, "
            "give --master_addr, or run the command on every node with --no_ssh"
        ) from error
    return (answer.stdout.split() or [host])[0]


def exported_variables() -> dict[str, str]:
    """The variables that go to every node: by prefix from this environment, and by name from the environment files."""
    exported = {name: value for name, value in os.environ.items() if name.startswith(tuple(EXPORT_ENVS))}
    for directory in (Path.home(), Path.cwd()):
        path = directory / DEEPSPEED_ENVIRONMENT_NAME
        if path.is_file():
            exported.update(_read_environment_file(path))
    return exported


def _read_environment_file(path: Path) -> dict[str, str]:
    variables: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(f"{path}:{number}: {text!r} is not of the form NAME=VALUE")
        variables[name] = value
    return variables


def _replace_process(command: list[str], variables: dict[str, str]) -> NoReturn:
    """Become the launcher of the nodes: signals and the exit code are then its own."""
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"{command[0]!r} is not installed; choose another --launcher, or run on every node with --no_ssh"
        )
    logger.info("%s", shlex.join(command))
    sys.stdout.flush()
    os.execvpe(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    sys.exit(main())
