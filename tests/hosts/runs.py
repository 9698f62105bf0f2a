"""Runs of the `deepspeed` command on the hosts of a cluster."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.pool import PATIENCE
from tests.hosts.cluster import ROOT, Cluster, missing

STARTERS = ["ssh", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pdsh", "openmpi", "mpich", "slurm"))]
NEEDED = "DS_NEED_HOSTS"
"""Variable that makes a machine without hosts an error: `make test-all` sets it."""


def need_hosts() -> None:
    """Skip the module where no hosts can be made; fail when they must be there."""
    why = missing()
    if why and os.environ.get(NEEDED):
        raise RuntimeError(why)
    if why:
        pytest.skip(why, allow_module_level=True)


@dataclass
class Done:
    """A finished run: exit code, output, errors, seconds."""

    code: int
    out: str
    err: str
    seconds: float


class Runs:
    """Starts the launcher on a host; whatever is left of it is killed at the end."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        dropped = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environment = {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self._started: list[subprocess.Popen[str]] = []
        self.hostfile({name: 2 for name in cluster.names})

    def hostfile(self, slots: dict[str, int]) -> None:
        """Write the hostfile that every run uses."""
        text = "".join(f"{name} slots={count}\n" for name, count in slots.items())
        (self.folder / "hostfile").write_text(text)

    def command(self, script: str, flags: Sequence[str] = (), args: Sequence[str] = (), by: str = "ssh") -> list[str]:
        """The command line; the script is written into the folder."""
        (self.folder / "train.py").write_text(textwrap.dedent(script))
        now = ["--launcher_args=-I"] if by == "slurm" else []
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "-H", "hostfile", "--launcher", by, *now]
        return [*launcher, *flags, "train.py", *args]

    def start(
        self, script: str, *flags: str, args: Sequence[str] = (), by: str = "ssh", on: str = "h0", **options: Any
    ) -> subprocess.Popen[str]:
        """The running command."""
        return self.run(self.command(script, flags, args, by), on, **options)

    def run(self, command: Sequence[str], on: str = "h0", **options: Any) -> subprocess.Popen[str]:
        """Any command on a host, in the folder."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        started = self.cluster.on(on, command, cwd=self.folder, env=self.environment, text=True, **streams)
        self._started.append(started)
        return started

    def to_end(self, script: str, *flags: str, limit: float = 60 * PATIENCE, **options: Any) -> Done:
        """Run to the end."""
        since = time.monotonic()
        started = self.start(script, *flags, **options)
        out, err = started.communicate(timeout=limit)
        return Done(started.returncode, out, err, time.monotonic() - since)

    def until_said(
        self, started: subprocess.Popen[str], words: str, count: int, limit: float = 60 * PATIENCE
    ) -> list[str]:
        """Read lines of the output until `count` of them begin with `words`."""
        assert started.stdout is not None
        lines: list[str] = []
        end = time.monotonic() + limit
        while len(lines) < count and time.monotonic() < end:
            line = started.stdout.readline()
            assert line, f"it ended: {started.stderr.read() if started.stderr else ''}"
            if line.startswith(words):
                lines.append(line.strip())
        return lines

    def left(self, within: float = 5.0, hosts: Sequence[str] = ()) -> list[psutil.Process]:
        """Processes of the hosts that are still there after `within` seconds."""
        end = time.monotonic() + within
        while True:
            found = [process for name in hosts or self.cluster.names for process in self.cluster.processes(name)]
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.05)

    @staticmethod
    def kill(started: subprocess.Popen[str]) -> None:
        """Kill a command and what it has started on its host, which hold its output open."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(started.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        started.kill()

    def close(self) -> None:
        """Kill what is left."""
        for started in self._started:
            self.kill(started)
            for stream in (started.stdout, started.stderr):
                if stream is not None:
                    stream.close()
            started.wait()
        for process in self.left(0.0):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
