"""Command-line arguments of `deepspeed`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepspeed.errors import LaunchError
from deepspeed.launcher.hosts import DLTS_HOSTFILE

_LEVELS = ["debug", "info", "warning", "error", "critical"]


def add_rank_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for the start of each rank to a parser or a group of a parser."""
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
    add("--log_level", default="info", choices=_LEVELS, help="how much the launcher itself says")
    add("-q", "--quiet", action="store_true", help="the launcher says nothing but errors")


_BY_TASK = """\
by task:
  begin                        ds_new FOLDER (writes a script and a JSON that run)
  train on two ranks           deepspeed --num_gpus 2 train.py
  on some devices              deepspeed -i localhost:0,2-3 train.py
  on several hosts             deepspeed -H hostfile train.py
  ... where ssh is not allowed deepspeed --no_ssh --node_rank N --master_addr NODE0 -H hostfile train.py
  see how far it is            deepspeed --progress train.py; ds_top RUN from another terminal
  find what failed             deepspeed --enable_each_rank_log DIR train.py; ds_bundle for a bug report
  stop and go on               Ctrl-C, once: saves where the script has saved before; --grace S is the time for it
  check a configuration        ds_config explain ds_config.json --world 8
  look at a checkpoint         ds_checkpoint ls FOLDER
  look at token files          ds_data look PREFIX; ds_data mixture PREFIX ... --tokens N
  see what is installed        ds_report
  find the best plan           deepspeed --autotuning run train.py --deepspeed_config FILE.json; ds_plan
  measure                      ds_bench (collectives), ds_io (disks)
  serve a trained model        ds_serve
  make a model smaller         ds_compress
Every command has --help; the pages are in docs/."""


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        usage="deepspeed [options] script.py [its arguments]",
        description="Run a training script with one process per device.",
        epilog=_BY_TASK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("which devices and hosts").add_argument
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
    add = parser.add_argument_group("several hosts").add_argument
    add("--master_addr", default="", help="address of the first node")
    add("--master_port", type=int, default=-1, help="default: a free port; 29500 with --no_ssh")
    add("--node_rank", type=int, default=-1, help="which node this is, with --no_ssh")
    add("--no_ssh", action="store_true", help="start only this node's ranks; the command is run on every node")
    add("--no_ssh_check", action="store_true", help="accepted: every host is tried by starting its agent")
    add("--ssh_port", type=int, default=None, help="of every host; default: what ssh uses")
    add("--launcher", default="", help="what starts an agent per host: ssh pdsh openmpi mpich impi mvapich slurm")
    add("--launcher_args", default="", help="further arguments for it, in one string")
    add("--force_multi", action="store_true", help="use the launcher for a single host too")
    add("--heartbeat", type=float, default=15.0, metavar="S", help="a host that is silent for so long is lost")
    add = parser.add_argument_group("stopping and going on").add_argument
    add("--grace", type=float, default=30.0, metavar="S", help="time to save after SIGTERM, SIGINT, SIGUSR1 or SIGHUP")
    add("--elastic_training", action="store_true", help="go on with the hosts that are left, or come back")
    add("--min_elastic_nodes", type=int, default=-1, help="fewest hosts of an elastic run; default: 1")
    add("--max_elastic_nodes", type=int, default=-1, help="most hosts; default: all of the hostfile")
    add(
        "--autotuning",
        default="",
        choices=["", "tune", "run"],
        help="find the best plan for the script by its JSON's `autotuning` block; run: then start it so",
    )
    ranks = parser.add_argument_group("the ranks, and what they print")
    ranks.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME[@HOST][=VALUE]",
        help="a variable for the ranks (of a host)",
    )
    ranks.add_argument("--venv_script", default="", help="shell script that is sourced before each rank")
    ranks.add_argument(
        "--progress", action="store_true", help="rank 0 shows a live line: step, loss, rate, time left, memory"
    )
    add_rank_options(ranks)
    parser.add_argument("user_script", nargs="?", help="the training script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def _count(text: str) -> int:
    """Parse a number of nodes, or a range MIN:MAX of elastic runs, and return the maximum."""
    return int(text.rpartition(":")[2])


def program(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a rank, as a list; `arguments` are those of the script.

    Raises:
        LaunchError: `options` have both --module and --no_python.
    """
    if options.module and options.no_python:
        raise LaunchError("--module and --no_python exclude each other: a module is run by python; give one of them")
    python = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    return [*python, options.user_script, *arguments]
