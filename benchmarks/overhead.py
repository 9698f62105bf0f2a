"""What bookkeeping costs: steps of almost nothing, by number of groups, against DDP's buckets and FSDP2's units."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import Interval, World, median_interval, print_table, results_folder, serve, start_world, write_json
from torch import Tensor, nn

WIDTH, BATCH = 8, 2
LAYER = WIDTH * WIDTH + WIDTH  # parameters of a layer: one group of stage 3, one bucket, one unit of FSDP2
COUNTS = [32, 64, 128, 256, 512]
STAGES = ["stage0", "stage1", "stage2", "stage3", "stage3-free"]
SIDES = ["ddp", "fsdp2", *STAGES]
PHASES = ["forward+backward", "step"]
AGAINST = {"stage0": "ddp", "stage1": "ddp", "stage2": "ddp", "stage3": "fsdp2", "stage3-free": "fsdp2"}
BARS = {"stage0": 1.15, "stage1": 1.15, "stage2": 1.15, "stage3": 1.0, "stage3-free": 1.0}
GROWTH = 1.2  # time per group at the most groups, over that at the fewest
FEWEST_ROUNDS, HALF_WIDTH = 10, 0.03


# ---- the sides, as they run inside a rank


class Layer(nn.Module):
    """The smallest module that counts as a block: one linear map in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: `[BATCH, WIDTH]`, as is the result."""
        return x + self.linear(x)


class Tower(nn.Module):
    """So many layers, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what comes out at the top."""
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@dataclass
class Side:
    """One way to train, in its two phases."""

    forward_backward: Callable[[Tensor], Tensor]
    step: Callable[[], None]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every side."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def torch_side(wrapped: nn.Module) -> Side:
    """A plain PyTorch loop."""
    optimizer = adamw(wrapped)

    def forward_backward(x: Tensor) -> Tensor:
        loss = wrapped(x)
        loss.backward()
        return loss

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Side(forward_backward, step)


def fsdp2_side(model: Tower) -> Side:
    """`fully_shard` of every layer."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return torch_side(fully_shard(model, mesh=mesh))


def stage_side(name: str, model: Tower) -> Side:
    """An engine with a group for every layer; `stage3-free` frees each one after its use."""
    import deepspeed

    stage = int(name[len("stage")])
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if stage < 3:
        zero["reduce_bucket_size"] = LAYER  # at stage 3 units are groups whatever the size of buckets
    if name == "stage3-free":
        zero |= {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 4 * LAYER}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    if len(engine._components.groups) != len(model.layers):
        raise RuntimeError(f"{name}: {len(engine._components.groups)} groups for {len(model.layers)} layers")

    def forward_backward(x: Tensor) -> Tensor:
        loss = engine(x)
        engine.backward(loss)
        return loss

    return Side(forward_backward, engine.step)


def make_side(name: str, count: int) -> Side:
    """The side of this name, all from the same random weights."""
    torch.manual_seed(0)
    model = Tower(count)
    if name == "ddp":
        parallel = nn.parallel.DistributedDataParallel
        return torch_side(parallel(model, gradient_as_bucket_view=True, bucket_cap_mb=LAYER * 4 / 2**20))
    if name == "fsdp2":
        return fsdp2_side(model)
    return stage_side(name, model)


def make_rank(sides: list[str], count: int) -> Callable[..., Any]:
    """A rank that holds all sides; answers with (seconds of forward and backward, seconds of the step) by side."""
    rank, _ = start_world()
    built = {name: make_side(name, count) for name in sides}
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def one_step(side: Side) -> tuple[float, float]:
        started = time.perf_counter()
        side.forward_backward(x)
        between = time.perf_counter()
        side.step()
        return between - started, time.perf_counter() - between

    def handle(order: list[str]) -> dict[str, tuple[float, float]]:
        times = {}
        for name in order:
            torch.distributed.barrier()
            one_step(built[name])  # what a side defers to its next forward is paid for by the timed step
            times[name] = one_step(built[name])
        return times

    return handle


# ---- the table, as it is put together in the parent


@dataclass
class Run:
    """The rounds of one number of ranks and groups: seconds by side and phase."""

    ranks: int
    count: int
    rounds: list[dict[str, tuple[float, float]]] = field(default_factory=list)

    def whole(self, name: str) -> list[float]:
        """Seconds of the whole step of a side."""
        return [sum(seconds[name]) for seconds in self.rounds]

    def microseconds(self, name: str, phase: int) -> float:
        """Median time of a phase per group."""
        return 1e6 * statistics.median(seconds[name][phase] for seconds in self.rounds) / self.count

    def ratio(self, name: str) -> Interval:
        """Paired ratio of a stage to what it is measured against."""
        pairs = zip(self.whole(name), self.whole(AGAINST[name]), strict=True)
        return median_interval([ours / theirs for ours, theirs in pairs])

    def settled(self) -> bool:
        """Whether the interval of every ratio is narrow enough."""
        return all(self.ratio(name).half_width <= HALF_WIDTH for name in self.rounds[0] if name in AGAINST)


