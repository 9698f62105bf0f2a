"""Run one command on every host of a hostfile by ssh, with its arguments unchanged (`ds_ssh`)."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.hosts import DLTS_HOSTFILE, read_hostfile
from deepspeed.launcher.multinode_runner import CONNECT_SECONDS, CONNECTING_AT_ONCE


def main(args: Sequence[str] | None = None) -> int:
    """Run `ds_ssh`: each line of output is printed after the host's name.

    Args:
        args: command line without the program's name; None: `sys.argv`.

    Returns:
        Largest exit code of the hosts; 2 if the hostfile cannot be read.
    """
    parser = argparse.ArgumentParser(prog="ds_ssh", description=__doc__)
    parser.add_argument("-f", "--hostfile", default=DLTS_HOSTFILE)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program and its arguments")
    options = parser.parse_args(args)
    try:
        hosts = list(read_hostfile(options.hostfile))
    except (DeepSpeedError, OSError) as error:
        print(f"ds_ssh: {error}", file=sys.stderr)
        return 2
    if not options.command:
        parser.error("no command was given")
    with ThreadPoolExecutor(CONNECTING_AT_ONCE) as threads:
        return max(threads.map(lambda host: _run(host, options.command), hosts))


def _run(host: str, command: list[str]) -> int:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    line = ["ssh", "-T", *options, "--", host, shlex.join(command)]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    for text, stream in ((done.stdout, sys.stdout), (done.stderr, sys.stderr)):
        stream.write("".join(f"{host}: {output}\n" for output in text.splitlines()))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
