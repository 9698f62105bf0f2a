"""Controller of a job: starts the ranks on all hosts or on none, and ends all ranks when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.attempt import Attempt
from deepspeed.launcher.channel import Channel
from deepspeed.launcher.event_loop import FORWARDED_SIGNALS, Loop, signal_socket
from deepspeed.launcher.host_state import HostState, StarterProcess
from deepspeed.launcher.job import Job

HELLO_SECONDS = 60.0
"""Maximum time between the start of a starter and the first message of its agent."""
GOODBYE_SECONDS = 3.0
"""Maximum time for agents and starters to end after the job."""
FULL_BYTES = 4 << 20
"""Bytes of output queued for the terminal above which the ranks' output is paused."""
CANNOT_START = 2


class Starter(Protocol):
    """Interface of classes that start an agent on each host; `name` is shown in messages."""

    name: str

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Start the agents of `peers`.

        Each process that starts agents (ssh, mpirun) goes to `control.adopt`; one that serves a single host also to
        `peer.process`. The channel of an agent goes to `control.attach`, here or when the agent connects later.

        Raises:
            LaunchError: agents cannot be started.
        """
        ...

    def restart(self, control: Control, peer: HostState) -> None:
        """Start the agent of a lost host again, if the starter can do so."""
        ...

    def close(self) -> None:
        """Release resources that are needed only to start agents."""
        ...


class Control:
    """Controller of a job: starts the agents of all hosts, sends requests to agents, and watches them and their ranks.

    Args:
        job: the job.
        starter: starts an agent on each host.
        front: channel to the foreground process, which shows output and sends signals.
    """

    def __init__(self, job: Job, starter: Starter, front: Channel) -> None:
        self.job = job
        self.loop = Loop()
        self.peers = [HostState(name, slots) for name, slots in job.slots.items()]
        self.hello_seconds = HELLO_SECONDS
        self.attempt: Attempt | None = None
        self.starter = starter
        self._front = front
        self._processes: list[StarterProcess] = []
        self._held = False
        self._refused = ""
        self._ports: list[int] = []
        self._beat_at = 0.0
        self._code, self._report = 1, ""

    # -- what starters use ---------------------------------------------------------------------------------------------

    def adopt(self, process: StarterProcess) -> None:
        """Watch a process that starts agents; the end of its output is recorded for failure reports."""
        self._processes.append(process)
        for stream in (process.popen.stderr, process.popen.stdout) if process.popen is not None else ():
            if stream is not None:
                fd = stream.fileno()
                os.set_blocking(fd, False)
                self.loop.watch(fd, lambda fd=fd: process.read(fd) or self.loop.unwatch(fd))

    def attach(self, peer: HostState, channel: Channel) -> None:
        """Set the channel to a host's agent, and process its messages from now on."""
        peer.channel, peer.since = channel, time.monotonic()
        self.loop.watch(channel.reader, lambda: self._read(peer))

    def on_hello(self, peer: HostState, hello: dict[str, Any]) -> None:
        """Process the first message of a host's agent: the host is ready."""
        peer.ready, peer.address, peer.host = True, hello["address"], hello["host"]
        peer.send("limit", seconds=self.job.heartbeat)

    def abort(self, why: str) -> None:
        """End all ranks because of the error `why`; then `wait` raises LaunchError."""
        self._refused = self._refused or why
        if self.attempt is not None:
            self.attempt.end()

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the job.

        Returns:
            Exit code, as of `runner.main`.
        """
        with signal_socket(FORWARDED_SIGNALS) as signals:
            self.loop.watch(signals.fileno(), lambda: [self.on_signal(n) for n in signals.recv(256)])
            self.loop.watch(self._front.reader, self._read_front)
            try:
                self.starter.begin(self, self.peers)
                self._code, self._report = self.run_attempts()
            except LaunchError as error:
                self._code, self._report = CANNOT_START, f"deepspeed: {error}"
            finally:
                self.starter.close()
                self._shut_down()
                self.loop.close()
        if self._report:
            self._show(2, f"{self._report}\n".encode())
        return self._code

    def run_attempts(self) -> tuple[int, str]:
        """Wait for all hosts and run one attempt; return the exit code and the report.

        Raises:
            LaunchError: a host did not answer, or the job was aborted.
        """
        self.wait(lambda: all(peer.ready or peer.lost for peer in self.peers))
        missing = [f"{peer.name}: {peer.problem}" for peer in self.peers if peer.lost]
        if missing:
            raise LaunchError(
                f"{len(missing)} of {len(self.peers)} hosts did not answer, so no rank was started:\n  "
                + "\n  ".join(missing)
                + "\nset ssh up, choose another --launcher, or run the command on every node with --no_ssh"
            )
        return self.one_attempt(self.peers, 0)

    def one_attempt(self, members: list[HostState], number: int) -> tuple[int, str]:
        """Run attempt `number` on the hosts `members`; return the exit code and the report."""
        attempt = Attempt(self.job, members, number, self.loop)
        first = members[0]
        port = self.job.port
        if port == 0 or number:
            self._ports.clear()
            first.send("port")
            self.wait(lambda: bool(self._ports) or first.lost)
            port = self._ports[-1] if self._ports else 0
        alone = len(members) == 1
        named = self.job.address if first is self.peers[0] else ""
        address = named or ("127.0.0.1" if alone else first.address)
        if not (alone and first.local):
            shown = " ".join(f"{peer.name}:{len(peer.slots)}" for peer in members[:8])
            more = f" and {len(members) - 8} more" if len(members) > 8 else ""
            place = f"{address}:{port}: {shown}{more}"
            by = self.starter.name
            logger.info("%d rank(s) on %d host(s) by %s, rendezvous at %s", attempt.world, len(members), by, place)
        self.attempt = attempt
        attempt.start(address, port)
        for peer in members:
            if peer.lost:  # in the meantime
                attempt.lost(peer, peer.problem)
        self.wait(lambda: attempt.over)
        return attempt.result()

    def wait(self, done: Callable[[], bool]) -> None:
        """Process events until `done()` is True.

        Raises:
            LaunchError: the job was aborted, and no rank runs any more.
        """
        while not done():
            waiting = self._front.waiting or any(peer.channel and peer.channel.waiting for peer in self.peers)
            # a starter's end makes no sound when its output stays open
            watched = any(process.popen for process in self._processes) and self.attempt is None
            self.loop.turn(0.02 if waiting else 0.1 if watched else max(0.0, self._beat_at - time.monotonic()))
            self._serve_timers()
            if self._refused and (self.attempt is None or self.attempt.over):
                raise LaunchError(self._refused)

    def _serve_timers(self) -> None:
        """Perform periodic work: flush channels, send heartbeats, check processes that start agents."""
        now = time.monotonic()
        self._front.flush()
        self._hold(self._front.waiting > FULL_BYTES)
        for peer in self.peers:
            if peer.channel is not None:
                peer.channel.flush()
        self._look_at_processes()
        if now >= self._beat_at:
            self._beat_at = now + min(self.job.heartbeat / 4, 2.0)
            for peer in self.peers:
                self._beat(peer, now)

    def _beat(self, peer: HostState, now: float) -> None:
        if peer.local or peer.lost:
            return
        if peer.ready and peer.channel is not None:
            peer.send("beat")
            if now - peer.channel.received_at > self.job.heartbeat:
                self.lose(peer, f"it was silent for {self.job.heartbeat:g} s")
        elif not peer.ready and now - peer.since > self.hello_seconds:
            self.lose(peer, f"no agent answered within {self.hello_seconds:g} s")

    def _look_at_processes(self) -> None:
        for process in list(self._processes):
            code = process.code()
            if process.popen is None or code is None:
                continue
            if process.popen.stderr is not None:
                process.read(process.popen.stderr.fileno())
            peer = process.peer
            if peer is not None and (peer.lost or peer.process is not process):  # that host is tried anew by another
                self._processes.remove(process)
                if process.popen.stderr is not None:
                    self.loop.unwatch(process.popen.stderr.fileno())
                    process.popen.stderr.close()
                continue
            why = f"{self.starter.name} ended with code {code}" + (
                f": {process.last_lines()}" if process.last_lines() else ""
            )
            if peer is None:
                process.kill()
                self._processes.remove(process)
                for waiting in self.peers:
                    if not waiting.ready or waiting.left:
                        self.lose(waiting, why)
            elif not peer.ready and not peer.lost:
                self.lose(peer, why)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _read(self, peer: HostState) -> None:
        if peer.channel is None:
            return None
        try:
            for message, data in peer.channel.receive():
                self._on_message(peer, message, data)
        except ValueError as error:
            self.lose(peer, str(error))
        if peer.channel is not None and not peer.channel.open:
            if not peer.ready and peer.process is not None and peer.process.popen is not None:
                return self.loop.unwatch(peer.channel.reader)  # its end, which is near, says why
            says = peer.process.last_lines() if peer.process is not None else ""
            self.lose(peer, "its connection was closed" + (f" ({says})" if says else ""))

    def _on_message(self, peer: HostState, message: dict[str, Any], data: bytes) -> None:
        kind = message["kind"]
        if kind == "out":
            self._show(message["to"], data)
        elif kind == "hello":
            self.on_hello(peer, message)
        elif kind == "ended" and self.attempt is not None:
            self.attempt.ended(peer, message)
        elif kind == "started" and self.attempt is not None:
            self.attempt.started(peer, message)
        elif kind == "port":
            self._ports.append(message["port"])
        elif kind == "refused":
            peer.left.clear()
            self.abort(message["why"] if len(self.peers) == 1 else f"host {peer.name}: {message['why']}")
        elif kind == "signalled":
            self.on_signal(message["number"])

    def lose(self, peer: HostState, why: str) -> None:
        """Mark a host as lost for the reason `why`: close its channel; kill its starter process and its local ranks."""
        if peer.lost:
            return
        peer.problem = why
        if peer.channel is not None:
            self.loop.unwatch(peer.channel.reader)
            peer.channel.close()
        if peer.process is not None:
            peer.process.kill()
        for pid in peer.pids if peer.local else ():  # should its guard be gone with it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self.attempt is not None:
            self.attempt.lost(peer, why)

    def on_signal(self, number: int) -> None:
        """Handle a signal to the launcher or an agent: pass it to the ranks, or end the job if none runs yet."""
        if number == signal.SIGCHLD:
            return
        if self.attempt is None or self.attempt.over:
            self.abort(f"stopped by {signal.Signals(number).name} before any rank was started")
        else:
            self.attempt.signal(number)

    # -- the front -----------------------------------------------------------------------------------------------------

    def _read_front(self) -> None:
        for message, _ in self._front.receive():
            self.on_signal(message["number"])
        if not self._front.open:  # the user's process was killed
            for process in self._processes:
                process.kill()
            os._exit(1)  # every connection closes with this process, and with it every rank ends

    def _show(self, descriptor: int, data: bytes) -> None:
        self._front.send("out", data, to=descriptor)

    def _hold(self, held: bool) -> None:
        """Request all agents to pause or resume the ranks' output, while the terminal is blocked."""
        if held == self._held or (self._held and self._front.waiting > FULL_BYTES // 4):
            return
        self._held = held
        for peer in self.peers:
            peer.send("hold", held=held)

    def _shut_down(self) -> None:
        """End agents, and kill the processes that started them, at the latest after `GOODBYE_SECONDS`."""
        somebody_is_gone = any(peer.lost for peer in self.peers)  # then a starter may wait for ever
        end = time.monotonic() + GOODBYE_SECONDS / (3 if somebody_is_gone else 1)
        for peer in self.peers:
            peer.send("bye", code=self._code, report=self._report)
        for peer in self.peers:
            while peer.channel is not None and peer.channel.waiting and time.monotonic() < end:
                peer.channel.flush()
                time.sleep(0.002)
        alive = [process for process in self._processes if process.popen is not None]
        pause = 0.001
        while time.monotonic() < end and (alive := [process for process in alive if process.code() is None]):
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        for peer in self.peers:
            if peer.channel is not None:
                peer.channel.close()
        for process in self._processes:
            process.kill()
