"""The process that writes to one monitor: `python -m deepspeed.monitor.writer`, started by `feed`.

Lines of JSON come on its standard input: first what to write to, and how long it may take at the end; then lists of
events. An empty line, or the end of the input when the run was killed, ends it. A thread takes them in, so the run
never waits for a package that imports, blocks or asks a server.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, BinaryIO

from deepspeed.monitor.base import Event, Monitor

# block of the configuration: where its monitor is
MONITORS = {
    "tensorboard": ("deepspeed.monitor.tensorboard", "TensorBoardMonitor"),
    "wandb": ("deepspeed.monitor.wandb", "WandbMonitor"),
    "comet": ("deepspeed.monitor.comet", "CometMonitor"),
    "csv_monitor": ("deepspeed.monitor.csv_monitor", "csvMonitor"),
    "jsonl_monitor": ("deepspeed.monitor.jsonl", "JsonlMonitor"),
    "mlflow": ("deepspeed.monitor.mlflow", "MLflowMonitor"),
    "prometheus": ("deepspeed.monitor.prometheus", "PrometheusMonitor"),
}


def monitor_class(block: str) -> type[Monitor]:
    """The monitor that a block of the configuration is for; its package is not imported."""
    module, name = MONITORS[block]
    return getattr(import_module(module), name)


def _take_in(lines: BinaryIO, limit: float, queue: SimpleQueue[list[Any] | None]) -> None:
    for line in iter(lines.readline, b""):
        if not line.strip():
            break
        if line.endswith(b"\n"):  # else the run was killed in the middle of it
            queue.put(json.loads(line))
    # The alarm's default action ends the process, whatever holds the interpreter up.
    signal.setitimer(signal.ITIMER_REAL, limit)
    queue.put(None)


def _all_there_is(queue: SimpleQueue[list[Any] | None]) -> list[list[Any] | None]:
    found = [queue.get()]
    try:
        while found[-1] is not None:
            found.append(queue.get_nowait())
    except Empty:
        pass
    return found


def _serve(lines: BinaryIO) -> None:
    block, settings, limit = json.loads(lines.readline())
    queue: SimpleQueue[list[Any] | None] = SimpleQueue()
    threading.Thread(target=_take_in, args=(lines, limit, queue), daemon=True).start()
    monitor = monitor_class(block)(SimpleNamespace(**settings))
    ended = False
    while not ended:
        found = _all_there_is(queue)
        ended = found[-1] is None
        events = [Event(*event) for together in found if together is not None for event in together]
        if events:
            monitor.write(events)
    monitor.close()


if __name__ == "__main__":
    status = 0
    try:
        _serve(sys.stdin.buffer)
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that a package left behind hold nothing up
