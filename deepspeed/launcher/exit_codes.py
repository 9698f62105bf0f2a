"""Explains the end of a rank: exit code, memory limit, disk, device, lost peer."""

from __future__ import annotations

import os
import re
import shutil
import signal

from deepspeed.foundation.cgroup import CgroupMemory, machine_memory

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
_RUNS_OUT = re.compile(r"memory of the container runs out for .*")  # of the engine's `MemoryWatchdog`


def meaning(code: int, peak: int, last_words: str, memory: CgroupMemory, kills_before: int) -> str:
    """One line on an exit code.

    Args:
        code: of the process; negative for a signal.
        peak: most bytes of memory it had.
        last_words: what it printed last.
        memory: of its container.
        kills_before: `memory.kills()` before it started.
    """
    if code < 0:
        told = _RUNS_OUT.search(last_words)
        said = f". Before that it said: {told[0]}" if told and code == -signal.SIGKILL else ""
        return _signalled(-code, peak, memory, memory.kills() > kills_before) + said
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


def _signalled(number: int, peak: int, memory: CgroupMemory, oom: bool) -> str:
    name = next((known.name for known in signal.Signals if known == number), "a real-time signal")
    reason = _MEANINGS.get(number, "")
    if number == signal.SIGKILL and oom:
        reason = "by the kernel's out-of-memory killer"
    if number == signal.SIGBUS and os.path.isdir("/dev/shm"):
        reason += f" ({_disk('/dev/shm')})"
    text = f"ended by {name} (signal {number})"
    return f"{text}: {reason}; {_of_memory(peak, memory)}" if reason else text


def _of_memory(peak: int, memory: CgroupMemory) -> str:
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
