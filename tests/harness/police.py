"""Notices environment variables, threads and child processes that a test leaves behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import psutil

PATIENCE = 5.0  # seconds a thread or child may take to end on its own, on a machine that may be busy
# By pytest, torch.compile, and importing Lightning.
SET_BY_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}
# Threads that live as long as the process group, and the one tqdm starts once per process (torch.compile shows bars).
LASTING = {"deepspeed-watch", "deepspeed-fetch", "tqdm_monitor"}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_OTHERS}


def _living_children() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE}


class Police:
    """The state of this process at one moment, to be compared with a later one."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._threads = set(threading.enumerate())
        self._children = _living_children()

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
        found += [f"child process {pid}" for pid in sorted(_living_children() - self._children - allowed_children)]
        return found
