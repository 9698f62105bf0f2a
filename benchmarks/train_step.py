"""Time of one training step against DDP: no-communication floor, FSDP2, ZeRO stages 0 to 3, other environments."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import (
    GPT,
    Interval,
    Shape,
    World,
    batch_of,
    fully_sharded,
    median_interval,
    print_table,
    serve,
    start_world,
    whole_bytes,
    write_json,
)
from torch import Tensor, nn

SHAPE = Shape()
LEARNING_RATE = 3e-4
FEWEST_ROUNDS = 10  # with fewer than six pairs a median has no 95 % interval
HALF_WIDTH = 0.02
SAME_LOSS = {"fp32": 1e-3, "bf16": 1e-2}
BARS = {"stage0": 1.00, "stage1": 1.05, "stage2": 1.05, "stage3": 1.12}
REFERENCE, AGAIN = "ddp", "ddp-again"
STAGES = ["stage0", "stage1", "stage2", "stage3"]
SIDES = [REFERENCE, AGAIN, "floor", "fsdp2", *STAGES, "stage3-free"]


# ---- the sides, as they run inside a rank


@dataclass
class Side:
    """One way to train: a callable that does a whole step and returns the loss before it."""

    step: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], Tensor]
    module: nn.Module
    losses: list[float] = field(default_factory=list)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every side."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def torch_side(model: nn.Module, wrapped: nn.Module, autocast: bool) -> Side:
    """A plain PyTorch loop around `wrapped`."""
    optimizer = adamw(wrapped.parameters())

    def forward(windows: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            return wrapped(windows)

    def step(windows: Tensor) -> Tensor:
        loss = forward(windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Side(step, forward, model)


def fsdp2_side(model: GPT, low_precision: bool) -> Side:
    """FSDP2 of every block and of the rest."""
    fully_sharded(model, low_precision)
    return torch_side(model, model, autocast=False)


def stage_config(name: str, low_precision: bool) -> dict[str, Any]:
    """The JSON of `stage0` … `stage3` (limits at their defaults) and `stage3-free` (each group freed after its use)."""
    zero: dict[str, Any] = {"stage": int(name[len("stage")])}
    if name == "stage3-free":
        block, embedding = 12 * SHAPE.width**2, SHAPE.vocabulary * SHAPE.width
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 2 * max(block, embedding),
            "stage3_prefetch_bucket_size": block,
        }
    return {
        "train_micro_batch_size_per_gpu": SHAPE.batch,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": low_precision},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def stage_side(model: GPT, config: dict[str, Any]) -> Side:
    """An engine of whichever `deepspeed` this interpreter has."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(windows: Tensor) -> Tensor:
        loss = engine(windows)
        engine.backward(loss)
        engine.step()
        return loss

    return Side(step, engine, model)


def make_side(name: str, low_precision: bool) -> Side:
    """The side of this name, all from the same random weights."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    if name in (REFERENCE, AGAIN):
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return torch_side(model, wrapped, autocast=low_precision)
    if name == "floor":
        return torch_side(model, model, autocast=low_precision)
    if name == "fsdp2":
        return fsdp2_side(model, low_precision)
    return stage_side(model, stage_config(name, low_precision))


def versions() -> str:
    """Of what a rank has imported."""
    found = [sys.modules[name] for name in ("torch", "deepspeed") if name in sys.modules]
    return ", ".join(f"{module.__name__} {module.__version__}" for module in found)


def make_rank(sides: list[str], dtype: str) -> Callable[..., Any]:
    """A rank that holds all sides; answers `round` with seconds by side and `finish` with losses and gathered bytes."""
    rank, _ = start_world()
    built = {name: make_side(name, dtype == "bf16") for name in sides}

    def one_step(side: Side) -> float:
        windows = batch_of(SHAPE, len(side.losses), rank)
        started = time.perf_counter()
        loss = side.step(windows)
        seconds = time.perf_counter() - started
        side.losses.append(loss.item())
        return seconds

    def handle(what: str, order: list[str] | None = None) -> Any:
        if what == "finish":
            gathered = {}
            for name, side in built.items():
                loss = side.forward(batch_of(SHAPE, len(side.losses), rank))
                gathered[name] = whole_bytes(side.module)  # while the loss holds its graph: backward has not begun
                del loss
            losses = {name: side.losses for name, side in built.items()}
            return {"gathered": gathered, "losses": losses, "versions": versions()}
        times = {}
        for name in order or []:
            torch.distributed.barrier()
            # The untimed step in front leaves behind what the side defers to its next forward, so that the timed step
            # pays for it as every step of a real run does.
            one_step(built[name])
            times[name] = one_step(built[name])
        return times

    return handle


# ---- the table, as it is put together in the parent


@dataclass
class Group:
    """The processes of one environment, and the seconds of every side by round."""

    world: World
    sides: list[str]
    rounds: list[dict[str, float]] = field(default_factory=list)
    report: list[dict[str, Any]] = field(default_factory=list)

    def run_round(self, order: random.Random) -> None:
        """Every side once, in random order; a side's time is that of its slowest rank."""
        shuffled = order.sample(self.sides, len(self.sides))
        answers = self.world.ask(what="round", order=shuffled)
        self.rounds.append({name: max(answer[name] for answer in answers) for name in self.sides})

    def ratio(self, name: str) -> Interval:
        """The paired ratio of a side to the DDP of the same processes."""
        return median_interval([seconds[name] / seconds[REFERENCE] for seconds in self.rounds])

    def settled(self) -> bool:
        """Whether the interval of every ratio is narrow enough."""
        return all(self.ratio(name).half_width <= HALF_WIDTH for name in self.sides if name != REFERENCE)

    @property
    def versions(self) -> str:
        """What the environment has installed."""
        return self.report[0]["versions"]

    def losses(self, name: str) -> list[float]:
        """Mean over the ranks at each step."""
        by_rank = [rank["losses"][name] for rank in self.report]
        return [statistics.fmean(values) for values in zip(*by_rank, strict=True)]


