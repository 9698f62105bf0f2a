"""Memory limit and use of a container (cgroup), and the number of processes that the kernel killed in it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


class CgroupMemory:
    """Memory of the container (cgroup, version 1 or 2) of this process.

    Args:
        root: mount point of the cgroups.
        listing: file that lists this process's groups.
    """

    def __init__(self, root: Path = _CGROUP, listing: Path = Path("/proc/self/cgroup")) -> None:
        self._folders = list(_folders(root, listing))

    def limit(self) -> int:
        """Return the limit in bytes; 0 if there is none below the machine's memory."""
        machine = machine_memory()
        limits = [self._number(folder, "memory.max", "memory.limit_in_bytes") for folder in self._folders]
        return min((limit for limit in limits if 0 < limit < machine), default=0)

    def peak(self) -> int:
        """Return the peak use in bytes of the group with the limit; 0 if there is no limit."""
        for folder in self._folders:
            if 0 < self._number(folder, "memory.max", "memory.limit_in_bytes") < machine_memory():
                return self._number(folder, "memory.peak", "memory.max_usage_in_bytes")
        return 0

    def used(self) -> int:
        """Return the used bytes of the group with the limit, without reclaimable file pages; 0 if there is no limit."""
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
        """Return the out-of-memory kills in the innermost group with a counter, else on the machine; 0 if unknown."""
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
    """Return the folders of this process's memory group and its parents, innermost first; [] if there are none."""
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
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
