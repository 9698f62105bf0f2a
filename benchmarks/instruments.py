"""What instruments cost: steps of one engine with each of them, paired with a plain one, and two plain ones with each
other, in an order drawn anew for each round. Wall clock of the slowest rank; CPU time of all ranks with their threads
and with the processes they have started: a monitor's writers run beside the steps that follow, so what they take in a
round is the monitors' side's.

A bar holds where the median of the CPU ratios is at most the bar (it is missed where their interval lies above), the
interval of the wall clock's reaches down to it, and the 99th percentile of a step is at most 1.05 of that of the second
plain side. The plain sides are not separable where both of their intervals hold 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from common import GPT, Shape, World, batch_of, median_interval, print_table, serve, start_world, write_json

SIDES = ["off", "off again", "recorder", "comms logger", "non_finite", "monitors", "norms", "counted"]
BARS = {"recorder": 1.01, "comms logger": 1.01, "non_finite": 1.01, "monitors": 1.01, "norms": 1.01, "counted": 1.5}
WARM = 2  # rounds that pay for lazy allocation and the writers' start
TAIL = 1.05  # the 99th percentile of a side over that of "off again"


def make_side(name: str, stage: int, shape: Shape, folder: str) -> Callable[[torch.Tensor], None]:
    """One step of an engine with an instrument on."""
    import deepspeed
    from deepspeed.comm.logging import comms_logger
    from deepspeed.foundation.recorder import recorder
    from deepspeed.profiling.flops_profiler import FlopsProfiler
    from deepspeed.profiling.timeline import ModuleSpans

    torch.manual_seed(0)
    model = GPT(shape)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": shape.batch, "zero_optimization": {"stage": stage}}
    if name == "monitors":
        config["csv_monitor"] = {"enabled": True, "output_path": folder}
    config["non_finite"] = {"enabled": name == "non_finite"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    profiler = FlopsProfiler(engine.module) if name == "counted" else None
    if name == "recorder":
        recorder.start()  # one for all sides: it is on in the steps of this one
        ModuleSpans(engine.module)

    def step(windows: torch.Tensor) -> None:
        recorder.on, comms_logger.enabled = name == "recorder", name == "comms logger"
        if profiler is not None:
            profiler.start_profile()
        engine.backward(engine(windows))
        if profiler is not None:
            profiler.stop_profile()
        if name == "norms":
            engine.gradient_norms()
        engine.step()

    return step


def make_rank(stage: int, width: int, layers: int) -> Callable[..., Any]:
    """A rank that holds all sides; answers with (wall, CPU, CPU of children) seconds of a step by side."""
    rank, _ = start_world()
    shape = Shape(width=width, layers=layers)
    folder = tempfile.mkdtemp(prefix="instruments-")
    built = {name: make_side(name, stage, shape, folder) for name in SIDES}

    def handle(order: list[str], index: int) -> dict[str, tuple[float, float, float]]:
        if index == WARM:  # eight engines are many objects: a collection would fall on a side by chance
            gc.collect()
            gc.freeze()
        times, aside = {}, seconds_of_children()
        for name in order:
            windows = batch_of(shape, index, rank)
            torch.distributed.barrier()
            cpu, began = time.process_time(), time.perf_counter()
            built[name](windows)
            took = time.perf_counter() - began
            times[name] = (took, time.process_time() - cpu, 0.0)
        took, cpu, _ = times["monitors"]  # the only side with processes of its own
        beside = seconds_of_children() - aside
        return {**times, "monitors": (took, cpu + beside, beside)}

    return handle


def seconds_of_children() -> float:
    """CPU seconds of all threads of the processes that this one has started, to the nanosecond."""
    total = 0
    for child in psutil.Process(os.getpid()).children(recursive=True):
        for path in Path(f"/proc/{child.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that ended meanwhile
                total += int(path.read_text().split()[0])
    return total / 1e9


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the sample lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def rows_of(rounds: list[dict[str, tuple[float, float, float]]], stage: int) -> list[dict[str, Any]]:
    """One record per side: paired ratios to "off"."""
    rows = []
    tail = percentile([seconds["off again"][0] for seconds in rounds], 0.99)
    for name in SIDES[1:]:
        wall, cpu = (median_interval([seconds[name][at] / seconds["off"][at] for seconds in rounds]) for at in (0, 1))
        rows.append(
            {"stage": stage, "side": name, "rounds": len(rounds), "bar": BARS.get(name)}
            | {"wall": wall.median, "wall_low": wall.low, "wall_high": wall.high}
            | {"cpu": cpu.median, "cpu_low": cpu.low, "cpu_high": cpu.high}
            | {"tail": percentile([seconds[name][0] for seconds in rounds], 0.99) / tail}
            | {"writers_ms": 1e3 * statistics.mean(seconds[name][2] for seconds in rounds)}
        )
    return rows


def verdict(row: dict[str, Any]) -> str:
    """Which of a side's bars hold; see above."""
    bar = row["bar"]
    if bar is None:
        apart = [x for x in ("wall", "cpu") if not row[f"{x}_low"] <= 1.0 <= row[f"{x}_high"]]
        return f"separable: {', '.join(apart)}" if apart else "not separable"
    missed = ["CPU"] if row["cpu_low"] > bar else []
    missed += ["wall"] if row["wall_low"] > bar else []
    missed += ["99th"] if bar == BARS["norms"] and row["tail"] > TAIL else []
    if missed:
        return f"{bar} MISSED: {', '.join(missed)}"
    return f"{bar} ok" if row["cpu"] <= bar else f"{bar} not shown: CPU"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = ["stage", "side", "rounds", "wall [95 %]", "CPU of all ranks [95 %]", "99th percentile", "writers ms", "bar"]
    body = []
    for row in rows:
        wall, cpu = (f"{row[x]:.3f} [{row[f'{x}_low']:.3f}, {row[f'{x}_high']:.3f}]" for x in ("wall", "cpu"))
        cells = [str(row["stage"]), row["side"], str(row["rounds"]), wall, cpu, f"{row['tail']:.2f}"]
        body.append([*cells, f"{row['writers_ms']:.2f}", verdict(row)])
    print_table(head, body)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1e9, help="of the rounds of a stage; fewer are made then")
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    order, rows = random.Random(0), []
    for stage in arguments.stages:
        setup = {"stage": stage, "width": arguments.width, "layers": arguments.layers}
        world = World("instruments.py", arguments.ranks, setup)
        rounds, end = [], time.monotonic() + arguments.seconds
        for index in range(arguments.rounds + WARM):
            answers = world.ask(order=order.sample(SIDES, len(SIDES)), index=index)
            by_side = {name: [answer[name] for answer in answers] for name in SIDES}
            if time.monotonic() > end:
                break
            rounds.append(
                {n: (max(a[0] for a in t), *(sum(a[at] for a in t) for at in (1, 2))) for n, t in by_side.items()}
            )
        world.close()
        rows += rows_of(rounds[WARM:], stage)
    show(rows)
    if not arguments.dry:
        print(f"written: {write_json('instruments.json', rows)}")


if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
