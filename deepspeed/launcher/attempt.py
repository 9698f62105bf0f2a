"""One attempt to run a job: the agents of all hosts start the ranks, and the first failure ends all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any

from deepspeed.foundation.log import logger
from deepspeed.launcher.environment import nodes_of
from deepspeed.launcher.event_loop import Loop
from deepspeed.launcher.exit_codes import LOST_ANOTHER, REQUEUE
from deepspeed.launcher.host_state import Failure, HostState
from deepspeed.launcher.job import Job

SETTLE_SECONDS = 1.0
"""Time after the first failure in which the other ranks can end by themselves with their own report."""
GRACE_SECONDS = 3.0
"""Time between SIGTERM and SIGKILL to ranks left over after a failure."""

_STOPS = (signal.SIGINT, signal.SIGTERM)  # after these the ranks end, whatever they do


class Attempt:
    """One attempt to run a job; the controller creates a new one for each restart.

    Args:
        job: the job.
        members: hosts of the attempt; the first has rank 0.
        number: number of the attempt, from 0.
        loop: event loop for timers.
    """

    def __init__(self, job: Job, members: Sequence[HostState], number: int, loop: Loop) -> None:
        self.members = list(members)
        self.number = number
        self.failures: list[Failure] = []
        self.stopped_by: int | None = None
        self._signals: set[int] = set()
        self._job = job
        self._loop = loop
        self._ending = False  # left-over ranks are being ended: how they end says nothing
        self._finished = False
        self.world = sum(len(peer.slots) for peer in members)

    @property
    def over(self) -> bool:
        return not any(peer.left for peer in self.members)

    def start(self, address: str, port: int) -> None:
        """Request the start of the ranks on every host, with MASTER_ADDR `address` and MASTER_PORT `port`."""
        shared = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "DS_JOB_ID": self._job.id,
            "DS_ATTEMPT": str(self.number),
            "DS_GRACE": str(self._job.grace),
        }
        placed = nodes_of({peer.name: peer.slots for peer in self.members})
        for peer in self.members:
            peer.node = placed[peer.name]
            peer.left = set(range(peer.node.first_rank, peer.node.first_rank + len(peer.slots)))
            peer.send("start", job=self._job.message(peer.name), node=peer.node.to_json(), shared=shared)

    def started(self, peer: HostState, message: dict[str, Any]) -> None:
        """Process the message `started` of a host's agent: record process ids; log devices (first host and attempt)."""
        peer.pids = message["pids"]
        if peer is not self.members[0] or self.number:
            return
        count = len(peer.slots)
        if message["devices"]:
            logger.info("%d rank(s), local rank i on the i-th of CUDA_VISIBLE_DEVICES=%s", count, message["devices"])
        elif len(self.members) == 1:
            hint = "; --num_gpus N starts N ranks" if count == 1 else ""
            logger.info("%d rank(s) on the CPU with gloo: this machine has no accelerator%s", count, hint)

    def ended(self, peer: HostState, message: dict[str, Any]) -> None:
        """Process an agent's message `ended`: record a rank's end, and its failure unless ranks are being ended."""
        peer.left.discard(message["rank"])
        if message["code"] == 0 or self._ending:
            return
        log = f", log {message['log']}" if message["log"] else ""
        text = (
            f"rank {message['rank']} of {self.world} failed first "
            f"(host {message['host']}, pid {message['pid']}{log}): {message['means']}\n{message['words']}"
        )
        failed_at = time.monotonic() - message["ago"]
        self._fail(Failure(failed_at, message["code"], text, LOST_ANOTHER in message["means"], message["rank"]))

    def lost(self, peer: HostState, why: str) -> None:
        """Record the loss of a host for the reason `why`; a failure if ranks ran and are not being ended."""
        had_ranks = bool(peer.left)
        peer.left.clear()
        if had_ranks and not self._ending:
            self._fail(Failure(time.monotonic(), 1, f"host {peer.name} ({peer.ranks()}) was lost: {why}"))

    def signal(self, number: int) -> None:
        """Send a user's or scheduler's signal to all ranks.

        The first SIGINT or SIGTERM starts the grace period, after which the ranks are killed; a second SIGINT kills
        them immediately. Other repetitions have no effect.
        """
        if number in self._signals:
            if number == signal.SIGINT:  # a second Ctrl-C means at once
                self._kill()
            return  # a scheduler tells the agent of every host, a platform every container
        if number in _STOPS and self._signals.isdisjoint(_STOPS):  # SIGUSR1 or SIGHUP may have come before
            self._loop.later(self._job.grace, self._kill)
        self._signals.add(number)
        self.stopped_by = number
        for peer in self.members:
            peer.send("signal", number=number)

    def end(self) -> None:
        if self._finished:  # the timer of an attempt that another one has followed
            return
        self._ending = True
        for peer in self.members:
            if peer.left:
                peer.send("end", number=int(signal.SIGTERM), grace=GRACE_SECONDS)

    def result(self) -> tuple[int, str]:
        """Return the exit code (0: success) and the report of the first failure; disable pending timers."""
        self._finished = True
        if not self.failures:
            return 0, ""
        first = min(self.failures, key=lambda failure: (failure.secondary, failure.time))
        code, stop = first.shell_code, self.stopped_by
        if stop is not None and (-first.code in (stop, signal.SIGKILL) or code == REQUEUE):
            saved = " (saved, to be started again)" if code == REQUEUE else ""
            return code, f"[deepspeed] stopped by {signal.Signals(stop).name}, exit code {code}{saved}"
        return code, f"[deepspeed] {first.text.rstrip()}"

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if len(self.failures) == 1:
            stopped = self.stopped_by is not None
            self._loop.later(self._job.grace if stopped else SETTLE_SECONDS, self._kill if stopped else self.end)

    def _kill(self) -> None:
        if self.over or self._finished:
            return
        self.failures = self.failures or [Failure(time.monotonic(), -signal.SIGKILL, "")]
        self._ending = True
        for peer in self.members:
            peer.send("end", number=int(signal.SIGKILL), grace=0)
