"""Processes that have imported already what takes seconds to import, and fork: two servers for all ranks.

Two, since Python orders sets by a number that it draws when it starts: ranks have to differ in it, as they do in a job,
or nobody notices that one iterates over a set. Ranks 0 and 3 share one, and ranks 1 and 2: in a mesh of two by two, any
two that form a group differ.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MOST = 1 << 20  # bytes of a request
# it leaves no name in `__main__`, which is the child's own
MAIN = "exec(__import__('tests.harness.fork_server', fromlist=['serve']).serve({number}, {modules}))"
_servers: dict[tuple[tuple[str, ...], int], ForkServer] = {}  # by modules, and 0 or 1


class Forked:
    """A child of a server, with what is needed of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self, wait: bool = False) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"ended": self.pid, "wait": wait})
        return self.returncode

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self.poll(wait=True)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:  # until then its number is nobody else's
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it runs."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The side of pytest: a process of these modules that forks on request, and ends with this one."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN.format(number=other.fileno(), modules=list(modules))],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
        )
        other.close()
        self.pid = self._process.pid

    def ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> Any:
        """What the server answers."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        answer = self._socket.recv(MOST)
        assert answer, "the server has ended"
        return json.loads(answer)

    def start(
        self, program: str, environment: Mapping[str, str], out: int, err: int, more: Sequence[int] = ()
    ) -> Forked:
        """A child that runs a program with no other variables, and no other open files than these.

        Args:
            program: Python; sys.argv[1:] are the numbers that the files of `more` have there.
            environment: all its variables.
            out: where it writes to.
            err: where its errors go.
            more: further open files.
        """
        request = {"program": program, "environment": dict(environment)}
        return Forked(self, self.ask(request, [out, err, *more]))

    def close(self) -> None:
        """End the server; its children find out by what they share with this process."""
        self._socket.close()
        self._process.wait()


def servers_of(ranks: int, modules: Sequence[str]) -> list[ForkServer]:
    """The one of each rank, once all have imported; they are started when they are first asked for, and stay."""
    keys = [(tuple(modules), (rank ^ rank >> 1) & 1) for rank in range(ranks)]
    for key in keys:
        if key not in _servers:
            _servers[key] = ForkServer(modules)
    for key in keys:  # a rank that has started waits for the others no longer than a timeout
        _servers[key].ask({})
    return [_servers[key] for key in keys]


def pids() -> set[int]:
    """Of the servers that run."""
    return {server.pid for server in _servers.values()}


@atexit.register
def close_all() -> None:
    """End them."""
    while _servers:
        _servers.popitem()[1].close()


def serve(number: int, modules: Sequence[str]) -> Any:
    """The side of the server: answers until nobody asks. Returns what a child is to run, in the child alone."""
    control = socket.socket(fileno=number)
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a child would miss the other threads"
    gc.collect()
    gc.freeze()
    while True:
        text, files, _, _ = socket.recv_fds(control, MOST, 16)
        if not text:
            os._exit(0)
        request = json.loads(text)
        if not request:  # whether this has come so far
            control.send(b"null")
            continue
        if "ended" in request:
            child, status = os.waitpid(request["ended"], 0 if request["wait"] else os.WNOHANG)
            control.send(json.dumps(os.waitstatus_to_exitcode(status) if child else None).encode())
            continue
        child = os.fork()
        if not child:
            control.close()
            return _entered(request, files)
        for file in files:
            os.close(file)
        control.send(json.dumps(child).encode())


def _entered(request: Mapping[str, Any], files: Sequence[int]) -> Any:
    """The program of a child that has become what was asked for."""
    out, err, *more = files
    os.dup2(out, 1), os.dup2(err, 2)
    os.close(out), os.close(err)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = map(str, more)
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    return compile(request["program"], "<string>", "exec")
