"""Time of a compiled training step: ZeRO stages beside compiled DDP and FSDP2, and beside their own eager steps."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import (
    GPT,
    Shape,
    World,
    batch_of,
    fully_sharded,
    median_interval,
    print_table,
    serve,
    start_world,
    write_json,
)

STAGES = ["stage0", "stage1", "stage2", "stage3"]
SIDES = [f"{name}{how}" for name in ("ddp", "fsdp2", *STAGES) for how in ("", "-compiled")]
# Of a side: the one that it is divided by, and the bar.
BARS = {
    **{f"{stage}-compiled": [("ddp-compiled", 1.00)] for stage in STAGES[:3]},
    "stage3-compiled": [("fsdp2-compiled", 0.90), ("stage3", 0.95)],
    "ddp-compiled": [("ddp", 1.00)],
    "fsdp2-compiled": [("fsdp2", 1.00)],
}
SAME_LOSS = 1e-3  # of its size
Step = Callable[[Tensor], Tensor]


def plain_step(wrapped: nn.Module, parameters: Any) -> Step:
    """A step of a plain PyTorch loop."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True)

    def step(windows: Tensor) -> Tensor:
        loss: Tensor = wrapped(windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fsdp2_step(model: GPT, compiled: bool) -> Step:
    """FSDP2 of every block and of the rest; blocks are compiled one by one, as its documentation says."""
    for block in model.blocks if compiled else ():
        block.compile()
    fully_sharded(model)
    return plain_step(model, model.parameters())


def engine_step(model: GPT, stage: int, compiled: bool, batch: int) -> Step:
    """A step of an engine."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": batch,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},  # FSDP2 shards everything, too
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if compiled:
        engine.compile()

    def step(windows: Tensor) -> Tensor:
        loss = engine(windows)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def make_side(name: str, shape: Shape) -> Step:
    """The side of this name, all from the same random weights."""
    torch.manual_seed(0)
    model, compiled = GPT(shape), name.endswith("-compiled")
    kind = name.removesuffix("-compiled")
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return plain_step(torch.compile(wrapped) if compiled else wrapped, model.parameters())  # type: ignore[arg-type]
    if kind == "fsdp2":
        return fsdp2_step(model, compiled)
    return engine_step(model, int(kind.removeprefix("stage")), compiled, shape.batch)


def make_rank(sides: list[str], shape: Shape) -> Callable[..., Any]:
    """A rank that holds all sides; answers `round` with seconds, seconds of CPU and loss by side."""
    rank, _ = start_world()
    steps = {name: make_side(name, shape) for name in sides}

    def handle(what: str, order: list[str], number: int) -> dict[str, tuple[float, float, float]]:
        found = {}
        for name in order:
            torch.distributed.barrier()
            loss = steps[name](batch_of(shape, 2 * number, rank))  # leaves behind what a side defers
            began, began_cpu = time.perf_counter(), time.process_time()
            loss = steps[name](batch_of(shape, 2 * number + 1, rank))
            found[name] = (time.perf_counter() - began, time.process_time() - began_cpu, loss.item())
        return found

    return handle


def measure(world: World, sides: list[str], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the slowest rank, and of CPU of all ranks, by side and round; two rounds more, at first, compile.

    Raises:
        SystemExit: losses of the sides differ.
    """
    order, times = random.Random(0), {name: [] for name in sides}
    for number in range(rounds + 2):
        answers = world.ask(what="round", order=order.sample(sides, len(sides)), number=number)
        losses = [answer[name][2] for answer in answers[:1] for name in sides]
        if max(losses) - min(losses) > SAME_LOSS * min(losses):
            raise SystemExit(f"the sides do not compute the same: losses {dict(zip(sides, losses, strict=True))}")
        for name in sides if number >= 2 else ():
            of_ranks = [answer[name] for answer in answers]
            times[name].append((max(seconds for seconds, *_ in of_ranks), sum(cpu for _, cpu, _ in of_ranks)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help="run as a rank process of the benchmark")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--json", default="", help="name of the result file; empty: none is written")
    options = parser.parse_args()
    if options.worker:
        serve(make_rank)
        return
    shape = Shape(layers=options.layers, width=options.width, vocabulary=options.vocabulary)
    world = World("compile.py", options.ranks, {"sides": options.sides, "shape": shape})
    times = measure(world, options.sides, options.rounds)
    world.close()
    rows, results = [], []
    for name in options.sides:
        for reference, bar in BARS.get(name, []):
            if reference in times:
                pairs = list(zip(times[name], times[reference], strict=True))
                wall = median_interval([ours[0] / theirs[0] for ours, theirs in pairs])
                cpu = median_interval([ours[1] / theirs[1] for ours, theirs in pairs])
                milliseconds = 1e3 * median_interval([seconds for seconds, _ in times[name]]).median
                rows.append([name, reference, f"{milliseconds:.1f}", str(wall), str(cpu), f"{bar:.2f}"])
                results.append({"side": name, "over": reference, "ms": milliseconds, "wall": wall.median,
                                "cpu": cpu.median, "cpu_low": cpu.low, "cpu_high": cpu.high, "bar": bar})  # fmt: skip
    print_table(["side", "over", "ms", "wall ratio", "CPU ratio", "bar"], rows)
    if options.json:
        print(write_json(options.json, results))


if __name__ == "__main__":
    main()
