"""Starts real processes for a snippet that communicates, with the variables of a launcher of one's choice.

They have imported torch when they begin, and nothing of the package unless it is asked for.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.fork_server import ForkServer, servers_of
from tests.harness.fresh import IMPORTS
from tests.harness.pool import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCHERS = (
    "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "SM_", "AZ", "TORCHELASTIC", "PET_",
    "MV2_", "JSM_", "LSB_", "PALS_", "MPI_LOCAL", "JOB_COMPLETION", "GROUP_", "ROLE_", "NODE_RANK", "DS_JOB",
)  # fmt: skip

ABSENT = ("native library:", "no shared memory among")

PRELUDE = """
import os, signal, sys, time, warnings
warnings.filterwarnings("error", module="deepspeed")
import torch
torch.set_num_threads(1)
import deepspeed.comm as dist

def meet(place):
    # Without a process group.
    folder = os.environ["START_LINE"]
    open(f"{folder}/{place}-{os.getpid()}", "w").close()
    while sum(name.startswith(f"{place}-") for name in os.listdir(folder)) < int(os.environ["STARTERS"]):
        time.sleep(0.01)

meet("start")  # importing torch may take ranks of one run seconds apart, more than their timeout
"""


@dataclass
class Ended:
    """How one rank ended. Times are seconds of the machine's monotonic clock."""

    code: int
    out: str
    err: str
    begun: float
    last_word: float  # when it last wrote to stderr
    ended: float

    @property
    def complaints(self) -> list[str]:
        """The lines of stderr but those that say that the native library is not there."""
        return [line for line in self.err.splitlines() if not any(words in line for words in ABSENT)]


def torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun and this package's launcher tell each rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def run_ranks(
    snippet: str,
    world: int = 1,
    env: Callable[[int, int, int], Mapping[str, str]] = torchrun,
    limit: float = 60.0,
    imported: Sequence[str] = IMPORTS,
    **extra: str,
) -> list[Ended]:
    """Run `snippet` on `world` ranks.

    Args:
        snippet: Python; `dist` is deepspeed.comm.
        world: number of processes.
        env: (rank, world, port) → variables; those of other launchers are taken out of the environment.
        limit: seconds after which whatever runs is killed, and ends with code -9.
        imported: modules that they have imported when they begin.
        extra: variables for every rank.
    """
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    clean |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **extra}
    with tempfile.TemporaryDirectory() as folder:
        clean |= {"START_LINE": folder, "STARTERS": str(world)}
        ranks = [
            _Rank(server, snippet, clean | dict(env(rank, world, port)), Path(folder, str(rank)))
            for rank, server in enumerate(servers_of(world, imported))
        ]
        limit += time.monotonic()
        while time.monotonic() < limit and any([rank.look() for rank in ranks]):
            time.sleep(0.02)
        return [rank.end() for rank in ranks]


class _Rank:
    def __init__(self, server: ForkServer, snippet: str, env: Mapping[str, str], files: Path) -> None:
        self.out, self.err = files.with_suffix(".out"), files.with_suffix(".err")
        self.begun = self.last_word = self.ended = time.monotonic()
        self.said = 0
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = server.start(PRELUDE + textwrap.dedent(snippet), env, out.fileno(), err.fileno())

    def look(self) -> bool:
        """Note how far it is; True while it runs."""
        now, said = time.monotonic(), self.err.stat().st_size
        if said > self.said:
            self.said, self.last_word = said, now
        if self.process.poll() is None:
            self.ended = now
        return self.process.returncode is None

    def end(self) -> Ended:
        """Kill it if it still runs."""
        self.process.kill()
        code = self.process.wait()
        return Ended(code, self.out.read_text(), self.err.read_text(), self.begun, self.last_word, self.ended)
