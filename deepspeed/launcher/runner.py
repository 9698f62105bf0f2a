"""Main program of the `deepspeed` command: selects hosts and devices, and runs the job by an agent on each host."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.foundation.log import logger
from deepspeed.foundation.progress_line import VARIABLE as PROGRESS
from deepspeed.launcher import hosts as launcher_hosts
from deepspeed.launcher import multinode_runner, node_rendezvous
from deepspeed.launcher.agent import own_folder
from deepspeed.launcher.arguments import DLTS_HOSTFILE, parse, program
from deepspeed.launcher.controller import Control
from deepspeed.launcher.elastic import ElasticControl, valid_sizes
from deepspeed.launcher.environment import DEEPSPEED_ENVIRONMENT_NAME, EXPORT_ENVS, declared, exported_variables
from deepspeed.launcher.foreground import run_behind
from deepspeed.launcher.hosts import Hosts, fetch_hostfile, is_this_machine, parse_inclusion_exclusion, select
from deepspeed.launcher.job import Elastic, Job
from deepspeed.launcher.rank_logs import terminal_size

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "PDSH_MAX_FAN_OUT",
    "exported_variables",
    "fetch_hostfile",
    "main",
    "parse_inclusion_exclusion",
]

PDSH_MAX_FAN_OUT = 1024
NO_SSH_PORT = 29500
"""Default rendezvous port of --no_ssh runs; --master_port overrides it."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the `deepspeed` command. With --autotuning, another program replaces this process.

    Args:
        args: command line without the program's name; None: `sys.argv`.

    Returns:
        Exit code: 0; that of the rank that failed first (128 + N for signal N); 1 if a host was lost or the launcher's
        process was killed; 2 if the job could not be started, which is printed.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        options = parse(arguments)
        if options.autotuning:
            _check(options)
            # The planner's autotuner takes the place of this process.
            words = json.dumps(own_options(arguments[: len(arguments) - len(options.user_args) - 1]))
            hosts, module = json.dumps(choose_hosts(options)), str(int(options.module))
            command = [sys.executable, "-m", "deepspeed.planner.autotuner", options.autotuning, hosts, words, module]
            sys.stdout.flush()
            os.execv(sys.executable, [*command, options.user_script, *options.user_args])
        return run(options)
    except DeepSpeedError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, known: Hosts | None = None) -> int:
    """Run the job of parsed options; return the exit code, as `main` does.

    Args:
        options: result of `arguments.parse`.
        known: hosts with their slots; None: those of the hostfile, the scheduler or this machine.

    Raises:
        LaunchError: the options, the hostfile or the machine do not allow the job.
    """
    _check(options)
    logger.setLevel(logging.ERROR if options.quiet else options.log_level.upper())
    pool = _pool(options) if known is None else launcher_hosts.Pool(known, "--world_info")
    hosts = _narrow(options, pool)
    every = options.no_ssh or pool.own is not None  # each host runs this command
    here = not every and not options.force_multi and len(hosts) == 1 and is_this_machine(next(iter(hosts)))
    job = _job(options, hosts, here, pool)
    kind = Control if job.elastic is None else ElasticControl
    if every:
        own = options.node_rank if options.node_rank >= 0 else pool.own or 0
        # What the hosts of one --no_ssh job have in common, and another job has not.
        common = [job.program[-1], job.arguments, list(job.slots.items()), job.address, job.port]
        fingerprint = hashlib.sha256(json.dumps(common).encode()).hexdigest()[:32]
        return run_behind(lambda front: node_rendezvous.run(job, own, fingerprint, front))
    if here:
        return run_behind(lambda front: kind(job, multinode_runner.ForkStarter(), front).run())
    settings = multinode_runner.StarterSettings(shlex.split(options.launcher_args), options.ssh_port)
    starter = multinode_runner.make(options.launcher or pool.launcher, settings)
    if job.elastic is not None and starter.name != "ssh":
        raise LaunchError(f"--elastic_training starts lost hosts again, and {starter.name} cannot: use ssh or --no_ssh")
    return run_behind(lambda front: kind(job, starter, front).run())


def _check(options: argparse.Namespace) -> None:
    if not options.elastic_training and (options.min_elastic_nodes >= 0 or options.max_elastic_nodes >= 0):
        raise LaunchError("--min_elastic_nodes and --max_elastic_nodes need --elastic_training")
    if options.user_script is None:
        raise LaunchError("no script was given; usage: deepspeed [options] script.py [its arguments]")
    runs_a_file = not options.module and not options.no_python
    if runs_a_file and not Path(options.user_script).exists():
        raise LaunchError(f"script {options.user_script!r} does not exist in {own_folder()}")
    if (options.include or options.exclude) and (options.num_nodes > 0 or options.num_gpus > 0):
        raise LaunchError("--include and --exclude already select devices; leave --num_nodes and --num_gpus out")
    if options.no_ssh and (options.node_rank < 0 or not options.master_addr):
        raise LaunchError("--no_ssh needs --node_rank N and --master_addr ADDRESS of node 0, on every node")
    if options.heartbeat <= 0 or options.grace < 0:
        raise LaunchError(f"--heartbeat {options.heartbeat:g} and --grace {options.grace:g} are seconds above zero")
    if options.master_port > 65535:
        raise LaunchError(f"--master_port {options.master_port} is not a port: ports end at 65535")


