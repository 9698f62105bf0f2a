"""What instruments cost: steps of one engine with each of them, paired with a plain one, and two plain ones with each
other, in an order drawn anew for each round. Wall clock of the slowest rank; CPU time of all ranks with their threads
and with the processes they have started: a monitor's writers run beside the steps that follow, so what they take in a
round is the monitors' side's.

Ratios of whole steps separate a few per cent. What an instrument adds does not depend on how many tokens a step has,
so one per cent is told from steps of the same model with few tokens: many of them, and the milliseconds that a side has
more than the plain one, as a part of the whole step. The 99th percentile likewise, less that of the second plain side.

A bar of 1.01 holds where what is added is at most that with its whole interval and the ratio of whole steps' CPU is at
most that, the interval of the wall clock's ratio reaches down to it, and the 99th percentile is at most 1.05 in both
kinds of steps. It is missed where the interval of the whole steps lies above, or that of the others does and the whole
steps' reaches above too; where the two kinds disagree, it is not shown. The intervals of the percentiles are
bootstrapped. The plain sides are not separable where both of their intervals hold 1.

Rounds are kept under `runs`: a run makes what is missing, of the sides it is given, and shows what there is of all.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from common import GPT, REPOSITORY, Shape, World, batch_of, median_interval, print_table, serve, start_world, write_json

SIDES = ["off", "off again", "recorder", "comms logger", "non_finite", "monitors", "norms", "counted"]
BARS = {"recorder": 1.01, "comms logger": 1.01, "non_finite": 1.01, "monitors": 1.01, "norms": 1.01, "counted": 1.5}
KEEP = 10  # rounds, after which they are written down
KINDS = "whole", "few"  # steps
WARM = 2  # rounds that pay for lazy allocation and the writers' start
TAIL = 1.05  # the 99th percentile of a side over that of "off again"
FEW = {"batch": 1, "sequence": 16}  # of the steps that show what is added
Round = dict[
    str, tuple[float, float, float]
]  # by side: seconds of the slowest rank, CPU of all, of that their children


def make_side(name: str, stage: int, shape: Shape, folder: str) -> Callable[[torch.Tensor], None]:
    """One step of an engine with an instrument on."""
    import deepspeed
    from deepspeed.comm.watchdog.comms_logger import comms_logger
    from deepspeed.foundation.spans import recorder
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


def make_rank(stage: int, sides: list[str], **sizes: int) -> Callable[..., Any]:
    """A rank that holds all sides; answers with (wall, CPU, CPU of children) seconds of a step by side."""
    rank, _ = start_world()
    shape = Shape(**sizes)
    folder = tempfile.mkdtemp(prefix="instruments-")
    built = {name: make_side(name, stage, shape, folder) for name in sides}

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
        if "monitors" in times:  # the only side with processes of its own
            took, cpu, _ = times["monitors"]
            beside = seconds_of_children() - aside
            times["monitors"] = (took, cpu + beside, beside)
        return times

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


def tails(rounds: list[Round], name: str, figure: Callable[[float, float], float]) -> tuple[float, float, float]:
    """A figure of the 99th percentiles of a side's and the second plain one's wall clock, and its bootstrapped ends."""
    found, draw = list[float](), random.Random(1)
    for turn in range(200):
        drawn = draw.choices(rounds, k=len(rounds)) if turn else rounds
        own, plain = (percentile([seconds[side][0] for seconds in drawn], 0.99) for side in (name, "off again"))
        found.append(figure(own, plain))
    ordered = sorted(found[1:])
    return found[0], ordered[4], ordered[-5]


def added(few: list[Round], name: str, step: Round) -> dict[str, float]:
    """What a side takes more than a plain one in steps with few tokens, as a part of a whole step: CPU, and the 99th
    percentile of the wall clock with a bootstrapped interval. Without such steps nothing is known."""
    if not few:
        unknown = {"": math.nan, "_low": -math.inf, "_high": math.inf}
        return {"added_ms": math.nan} | {f"{key}{end}": x for key in ("added", "tail") for end, x in unknown.items()}
    cpu = sorted(seconds[name][1] - seconds["off"][1] for seconds in few)
    middle = median_interval([each + 1.0 for each in cpu])  # its lower end is 0 where there are too few
    tail, low, high = tails(few, name, lambda own, plain: 1 + (own - plain) / step["off again"][0])
    found = {"added_ms": 1e3 * (middle.median - 1.0)}
    ends = (("added", middle.median), ("added_low", middle.low), ("added_high", middle.high))
    found |= {key: (value - 1.0) / step["off"][1] for key, value in ends}
    return found | {"tail": tail, "tail_low": low, "tail_high": high}


def rows_of(rounds: list[Round], few: list[Round], stage: int) -> list[dict[str, Any]]:
    """One record per side: paired ratios to "off" of whole steps, and what is added. Each side has the rounds that it
    was in."""
    sides = [name for name in SIDES[1:] if any(name in seconds for seconds in rounds)]
    return [row_of(name, with_side(rounds, name), with_side(few, name), stage) for name in sides]


def with_side(rounds: list[Round], name: str) -> list[Round]:
    """Those that a side was in."""
    return [seconds for seconds in rounds if name in seconds]


def row_of(name: str, rounds: list[Round], few: list[Round], stage: int) -> dict[str, Any]:
    """The record of a side, of rounds that it was in."""
    # A whole step: its median, but for the 99th percentile of the second plain side's wall clock.
    tail = percentile([seconds["off again"][0] for seconds in rounds], 0.99)
    cpu_of_step = statistics.median(seconds["off"][1] for seconds in rounds)
    step: Round = {"off": (0.0, cpu_of_step, 0.0), "off again": (tail, 0.0, 0.0)}
    wall, cpu = (median_interval([seconds[name][at] / seconds["off"][at] for seconds in rounds]) for at in (0, 1))
    whole = tails(rounds, name, lambda own, plain: own / plain)
    return (
        {"stage": stage, "side": name, "rounds": len(rounds), "few": len(few), "bar": BARS.get(name)}
        | {"wall": wall.median, "wall_low": wall.low, "wall_high": wall.high}
        | {"cpu": cpu.median, "cpu_low": cpu.low, "cpu_high": cpu.high, "step_cpu_ms": 1e3 * cpu_of_step}
        | dict(zip(("whole_tail", "whole_tail_low", "whole_tail_high"), whole, strict=True))
        | added(few, name, step)
        | {"writers_ms": 1e3 * statistics.mean(seconds[name][2] for seconds in rounds)}
    )


def state(row: dict[str, Any], few: str, few_bar: float, holds: str, whole: str, bar: float) -> str:
    """What both kinds of steps say of a bar.

    Args:
        row: with the figures and their ends.
        few, whole: figures of steps with few tokens, and of whole ones.
        few_bar, bar: what they may be at most.
        holds: the figure of the former that must be within.
    """
    if row[f"{whole}_low"] > bar or (row[f"{few}_low"] > few_bar and row[f"{whole}_high"] > bar):
        return "missed"
    return "held" if row[holds] <= few_bar and row[whole] <= bar else "not shown"


def verdict(row: dict[str, Any]) -> str:
    """Which of a side's bars hold; see above."""
    bar = row["bar"]
    if bar is None:
        apart = [x for x in ("wall", "cpu") if not row[f"{x}_low"] <= 1.0 <= row[f"{x}_high"]]
        return f"separable: {', '.join(apart)}" if apart else "not separable"
    if bar == BARS["counted"]:
        return f"{bar} {'MISSED' if max(row['cpu_low'], row['wall_low']) > bar else 'ok'}"
    states = {
        "CPU": state(row, "added", bar - 1.0, "added_high", "cpu", bar),
        "wall": "missed" if row["wall_low"] > bar else "held",
        "99th": state(row, "tail", TAIL, "tail", "whole_tail", TAIL),
    }
    for said, word in (("missed", "MISSED"), ("not shown", "not shown")):
        those = [name for name, found in states.items() if found == said]
        if those:
            return f"{bar} {word}: {', '.join(those)}"
    return f"{bar} ok"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = ["stage", "side", "rounds", "wall [95 %]", "CPU of all ranks [95 %]", "added CPU, of the step [95 %]", "ms",
            "99th percentile [95 %]", "of whole steps", "writers ms", "bar"]  # fmt: skip
    body = []
    for row in rows:
        wall, cpu, tail, whole = (
            f"{row[x]:.3f} [{row[f'{x}_low']:.3f}, {row[f'{x}_high']:.3f}]"
            for x in ("wall", "cpu", "tail", "whole_tail")
        )
        more = f"{row['added']:+.4f} [{row['added_low']:+.4f}, {row['added_high']:+.4f}]"
        cells = [str(row["stage"]), row["side"], f"{row['rounds']} + {row['few']}", wall, cpu, more]
        body.append([*cells, f"{row['added_ms']:+.2f}", tail, whole, f"{row['writers_ms']:.2f}", verdict(row)])
    print_table(head, body)


