"""Agent: the process on each host that starts the ranks of this host, and the command that starts an agent.

The launcher sends requests over the agent's connection. The agent kills the ranks if the connection closes or, unless
the launcher is its parent process, is silent for too long.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.errors import DeepSpeedError, LaunchError
from deepspeed.launcher.channel import MAGIC, Channel
from deepspeed.launcher.environment import STARTER_NAMES, STARTER_PREFIXES, NodePlacement, parse_cores
from deepspeed.launcher.event_loop import FORWARDED_SIGNALS, signal_socket
from deepspeed.launcher.exit_codes import CgroupMemory, meaning
from deepspeed.launcher.hosts import VISIBLE, device_variable
from deepspeed.launcher.job import save_digests
from deepspeed.launcher.rank_logs import attempt_folder
from deepspeed.launcher.rank_process import Guard, Rank, RankSpec

CALL = "DS_AGENT_CALL"
"""Variable with the launcher's address and the token, for agents without standard input."""

# The first line that the agent reads is the import path, as JSON. If the agent must connect to the launcher,
# `token port address…` is an argument, a variable, or the first line of standard input. The source has no percent
# sign, dollar, backslash or single quote, so no starter changes it.
_SOURCE = (
    "import json,os,signal,socket,sys\n"
    "signal.alarm(90)\n"
    "a=sys.argv[1] if len(sys.argv)>1 else os.environ.pop({call},{none})\n"
    "s=None\n"
    "if a!={none}:\n"
    " if a=={line}:a=os.fdopen(os.dup(0),{rb},0).readline().decode()\n"
    " t,p,*h=a.split()[0].split({comma})\n"
    " for x in h:\n"
    "  try:\n"
    "   s=socket.create_connection((x,int(p)),5);break\n"
    "  except OSError as e:print(x,p,e,file=sys.stderr)\n"
    " if s is None:sys.exit(1)\n"
    " s.settimeout(None);s.sendall(t.encode()+bytes([10]))\n"
    "f=os.fdopen(os.dup(s.fileno() if s else 0),{rb},0)\n"
    "sys.path[:]=json.loads(f.readline())\n"
    "f.close()\n"
    "from deepspeed.launcher.agent import main\n"
    "sys.exit(main(s))"
).format(call=f'"{CALL}"', none='"-"', line='"stdin"', rb='"rb"', comma='","')
SCRIPT = 'exec("' + _SOURCE.replace('"', '\\"').replace("\n", "\\n") + '")'
"""The source as one line that no shell changes."""


def import_path() -> list[str]:
    """Return the import path for agents: this package's parent folder, then the other nonempty items of `sys.path`."""
    own = str(Path(__file__).resolve().parents[2])
    return [own, *(path for path in sys.path if path and path != own)]


def addresses(hosts: list[str]) -> list[str]:
    """Return this machine's addresses, those on routes to the first 8 `hosts` first; loopback if there is no other."""
    local: list[str] = []
    for host in hosts[:8]:
        with contextlib.suppress(OSError):
            family, kind, _, _, place = socket.getaddrinfo(host.rpartition("@")[2], 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # no packet is sent: only the route is looked up
                local.append(probe.getsockname()[0])
    unique = list(dict.fromkeys([*local, *resolved(socket.gethostname())]))
    return [address for address in unique if not is_loopback(address)] or unique or ["127.0.0.1"]


def resolved(name: str) -> list[str]:
    """Return the IP addresses of a host name; empty if it cannot be resolved."""
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)]
    except OSError:
        return []


def is_loopback(address: str) -> bool:
    """Whether `address`, an IP address as text, is a loopback address."""
    return address.startswith("127.") or address == "::1"


def own_folder() -> str:
    """Return the working directory, or "/" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


WAITS_FOR_JOB_S = 900.0
"""Maximum time that an agent waits for its job: other hosts may still be starting."""
FULL_BYTES = 4 << 20
"""Bytes of output queued for the terminal above which the ranks' output is paused."""


