"""Functions in children of this process: what is imported is there already, and what a child does dies with it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

Work = Callable[[], dict[str, Any]]


def in_a_fork(work: Work, seconds: float) -> dict[str, Any]:
    """As `in_forks`, of one child."""
    return in_forks([work], seconds)[0]


def in_forks(works: Sequence[Work], seconds: float) -> list[dict[str, Any]]:
    """What functions return that run at the same time, each in a child that may die or take too long.

    Args:
        works: return what JSON can hold.
        seconds: after which a child ends, with the processes that it has started.

    Returns:
        In their order; {"failed": why} of one that raised, died or took too long.
    """
    started = [(*_start(work, seconds), time.monotonic() + seconds) for work in works]
    return [_ended(child, read, seconds, end) for child, read, end in started]


def _start(work: Work, seconds: float) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.setsid()  # what it starts can be ended with it
    os.close(read)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))  # ends a child of a parent that was killed, too
    warnings.simplefilter("ignore")
    try:
        found = work()
    except BaseException as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"}
    try:
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps(found).encode())
    finally:
        os._exit(0)


def _said(read: int, end: float) -> tuple[bytes, bool]:
    """What a child writes until then, and whether it is over: a process that it has started may hold the pipe open."""
    text, part = b"", b" "
    while part:
        if not select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
            return text, False
        part = os.read(read, 1 << 16)
        text += part
    return text, True


def _ended(child: int, read: int, seconds: float, end: float) -> dict[str, Any]:
    text, over = _said(read, end)
    os.close(read)
    for kill in (os.killpg, os.kill):  # it has no group of its own yet where it was not run at all
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ValueError):  # nothing, or a part
        return json.loads(text)
    late = not over or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM)
    return {"failed": f"no answer within {math.ceil(seconds)} s" if late else "its process died"}
