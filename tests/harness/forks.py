"""Functions in children of this process: what is imported is there already, and what a child does dies with it."""

from __future__ import annotations

import json
import math
import os
import signal
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
        seconds: after which a child ends by itself.

    Returns:
        In their order; {"failed": why} of one that raised, died or took too long.
    """
    started = [_start(work, seconds) for work in works]
    return [_ended(child, read, seconds) for child, read in started]


def _start(work: Work, seconds: float) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
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


def _ended(child: int, read: int, seconds: float) -> dict[str, Any]:
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return {"failed": f"no answer within {math.ceil(seconds)} s" if late else "its process died"}
