"""Start the ranks of one node, for programs that start each node (`python -m deepspeed.launcher.launch`)."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.launcher import runner
from deepspeed.launcher.arguments import add_rank_options, parse
from deepspeed.launcher.hosts import Hosts


def encode_world(hosts: Hosts) -> str:
    """Return hosts and slots as base64 of JSON, for --world_info."""
    return base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()


def main(args: Sequence[str] | None = None) -> int:
    """Run the ranks of this node.

    Args:
        args: command line without the program's name; None: `sys.argv`.

    Returns:
        Exit code of the whole job, as of `runner.main`.

    Raises:
        LaunchError: --node_rank is out of range, or the options are invalid; before anything starts.
    """
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("--world_info", required=True, help="base64 of JSON {host: [slot, ...]}")
    add_rank_options(parser)
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(args)
    hosts: Hosts = json.loads(base64.urlsafe_b64decode(arguments.world_info))
    if not 0 <= arguments.node_rank < len(hosts):
        raise LaunchError(f"--node_rank {arguments.node_rank} is not one of 0 to {len(hosts) - 1}: {', '.join(hosts)}")
    options = parse([arguments.user_script])
    for name, value in vars(arguments).items():
        setattr(options, name, value)
    options.no_ssh = True
    return runner.run(options, hosts)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeepSpeedError as error:
        sys.exit(f"deepspeed: {error}")
