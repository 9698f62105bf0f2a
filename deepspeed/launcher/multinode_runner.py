"""Starts an agent on each host: by fork, ssh, pdsh, MPI or srun."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.errors import LaunchError
from deepspeed.launcher import agent
from deepspeed.launcher.agent import Agent
from deepspeed.launcher.callback_server import CallbackServer
from deepspeed.launcher.channel import Channel
from deepspeed.launcher.controller import Control, Starter
from deepspeed.launcher.event_loop import make_room
from deepspeed.launcher.host_state import HostState, StarterProcess
from deepspeed.launcher.rank_process import adopt_orphans, close_all_but

CONNECT_SECONDS = 10
"""How long ssh tries to connect to a host."""
CONNECTING_AT_ONCE = 128
_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "TERM")
"""What a login would have set on the host; srun and mpirun start their processes without one."""
_STARTERS_OWN = (
    "OMPI_", "OPAL_", "PMIX_", "PRTE_", "ORTE_", "HYDRA_", "MPIEXEC_", "MPIR_", "I_MPI_", "MV2_", "UCX_", "FI_",
    "PDSH_", "SSH_", "SLURM_", "SRUN_", "KRB5", "MUNGE_", "FANOUT", "WCOLL",
)  # fmt: skip

_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True)
class StarterSettings:
    """What the user said about starting agents: further arguments for the starter, and the port of ssh."""

    arguments: Sequence[str] = ()
    ssh_port: int | None = None


def make(name: str, settings: StarterSettings) -> Starter:
    """The starter of that name.

    Raises:
        LaunchError: there is none, or its program is not installed.
    """
    known = {"ssh": Ssh, **{kind: FanoutStarter for kind in _COMMANDS}}
    if name.lower() not in known:
        raise LaunchError(f"--launcher {name!r} is not known; there is {', '.join(known)}")
    return known[name.lower()](name.lower(), settings)


class ForkStarter:
    """An agent on this machine, as a child that inherits everything."""

    name = "fork"

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Fork the agent of the one host."""
        [peer] = peers
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _be_agent(theirs)
        theirs.close()
        descriptor = ours.detach()
        peer.local, peer.process = True, StarterProcess(None, pid, peer)
        control.attach(peer, Channel(descriptor, descriptor))

    def again(self, control: Control, peer: HostState) -> None:
        """Fork another agent."""
        self.begin(control, [peer])

    def close(self) -> None:
        """Nothing was opened."""


def _be_agent(connection: socket.socket) -> None:
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        descriptor = connection.detach()
        close_all_but(descriptor)
        code = Agent(Channel(descriptor, descriptor), local=True).run()
    finally:
        os._exit(code)


