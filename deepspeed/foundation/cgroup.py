"""Reads a container's memory limit, its use, and how often the kernel has killed a process in it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


class CgroupMemory:
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

    def used(self) -> int:
        """Bytes that are used in the group with the limit, without files' pages, which the system can take back."""
        for folder in self._folders:
            if 0 < self._number(folder, "memory.max", "memory.limit_in_bytes") < machine_memory():
                used = self._number(folder, "memory.current", "memory.usage_in_bytes")
                with contextlib.suppress(OSError):
                    text = (folder / "memory.stat").read_text()
                    counters = dict(re.findall(r"^(?:total_)?((?:in)?active_file) (\d+)", text, re.MULTILINE))
                    return max(0, used - sum(map(int, counters.values())))
                return used
        return 0

    def kills(self) -> int:
        """How often the out-of-memory killer has come, for this group or, where no group tells, for the machine."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    match = re.search(r"^oom_kill (\d+)", (folder / name).read_text(), re.MULTILINE)
                    if match:
                        return int(match[1])
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
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        bases = [root / "memory"] if "memory" in controllers.split(",") else [root] if not controllers else []
        for base in bases:
            own = base / path.lstrip("/")
            while own != base and base in own.parents:
                if own.is_dir():
                    folders.append(own)
                own = own.parent
            folders.append(base)
    return folders


def machine_memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
