"""The loop that runs beside the ranks of a node: passes output and signals on, ends all when one fails, says why."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from deepspeed.launcher.children import Rank

SETTLE_SECONDS = 1.0
"""Time the other ranks have, after the first failure, to end by themselves with their own report."""
GRACE_SECONDS = 3.0
"""Time between SIGTERM and SIGKILL to ranks left over after a failure."""
STOP_GRACE_SECONDS = 30.0
"""The same after the user's own SIGINT or SIGTERM: a rank may be saving a checkpoint."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "by the out-of-memory killer of the machine or container, or by hand",
    signal.SIGBUS: "usually /dev/shm or another memory-mapped file system is full",
    signal.SIGSEGV: "a native library touched memory that is not its own",
    signal.SIGABRT: "a native library gave up",
}


class Supervisor:
    """Runs until every rank has ended.

    Args:
        ranks: the started ranks of this node.
        world_size: ranks on all nodes.
    """

    def __init__(self, ranks: Sequence[Rank], world_size: int) -> None:
        self._ranks = ranks
        self._world_size = world_size
        self._stopped_by: signal.Signals | None = None
        self._to_send: list[tuple[float, signal.Signals]] = []
        self._failed: list[Rank] = []
        self._ending_ranks = False
        self._oom_kills = _oom_kills()

    def run(self) -> int:
        """Wait for the ranks.

        Returns:
            0, or the exit code of the rank that failed first (128 + n for signal n).
        """
        with _signal_socket() as signals, selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ)
            for rank in self._ranks:
                for stream in rank.streams:
                    selector.register(stream.reader, selectors.EVENT_READ, stream)
            while any(rank.exit_code is None for rank in self._ranks):
                for key, _ in selector.select(self._seconds_to_next_signal()):
                    if key.data is None:
                        self._forward(signals.recv(256))
                    elif not key.data.pump():
                        selector.unregister(key.fd)
                self._reap(selector)
                self._send_what_is_due()
        if not self._failed:
            return 0
        for rank in self._ranks:
            rank.kill_group()
        return self._report(min(self._failed, key=lambda rank: rank.failed_at))

    def _forward(self, numbers: bytes) -> None:
        for number in map(signal.Signals, numbers):
            if number not in _FORWARDED:
                continue
            again = number == self._stopped_by == signal.SIGINT  # a second Ctrl-C means at once
            self._stopped_by = number
            for rank in self._ranks:
                rank.signal(signal.SIGKILL if again else number)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        for rank in self._ranks:
            if not rank.reap():
                continue
            for stream in rank.streams:
                with contextlib.suppress(KeyError):  # it was at its end already
                    selector.unregister(stream.reader)
            rank.close()
            if rank.exit_code != 0:
                self._note_failure(rank)

    def _note_failure(self, rank: Rank) -> None:
        if self._ending_ranks:
            return
        self._failed.append(rank)
        if len(self._failed) > 1:
            return
        now = time.monotonic()
        if self._stopped_by is not None:
            self._to_send = [(now + STOP_GRACE_SECONDS, signal.SIGKILL)]
        else:
            end = now + SETTLE_SECONDS
            self._to_send = [(end, signal.SIGTERM), (end + GRACE_SECONDS, signal.SIGKILL)]

    def _seconds_to_next_signal(self) -> float | None:
        return max(0.0, self._to_send[0][0] - time.monotonic()) if self._to_send else None

    def _send_what_is_due(self) -> None:
        while self._to_send and self._to_send[0][0] <= time.monotonic():
            _, number = self._to_send.pop(0)
            self._ending_ranks = True
            for rank in self._ranks:
                rank.signal(number)

    def _report(self, rank: Rank) -> int:
        code = rank.exit_code or 0
        shell_code = 128 - code if code < 0 else code
        if self._stopped_by is not None and -code in (self._stopped_by, signal.SIGKILL):
            text = f"[deepspeed] stopped by {self._stopped_by.name}, exit code {shell_code}"
        else:
            log = f", log {rank.log_path}" if rank.log_path else ""
            text = (
                f"[deepspeed] rank {rank.number} of {self._world_size} failed first "
                f"(host {socket.gethostname()}, pid {rank.process.pid}{log}): {self._meaning(rank)}\n"
                f"{rank.last_words()}"
            )
        print(text.rstrip(), file=sys.stderr, flush=True)
        return shell_code

    def _meaning(self, rank: Rank) -> str:
        code = rank.exit_code or 0
        if code > 0:
            return f"exit code {code}"
        name = next((known.name for known in signal.Signals if known == -code), "a real-time signal")
        reason = _MEANINGS.get(-code, "")
        if -code == signal.SIGKILL and _oom_kills() > self._oom_kills:
            reason = "by the kernel's out-of-memory killer"
        meaning = f"ended by {name} (signal {-code})"
        return f"{meaning}: {reason}; {_memory(rank)}" if reason else meaning


@contextlib.contextmanager
def _signal_socket() -> Iterator[socket.socket]:
    """A socket that receives the number of each child's end and each signal to forward, so that one wait sees all."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    watched = (*_FORWARDED, signal.SIGCHLD)
    before = {number: signal.signal(number, lambda *_: None) for number in watched}
    old_writer = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    writer.send(bytes([signal.SIGCHLD]))  # a rank may have ended before this stood
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old_writer)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _oom_kills() -> int:
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def _memory(rank: Rank) -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"its peak memory was {rank.peak_memory / 2**30:.2f} of the machine's {total / 2**30:.2f} GiB"