class Kept:
    """Rounds of one size of step that were made before, and the file they are in.

    Args:
        path: of the file.
        sides: of the rounds to come.
    """

    def __init__(self, path: Path, sides: list[str]) -> None:
        self.path, self.sides = path, sides
        self.rounds: list[Round] = json.loads(path.read_text()) if path.exists() else []

    def missing(self, count: int) -> int:
        """How many rounds are missing until the side that has fewest has so many."""
        return count - min(sum(name in seconds for seconds in self.rounds) for name in self.sides)

    def add(self, rounds: list[Round]) -> None:
        """Keep these too."""
        self.rounds += rounds
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.rounds) + "\n")
        part.replace(self.path)


def rounds_of(count: int, seconds: float, ranks: int, setup: dict[str, Any], kept: Kept) -> None:
    """Rounds of one size of step, until there are so many."""
    count = kept.missing(count)
    if count <= 0:
        return
    world, rounds, order = World("instruments.py", ranks, setup), list[Round](), random.Random(len(kept.rounds))
    end, sides = time.monotonic() + seconds, setup["sides"]
    for index in range(count + WARM):
        answers = world.ask(order=order.sample(sides, len(sides)), index=index)
        by_side = {name: [answer[name] for answer in answers] for name in sides}
        if time.monotonic() > end:
            break
        rounds.append(
            {n: (max(a[0] for a in t), sum(a[1] for a in t), sum(a[2] for a in t)) for n, t in by_side.items()}
        )
        if len(rounds) == WARM + KEEP:
            kept.add(rounds[WARM:])
            rounds = rounds[:WARM]
    world.close()
    kept.add(rounds[WARM:])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--few", type=int, default=600, help="rounds of steps with few tokens")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="of the rounds of a size; the next run makes the rest"
    )
    parser.add_argument("--anew", action="store_true", help="forget the rounds that are kept")
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--sides", nargs="*", choices=SIDES[2:], default=SIDES[2:], help="beside the two plain ones")
    parser.add_argument("--dry", action="store_true", help="write no results")
    given = parser.parse_args()
    rows = list[dict[str, Any]]()
    for stage in given.stages:
        sides = [*SIDES[:2], *given.sides]
        setup = {"stage": stage, "sides": sides, "width": given.width, "layers": given.layers}
        name = f"{given.ranks}-ranks-stage-{stage}-{given.width}x{given.layers}"
        whole, few = (Kept(REPOSITORY / "runs" / "instruments" / f"{name}-{kind}.json", sides) for kind in KINDS)
        if given.anew:
            whole.rounds, few.rounds = [], []
        rounds_of(given.rounds, given.seconds, given.ranks, setup, whole)
        if not whole.rounds:
            print(f"stage {stage}: no round within {given.seconds:g} s; give more --seconds", file=sys.stderr)
            continue
        rounds_of(given.few, given.seconds, given.ranks, {**setup, **FEW}, few)
        rows += rows_of(whole.rounds, few.rounds, stage)
    show(rows)
    if rows and not given.dry:
        print(f"written: {write_json('instruments.json', rows)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
