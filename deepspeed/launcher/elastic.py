"""Elastic jobs: restart on the same hosts after a rank has failed, and on the remaining hosts after a host is lost."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.elasticity import compute_elastic_config, elasticity_enabled
from deepspeed.elasticity.batch import SCHEDULER_VIEW, read_block
from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.controller import Control
from deepspeed.launcher.exit_codes import REQUEUE
from deepspeed.launcher.host_state import HostState
from deepspeed.launcher.hosts import is_this_machine
from deepspeed.launcher.job import Elastic
from deepspeed.version import __version__

RETRY_SECONDS = 3.0
"""Time between two attempts to reach a lost host."""
GROW_AFTER_SECONDS = 10.0
"""Minimum run time of an attempt before it is stopped for a larger one."""
WAIT_SECONDS = 1800.0
"""Maximum wait for hosts if there are too few."""
MOST_RESTARTS = 100
MOST_ERRORS_IN_A_ROW = 3
"""Maximum number of consecutive attempts that end with a script's error, against which a restart does not help."""


class ElasticControl(Control):
    """Controller of an elastic job: runs attempts, each on the hosts that are available."""

    def run_attempts(self) -> tuple[int, str]:
        """Run attempts until success, a stop signal, or `MOST_RESTARTS` or `MOST_ERRORS_IN_A_ROW` is reached.

        Returns:
            Exit code and report of the last attempt.

        Raises:
            LaunchError: too few hosts for `WAIT_SECONDS`.
        """
        self._slots = {peer.name: list(peer.slots) for peer in self.peers}
        self._began = 0.0
        self._growing = False
        self._world = 0
        self.wait(lambda: all(peer.ready or peer.lost for peer in self.peers))
        if len(self.peers) > 1 and is_this_machine(self.peers[0].name):
            logger.info("this host runs the launcher and ranks: the run survives the loss of any other host")
        self.loop.later(RETRY_SECONDS, self._look_for_hosts)
        errors = number = 0
        while True:
            members = self._form()
            self._began, self._growing, self._world = time.monotonic(), False, sum(len(p.slots) for p in members)
            code, report = self.one_attempt(members, number)
            stopped = self.attempt is None or self.attempt.stopped_by is not None
            grown = code == REQUEUE and self._growing
            failed = [] if self.attempt is None else self.attempt.failures
            own_error = not grown and not any(peer.lost for peer in members) and code < 128 and bool(failed)
            errors = errors + 1 if own_error else 0
            if code == 0 or stopped or errors >= MOST_ERRORS_IN_A_ROW or number >= MOST_RESTARTS:
                return code, report
            number += 1
            why = "hosts came back" if self._growing else (report.splitlines() or ["a host was lost"])[0]
            logger.info("attempt %d follows: %s", number, why.removeprefix("[deepspeed] "))

    def _form(self) -> list[HostState]:
        """Wait for enough hosts; return the hosts of the next attempt, and set their `slots` to the slots in use.

        Raises:
            LaunchError: too few hosts for `WAIT_SECONDS`.
        """
        elastic = self.job.elastic or Elastic(1, len(self.peers))
        end, logged = time.monotonic() + WAIT_SECONDS, False
        while True:
            there = [peer for peer in self.peers if peer.ready and not peer.lost][: elastic.most]
            size = self._largest(elastic.valid, sum(len(self._slots[peer.name]) for peer in there))
            if len(there) >= elastic.fewest and size > 0:
                return self._share(there, size)
            if time.monotonic() > end:
                raise LaunchError(f"{len(there)} host(s) for {WAIT_SECONDS:g} s; the run needs {elastic.fewest}")
            if not logged:
                logged = True
                logger.info("%d host(s), and %d are needed: waiting", len(there), elastic.fewest)
            moment = time.monotonic() + 0.2
            self.wait(lambda moment=moment: time.monotonic() >= moment)

    def _share(self, there: list[HostState], size: int) -> list[HostState]:
        members: list[HostState] = []
        for peer in there:
            peer.slots = self._slots[peer.name][:size]
            size -= len(peer.slots)
            if peer.slots:
                members.append(peer)
        return members

    def _look_for_hosts(self) -> None:
        """Every `RETRY_SECONDS`, restart lost hosts' agents; if more ranks are possible, request a save (SIGUSR1)."""
        self.loop.later(RETRY_SECONDS, self._look_for_hosts)
        for peer in self.peers:
            if peer.lost:
                peer.reset()
                self.starter.restart(self, peer)
        elastic, attempt = self.job.elastic, self.attempt
        if elastic is None or attempt is None or attempt.over or attempt.failures or self._growing:
            return
        there = [peer for peer in self.peers if peer.ready and not peer.lost][: elastic.most]
        larger = self._largest(elastic.valid, sum(len(self._slots[peer.name]) for peer in there)) > self._world
        if larger and time.monotonic() - self._began > GROW_AFTER_SECONDS:
            self._growing = True
            for peer in attempt.members:
                peer.send("signal", number=int(signal.SIGUSR1))

    @staticmethod
    def _largest(valid: Sequence[int], there: int) -> int:
        """Return the largest number in `valid` up to `there`, or 0; if `valid` is empty, return `there`."""
        return max((size for size in valid if size <= there), default=0) if valid else there


def valid_sizes(arguments: Sequence[str], environment: dict[str, str]) -> tuple[int, ...]:
    """Return the numbers of ranks that the `elasticity` section allows; empty: any number.

    Args:
        arguments: arguments of the script; the first JSON file with an enabled `elasticity` section is used.
        environment: variables; used if there is no such file: the section in the scheduler's variable.

    Raises:
        ValueError: a file or the variable is not valid JSON, or the section is wrong.
    """
    for word in [part.partition("=")[2] or part for part in arguments]:
        config = json.loads(Path(word).read_text()) if word.endswith(".json") and Path(word).is_file() else None
        if isinstance(config, dict) and elasticity_enabled(config):
            block: dict[str, Any] = config["elasticity"]
            break
    else:
        seen = environment.get(SCHEDULER_VIEW)
        if not seen:
            return ()
        block = {**json.loads(seen), "enabled": True}
    # The sizes of version 0.2 too do not depend on the world that is asked for.
    read = read_block(block)
    world = 0 if read.version == 0.1 else read.gpus_per_node
    _, counts, *_ = compute_elastic_config({"elasticity": block}, __version__, world)
    return tuple(count * read.model_parallel for count in counts)
