"""One-sided all-gather: a rank reads the shards it needs, independently of the other ranks' computations.

[Note: any graph] If ranks take different branches, they need different groups of parameters, and a collective gather
would hang. So the rank that needs a group sends a request to each owner of a shard over a socket, and a thread of the
owner answers with a tagged message. No other rank takes part, so a branch taken on one rank costs the others nothing. A
request contains the version that it needs; if the requester is a version ahead, the owner answers once it reaches that
version. A shard changes only after all ranks have synchronized since their last request: inside `step`, which first
synchronizes the ranks, and after `meet` for edits and loads. A request for an older version fails.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives.collectives import PULL, SMALL, Handle, delay, post, spread
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.comm.shared_memory.doorbell import groups
from deepspeed.comm.shared_memory.transport import SharedMemory
from deepspeed.comm.shutdown import Phase, released_in
from deepspeed.comm.watchdog import watchdog
from deepspeed.errors import CommError, StorageError
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import logger

_REQUEST = struct.Struct("<iiqq")  # requesting rank, channel, version, sequence number
_TOKEN_BYTES = 16
_PATIENCE_S = 5.0
_FUTURE = "rank {} of the group reads a slice that has changed since: an edit or load was not called by all ranks"


# A slice in memory, or a function that creates a context with the slice, which lasts until the slice has been sent.
Served = torch.Tensor | Callable[[], AbstractContextManager[torch.Tensor]]


@dataclass
class _Served:
    """A slice that other ranks can request, with its version."""

    slice: Served
    version: int = 0
    waiting: list[tuple[int, int, int]] = field(default_factory=list)  # (version, rank, seq)


class FetchService:
    """Service that sends this rank's slices on request and fetches those of other ranks.

    Args:
        axis: participating ranks (several, with tags), which must all create their service together.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._served: dict[int, _Served] = {}
        self._lock = threading.Lock()
        # (channel, handle), referenced until long complete: gloo reports completion only to a waiting caller.
        self._sent: deque[tuple[int, Any]] = deque(maxlen=4096)
        self._seq = 0
        self._peers: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._meet()
        self._thread = threading.Thread(target=self._serve, name="deepspeed-fetch", daemon=True)
        self._thread.start()

    def _meet(self) -> None:
        """Open the listening socket and exchange addresses and a token with all ranks."""
        host = os.environ.get("DEEPSPEED_FETCH_HOST") or self._own_address()
        self._listener = socket.create_server((host, 0), backlog=self.axis.size)
        self._selector.register(self._listener, selectors.EVENT_READ)
        address = (host, self._listener.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))
        rows: list[Any] = [None] * self.axis.size
        dist.all_gather_object(rows, address, group=self.axis.group)
        self._addresses = rows
        self._token = bytes.fromhex(address[2])

    def serve(self, channel: int, slice_: Served) -> None:
        atexit.unregister(_stay_at_exit)
        atexit.register(_stay_at_exit)
        with self._lock:
            self._served[channel] = _Served(slice_)

    def withdraw(self, channel: int) -> None:
        """Stop serving the slice of `channel`, and release it with its pending sends."""
        with self._lock:
            self._served.pop(channel, None)
            self._sent = deque((entry for entry in self._sent if entry[0] != channel), self._sent.maxlen)

    @property
    def serves(self) -> bool:
        """Return whether any slice is served."""
        return bool(self._served)

    def advance(self, channel: int) -> None:
        """Increment the version of `channel`'s slice and answer the requests that waited for it."""
        with self._lock:
            served = self._served[channel]
            served.version += 1
            due = [w for w in served.waiting if w[0] <= served.version]
            served.waiting = [w for w in served.waiting if w[0] > served.version]
            for _, rank, seq in due:
                self._send(channel, served, rank, seq)

    def version(self, channel: int) -> int:
        return self._served[channel].version

    def pull(
        self, channel: int, full: torch.Tensor, cuts: tuple[int, ...], label: str, within: slice | None = None
    ) -> Handle:
        """Request the other ranks' slices of `full`; returns a handle, complete once the slices are received in place.

        Args:
            channel: channel on which every rank serves its slice.
            full: 1-D.
            cuts: slice boundaries: rank r owns full[cuts[r] : cuts[r + 1]].
            label: name in error reports.
            within: slice of the needed elements of `full`; more may be received. None: all.

        Raises:
            CommError: an owner has ended, or the axis has one rank.
        """
        self._seq += 1
        seq, version, group = self._seq, self.version(channel), self.axis.group
        if group is None:
            raise CommError("pull needs an axis of several ranks")

        def start() -> list[Any]:
            works = []
            for rank in self.axis.peers:
                part = full[cuts[rank] : cuts[rank + 1]]
                needed = within is None or (cuts[rank] < within.stop and cuts[rank + 1] > within.start)
                if part.numel() and needed:
                    works.append(group.recv([part], rank, tag_of(channel, PULL, seq)))
                    self._ask(rank, _REQUEST.pack(self.axis.rank, channel, version, seq), label)
            return works

        return Handle(
            self.axis, label, post(self.axis, label, start), None, full, self.axis.bytes_of_others(full, cuts)
        )

    def _ask(self, rank: int, request: bytes, label: str) -> None:
        try:
            if rank not in self._peers:
                host, port, token = self._addresses[rank]
                sock = socket.create_connection((host, port), timeout=30)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(bytes.fromhex(token))
                self._peers[rank] = sock
            self._peers[rank].sendall(request)
        except OSError as error:
            raise watchdog.failed(label, RuntimeError(f"rank {self.axis.ranks[rank]} is gone: {error}")) from error

    # -- the answering thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        strangers: set[socket.socket] = set()
        while True:
            for key, _ in self._selector.select():
                sock: Any = key.fileobj
                if sock is self._wake_in:
                    return
                try:
                    if sock is self._listener:
                        accepted, _ = sock.accept()
                        accepted.settimeout(_PATIENCE_S)  # a stranger must not block the thread
                        strangers.add(accepted)
                        self._selector.register(accepted, selectors.EVENT_READ)
                        continue
                    self._read(sock, strangers)
                except (OSError, CommError, RuntimeError) as error:
                    if not isinstance(error, ConnectionResetError):
                        logger.debug("fetch service: %s", error)
                    self._selector.unregister(sock)
                    sock.close()

    def _read(self, sock: socket.socket, strangers: set[socket.socket]) -> None:
        if sock in strangers:
            if not hmac.compare_digest(self._exactly(sock, _TOKEN_BYTES), self._token):
                raise CommError("a stranger knocked at the fetch service")
            strangers.discard(sock)
            return
        rank, channel, version, seq = _REQUEST.unpack(self._exactly(sock, _REQUEST.size))
        delay(f"serve channel {channel}")
        with self._lock:
            served = self._served.get(channel)
            if served is None:
                return
            if version > served.version:
                served.waiting.append((version, rank, seq))
            elif version < served.version:
                raise watchdog.failed(f"serve of a slice on channel {channel}", RuntimeError(_FUTURE.format(rank)))
            else:
                self._send(channel, served, rank, seq)

    def _send(self, channel: int, served: _Served, rank: int, seq: int) -> None:
        group, slice_ = self.axis.group, served.slice
        if group is not None and not isinstance(slice_, torch.Tensor):
            try:
                with slice_() as lent:
                    group.send([lent], rank, tag_of(channel, PULL, seq)).wait()
            except StorageError as error:  # the rank that asked would wait for ever
                raise watchdog.failed(f"serve of a slice on channel {channel}", RuntimeError(str(error))) from error
        elif group is not None and isinstance(slice_, torch.Tensor):
            self._sent.append((channel, group.send([slice_], rank, tag_of(channel, PULL, seq))))

    def close(self) -> None:
        """Stop the thread and close the sockets; call this after all ranks have finished their pulls."""
        self._wake_out.send(b"x")
        self._thread.join(timeout=5)
        for sock in [*self._peers.values(), self._listener, self._wake_in, self._wake_out]:
            with contextlib.suppress(OSError):
                sock.close()
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._served.clear()

    @staticmethod
    def _own_address() -> str:
        """Return this host's address on the route to MASTER_ADDR; 127.0.0.1 if there is no route."""
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))
                return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"

    @staticmethod
    def _exactly(sock: socket.socket, count: int) -> bytes:
        data = sock.recv(count, socket.MSG_WAITALL)
        if len(data) != count:
            raise ConnectionResetError("closed by the other rank")
        return data