def measure(dtype: str, arguments: argparse.Namespace) -> list[Group]:
    """Rounds of all environments in turn until every interval is narrow enough or the time is spent."""
    groups: list[Group] = []
    deadline = time.monotonic() + arguments.minutes * 60
    order = random.Random(0)
    try:
        for python in [None, *arguments.env]:
            sides = list(dict.fromkeys([REFERENCE, *(arguments.sides if python is None else STAGES)]))
            world = World("train_step.py", arguments.ranks, {"sides": sides, "dtype": dtype}, python)
            groups.append(Group(world, sides))
        for count in itertools.count():
            for group in groups:
                group.run_round(order)
            if count == 0:
                for group in groups:
                    group.rounds.clear()  # the first round pays for lazy allocation
            elif count >= FEWEST_ROUNDS and (time.monotonic() > deadline or all(group.settled() for group in groups)):
                break
        for group in groups:
            group.report = group.world.ask(what="finish")
    finally:
        for group in groups:
            group.world.close()
    return groups


def rows_of(dtype: str, groups: list[Group]) -> list[dict[str, Any]]:
    """One record per side: milliseconds, paired ratio, losses against DDP's, bar, gathered bytes."""
    reference = groups[0].losses(REFERENCE)
    rows = []
    for group in groups:
        for name in group.sides:
            ratio = group.ratio(name)
            losses = group.losses(name)
            apart = max(abs(ours - ddp) / ddp for ours, ddp in zip(losses, reference, strict=True))
            bar = BARS.get(name) if group is groups[0] else None
            held = "open" if ratio.half_width > HALF_WIDTH else "reached" if bar and ratio.low <= bar else "missed"
            rows.append(
                {
                    "dtype": dtype,
                    "environment": group.versions,
                    "side": name,
                    "ms": 1e3 * statistics.median(seconds[name] for seconds in group.rounds),
                    "ratio": ratio.median,
                    "low": ratio.low,
                    "high": ratio.high,
                    "pairs": ratio.count,
                    "first_loss": losses[0],
                    "last_loss": losses[-1],
                    "loss_apart": None if name == "floor" else apart,
                    "same_loss": name == "floor" or apart <= SAME_LOSS[dtype],
                    "bar": bar,
                    "bar_is": held if bar else None,
                    "whole_bytes_after_forward": max(rank["gathered"][name] for rank in group.report),
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one dtype."""
    for environment in dict.fromkeys(row["environment"] for row in rows):
        print(f"{rows[0]['dtype']}, {environment}:")
        _show_environment([row for row in rows if row["environment"] == environment])


def _show_environment(rows: list[dict[str, Any]]) -> None:
    head = ["side", "ms", "x DDP [95 %]", "pairs", "bar", "loss", "from DDP", "MB gathered"]
    body = []
    for row in rows:
        bar = "" if row["bar"] is None else f"{row['bar']:.2f} {row['bar_is']}"
        apart = "-" if row["loss_apart"] is None else f"{row['loss_apart']:.1e}{'' if row['same_loss'] else ' DIFFERS'}"
        ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        loss = f"{row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        whole = f"{row['whole_bytes_after_forward'] / 1e6:.1f}"
        body.append([row["side"], f"{row['ms']:.1f}", ratio, str(row["pairs"]), bar, loss, apart, whole])
    print_table(head, body)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "both"], default="both")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--env", nargs="*", default=[], metavar="PYTHON", help="interpreters of other environments")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=15, help="time limit for each dtype")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    arguments = parse_arguments()
    rows = []
    for dtype in ["fp32", "bf16"] if arguments.dtype == "both" else [arguments.dtype]:
        found = rows_of(dtype, measure(dtype, arguments))
        show(found)
        rows += found
    print(f"written: {write_json('train_step.json', rows)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