class Ssh:
    """An ssh connection per host: the agent talks through its standard input and output.

    Args:
        name: "ssh".
        settings: of the user.
    """

    def __init__(self, name: str, settings: StarterSettings) -> None:
        _need("ssh")
        self.name = name
        self._settings = settings
        self._waiting: list[HostState] = []

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Connect to every host, a limited number at a time."""
        make_room(2 * len(peers))  # the connection, and what ssh says itself
        self._waiting = list(peers)
        self._go_on(control)

    def again(self, control: Control, peer: HostState) -> None:
        """Connect once more."""
        self._connect(control, peer)

    def _go_on(self, control: Control) -> None:
        connecting = sum(peer.process is not None and not peer.ready and not peer.lost for peer in control.peers)
        while self._waiting and connecting < CONNECTING_AT_ONCE:
            self._connect(control, self._waiting.pop(0))
            connecting += 1
        if self._waiting:
            control.loop.later(0.05, lambda: self._go_on(control))

    def _connect(self, control: Control, peer: HostState) -> None:
        port = [] if self._settings.ssh_port is None else ["-p", str(self._settings.ssh_port)]
        options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "RemoteCommand=none", "ForwardX11=no"]
        flags = [word for option in options for word in ("-o", option)]
        command = ["ssh", "-T", *flags, *port, *self._settings.arguments, "--", peer.name, agent_command()]
        # one descriptor for both directions; of its own session, so that the terminal's signals pass it by
        ours, theirs = socket.socketpair()
        with theirs:
            popen = _start(command, stdin=theirs, stdout=theirs)
        descriptor = ours.detach()
        channel = Channel(descriptor, descriptor, magic=True)
        peer.process = StarterProcess(popen, popen.pid, peer)
        control.adopt(peer.process)
        control.attach(peer, channel)
        channel.send_line(json.dumps(agent.import_path()))

    def close(self) -> None:
        """Nothing is left open."""
        self._waiting.clear()


def agent_command(*arguments: str) -> str:
    """The constant command for a shell of the host."""
    return f"exec {shlex.join([_python(), '-c', agent.script(), *arguments])}"


def _python() -> str:
    if any(char in sys.executable for char in "\n\r\0"):
        raise LaunchError(f"the path of Python, {sys.executable!r}, cannot be part of a command on other hosts")
    return sys.executable


class FanoutStarter:
    """One program that starts the agents of all hosts, which call the launcher back with a token.

    Args:
        name: pdsh, openmpi, mpich, impi, mvapich or slurm.
        settings: of the user.
    """

    def __init__(self, name: str, settings: StarterSettings) -> None:
        self.name = name
        self._settings = settings
        self._door: CallbackServer | None = None
        self._hosts_file = ""

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Open the door and start the program."""
        make_room(len(peers))
        adopt_orphans()
        names = [peer.name for peer in peers]
        self._door = CallbackServer(control, peers)
        call = ",".join([self._door.token, str(self._door.port), *agent.addresses(names)])
        plan = _COMMANDS[self.name](names, call, self._settings, self._write_hosts)
        stdin = subprocess.PIPE if plan.told else subprocess.DEVNULL
        variables = {**_kept(), **plan.variables}
        popen = _start(plan.command, stdin=stdin, stdout=subprocess.PIPE, variables=variables)
        if popen.stdin is not None:  # its end is the end of what has to be said, or of the launcher
            with contextlib.suppress(BrokenPipeError):
                popen.stdin.write(plan.told.encode())
                popen.stdin.flush()
                if plan.closes:
                    popen.stdin.close()
        process = StarterProcess(popen, popen.pid, None)
        control.adopt(process)
        if popen.stdout is not None:
            _drain(control, popen.stdout.fileno(), process)

    def again(self, control: Control, peer: HostState) -> None:
        """The program cannot start one agent alone."""
        control.lose(peer, f"{self.name} cannot start a single host again")

    def _write_hosts(self, lines: Sequence[str]) -> str:
        """A file of hosts, of this user alone."""
        descriptor, self._hosts_file = tempfile.mkstemp(prefix="deepspeed-hosts-")
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
        return self._hosts_file

    def close(self) -> None:
        """Close the door and remove the file of hosts."""
        if self._door is not None:
            self._door.close()
        if self._hosts_file:
            with contextlib.suppress(OSError):
                os.unlink(self._hosts_file)


def _drain(control: Control, descriptor: int, process: StarterProcess) -> None:
    """What the starter prints itself is kept for the report of a failure."""
    os.set_blocking(descriptor, False)

    def take() -> None:
        try:
            data = os.read(descriptor, 8192)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        process.tail = (process.tail + data)[-8192:]
        if not data:
            control.loop.unwatch(descriptor)

    control.loop.watch(descriptor, take)


@dataclass(frozen=True)
class StartPlan:
    """A command line, variables to add for it, what it is told on standard input, and whether that ends then."""

    command: list[str]
    variables: dict[str, str]
    told: str = ""
    closes: bool = True


def _kept() -> dict[str, str]:
    """The variables for a starter that hands its own to agents: those of a login, and those for the starter itself."""
    return {name: value for name, value in os.environ.items() if name in _LOGIN or name.startswith(_STARTERS_OWN)}


WriteHosts = Callable[[Sequence[str]], str]


def _pdsh(names: list[str], call: str, settings: StarterSettings, write: WriteHosts) -> StartPlan:
    _need("pdsh")
    variables = {"PDSH_RCMD_TYPE": "ssh"}
    options = f"-o BatchMode=yes -o ConnectTimeout={CONNECT_SECONDS}"
    port = "" if settings.ssh_port is None else f" -p {settings.ssh_port}"
    variables["PDSH_SSH_ARGS_APPEND"] = " ".join(filter(None, [os.environ.get("PDSH_SSH_ARGS_APPEND"), options + port]))
    fan_out = str(max(1, len(names)))  # all at once: an agent lasts as long as the job
    command = agent_command(call).replace("%", "%%")  # %h, %n and %u are pdsh's own words
    return StartPlan(
        ["pdsh", "-S", "-R", "ssh", "-f", fan_out, "-w", "-", *settings.arguments, command],
        variables,
        "".join(f"{name}\n" for name in names),
    )


