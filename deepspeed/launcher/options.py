"""The options of the `deepspeed` command, those that also reach the supervisor of each node marked as such."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.pool import DLTS_HOSTFILE

_LEVELS = ["debug", "info", "warning", "error", "critical"]


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how each rank is started."""
    add = parser.add_argument
    add("--module", action="store_true", help="run the script as a module, as `python -m` does")
    add("--no_python", action="store_true", help="run the script itself, without `python` before it")
    add("--no_local_rank", action="store_true", help="do not add --local_rank=N after the script")
    add("--save_pid", action="store_true", help="keep the ranks' process ids in <launcher pid>.deepspeed")
    add(
        "--enable_each_rank_log",
        metavar="DIR",
        default="",
        help="where each rank's log goes; shown lines name their rank",
    )
    add("--bind_cores_to_rank", action="store_true", help="give each rank its own share of the CPU cores")
    add("--bind_core_list", metavar="LIST", default="", help="the cores to share out, like 0-7,16-23 (default: all)")
    add("--log_level", default="info", choices=_LEVELS)
    add("-q", "--quiet", action="store_true", help="the launcher says nothing but errors")


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    """The options of the `deepspeed` command."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Run a training script with one process per device.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-H",
        "--hostfile",
        default=DLTS_HOSTFILE,
        help="lines `name slots=N`; absent: what SLURM, PBS, SageMaker or an MPI operator says, or this machine",
    )
    add("-i", "--include", default="", metavar="SLOTS", help="hosts and slots to use: host1@host2:0,2-3")
    add("-e", "--exclude", default="", metavar="SLOTS", help="hosts and slots to leave out, in the same form")
    add("--num_nodes", type=_count, default=-1, help="use the first N hosts of the hostfile")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks per node; N gloo ranks on a CPU machine")
    add("--master_addr", default="", help="address of the first node")
    add("--master_port", type=int, default=-1, help="default: a free port; 29500 with --no_ssh")
    add("--node_rank", type=int, default=-1, help="which node this is, with --no_ssh")
    add("--no_ssh", action="store_true", help="start only this node's ranks; the command is run on every node")
    add("--no_ssh_check", action="store_true", help="accepted: every host is tried by starting its agent")
    add("--ssh_port", type=int, default=None)
    add("--launcher", default="", help="what starts an agent per host: ssh pdsh openmpi mpich impi mvapich slurm")
    add("--launcher_args", default="", help="further arguments for it, in one string")
    add("--force_multi", action="store_true", help="use the launcher for a single host too")
    add("--venv_script", default="", help="shell script that is sourced before each rank")
    add(
        "--export",
        action="append",
        default=[],
        metavar="NAME[@HOST][=VALUE]",
        help="a variable for the ranks (of a host)",
    )
    add("--heartbeat", type=float, default=15.0, metavar="S", help="a host that is silent for so long is lost")
    add("--grace", type=float, default=30.0, metavar="S", help="time to save after SIGTERM, SIGINT, SIGUSR1 or SIGHUP")
    add("--min_elastic_nodes", type=int, default=-1)
    add("--max_elastic_nodes", type=int, default=-1)
    add("--elastic_training", action="store_true")
    add("--autotuning", default="", choices=["", "tune", "run"])
    add("--progress", action="store_true", help="rank 0 shows a live line: step, loss, rate, time left, memory")
    add_rank_options(parser)
    add("user_script", nargs="?", help="the training script")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def _count(text: str) -> int:
    """A number of nodes; the text form MIN:MAX of elastic runs counts as its maximum."""
    return int(text.rpartition(":")[2])


def program(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """The command line of a rank with these arguments of the script."""
    if options.module and options.no_python:
        raise LaunchError("--module and --no_python exclude each other: a module is run by python; give one of them")
    python = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    return [*python, options.user_script, *arguments]


def set_log_level(options: argparse.Namespace) -> None:
    """Apply --log_level and --quiet to the launcher's own lines."""
    logger.setLevel(logging.ERROR if options.quiet else options.log_level.upper())
