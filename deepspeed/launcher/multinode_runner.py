"""Start of an agent on each host: by fork, ssh, pdsh, MPI or srun."""

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
from typing import Any, ClassVar

from deepspeed.errors import LaunchError
from deepspeed.launcher import agent
from deepspeed.launcher.agent import Agent
from deepspeed.launcher.callback_server import CallbackServer
from deepspeed.launcher.channel import Channel
from deepspeed.launcher.controller import Control, Starter
from deepspeed.launcher.event_loop import make_room
from deepspeed.launcher.host_state import HostState, StarterProcess
from deepspeed.launcher.rank_process import close_all_but

CONNECT_SECONDS = 10
"""Timeout of ssh connections, in seconds."""
CONNECTING_AT_ONCE = 128
_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "TERM")
"""Variables that a login sets on the host; srun and mpirun start processes without a login."""
_STARTERS_OWN = (
    "OMPI_", "OPAL_", "PMIX_", "PRTE_", "ORTE_", "HYDRA_", "MPIEXEC_", "MPIR_", "I_MPI_", "MV2_", "UCX_", "FI_",
    "PDSH_", "SSH_", "SLURM_", "SRUN_", "KRB5", "MUNGE_", "FANOUT", "WCOLL",
)  # fmt: skip

_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class StarterSettings:
    """Options of starters.

    Args:
        arguments: further arguments of the starting program (--launcher_args).
        ssh_port: port of ssh; None: its default.
    """

    arguments: Sequence[str] = ()
    ssh_port: int | None = None


def make(name: str, settings: StarterSettings) -> Starter:
    """Return the starter `name`: ssh, pdsh, openmpi, mpich, impi, mvapich or slurm.

    Raises:
        LaunchError: the name is unknown, or it is `ssh`, which is not installed.
    """
    known = {"ssh": Ssh, **{kind: FanoutStarter for kind in FanoutStarter.PLANS}}
    if name.lower() not in known:
        raise LaunchError(f"--launcher {name!r} is not known; there is {', '.join(known)}")
    return known[name.lower()](name.lower(), settings)


class ForkStarter:
    """Starter of one agent on this machine, as a forked process."""

    name = "fork"

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Fork the agent of the only host in `peers`."""
        [peer] = peers
        own_end, agent_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._run_agent(agent_end)
        agent_end.close()
        descriptor = own_end.detach()
        peer.local, peer.process = True, StarterProcess(None, pid, peer)
        control.attach(peer, Channel(descriptor, descriptor))

    def restart(self, control: Control, peer: HostState) -> None:
        self.begin(control, [peer])

    def close(self) -> None:
        """Return without effect; there are no resources."""

    @staticmethod
    def _run_agent(connection: socket.socket) -> None:
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


def agent_arguments(*arguments: str) -> list[str]:
    """Return an agent's command line with `arguments`; LaunchError if Python's path has a line break or zero byte."""
    if any(char in sys.executable for char in "\n\r\0"):
        raise LaunchError(f"the path of Python, {sys.executable!r}, cannot be part of a command on other hosts")
    return [sys.executable, "-c", agent.SCRIPT, *arguments]


class Ssh:
    """Starter of agents by one ssh process per host; the agent's standard input and output are its channel.

    Args:
        name: name for messages.
        settings: options of ssh.

    Raises:
        LaunchError: ssh is not installed.
    """

    def __init__(self, name: str, settings: StarterSettings) -> None:
        _need("ssh")
        self.name = name
        self._settings = settings
        self._waiting: list[HostState] = []

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Connect to every host, at most `CONNECTING_AT_ONCE` at a time."""
        make_room(2 * len(peers))  # the connection, and what ssh says itself
        self._waiting = list(peers)
        self._go_on(control)

    def restart(self, control: Control, peer: HostState) -> None:
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
        command = ["ssh", "-T", *flags, *port, *self._settings.arguments, "--", peer.name]
        command.append(f"exec {shlex.join(agent_arguments())}")
        # One descriptor for both directions. ssh runs in a session of its own, so it gets no signals of the terminal.
        own_end, ssh_end = socket.socketpair()
        with ssh_end:
            popen = _start(command, stdin=ssh_end, stdout=ssh_end)
        descriptor = own_end.detach()
        channel = Channel(descriptor, descriptor, magic=True)
        peer.process = StarterProcess(popen, popen.pid, peer)
        control.adopt(peer.process)
        control.attach(peer, channel)
        channel.send_line(json.dumps(agent.import_path()))

    def close(self) -> None:
        self._waiting.clear()


