"""Rendezvous of nodes if the user or a platform runs the command on every node (--no_ssh, SageMaker, Kubeflow)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.agent import Agent
from deepspeed.launcher.channel import MAGIC, Channel
from deepspeed.launcher.controller import Control
from deepspeed.launcher.elastic import ElasticControl
from deepspeed.launcher.event_loop import make_room
from deepspeed.launcher.host_state import HostState
from deepspeed.launcher.job import Job
from deepspeed.launcher.multinode_runner import ForkStarter

ARRIVE_SECONDS = 600.0
"""Maximum time that hosts wait for each other, for example while containers are pulled."""
LOG_SECONDS = 15.0
"""Time after which a line lists the missing hosts."""


def run(job: Job, own: int, fingerprint: str, front: Channel) -> int:
    """Run this host's part of a job: host 0 runs the controller, the others an agent that connects to it.

    Args:
        job: the job, equal on every host.
        own: index of this host.
        fingerprint: hash of the job; host 0 rejects connections with another one.
        front: channel to the foreground process of this host, which shows the output of its ranks.

    Returns:
        Exit code of the whole job; 1 if the connection to host 0 was lost; 2 if the job could not be started.
    """
    if not 0 <= own < len(job.slots):
        names = ", ".join(job.slots)
        print(
            f"deepspeed: --node_rank {own} is not one of 0 to {len(job.slots) - 1}: {names}",
            file=sys.stderr,
        )
        return 2
    try:
        if own == 0:
            kind = Control if job.elastic is None else ElasticControl
            return kind(job, NodeRendezvous(job, fingerprint), front).run()
        return _follow(job, own, fingerprint, front)
    except LaunchError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return 2


def control_port(job: Job) -> int:
    """Return the port on which host 0 listens for the others: rendezvous port + 1, or 65534 for port 65535."""
    return job.port + 1 if job.port < 65535 else job.port - 1


class NodeRendezvous:
    """Starter on host 0: forks the agent of this host, and accepts connections of the other hosts' agents.

    Args:
        job: the job.
        fingerprint: hash of the job.
    """

    name = "the command on every host"

    def __init__(self, job: Job, fingerprint: str) -> None:
        self._job = job
        self._fingerprint = fingerprint
        self._socket: socket.socket | None = None

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Listen for other hosts, and fork the agent of this host.

        Raises:
            LaunchError: a port is in use.
        """
        port = control_port(self._job)
        for wanted in dict.fromkeys((port, self._job.port)):
            try:
                listening = socket.create_server(("", wanted), backlog=4096)
            except OSError as error:
                raise LaunchError(
                    f"port {wanted} of this host is taken ({error.strerror}), by another job perhaps: "
                    f"--master_port takes another one, on every host (it and the next are used)"
                ) from error
            if wanted == port:
                self._socket = listening
            else:
                listening.close()  # the ranks' own, free until rank 0 takes it
        ForkStarter().begin(control, peers[:1])  # the ranks keep the limit of the user's shell
        make_room(len(peers))
        if self._socket is not None:
            self._socket.setblocking(False)
            control.loop.watch(self._socket.fileno(), lambda: self._accept(control, peers))
        control.hello_seconds = ARRIVE_SECONDS
        control.loop.later(LOG_SECONDS, lambda: self._log_missing(peers))

    def restart(self, control: Control, peer: HostState) -> None:
        """Fork the agent of this host again; other hosts connect when their command is started again."""
        if peer is control.peers[0]:
            ForkStarter().begin(control, [peer])
        else:
            peer.since = float("inf")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _accept(self, control: Control, peers: list[HostState]) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            caller, (address, *_) = self._socket.accept()
            descriptor = caller.detach()
            channel = Channel(descriptor, descriptor, magic=True)
            control.loop.watch(descriptor, lambda: self._hear(control, peers, channel, address))

    def _hear(self, control: Control, peers: list[HostState], channel: Channel, address: str) -> None:
        with contextlib.suppress(ValueError, KeyError):
            for message, _ in channel.receive():
                control.loop.unwatch(channel.reader)
                own, known = message["own"], message["fingerprint"] == self._fingerprint
                if known and 0 < own < len(peers) and peers[own].channel is None:
                    control.attach(peers[own], channel)
                    return
                why = f"node {own} is there already" if known else "it runs another job, or with other hosts or options"
                logger.warning("a host at %s connected and was rejected: %s", address, why)
                channel.send("sent_away", why=f"the first host {self._job.address} sent this one away: {why}")
                channel.close()
                return
            if channel.open:
                return
        control.loop.unwatch(channel.reader)
        channel.close()

    @staticmethod
    def _log_missing(peers: list[HostState]) -> None:
        missing = [peer.name for peer in peers if not peer.ready and not peer.lost]
        if missing:
            logger.info("waiting for %s (%d of %d hosts)", ", ".join(missing[:8]), len(missing), len(peers))


def _follow(job: Job, own: int, fingerprint: str, front: Channel) -> int:
    """Connect to host 0 and run as its agent; the output of this host's ranks is shown here.

    Returns the exit code. Raises LaunchError if host 0 does not answer in `ARRIVE_SECONDS`, or a signal comes before.
    """
    place = (job.address, control_port(job))
    end = time.monotonic() + ARRIVE_SECONDS
    log_at = time.monotonic() + LOG_SECONDS
    while True:
        try:
            connection = socket.create_connection(place, timeout=1)  # a signal waits for this long
            break
        except OSError as error:
            for message, _ in front.receive():
                name = signal.Signals(message["number"]).name
                raise LaunchError(f"stopped by {name} before any rank was started") from None
            if time.monotonic() > end or not front.open:
                raise LaunchError(f"the first host does not answer at {place[0]}:{place[1]}: {error}") from error
            if time.monotonic() > log_at:
                log_at = end
                logger.info("waiting for the first host at %s:%d: %s", *place, error)
            select.select([front.reader], [], [], 0.5)
    connection.setblocking(False)
    descriptor = connection.detach()
    channel = Channel(descriptor, descriptor)
    os.write(descriptor, MAGIC)
    channel.send("caller", own=own, fingerprint=fingerprint)
    name = list(job.slots)[own]
    return Agent(channel, local=False, front=front, job=job.message(name)).run()
