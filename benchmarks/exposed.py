"""What the timeline calls exposed communication, against steps without any: two ranks at stage 0, beside the same two
processes' worth of work with nothing to send. The step less its exposed communication should be the bare step.

Sides take turns, in an order drawn anew each round: the pair, and twice two processes that train the same model alone
at the same time, so that as many cores, caches and memory channels are busy. The two bare readings are each other's
A/A line. Every process starts a block of steps at an agreed moment; a block counts as the median of its steps after the
first, a round as one paired gap, the table as the median of rounds with its 95 % interval. A machine that is busy
widens the interval: the bar is reached where all of it lies within, missed where none of it does, and else nothing is
shown.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from common import (
    GPT,
    Interval,
    Shape,
    World,
    batch_of,
    free_port,
    median_interval,
    print_table,
    serve,
    start_world,
    write_json,
)

BAR = 0.05  # of the step
AHEAD = 0.05  # seconds from a message to the moment that all start at


def make_rank(alone: bool, overlap: bool, width: int, layers: int) -> Callable[..., Any]:
    """A process; answers with (seconds of a step, exposed in it) of each step of a block."""
    rank = int(os.environ["RANK"])
    if alone:  # a world of its own
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        os.environ["MASTER_PORT"] = str(free_port())
    import deepspeed
    from deepspeed.foundation.spans import now, recorder
    from deepspeed.profiling.timeline import RankRecord, Timeline

    start_world()
    shape = Shape(width=width, layers=layers)
    torch.manual_seed(0)
    model = GPT(shape)
    zero = {"stage": 0, "overlap_comm": overlap}
    config = {"train_micro_batch_size_per_gpu": shape.batch, "zero_optimization": zero}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def handle(index: int, steps: int, at: float) -> list[tuple[float, float]]:
        batches = [batch_of(shape, index * 100 + step, rank) for step in range(steps)]
        recorder.start()
        while time.monotonic() < at:  # a core that sleeps comes back slower
            pass
        marks = [now()]
        for windows in batches:
            engine.backward(engine(windows))
            engine.step()
            marks.append(now())
        recorder.stop()
        spans, lost = recorder.take()
        if lost:
            raise RuntimeError(f"{lost} spans did not fit: fewer steps in a block")
        main = threading.get_ident()
        lines = [Timeline([RankRecord(0, spans, list(ends), main, 0)]) for ends in zip(marks, marks[1:], strict=False)]
        return [(line.step_seconds, line.exposed) for line in lines]

    return handle


def block(world: World, index: int, steps: int) -> tuple[float, float, float]:
    """Medians of a block's later steps, the mean of both processes: seconds of a step, exposed, the rest."""
    answers = world.ask(index=index, steps=steps + 1, at=time.monotonic() + AHEAD)
    found = [[(step, bare, step - bare) for step, bare in answer[1:]] for answer in answers]
    columns = [[statistics.median(column) for column in zip(*of_rank, strict=True)] for of_rank in found]
    step, exposed, rest = (statistics.mean(values) for values in zip(*columns, strict=True))
    return step, exposed, rest


def interval_of(values: list[float]) -> Interval:
    """`median_interval` of values that may lie below 0: with fewer than six it has no lower end either."""
    found = median_interval(values)
    return found if math.isfinite(found.high) else Interval(found.median, -math.inf, math.inf, found.count)


def verdict(gap: Interval) -> str:
    """What an interval says of the bar."""
    if max(abs(gap.low), abs(gap.high)) <= BAR:
        return "reached"
    return "MISSED" if gap.low > BAR or gap.high < -BAR else "not shown"


def measure(overlap: bool, given: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one setting."""
    setup = {"overlap": overlap, "width": given.width, "layers": given.layers}
    pair = World("exposed.py", 2, {"alone": False, **setup})
    bare = World("exposed.py", 2, {"alone": True, **setup})
    sides = {"pair": pair, "alone": bare, "alone again": bare}
    order, rounds, ends = random.Random(5), [], time.monotonic() + given.seconds
    for index in range(given.rounds + 1):
        found = {name: block(sides[name], index, given.steps) for name in order.sample(list(sides), len(sides))}
        if index:  # the first warms up
            rounds.append(found)
        if time.monotonic() > ends:
            break
    pair.close()
    bare.close()
    gaps = [(r["pair"][2] - (r["alone"][0] + r["alone again"][0]) / 2) / r["pair"][0] for r in rounds]
    same = [(r["alone"][0] - r["alone again"][0]) / r["pair"][0] for r in rounds]
    gap, noise = interval_of(gaps), interval_of(same)
    of = (("step_ms", "pair", 0), ("exposed_ms", "pair", 1), ("alone_ms", "alone", 0))
    ms = {name: 1e3 * statistics.median(one[side][at] for one in rounds) for name, side, at in of}
    row = {"overlap_comm": overlap, **ms, "bar": BAR, "rounds": len(rounds), "verdict": verdict(gap)}
    for name, interval in (("gap", gap), ("a/a", noise)):
        row |= {name: interval.median, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return row


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="six and more give an interval")
    parser.add_argument("--seconds", type=float, default=240, help="of a setting, after which no round begins")
    parser.add_argument("--steps", type=int, default=3, help="that count, of a block")
    parser.add_argument("--overlap", choices=["on", "off"], nargs="+", default=["off", "on"])
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--dry", action="store_true", help="write no results")
    given = parser.parse_args()
    rows = [measure(overlap == "on", given) for overlap in given.overlap]
    body = []
    for row in rows:
        times = [f"{row[name]:.1f}" for name in ("step_ms", "exposed_ms", "alone_ms")]
        gaps = [f"{row[name]:+.3f} [{row[f'{name}_low']:+.3f}, {row[f'{name}_high']:+.3f}]" for name in ("gap", "a/a")]
        body.append(["on" if row["overlap_comm"] else "off", *times, *gaps, f"{BAR} {row['verdict']}"])
    print_table(["overlap", "step ms", "exposed ms", "alone ms", "gap, of the step [95 %]", "A/A", "bar"], body)
    if not given.dry:
        print(f"written: {write_json('exposed.json', rows)}")


if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