def measure(ranks: int, counts: list[int], sides: list[str], minutes: float) -> list[Run]:
    """Rounds of all counts in turn, so that a slow minute of the machine meets all of them alike."""
    order, runs, worlds = random.Random(0), [Run(ranks, count) for count in counts], []
    deadline = time.monotonic() + 60 * minutes
    try:
        for run in runs:
            worlds.append(World("overhead.py", ranks, {"sides": sides, "count": run.count}))
        for index in itertools.count():
            for run, world in zip(runs, worlds, strict=True):
                answers = world.ask(order=order.sample(sides, len(sides)))
                if index:  # the first round pays for lazy allocation
                    run.rounds.append({name: max((a[name] for a in answers), key=sum) for name in sides})
            if index >= FEWEST_ROUNDS and (time.monotonic() > deadline or all(run.settled() for run in runs)):
                return runs
    finally:
        for world in worlds:
            world.close()


def rows_of(runs: list[Run], sides: list[str]) -> list[dict[str, Any]]:
    """One record per number of ranks, groups and side."""
    first = {run.ranks: run for run in reversed(runs)}
    rows = []
    for run, name in itertools.product(runs, sides):
        ratio = run.ratio(name) if name in AGAINST and AGAINST[name] in sides else None
        least = first[run.ranks]
        growth = statistics.median(run.whole(name)) / run.count / (statistics.median(least.whole(name)) / least.count)
        row: dict[str, Any] = {"ranks": run.ranks, "groups": run.count, "side": name, "rounds": len(run.rounds)}
        row |= {f"us_per_group {phase}": run.microseconds(name, at) for at, phase in enumerate(PHASES)}
        row |= {"growth": growth, "growth_held": growth <= GROWTH if name in BARS else None}
        if ratio is not None:
            row |= {"against": AGAINST[name], "ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            row |= {"bar": BARS[name], "held": ratio.low <= BARS[name]}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = ["ranks", "groups", "side", *(f"us/group {phase}" for phase in PHASES), "x fewest", "x other [95 %]", "bar"]
    body = []
    for row in rows:
        cells = [str(row["ranks"]), str(row["groups"]), row["side"]]
        cells += [f"{row[f'us_per_group {phase}']:.1f}" for phase in PHASES]
        cells.append(f"{row['growth']:.2f}{' MISSED' if row['growth_held'] is False else ''}")
        if "ratio" in row:
            cells.append(f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}] {row['against']}")
            cells.append(f"{row['bar']:.2f} {'reached' if row['held'] else 'missed'}")
        body.append(cells + [""] * (len(head) - len(cells)))
    print_table(head, body)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time per group over the number of groups, one picture for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    worlds = sorted({row["ranks"] for row in rows})
    figure, pictures = plt.subplots(1, len(worlds), figsize=(5.5 * len(worlds), 4), squeeze=False, sharey=True)
    for axes, ranks in zip(pictures[0], worlds, strict=True):
        for name in dict.fromkeys(row["side"] for row in rows):
            line = [row for row in rows if (row["ranks"], row["side"]) == (ranks, name)]
            whole = [sum(row[f"us_per_group {phase}"] for phase in PHASES) for row in line]
            axes.plot([row["groups"] for row in line], whole, marker="o", label=name, ls="-" if name in BARS else "--")
        axes.set(xscale="log", yscale="log", title=f"{ranks} rank(s)", xlabel="groups", xticks=COUNTS)
        axes.set_xticklabels([str(count) for count in COUNTS])
        axes.minorticks_off()
    pictures[0][0].set_ylabel("time of a step per group, µs")
    pictures[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--groups", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--minutes", type=float, default=4, help="time limit for each number of ranks")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    rows = []
    for ranks in arguments.ranks:
        found = rows_of(measure(ranks, arguments.groups, arguments.sides, arguments.minutes), arguments.sides)
        show(found)
        rows += found
    if arguments.dry:
        return
    print(f"written: {write_json('overhead.json', rows)}")
    draw(rows, results_folder() / "overhead.png")


if __name__ == "__main__":
    import sys

    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