def own_options(words: Sequence[str]) -> list[str]:
    """Return command-line words without --autotuning and its value."""
    flag = "--autotuning"
    remaining, skip = list[str](), False
    for word in words:
        if skip or word == flag:
            skip = word == flag and not skip
        elif not word.startswith(f"{flag}="):
            remaining.append(word)
    return remaining


def choose_hosts(options: argparse.Namespace) -> Hosts:
    """Return the hosts and slots that the options select from hostfile, scheduler or this machine.

    Raises:
        LaunchError: the options do not fit the hosts, or the hostfile or the scheduler's data are wrong.
    """
    return _narrow(options, _pool(options))


def _pool(options: argparse.Namespace) -> launcher_hosts.Pool:
    pool = launcher_hosts.find(options.hostfile, options.num_gpus)
    if options.no_ssh and len(pool.hosts) == 1 and options.num_nodes > 1:  # containers without any list of hosts
        slots = next(iter(pool.hosts.values()))
        return launcher_hosts.Pool({f"node{index}": slots for index in range(options.num_nodes)}, "--num_nodes")
    return pool


def _narrow(options: argparse.Namespace, pool: launcher_hosts.Pool) -> Hosts:
    hosts = select(pool.hosts, options.include, options.exclude)
    if options.num_nodes > len(hosts):
        named = f"the hostfile {options.hostfile}" if pool.source == "this machine" else pool.source
        raise LaunchError(f"--num_nodes {options.num_nodes}, but {named} gives {list(hosts)}")
    if options.num_nodes > 0:
        hosts = dict(list(hosts.items())[: options.num_nodes])
    if options.num_gpus > 0:
        short = {host: len(slots) for host, slots in hosts.items() if len(slots) < options.num_gpus}
        if short:
            raise LaunchError(f"--num_gpus {options.num_gpus}, but there are only {short}")
        hosts = {host: slots[: options.num_gpus] for host, slots in hosts.items()}
    return hosts


def _job(options: argparse.Namespace, hosts: Hosts, here: bool, pool: launcher_hosts.Pool) -> Job:
    every = options.no_ssh or pool.own is not None
    known = set(hosts) | set(pool.hosts)
    exports = declared(options.export, several_hosts=not here and not every, hosts=known)
    unknown = sorted({host for _, _, host in exports if host is not None} - known)
    if unknown:
        raise LaunchError(f"a variable is declared for {', '.join(unknown)}, which the job does not use: {list(hosts)}")
    if options.progress:
        exports = [*exports, (PROGRESS, "1", None)]
    port = options.master_port if options.master_port > 0 else NO_SSH_PORT if every else 0
    return Job(
        slots=hosts,
        program=program(options, []),
        arguments=list(options.user_args),
        folder=own_folder(),
        exports=exports,
        address=options.master_addr or pool.address,
        port=port,
        heartbeat=options.heartbeat,
        elastic=_elastic(options, hosts),
        grace=options.grace,
        local_rank=not options.no_local_rank,
        venv_script=os.path.abspath(options.venv_script) if options.venv_script else "",
        logs=os.path.abspath(options.enable_each_rank_log) if options.enable_each_rank_log else "",
        prefix=bool(options.enable_each_rank_log),
        bind_cores=options.bind_cores_to_rank,
        bind_core_list=options.bind_core_list,
        terminals=(terminal_size(1), terminal_size(2)),
        pid_of=os.getpid() if options.save_pid else 0,
    )


def _elastic(options: argparse.Namespace, hosts: Hosts) -> Elastic | None:
    if not options.elastic_training:
        return None
    fewest = options.min_elastic_nodes if options.min_elastic_nodes > 0 else 1
    most = options.max_elastic_nodes if options.max_elastic_nodes > 0 else len(hosts)
    if not fewest <= most or fewest > len(hosts):
        raise LaunchError(f"--min_elastic_nodes {fewest}, --max_elastic_nodes {most}, and there are {len(hosts)} hosts")
    return Elastic(fewest, most, valid_sizes(options.user_args, dict(os.environ)))


if __name__ == "__main__":
    sys.exit(main())