def main(connection: socket.socket | None = None) -> int:
    """Run an agent until the job ends.

    Args:
        connection: socket to the launcher; None: standard input and output.

    Returns:
        Exit code: 0 if the launcher ended the agent, else 1.
    """
    signal.alarm(0)  # set by the command that started this process, against a launcher that never speaks
    if connection is None:
        # Moved away from standard input and output, where ranks and libraries would disturb the connection.
        channel = Channel(os.dup(0), os.dup(1))
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
    else:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        descriptor = connection.detach()
        channel = Channel(descriptor, descriptor)
    os.write(channel.writer, MAGIC)
    return Agent(channel, local=False).run()


class Agent:
    """Agent of one host: starts its ranks, forwards their output and reports their end.

    Args:
        channel: connection to the launcher.
        local: whether the launcher is the parent process; then no heartbeats are needed.
        front: channel to a foreground process on this host, which shows the output and sends signals; None: the
            launcher does both.
        job: result of `Job.message` if the command was also run on this host; None: the launcher sends it.
    """

    def __init__(
        self, channel: Channel, local: bool, front: Channel | None = None, job: dict[str, Any] | None = None
    ) -> None:
        self._channel = channel
        self._local = local
        self._front = front
        self._job = job
        self._ranks: list[Rank] = []
        self._running: set[int] = set()  # pids of ranks whose end has not been reported
        self._guard: Guard | None = None
        self._selector = selectors.DefaultSelector()
        self._held = False
        self._clean = True  # no rank of this attempt has failed or been ended
        self._kill_at: float | None = None
        self._limit = WAITS_FOR_JOB_S
        self._beat_at = 0.0
        self._memory = CgroupMemory()
        self._kills_before = 0
        self._pid_file: Path | None = None
        self._done: int | None = None

    def run(self) -> int:
        """Process messages until the launcher ends the agent; return 0 or, with `front`, the exit code of the job.

        Return 1 if the launcher disconnects or is silent for too long, or if the foreground process is killed.
        """
        with signal_socket(FORWARDED_SIGNALS) as signals, self._selector:
            self._selector.register(self._channel.reader, selectors.EVENT_READ, self._read)
            self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals.recv(256)))
            if self._front is not None:
                self._selector.register(self._front.reader, selectors.EVENT_READ, self._read_front)
            names = os.environ
            ranks = (names[key] for key in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if key in names)
            self._channel.send(
                "hello",
                host=socket.gethostname(),
                node_name=names.get("SLURMD_NODENAME", ""),
                index=next(ranks, ""),
                address=self._own_address(),
                pid=os.getpid(),
            )
            try:
                while self._done is None:
                    for key, _ in self._selector.select(self._timeout()):
                        if key.fd in self._selector.get_map():  # an earlier one may have closed it
                            key.data()
                    self._channel.flush()
                    if self._front is not None:
                        self._front.flush()
                        waiting = self._front.waiting
                        if waiting > FULL_BYTES or (self._held and waiting < FULL_BYTES // 4):
                            self._on_hold(waiting > FULL_BYTES)
                    self._check_ranks_and_connection()
            finally:
                self._end_ranks()
        return self._done

    def _timeout(self) -> float:
        if self._channel.waiting or (self._front is not None and self._front.waiting):
            return 0.02
        times = [self._beat_at - time.monotonic()] if not self._local else [5.0]
        if self._kill_at is not None:
            times.append(self._kill_at - time.monotonic())
        return max(0.0, min(times))

    def _read_front(self) -> None:
        if self._front is None:
            return
        for message, _ in self._front.receive():
            self._channel.send("signalled", number=message["number"])
        if not self._front.open:  # the user's process was killed
            self._done = 1

    def _check_ranks_and_connection(self) -> None:
        now = time.monotonic()
        self._reap()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for rank in self._ranks:
                rank.kill_group()
        if self._local or self._done is not None:
            return
        if now - self._channel.received_at > self._limit:
            print(f"[deepspeed] agent: the launcher was silent for {self._limit:g} s", file=sys.stderr)
            self._done = 1
        if now >= self._beat_at:
            self._beat_at = now + min(self._limit / 4, 2.0)
            self._channel.send("beat")

    def _read(self) -> None:
        for message, _ in self._channel.receive():
            try:
                getattr(self, f"_on_{message.pop('kind')}")(**message)
            except (DeepSpeedError, OSError) as error:
                self._end_ranks()
                self._channel.send("refused", why=str(error))
                if self._front is not None:
                    self._front.send("out", f"deepspeed: {error}\n".encode(), to=2)
        if not self._channel.open and self._done is None:
            self._done = 1
            if self._front is not None:
                self._front.send("out", b"[deepspeed] the first host is gone\n", to=2)

    def _on_beat(self) -> None:
        pass

    def _on_bye(self, code: int, report: str) -> None:
        self._done = 0
        if self._front is not None:
            self._done = code
            if report:
                self._front.send("out", f"{report}\n".encode(), to=2)

    def _on_sent_away(self, why: str) -> None:
        raise LaunchError(why)

    def _on_port(self) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            self._channel.send("port", port=probe.getsockname()[1])

    def _on_limit(self, seconds: float) -> None:
        self._limit = seconds
        self._beat_at = 0.0

    def _on_hold(self, held: bool) -> None:
        """Pause (`held`: too much output is queued for the terminal) or resume reading of the ranks' output."""
        self._held = held
        for rank in self._ranks:
            for stream in rank.streams:
                known = stream.reader in self._selector.get_map()
                if held and known:
                    self._selector.unregister(stream.reader)
                elif not held and not known and rank.exit_code is None:
                    self._watch(stream)

    def _on_signal(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal(number)

    def _on_end(self, number: int, grace: float) -> None:
        """Send signal `number` to the ranks and kill their groups `grace` seconds later; 0: only kill, at once."""
        self._clean = False
        if grace > 0:
            self._on_signal(number)
            self._kill_at = time.monotonic() + grace
        else:
            for rank in self._ranks:
                rank.kill_group()

    def _on_start(self, job: dict[str, Any], node: dict[str, Any], shared: dict[str, str]) -> None:
        job = self._job or job
        place = NodePlacement(**node)
        self._kill_at, self._clean = None, True
        self._kills_before = self._memory.kills()
        base = self._base_environment(job, shared)
        devices = device_variable(place.slots, base)
        folder = attempt_folder(job["logs"], job["id"], shared["DS_ATTEMPT"])
        if folder is not None:
            save_digests(folder, {name: value for name, value, host in job["exports"] if host in (None, job["host"])})
        self._guard = Guard()
        self._ranks = []
        cores = parse_cores(job["bind_core_list"])
        share = len(cores) // max(1, len(place.slots))
        if job["bind_cores"] and share == 0:
            raise LaunchError(f"{len(place.slots)} ranks cannot each have one of the {len(cores)} cores {cores}")
        # Between hosts each rank would print that torch cannot look up a name for the other side's address.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if place.nodes > 1 else {}
        environment = {"OMP_NUM_THREADS": str(max(1, share)), **quiet, **base, **devices}
        for local_rank in range(len(place.slots)):
            own = cores[local_rank * share : (local_rank + 1) * share] if job["bind_cores"] else None
            number = place.first_rank + local_rank
            start = RankSpec(
                number=number,
                command=self._command(job, local_rank),
                environment={**environment, **place.variables(local_rank)},
                folder=job["folder"],
                cores=own,
                log_path=folder / f"rank{number}.log" if folder else None,
                prefix=b"[rank %d] " % number if job["prefix"] else b"",
                terminals=tuple(tuple(size) if size else None for size in job["terminals"]),  # pyright: ignore[reportArgumentType]
            )
            self._start_rank(start)
        pids = [rank.process.pid for rank in self._ranks]
        if job["pid_of"]:
            self._pid_file = Path(tempfile.gettempdir(), f"{job['pid_of']}.deepspeed")
            self._pid_file.write_text(json.dumps(pids))
        self._channel.send("started", pids=pids, logs=str(folder or ""), devices=devices.get(VISIBLE, ""))

    def _start_rank(self, start: RankSpec) -> None:
        try:
            rank = Rank(start, self._show)
        except OSError as error:
            if start.folder is not None and not os.path.isdir(start.folder):
                raise LaunchError(f"the folder {start.folder!r} does not exist there: {error}") from error
            raise LaunchError(f"rank {start.number}: {start.command[0]!r} cannot be started: {error}") from error
        self._ranks.append(rank)
        self._running.add(rank.process.pid)
        if self._guard is not None:
            self._guard.watch(rank)
        for stream in rank.streams:
            self._watch(stream)

    def _watch(self, stream: Any) -> None:
        if self._held:
            return

        def pump() -> None:
            if not stream.pump():
                self._selector.unregister(stream.reader)

        self._selector.register(stream.reader, selectors.EVENT_READ, pump)

    def _show(self, descriptor: int, data: bytes) -> None:
        (self._channel if self._front is None else self._front).send("out", data, to=descriptor)

    def _on_signals(self, numbers: bytes) -> None:
        """Forward signals to this agent, such as a scheduler's, to the launcher, which decides for all hosts."""
        for number in numbers:
            if number in FORWARDED_SIGNALS:
                self._channel.send("signalled", number=number)

    def _reap(self) -> None:
        for rank in self._ranks:
            if not rank.reap():
                continue
            for stream in rank.streams:
                with contextlib.suppress(KeyError):  # it was at its end already
                    self._selector.unregister(stream.reader)
            rank.close()
            self._running.discard(rank.process.pid)
            code, words = rank.exit_code or 0, rank.last_words()
            self._clean = self._clean and code == 0
            self._channel.send(
                "ended",
                rank=rank.number,
                code=code,
                ago=time.monotonic() - rank.failed_at,
                pid=rank.process.pid,
                host=socket.gethostname(),
                log=str(rank.log_path or ""),
                means=meaning(code, rank.peak_memory, words, self._memory, self._kills_before) if code else "",
                words=words if code else "",
            )
            if not self._running:
                self._end_ranks()

    def _end_ranks(self) -> None:
        """Kill running ranks (after a failure or `_on_end`: all groups), end the guard, delete the --save_pid file."""
        for rank in self._ranks:
            if not self._clean or rank.exit_code is None:
                rank.kill_group()
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        if self._pid_file is not None:
            self._pid_file.unlink(missing_ok=True)
            self._pid_file = None

    @staticmethod
    def _own_address() -> str:
        """Return this host's address for other hosts: that of the ssh connection, one by name or route, or the name."""
        reached = os.environ.get("SSH_CONNECTION", "").split()
        if len(reached) == 4 and not is_loopback(reached[2]):
            return reached[2]
        local = resolved(socket.gethostname())
        for target in ("10.255.255.255", "192.0.2.1"):  # no packet is sent: only the route is looked up
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                local.append(probe.getsockname()[0])
        return next((address for address in local if not is_loopback(address)), socket.gethostname())

    def _base_environment(self, job: Mapping[str, Any], shared: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of all ranks: variables of this host, of the job, and `shared` for the rendezvous.

        Variables that describe the agent as a rank are left out. On other hosts, PYTHONPATH starts with job["folder"].
        """
        inherits = self._local or self._job is not None
        # Without those by which MPI, SLURM or torchrun gave the agent a rank of its own.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in STARTER_NAMES and not name.startswith(STARTER_PREFIXES)
        }
        if not inherits:
            environment.pop("SSH_CONNECTION", None)
            environment.pop("SSH_CLIENT", None)
        declared = {name: value for name, value, host in job["exports"] if host in (None, job["host"])}
        if not inherits:
            paths = [job["folder"], *filter(None, [declared.get("PYTHONPATH", environment.get("PYTHONPATH"))])]
            declared["PYTHONPATH"] = os.pathsep.join(paths)
        return {**environment, **declared, **shared}

    @staticmethod
    def _command(job: Mapping[str, Any], local_rank: int) -> list[str]:
        added = [f"--local_rank={local_rank}"] if job["local_rank"] else []
        command = [*job["program"], *added, *job["arguments"]]
        if job["venv_script"]:
            return ["bash", "-c", '. "$0" && exec "$@"', job["venv_script"], *command]
        return command
