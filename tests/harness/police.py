"""Notices environment variables, threads and child processes that a test leaves behind."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE = 5.0  # seconds a thread or child may take to end on its own, on a machine that may be busy
# By pytest, torch.compile, and importing Lightning.
SET_BY_OTHERS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "TRITON_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}
# Threads that live as long as the process group, and the one tqdm starts once per process (torch.compile shows bars).
LASTING = {"deepspeed-watch", "deepspeed-fetch", "tqdm_monitor"}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_OTHERS}


def _living_children(apart: set[int]) -> set[int]:
    """As the kernel lists them, in a hundredth of the time in which psutil asks every process for its parent.

    The list may miss some while others end, so it is read twice.

    Args:
        apart: below these it does not look; a rank of a pool has a dozen threads, and a list of children for each.
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return {child.pid for child in psutil.Process().children(recursive=True) if _lives(child.pid)}
    found: set[int] = set()
    for _ in range(2):
        left = [os.getpid()]
        while left:
            children = _listed(left.pop())
            left += [child for child in children if child not in apart]
            found.update(children)
    return {pid for pid in found if _lives(pid)}


def _listed(pid: int) -> list[int]:
    """The children of each thread of a process."""
    words: list[str] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            words += Path(path).read_text().split()
    return [int(word) for word in words]


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


class Police:
    """The state of this process at one moment, to be compared with a later one."""

    def __init__(self, apart: Callable[[], set[int]] = set) -> None:
        """
        Args:
            apart: ids of processes that have police of their own, asked for at each look.
        """
        self._apart = apart
        self._environment = _environment()
        self._threads = set(threading.enumerate())
        self._children = _living_children(apart())

    def report(self, allowed_children: Callable[[], set[int]] = set) -> str:
        """What is there now and was not before, in words; empty when nothing is.

        Args:
            allowed_children: process ids that may be new, asked for at the moment of the check.
        """
        found = self._changes(allowed_children())
        end = time.monotonic() + PATIENCE
        while found and time.monotonic() < end:
            gc.collect()  # once more: tensors that C++ holds are let go layer by layer
            time.sleep(0.02)
            found = self._changes(allowed_children())
        return "; ".join(found)

    def _changes(self, allowed_children: set[int]) -> list[str]:
        now = _environment()
        names = sorted(set(now) | set(self._environment))
        found = [f"environment variable {name}" for name in names if now.get(name) != self._environment.get(name)]
        threads = [thread for thread in threading.enumerate() if thread not in self._threads]
        # Autograd's threads for devices last, and are known to Python since they ran a hook.
        ours = [t for t in threads if t.name not in LASTING and not isinstance(t, threading._DummyThread)]
        found += [f"thread {t.name}" for t in ours if t.is_alive()]
        children = _living_children(self._apart()) - self._children - allowed_children
        found += [f"child process {pid}" for pid in sorted(children)]
        return found
