"""What a starter has started here, such as the ssh of pdsh: in a session of its own, and there after its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def adopt_orphans() -> None:
    """Become the parent of what is left when a child of this process ends before its own children."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def helpers_of(pid: int) -> list[int]:
    """Everything below a process but agents, which end with their connection, and what is below those."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    own, found, waiting = _program(os.getpid()), list[int](), [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            program = _program(child)
            if program and program != own:
                found.append(child)
                waiting.append(child)
    return found


def _program(pid: int) -> str:
    """The file a process runs; empty when it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def kill(pids: list[int]) -> None:
    """Kill what is left of these."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