@dataclass(frozen=True)
class StartPlan:
    """Start of a program that starts agents.

    Args:
        command: command line.
        variables: additional environment variables.
        stdin: text for its standard input.
        closes_stdin: whether standard input is closed after the text.
    """

    command: list[str]
    variables: dict[str, str]
    stdin: str = ""
    closes_stdin: bool = True


class FanoutStarter:
    """Starter of all agents by one program (pdsh, mpirun or srun); the agents connect to a `CallbackServer`.

    Args:
        name: key of `PLANS`.
        settings: options of the program.
    """

    def __init__(self, name: str, settings: StarterSettings) -> None:
        self.name = name
        self._settings = settings
        self._server: CallbackServer | None = None
        self._hosts_file = ""

    def begin(self, control: Control, peers: list[HostState]) -> None:
        """Listen for the agents and start the program.

        Raises:
            LaunchError: the program is not installed, or does not support the host names.
        """
        make_room(len(peers))
        if _prctl is not None:  # become the parent of what the program leaves behind
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        names = [peer.name for peer in peers]
        self._server = CallbackServer(control, peers)
        call = ",".join([self._server.token, str(self._server.port), *agent.addresses(names)])
        plan = self.PLANS[self.name](self, names, call)
        # The program hands its own environment to agents: what a login sets, and what the program itself reads.
        variables = {
            name: value for name, value in os.environ.items() if name in _LOGIN or name.startswith(_STARTERS_OWN)
        }
        stdin = subprocess.PIPE if plan.stdin else subprocess.DEVNULL
        popen = _start(plan.command, stdin=stdin, stdout=subprocess.PIPE, variables={**variables, **plan.variables})
        if popen.stdin is not None:  # one that stays open ends with the launcher
            with contextlib.suppress(BrokenPipeError):
                popen.stdin.write(plan.stdin.encode())
                popen.stdin.flush()
                if plan.closes_stdin:
                    popen.stdin.close()
        control.adopt(StarterProcess(popen, popen.pid, None))

    def restart(self, control: Control, peer: HostState) -> None:
        """Mark the host as lost again: the program cannot start a single agent."""
        control.lose(peer, f"{self.name} cannot start a single host again")

    def _write_hosts(self, lines: Sequence[str]) -> str:
        """Write a temporary hosts file that only this user can read, and return its path."""
        descriptor, self._hosts_file = tempfile.mkstemp(prefix="deepspeed-hosts-")
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
        return self._hosts_file

    def close(self) -> None:
        """Stop listening and remove the hosts file."""
        if self._server is not None:
            self._server.close()
        if self._hosts_file:
            with contextlib.suppress(OSError):
                os.unlink(self._hosts_file)

    def _pdsh(self, names: list[str], call: str) -> StartPlan:
        _need("pdsh")
        variables = {"PDSH_RCMD_TYPE": "ssh"}
        options = f"-o BatchMode=yes -o ConnectTimeout={CONNECT_SECONDS}"
        port = "" if self._settings.ssh_port is None else f" -p {self._settings.ssh_port}"
        variables["PDSH_SSH_ARGS_APPEND"] = " ".join(
            filter(None, [os.environ.get("PDSH_SSH_ARGS_APPEND"), options + port])
        )
        fan_out = str(max(1, len(names)))  # all at once: an agent lasts as long as the job
        command = f"exec {shlex.join(agent_arguments(call))}".replace("%", "%%")  # %h, %n and %u are pdsh's own words
        return StartPlan(
            ["pdsh", "-S", "-R", "ssh", "-f", fan_out, "-w", "-", *self._settings.arguments, command],
            variables,
            "".join(f"{name}\n" for name in names),
        )

    def _openmpi(self, names: list[str], call: str) -> StartPlan:
        program = self._mpi(("mpirun.openmpi", "mpirun", "mpiexec"), "Open MPI")
        self._refuse_user_names(names)
        port = [] if self._settings.ssh_port is None else ["--mca", "plm_rsh_args", f"-p {self._settings.ssh_port}"]
        file = self._write_hosts([f"{name} slots=1" for name in names])
        where = ["--hostfile", file, "-n", str(len(names)), "--map-by", "ppr:1:node", "--bind-to", "none"]
        command = [program, *where, *port, "-x", agent.CALL, *self._settings.arguments, *agent_arguments()]
        return StartPlan(command, {agent.CALL: call})

    def _hydra(self, names: list[str], call: str) -> StartPlan:
        program = self._mpi(("mpiexec.hydra", "mpirun.mpich", "mpirun", "mpiexec"), "HYDRA", "Intel(R) MPI")
        self._refuse_user_names(names)
        file = self._write_hosts([f"{name}:1" for name in names])
        where = ["-f", file, "-n", str(len(names)), "-ppn", "1"]  # it hands on its whole environment
        return StartPlan([program, *where, *self._settings.arguments, *agent_arguments()], {agent.CALL: call})

    def _mvapich(self, names: list[str], call: str) -> StartPlan:
        plan = self._hydra(names, call)
        # its own pinning would put the threads of every local rank on one core
        return StartPlan(plan.command, {**plan.variables, "MV2_ENABLE_AFFINITY": "0"})

    def _slurm(self, names: list[str], call: str) -> StartPlan:
        _need("srun")
        self._refuse_user_names(names)
        count = str(len(names))
        where = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(names)]
        # --disable-status: a single SIGINT goes to the agents, instead of asking for a second one
        how = ["--cpu-bind", "none", "--kill-on-bad-exit=0", "--wait=0", "--disable-status"]
        # srun sends its standard input, which stays open as long as the launcher, to every task: the call comes there
        command = [
            "srun",
            *where,
            "--export",
            ",".join(_LOGIN),
            *how,
            *self._settings.arguments,
            *agent_arguments("stdin"),
        ]
        return StartPlan(command, {}, f"{call}\n", closes_stdin=False)

    @staticmethod
    def _mpi(programs: Sequence[str], *says: str) -> str:
        """Return the first of `programs` with one of the texts `says` in the output of `--version`.

        Raises:
            LaunchError: there is no such program.
        """
        seen: list[str] = []
        for program in programs:
            if shutil.which(program) is None:
                continue
            done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
            if any(word in done.stdout + done.stderr for word in says):
                return program
            seen.append(program)
        others = f"; {' and '.join(seen)} belong to another MPI" if seen else ""
        raise LaunchError(
            f"none of {', '.join(programs)} is of {says[0]}{others}: choose another --launcher, or --no_ssh"
        )

    def _refuse_user_names(self, names: list[str]) -> None:
        named = [name for name in names if "@" in name]
        if named:
            raise LaunchError(
                f"--launcher {self.name} takes no user names: {', '.join(named)}; set them in ssh's config file"
            )

    PLANS: ClassVar[dict[str, Callable[[FanoutStarter, list[str], str], StartPlan]]] = {
        "pdsh": _pdsh,
        "openmpi": _openmpi,
        "mpich": _hydra,
        "impi": _hydra,
        "mvapich": _mvapich,
        "slurm": _slurm,
    }


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
    """Start a program in a new session, so it gets no signals of the terminal; on Linux, it ends with this process.

    `variables`: its environment; None: that of this process.
    """

    def prepare() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=variables,
        start_new_session=True,
        preexec_fn=prepare,
    )
