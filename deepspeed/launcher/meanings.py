"""What the end of a rank means: its exit code, the memory its container allowed, the disk, the device, a lost peer."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from pathlib import Path

REQUEUE = 85
"""Exit code of a rank that saved its state because it was asked to stop: start the job again."""

LOST_ANOTHER = "it lost another rank"

_MEANINGS: dict[int, str] = {
    signal.SIGKILL: "by the out-of-memory killer of the machine or container, or by hand",
    signal.SIGBUS: "usually /dev/shm or another memory-mapped file system is full",
    signal.SIGSEGV: "a native library touched memory that is not its own",
    signal.SIGABRT: "a native library gave up",
}
_CODES = {
    REQUEUE: "saved on request, to be started again",
    126: "the program may not be executed",
    127: "the program was not found",
}
_CAUSES = (
    (re.compile(r"\[Errno 28\]|No space left on device"), "disk"),
    (re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE), "device"),
    (re.compile(r"\bMemoryError\b|Cannot allocate memory"), "memory"),
    (re.compile(r"Connection (closed|reset) by peer|Broken pipe|no answer \(process gone"), "peer"),
)
_CGROUP = Path("/sys/fs/cgroup")


class Memory:
    """The memory of the container (cgroup, version 1 or 2) that this process is in.

    Args:
        root: where cgroups are mounted.
        listing: what the system says of this process's groups.
    """

    def __init__(self, root: Path = _CGROUP, listing: Path = Path("/proc/self/cgroup")) -> None:
        self._folders = list(_folders(root, listing))

    def limit(self) -> int:
        """Bytes that may be used; 0 when there is no limit below the machine's."""
        machine = machine_memory()
        limits = [self._number(folder, "memory.max", "memory.limit_in_bytes") for folder in self._folders]
        return min((limit for limit in limits if 0 < limit < machine), default=0)

    def peak(self) -> int:
        """Most bytes that were used at once in the group with the limit."""
        for folder in self._folders:
            if 0 < self._number(folder, "memory.max", "memory.limit_in_bytes") < machine_memory():
                return self._number(folder, "memory.peak", "memory.max_usage_in_bytes")
        return 0

    def kills(self) -> int:
        """How often the out-of-memory killer has come, for this group or, where no group tells, for the machine."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    found = re.search(r"^oom_kill (\d+)", (folder / name).read_text(), re.MULTILINE)
                    if found:
                        return int(found[1])
        with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return 0

    @staticmethod
    def _number(folder: Path, *names: str) -> int:
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                return int((folder / name).read_text())
        return 0


def _folders(root: Path, listing: Path) -> list[Path]:
    """This process's memory group and those around it, the innermost first; the mount itself inside a container."""
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        bases = [root / "memory"] if "memory" in controllers.split(",") else [root] if not controllers else []
        for base in bases:
            own = base / path.lstrip("/")
            while own != base and base in own.parents:
                if own.is_dir():
                    found.append(own)
                own = own.parent
            found.append(base)
    return found


def machine_memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def meaning(code: int, peak: int, last_words: str, memory: Memory, kills_before: int) -> str:
    """One line on an exit code.

    Args:
        code: of the process; negative for a signal.
        peak: most bytes of memory it had.
        last_words: what it printed last.
        memory: of its container.
        kills_before: `memory.kills()` before it started.
    """
    if code < 0:
        return _signalled(-code, peak, memory, memory.kills() > kills_before)
    text = f"exit code {code}"
    if code in _CODES:
        return f"{text}: {_CODES[code]}"
    cause = next((kind for pattern, kind in _CAUSES if pattern.search(last_words)), "")
    added = {
        "disk": f"a disk is full: {_disks(last_words)}",
        "device": "the memory of the device is used up: a smaller micro-batch, a higher stage or offload needs less",
        "memory": f"memory is used up; {_of_memory(peak, memory)}",
        "peer": f"{LOST_ANOTHER}, whose own end is the cause",
    }.get(cause)
    return f"{text}: {added}" if added else text


def _signalled(number: int, peak: int, memory: Memory, oom: bool) -> str:
    name = next((known.name for known in signal.Signals if known == number), "a real-time signal")
    reason = _MEANINGS.get(number, "")
    if number == signal.SIGKILL and oom:
        reason = "by the kernel's out-of-memory killer"
    if number == signal.SIGBUS and os.path.isdir("/dev/shm"):
        reason += f" ({_disk('/dev/shm')})"
    text = f"ended by {name} (signal {number})"
    return f"{text}: {reason}; {_of_memory(peak, memory)}" if reason else text


def _of_memory(peak: int, memory: Memory) -> str:
    """What it used, of what it was allowed: the container's limit where there is one."""
    limit = memory.limit()
    text = f"its peak memory was {_gib(peak)} of the {'container' if limit else 'machine'}'s "
    text += f"{_gib(limit or machine_memory())} GiB"
    return f"{text} (all of the container: {_gib(memory.peak())})" if limit and memory.peak() else text


def _disks(last_words: str) -> str:
    named = re.findall(r"'(/[^']+)'", last_words)
    paths = [path for path in named if os.path.exists(os.path.dirname(path))][-1:] or [os.getcwd(), "/tmp"]
    return ", ".join(_disk(os.path.dirname(path) if path in named else path) for path in paths)


def _disk(path: str) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return path
    return f"{path} has {_gib(usage.free)} of {_gib(usage.total)} GiB free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
