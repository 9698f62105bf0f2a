"""Starts the ranks of one node; `python -m deepspeed.launcher.launch` is what the runner starts on each node."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.children import Guard, Rank
from deepspeed.launcher.devices import VISIBLE, visible_devices
from deepspeed.launcher.hostfile import Hosts
from deepspeed.launcher.options import add_rank_options, program, set_log_level
from deepspeed.launcher.supervise import Supervisor


@dataclass(frozen=True)
class Node:
    """The place of this node in the world.

    Args:
        hosts: every host with its slots.
        index: which of them this is.
    """

    hosts: Hosts
    index: int

    @property
    def slots(self) -> list[int]:
        """Device slots of this node, one per local rank."""
        return list(self.hosts.values())[self.index]

    @property
    def first_rank(self) -> int:
        """Global rank of local rank 0."""
        return sum(map(len, list(self.hosts.values())[: self.index]))

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return sum(map(len, self.hosts.values()))


def encode_world(hosts: Hosts) -> str:
    """Hosts and slots as one word for a command line."""
    return base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()


def main(args: Sequence[str] | None = None) -> int:
    """Run the ranks of this node.

    Args:
        args: command line; None takes the process's own.

    Returns:
        0, or the exit code of the rank that failed first.
    """
    options = _parse(args)
    set_log_level(options)
    hosts: Hosts = json.loads(base64.urlsafe_b64decode(options.world_info))
    if not 0 <= options.node_rank < len(hosts):
        raise LaunchError(f"--node_rank {options.node_rank} is not one of 0 to {len(hosts) - 1}: {', '.join(hosts)}")
    node = Node(hosts, options.node_rank)
    shared = {"MASTER_ADDR": options.master_addr, "MASTER_PORT": str(options.master_port), **_devices(node)}
    ranks: list[Rank] = []
    guard = Guard()
    try:
        for local_rank in range(len(node.slots)):
            ranks.append(_start(options, node, local_rank, shared))
            guard.watch(ranks[-1])
        with _pid_file(ranks) if options.save_pid else contextlib.nullcontext():
            return Supervisor(ranks, node.world_size).run()
    finally:
        for rank in ranks:
            if rank.exit_code is None:
                rank.kill_group()
        guard.dismiss()


def _parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("--world_info", required=True, help="base64 of JSON {host: [slot, ...]}")
    add_rank_options(parser)
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def _devices(node: Node) -> dict[str, str]:
    """The variable that shows each local rank the node's chosen devices: slots count within what is visible here."""
    names = visible_devices()
    if not names:
        hint = "; --num_gpus N starts N ranks" if node.world_size == 1 else ""
        logger.info("%d rank(s) on the CPU with gloo: this machine has no accelerator%s", len(node.slots), hint)
        return {}
    if max(node.slots) >= len(names):
        raise LaunchError(
            f"device slots {node.slots} were asked for, and this machine shows {len(names)}: {','.join(names)}; "
            f"lower --num_gpus, or name others by --include or {VISIBLE}"
        )
    chosen = ",".join(names[slot] for slot in node.slots)
    logger.info("%d rank(s), local rank i on the i-th of %s=%s", len(node.slots), VISIBLE, chosen)
    return {VISIBLE: chosen}


def _start(options: argparse.Namespace, node: Node, local_rank: int, shared: dict[str, str]) -> Rank:
    number = node.first_rank + local_rank
    cores = parse_cores(options.bind_core_list)
    share = len(cores) // len(node.slots)
    if options.bind_cores_to_rank and share == 0:
        raise LaunchError(f"{len(node.slots)} ranks cannot each have one of the {len(cores)} cores {cores}")
    environment = {
        "OMP_NUM_THREADS": str(max(1, share)),
        **os.environ,
        **shared,
        "WORLD_SIZE": str(node.world_size),
        "RANK": str(number),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_SIZE": str(len(node.slots)),
        "CROSS_RANK": str(node.index),
        "CROSS_SIZE": str(len(node.hosts)),
    }
    added = [] if options.no_local_rank else [f"--local_rank={local_rank}"]
    log_path = None
    if options.enable_each_rank_log:
        log_path = Path(options.enable_each_rank_log) / f"rank{number}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
    command = program(options, [*added, *options.user_args])
    own_cores = cores[local_rank * share : (local_rank + 1) * share] if options.bind_cores_to_rank else None
    try:
        return Rank(number, command, environment, own_cores, log_path)
    except OSError as error:
        raise LaunchError(f"rank {number}: {command[0]!r} cannot be started: {error}") from error


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


@contextlib.contextmanager
def _pid_file(ranks: Sequence[Rank]) -> Iterator[None]:
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    path.write_text(json.dumps([rank.process.pid for rank in ranks]))
    try:
        yield
    finally:
        path.unlink()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeepSpeedError as error:
        sys.exit(f"deepspeed: {error}")
