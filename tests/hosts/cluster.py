"""Hosts on one machine: each has its own network, processes, mounts, name, shared memory and boot id, and an sshd."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "sshd": "openssh-server",
    "pdsh": "pdsh",
    "mpirun.openmpi": "openmpi-bin",
    "mpirun.mpich": "mpich",
    "srun": "slurm-wlm",
    "munged": "munge",
}
OWN = {
    "sshd",
    "unshare",
    "nsenter",
    "slurmctld",
    "slurmd",
    "slurmstepd",
    "slurmscriptd",
    "munged",
}  # processes of the hosts themselves
SSH_PORT = 2222
_numbers = itertools.count()


@functools.cache
def missing() -> str:
    """Why no hosts can be made here; empty when they can."""
    if os.geteuid() != 0:
        return "hosts need root: network and process namespaces"
    packages = sorted({package for program, package in PROGRAMS.items() if not _which(program)})
    if packages:
        return f"hosts need the packages {' '.join(packages)}: `make hosts`"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "true"], capture_output=True, text=True
    )
    return f"hosts need namespaces, which root may not make here: {tried.stderr.strip()}" if tried.returncode else ""


def _which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, text=True)


class Cluster:
    """Hosts on one switch that no route leaves.

    Args:
        names: of the hosts, in the order of their addresses 10.77.0.10, .11, …
    """

    def __init__(self, names: Sequence[str] = ("h0", "h1")) -> None:
        self.names = list(names)
        self.folder = Path(tempfile.mkdtemp(prefix="hosts."))
        self._prefix = f"ds{os.getpid()}x{next(_numbers)}"
        self._first: dict[str, psutil.Process] = {}  # each host's first process, its sshd
        self._outer: dict[str, subprocess.Popen[bytes]] = {}
        self._lasting: list[subprocess.Popen[Any]] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        """The host's IPv4 address."""
        return f"10.77.0.{10 + self.names.index(name)}"

    def space(self, name: str) -> str:
        """The name of the host's network namespace."""
        return f"{self._prefix}-{self.names.index(name)}"

    def on(
        self, name: str, command: Sequence[str], cwd: str | Path = "/", user: int = 0, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command as a process of the host, not through ssh; `inner` finds the process itself."""
        return subprocess.Popen(self.enter(name, ["env", "-C", str(cwd), *command], user), **options)

    def enter(self, name: str, command: Sequence[str], user: int = 0) -> list[str]:
        """The command line that runs `command` on the host, as a user of that number."""
        target = str(self._first[name].pid)
        return ["nsenter", "-t", target, "-n", "-u", "-m", "-p", "-i", "-S", str(user), "-G", str(user), "--", *command]

    def sees(self, name: str, path: str) -> Path:
        """A path of the host, whose mounts are its own, as this process can read it."""
        return Path(f"/proc/{self._first[name].pid}/root", path.lstrip("/"))

    def inner(self, process: subprocess.Popen[Any]) -> psutil.Process:
        """The process that `on` started, for signals: the command that enters the host does not pass them on."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children()
                if children:
                    return children[0]
            time.sleep(0.01)
        raise AssertionError(f"{process.args} did not start")

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on the host beside its sshd."""
        listed = subprocess.run(["ip", "netns", "pids", self.space(name)], capture_output=True, text=True, check=False)
        found = []
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.name() not in OWN and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, name: str) -> None:
        """Power off: the host's processes are gone, and nothing said goodbye."""
        self.cut(name)
        self._first[name].send_signal(signal.SIGKILL)
        self._outer[name].wait(timeout=10)

    def boot(self, name: str) -> None:
        """Start the host (again, with another boot id)."""
        self.join(name)
        self._start(name)

    def cut(self, name: str) -> None:
        """Pull the cable: no packet in or out, and no reset either."""
        _run("ip", "-n", self.space(name), "link", "set", "eth0", "down")

    def join(self, name: str) -> None:
        """Put the cable back."""
        _run("ip", "-n", self.space(name), "link", "set", "eth0", "up")

    def lasting(self, process: subprocess.Popen[Any]) -> None:
        """A process that is to end with the cluster."""
        self._lasting.append(process)

    def close(self) -> None:
        """End everything and remove the namespaces."""
        for process in self._lasting:
            process.kill()
            process.wait()
        for outer in self._outer.values():
            if outer.poll() is None:
                outer.kill()
                outer.wait()
        for space in [*(self.space(name) for name in self.names), f"{self._prefix}-sw"]:
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _run("ip", "netns", "del", space, check=False)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> None:
        switch = f"{self._prefix}-sw"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        hosts = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        for key in ("hostkey", "id"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        Path("/run/sshd").mkdir(exist_ok=True)
        for index, name in enumerate(self.names):
            space, cable = self.space(name), f"v{self._prefix}-{index}"[:15]
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "link", "add", cable, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", switch, "link", "set", cable, "master", "br0", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            etc = Path("/etc/netns", space)
            (etc / "ssh").mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            (etc / "ssh" / "ssh_config").write_text(self._ssh_config())
            (self.folder / f"sshd.{name}").write_text(self._sshd_config(name))
        for name in self.names:
            self._start(name, wait=False)
        for name in self.names:
            self._until_up(name)

    def _ssh_config(self) -> str:
        lines = ["Host *", f"Port {SSH_PORT}", f"IdentityFile {self.folder}/id", "StrictHostKeyChecking no"]
        return "\n  ".join([*lines, "UserKnownHostsFile /dev/null", "LogLevel ERROR", "BatchMode yes"]) + "\n"

    def _sshd_config(self, name: str) -> str:
        return "\n".join([
            f"Port {SSH_PORT}", f"ListenAddress {self.address(name)}", f"HostKey {self.folder}/hostkey",
            f"AuthorizedKeysFile {self.folder}/id.pub", f"PidFile {self.folder}/sshd.{name}.pid", "StrictModes no",
            "UsePAM no", "PermitRootLogin yes", "PasswordAuthentication no", "MaxStartups 200", "MaxSessions 200\n",
        ])  # fmt: skip

    def _start(self, name: str, wait: bool = True) -> None:
        (self.folder / f"boot.{name}").write_text(f"{uuid.uuid4()}\n")
        (self.folder / f"sshd.{name}.log").unlink(missing_ok=True)  # of the boot before
        home = os.path.expanduser("~")
        script = " && ".join([
            f"hostname {name}",
            "mount -t tmpfs -o size=2g tmpfs /dev/shm",
            f"{{ [ ! -e {home}/.bashrc ] || mount --bind /dev/null {home}/.bashrc; }}",  # it may take long
            f"mount --bind {self.folder}/boot.{name} /proc/sys/kernel/random/boot_id",
            "mount -t tmpfs tmpfs /sys/fs/cgroup",
            f"exec {_which('sshd')} -D -f {self.folder}/sshd.{name} -E {self.folder}/sshd.{name}.log",
        ])  # fmt: skip
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--mount-proc"]
        with (self.folder / f"start.{name}.log").open("wb") as log:
            self._outer[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.space(name), *own, "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        if wait:
            self._until_up(name)

    def _until_up(self, name: str) -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self._outer[name].pid).children(recursive=True):
                    if process.name() == "sshd" and (self.folder / f"sshd.{name}.log").exists():
                        self._first[name] = process
                        if b"listening" in (self.folder / f"sshd.{name}.log").read_bytes():
                            return
            time.sleep(0.01)
        raise RuntimeError(f"{name} did not start: {(self.folder / f'start.{name}.log').read_text()}")


@contextlib.contextmanager
def cluster(count: int = 2, names: Sequence[str] = ()) -> Iterator[Cluster]:
    """Hosts h0, h1, … or those named, for the time of the block."""
    made = Cluster(names or [f"h{index}" for index in range(count)])
    try:
        yield made
    finally:
        made.close()


def main() -> int:
    """Start two hosts, see whether one reaches the other, end them."""
    if missing():
        print(missing())
        return 1
    with cluster(2) as made:
        done = made.on("h0", ["ssh", "h1", "hostname"], stdout=subprocess.PIPE, text=True)
        said = done.communicate(timeout=30)[0].strip()
    print(f"two hosts start, and h0 reaches {said}")
    return 0 if said == "h1" else 1


if __name__ == "__main__":
    raise SystemExit(main())
