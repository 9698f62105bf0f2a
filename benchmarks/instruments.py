"""What instruments cost: steps of one engine with each of them, paired with a plain one, and two plain ones with each
other. Wall clock of the slowest rank and CPU time of all ranks; a monitor's writers are processes of their own, whose
CPU time is a column of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from common import GPT, Shape, World, batch_of, median_interval, print_table, serve, start_world, write_json

SIDES = ["off", "off again", "recorder", "comms logger", "non_finite", "monitors", "norms", "counted"]
BARS = {"recorder": 1.01, "comms logger": 1.01, "non_finite": 1.01, "monitors": 1.01, "norms": 1.01, "counted": 1.5}
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
    children = psutil.Process(os.getpid()).children()

    def writers() -> float:
        return sum(sum(child.cpu_times()[:2]) for child in children)

    def handle(order: list[str], index: int) -> dict[str, tuple[float, float, float]]:
        times = {}
        for name in order:
            windows = batch_of(shape, index, rank)
            torch.distributed.barrier()
            aside, cpu, began = writers(), time.process_time(), time.perf_counter()
            built[name](windows)
            took = time.perf_counter() - began
            times[name] = (took, time.process_time() - cpu, writers() - aside)
        return times

    return handle


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


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = ["stage", "side", "rounds", "wall [95 %]", "CPU of all ranks [95 %]", "99th percentile", "writers ms", "bar"]
    body = []
    for row in rows:
        wall, cpu = (f"{row[x]:.3f} [{row[f'{x}_low']:.3f}, {row[f'{x}_high']:.3f}]" for x in ("wall", "cpu"))
        held = "" if row["bar"] is None else f"{row['bar']} {'reached' if row['cpu_low'] <= row['bar'] else 'MISSED'}"
        tail = f"{row['tail']:.2f}{' MISSED' if row['bar'] == BARS['norms'] and row['tail'] > TAIL else ''}"
        cells = [str(row["stage"]), row["side"], str(row["rounds"]), wall, cpu, tail, f"{row['writers_ms']:.2f}", held]
        body.append(cells)
    print_table(head, body)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    order, rows = random.Random(0), []
    for stage in arguments.stages:
        setup = {"stage": stage, "width": arguments.width, "layers": arguments.layers}
        world = World("instruments.py", arguments.ranks, setup)
        rounds = []
        for index in range(arguments.rounds + 2):  # the first two pay for lazy allocation and the writers' start
            answers = world.ask(order=order.sample(SIDES, len(SIDES)), index=index)
            by_side = {name: [answer[name] for answer in answers] for name in SIDES}
            rounds.append(
                {n: (max(a[0] for a in t), *(sum(a[at] for a in t) for at in (1, 2))) for n, t in by_side.items()}
            )
        world.close()
        rows += rows_of(rounds[2:], stage)
    show(rows)
    if not arguments.dry:
        print(f"written: {write_json('instruments.json', rows)}")


if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