def _openmpi(names: list[str], call: str, settings: StarterSettings, write: WriteHosts) -> StartPlan:
    program = _mpi(("mpirun.openmpi", "mpirun", "mpiexec"), "Open MPI")
    _check_no_user_names("openmpi", names)
    port = [] if settings.ssh_port is None else ["--mca", "plm_rsh_args", f"-p {settings.ssh_port}"]
    file = write([f"{name} slots=1" for name in names])
    where = ["--hostfile", file, "-n", str(len(names)), "--map-by", "ppr:1:node", "--bind-to", "none"]
    command = [program, *where, *port, "-x", agent.CALL, *settings.arguments, _python(), "-c", agent.script()]
    return StartPlan(command, {agent.CALL: call})


def _hydra(names: list[str], call: str, settings: StarterSettings, write: WriteHosts) -> StartPlan:
    program = _mpi(("mpiexec.hydra", "mpirun.mpich", "mpirun", "mpiexec"), "HYDRA", "Intel(R) MPI")
    _check_no_user_names("mpich", names)
    file = write([f"{name}:1" for name in names])
    where = ["-f", file, "-n", str(len(names)), "-ppn", "1"]  # it hands on its whole environment
    return StartPlan([program, *where, *settings.arguments, _python(), "-c", agent.script()], {agent.CALL: call})


def _mvapich(names: list[str], call: str, settings: StarterSettings, write: WriteHosts) -> StartPlan:
    plan = _hydra(names, call, settings, write)
    # its own pinning would put the threads of every local rank on one core
    return StartPlan(plan.command, {**plan.variables, "MV2_ENABLE_AFFINITY": "0"})


def _slurm(names: list[str], call: str, settings: StarterSettings, write: WriteHosts) -> StartPlan:
    _need("srun")
    _check_no_user_names("slurm", names)
    count = str(len(names))
    where = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(names)]
    # --disable-status: a single SIGINT goes to the agents, instead of asking for a second one
    how = ["--export", ",".join(_LOGIN), "--cpu-bind", "none", "--kill-on-bad-exit=0", "--wait=0", "--disable-status"]
    # the call comes over standard input, which srun sends to every task, and which stays open as long as the launcher
    command = ["srun", *where, *how, *settings.arguments, _python(), "-c", agent.script(), "stdin"]
    return StartPlan(command, {}, f"{call}\n", closes=False)


_COMMANDS: dict[str, Callable[[list[str], str, StarterSettings, WriteHosts], StartPlan]] = {
    "pdsh": _pdsh,
    "openmpi": _openmpi,
    "mpich": _hydra,
    "impi": _hydra,
    "mvapich": _mvapich,
    "slurm": _slurm,
}


def _mpi(programs: Sequence[str], *says: str) -> str:
    """The first of these programs whose version names the MPI that is asked for: Debian's mpirun may be any."""
    seen: list[str] = []
    for program in programs:
        if shutil.which(program) is None:
            continue
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        if any(word in done.stdout + done.stderr for word in says):
            return program
        seen.append(program)
    found = f"; {' and '.join(seen)} belong to another MPI" if seen else ""
    raise LaunchError(f"none of {', '.join(programs)} is of {says[0]}{found}: choose another --launcher, or --no_ssh")


def _check_no_user_names(launcher: str, names: list[str]) -> None:
    named = [name for name in names if "@" in name]
    if named:
        raise LaunchError(
            f"--launcher {launcher} takes no user names: {', '.join(named)}; set them in ssh's config file"
        )


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise LaunchError(
            f"{program!r} is not installed; choose another --launcher, or run on every node with --no_ssh"
        )


def _start(
    command: list[str],
    stdin: Any,
    stdout: Any,
    variables: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program that dies with this process and hears nothing from the terminal."""

    def prepare() -> None:
        if _prctl is not None:
            _prctl(1, signal.SIGTERM)  # the parent-death signal

    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=variables,
        start_new_session=True,
        preexec_fn=prepare,
    )
