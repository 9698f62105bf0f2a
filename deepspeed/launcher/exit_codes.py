"""Explanations of exit codes: signals, memory limits, full disks, device memory, lost ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal

from deepspeed.foundation.cgroup import CgroupMemory, machine_memory

REQUEUE = 85
"""Exit code of a rank that saved its state after a stop request: start the job again."""

_GIB = 2**30
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
    (
        re.compile(r"Connection (closed|reset) by peer|Broken pipe|no answer \(process gone|of another rank has ended"),
        "peer",
    ),
)
_RUNS_OUT = re.compile(r"memory of the container runs out for .*")  # of the engine's `MemoryWatchdog`


def meaning(code: int, peak: int, last_words: str, memory: CgroupMemory, kills_before: int) -> str:
    """Return an explanation of an exit code in one line.

    Args:
        code: exit code; -N: ended by signal N.
        peak: peak memory of the process, in bytes.
        last_words: last output of the process on standard error.
        memory: memory limits of the container.
        kills_before: `memory.kills()` before the start of the process.
    """
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), "a real-time signal")
        reason = _MEANINGS.get(-code, "")
        if code == -signal.SIGKILL and memory.kills() > kills_before:
            reason = "by the kernel's out-of-memory killer"
        if code == -signal.SIGBUS and os.path.isdir("/dev/shm"):
            reason += f" ({_disk('/dev/shm')})"
        text = f"ended by {name} (signal {-code})" + (f": {reason}; {_of_memory(peak, memory)}" if reason else "")
        line = _RUNS_OUT.search(last_words) if code == -signal.SIGKILL else None
        return f"{text}. Before that it said: {line[0]}" if line else text
    text = f"exit code {code}"
    if code in _CODES:
        return f"{text}: {_CODES[code]}"
    cause = next((kind for pattern, kind in _CAUSES if pattern.search(last_words)), "")
    if cause == "disk":
        named = [path for path in re.findall(r"'(/[^']+)'", last_words) if os.path.exists(os.path.dirname(path))]
        folders = [os.path.dirname(path) for path in named[-1:]] or [os.getcwd(), "/tmp"]
        return f"{text}: a disk is full: {', '.join(map(_disk, folders))}"
    if cause == "device":
        return (
            f"{text}: the memory of the device is used up: a smaller micro-batch, a higher stage or offload needs less"
        )
    if cause == "memory":
        return f"{text}: memory is used up; {_of_memory(peak, memory)}"
    return f"{text}: {LOST_ANOTHER}, whose own end is the cause" if cause == "peer" else text


def _of_memory(peak: int, memory: CgroupMemory) -> str:
    """Return a text that compares the process's peak memory with the container's limit or the machine's memory."""
    limit = memory.limit()
    text = f"its peak memory was {peak / _GIB:.2f} of the {'container' if limit else 'machine'}'s "
    text += f"{(limit or machine_memory()) / _GIB:.2f} GiB"
    return f"{text} (all of the container: {memory.peak() / _GIB:.2f})" if limit and memory.peak() else text


def _disk(path: str) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return path
    return f"{path} has {usage.free / _GIB:.2f} of {usage.total / _GIB:.2f} GiB free"