class SharedSlices:
    """`FetchService` for ranks that share memory: slices are copied from the owner's memory, without requests."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self._window = axis, SharedMemory.require(axis.shared)

    def serve(self, channel: int, slice_: torch.Tensor) -> None:
        atexit.unregister(_stay_at_exit)
        atexit.register(_stay_at_exit)
        self._window.serve(channel, slice_)

    def withdraw(self, channel: int) -> None:
        self._window.serving.pop(channel, None)

    def advance(self, channel: int) -> None:
        self._window.advance(channel)

    def pull(
        self, channel: int, full: torch.Tensor, cuts: tuple[int, ...], label: str, within: slice | None = None
    ) -> Handle:
        """Copy other ranks' slices into `full`, once the slices have this rank's version; see `FetchService.pull`."""
        shared = self._window
        first, last = (0, cuts[-1]) if within is None else (within.start, within.stop)
        givers = [r for r in self.axis.peers if max(cuts[r], first) < min(cuts[r + 1], last)]

        def copy() -> None:
            for r in givers:
                low, high = max(cuts[r], first), min(cuts[r + 1], last)
                full[low:high].copy_(shared.served(r, channel, full.dtype)[low - cuts[r] : high - cuts[r]])
                if not shared.level(r, channel):
                    raise watchdog.failed(label, RuntimeError(_FUTURE.format(shared.rank)), list(self.axis.ranks))

        received = self.axis.bytes_of_others(full, cuts)
        return Handle(self.axis, label, [shared.reached(channel, givers)], copy, full, received)


def meet(axis: Axis, channel: int, seq: int, label: str) -> None:
    """Wait until all ranks of the axis have made this call, so that no earlier pull is pending.

    `seq` numbers the calls on a channel; `label` is the name in error reports.
    """
    here = torch.zeros(axis.size, dtype=torch.float64, device="cpu")
    spread(axis, here, range(axis.size + 1), tag_of(channel, SMALL, seq), label).wait()


def release_abandoned(axes: Iterable[Axis]) -> None:
    """Stop serving the slices of engines that all ranks have dropped without closing. Collective over each axis.

    Until then a rank that dropped its engine must keep serving, since other ranks can still request its slices.
    """
    for axis in dict.fromkeys(axes):
        if axis.group is None or not axis.tagged:
            continue
        shared, service = axis.shared, _services.get(id(axis))
        if (shared is not None and shared.serving) or (service is not None and service.serves):
            gc.collect()  # dropped engines are reference cycles; all ranks wait for the last one
        abandoned: list[Any] = [None] * axis.size
        start = partial(dist.all_gather_object, abandoned, list(axis.abandoned), group=axis.group)
        post(axis, "release of dropped engines", lambda start=start: start() or [])
        for channel in sorted(set.intersection(*map(set, abandoned))):
            axis.abandoned.remove(channel)
            if shared is not None:
                shared.serving.pop(channel, None)
            if service is not None:
                service.withdraw(channel)


fetch_services: Replaceable[type[FetchService]] = Replaceable(FetchService)
_services: dict[int, FetchService] = {}


def service_of(axis: Axis) -> FetchService:
    """Return the fetch service of an axis, which all engines share; the first call creates it and is collective."""
    if id(axis) not in _services:
        _services[id(axis)] = fetch_services.current(axis)
    return _services[id(axis)]


_AFTER_GROUPS_S = 30.0  # time without a collective of a peer, after which a rank that destroys its groups continues


def _serving() -> bool:
    """Return whether this rank serves a slice that other ranks may still request."""
    memories = [memory for memory in groups.memories if isinstance(memory, SharedMemory)]
    return any(memory.serving for memory in memories) or any(service.serves for service in _services.values())


def _stay_at_exit() -> None:
    """Keep serving at process exit until slower ranks have finished, unless an exception ends this process."""
    if _serving() and not hasattr(sys, "last_value"):
        watchdog.wait_while_others_pull(watchdog.timeout().total_seconds())


@released_in(Phase.PEERS)
def _stay() -> None:
    """Keep serving when the groups are destroyed, for a shorter time: a peer may wait for this process elsewhere."""
    if _serving() and not hasattr(sys, "last_value"):
        watchdog.wait_while_others_pull(_AFTER_GROUPS_S)


@released_in(Phase.CONNECTIONS)
def close_all() -> None:
    """Close all fetch services before the process group is destroyed."""
    for service in list(_services.values()):
        service.close()
    _services.clear()
