"""Time of one AdamW step on the CPU, fp32 and bf16 in and out: ours, torch's, other environments', and the floor.

Every side of every process runs once in each round, in random order; a ratio is that of two sides in one round. Both
steps move 28 bytes per parameter: fp32 reads gradient, parameter and moments and writes all but the first; bf16 reads a
2-byte gradient and writes a 2-byte copy. `z += a * x` in place moves 12 per element and runs over the same buffers and
bytes: its time is the floor, the bytes over the bandwidth of the memory. It reads twice what it writes; `z *= a` reads
as much as it writes, as the bf16 step does, and shows what memory gives to that mix. Others get from bf16 to bf16 by a
composition: cast the gradient, scale it, step, cast the parameter.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import REPOSITORY, World, median_interval, print_table, results_folder, serve, write_json
from torch import Tensor

BYTES = 28
FACTOR = 1.0 / 1024
FEWEST_ROUNDS = 15
OURS, AGAIN, TORCH, FLOOR, EVEN = "ours", "ours again", "torch fused", "z += a x", "z *= a"
MEMORY = (EVEN, FLOOR)  # no optimizers, the same in both dtypes
DTYPES = ("fp32", "bf16")
BARS = {"fp32": 0.98, "bf16": 1.9, FLOOR: 1.05}
Key = tuple[str, str, int]  # side, dtype, threads
Step = Callable[[], Any]


# ---- the sides, as they run inside a process


def in_one_pass(optimizer: Any, param: Tensor, gradient: Tensor, out: Tensor) -> Step:
    """From bf16 to bf16 by our fold."""
    from deepspeed.ops.cpu_optimizer import Fold

    def step() -> None:
        optimizer.folds, optimizer.factor = {param: Fold(gradient, out)}, FACTOR
        optimizer.step()
        optimizer.folds, optimizer.factor = None, 1.0

    return step


def composed(optimizer: Any, param: Tensor, gradient: Tensor, out: Tensor) -> Step:
    """From bf16 to bf16 by whole-tensor operations around a step."""
    wide = param.grad
    assert wide is not None

    def step() -> None:
        wide.copy_(gradient)
        wide.mul_(FACTOR)
        optimizer.step()
        out.copy_(param.detach())

    return step


def make_process(parameters: int, name: str) -> Callable[..., Any]:
    """A process with the DeepSpeedCPUAdam of its environment; ours has torch's step and the floor beside it."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(torch.randn(parameters))
    param.grad = torch.randn(parameters)
    low, out = param.grad.bfloat16(), torch.empty(parameters, dtype=torch.bfloat16)
    own = DeepSpeedCPUAdam([param], lr=1e-6, weight_decay=0.01)
    if name != OURS:
        steps = {(name, "fp32"): own.step, (name, "bf16"): composed(own, param, low, out)}
    else:
        fused = torch.optim.AdamW([param], lr=1e-6, weight_decay=0.01, fused=True)
        fused.step()
        own.state[param].update(fused.state[param])  # the same moments: memory differs from buffer to buffer
        moments = [fused.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
        folded = in_one_pass(own, param, low, out)
        steps = {
            (OURS, "fp32"): own.step,
            (AGAIN, "fp32"): own.step,
            (TORCH, "fp32"): fused.step,
            (OURS, "bf16"): folded,
            (AGAIN, "bf16"): folded,
            (TORCH, "bf16"): composed(fused, param, low, out),
            (FLOOR, "fp32"): floor_over([param.data, *moments], param.grad),
            (EVEN, "fp32"): even_over([param.data, *moments], param.grad),
        }

    def handle(side: str | None = None, dtype: str = "", threads: int = 1) -> Any:
        if side is None:
            return {"sides": list(steps), "versions": versions()}
        torch.set_num_threads(threads)
        started = time.perf_counter()
        steps[side, dtype]()
        return time.perf_counter() - started

    return handle


def floor_over(kept: list[Tensor], x: Tensor) -> Step:
    """`z += a * x` in place over as many bytes as a step moves: 28 / 12 of the elements."""
    third = len(x) // 3
    pairs = [(kept[0], x), (kept[1], x), (kept[2][:third], x[:third])]

    def step() -> None:
        for z, other in pairs:
            z.add_(other, alpha=1e-12)

    return step


def even_over(kept: list[Tensor], x: Tensor) -> Step:
    """`z *= a` in place over as many bytes as a step moves: 28 / 8 of the elements."""
    scaled = [*kept, x[: len(x) // 2]]

    def step() -> None:
        for z in scaled:
            z.mul_(1.0)

    return step


def versions() -> str:
    """Of what a process has imported."""
    import deepspeed

    return f"torch {torch.__version__}, deepspeed {deepspeed.__version__}"


# ---- the table, as it is put together in the parent


def measure(arguments: argparse.Namespace, parameters: int) -> tuple[list[dict[Key, float]], dict[str, str]]:
    """Seconds of every side by round, and what each process has installed."""
    worlds: dict[str, World] = {}
    order = random.Random(0)
    rounds: list[dict[Key, float]] = []
    try:
        for name, python in [(OURS, None), *(given.split("=", 1) for given in arguments.env)]:
            setup = {"parameters": parameters, "name": name}
            worlds[name] = World("cpu_optimizer.py", 1, setup, python)
        about = {name: world.ask()[0] for name, world in worlds.items()}
        sides = [(name, side, dtype) for name, found in about.items() for side, dtype in found["sides"]]
        cells = list(itertools.product(sides, arguments.threads))
        deadline = time.monotonic() + arguments.minutes * 60
        while len(rounds) <= FEWEST_ROUNDS or time.monotonic() < deadline:
            seconds: dict[Key, float] = {}
            for (name, side, dtype), threads in order.sample(cells, len(cells)):
                seconds[side, dtype, threads] = worlds[name].ask(side=side, dtype=dtype, threads=threads)[0]
            rounds.append(seconds)
    finally:
        for world in worlds.values():
            world.close()
    return rounds[1:], {name: found["versions"] for name, found in about.items()}  # the first touches the memory


def rows_of(rounds: list[dict[Key, float]], parameters: int) -> list[dict[str, Any]]:
    """One record per side, dtype and number of threads: ms, GB/s, and our speed as a multiple of the side's."""
    rows = []
    for threads in sorted({key[2] for key in rounds[0]}):
        for dtype in DTYPES:
            sides = sorted(side for side, kind, count in rounds[0] if (kind, count) == (dtype, threads))
            others = [side for side in sides if side not in (OURS, AGAIN, *MEMORY)]
            rows += rows_against(rounds, parameters, (dtype, threads), [OURS, AGAIN, *others, *MEMORY])
    return rows


def rows_against(
    rounds: list[dict[Key, float]], parameters: int, cell: tuple[str, int], sides: list[str]
) -> list[dict[str, Any]]:
    """The rows of one dtype and number of threads; the fastest of the others and the floor carry the bars."""
    dtype, threads = cell
    rows = []
    for side in sides:
        key = (side, "fp32" if side in MEMORY else dtype, threads)
        ratio = median_interval([seconds[key] / seconds[OURS, dtype, threads] for seconds in rounds])
        median = statistics.median(seconds[key] for seconds in rounds)
        row = {"threads": threads, "dtype": dtype, "side": side, "ms": 1e3 * median}
        row |= {"gb_per_second": BYTES * parameters / median / 1e9, "bar": None, "reached": None}
        rows.append(row | {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "pairs": ratio.count})
    fastest = min((row for row in rows if row["side"] not in (OURS, AGAIN, *MEMORY)), key=lambda row: row["ms"])
    for row, bar in ((fastest, BARS[dtype]), (rows[-1], BARS[FLOOR])):
        row |= {"bar": bar, "reached": row["ratio"] >= bar}
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    body = []
    for row in rows:
        bar = "" if row["bar"] is None else f"{row['bar']} {'reached' if row['reached'] else 'MISSED'}"
        ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        figures = [f"{row['ms']:.1f}", f"{row['gb_per_second']:.1f}", ratio, str(row["pairs"]), bar]
        body.append([str(row["threads"]), row["dtype"], row["side"], *figures])
    print_table(["threads", "", "side", "ms", "GB/s", "ours is x as fast [95 %]", "pairs", "bar"], body)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of the speeds with the floor as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.3 * len(rows) + 1.2))
    names = [f"{row['side']}, {row['dtype']}, {row['threads']} threads" for row in rows]
    colours = ["tab:orange" if row["side"] in (OURS, AGAIN) else "tab:blue" for row in rows]
    axes.barh(names, [row["gb_per_second"] for row in rows], color=colours, alpha=0.7)
    axes.invert_yaxis()
    axes.set_xlabel("GB moved per second (median); a step moves 28 bytes per parameter")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--env", nargs="*", default=[], metavar="NAME=PYTHON", help="interpreters with another deepspeed"
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[40_000_000, 100_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--minutes", type=float, default=1, help=f"time limit of each size, once {FEWEST_ROUNDS} rounds are done"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    arguments = parse_arguments()
    records = []
    for parameters in arguments.parameters:
        rounds, about = measure(arguments, parameters)
        rows = rows_of(rounds, parameters)
        print(f"{parameters:,} parameters, {BYTES} bytes each; {about}")
        show(rows)
        records.append({"parameters": parameters, "bytes": BYTES, "environments": about, "rows": rows})
    print(f"written: {write_json('cpu_optimizer.json', records)}")
    picture = results_folder() / "cpu_optimizer.png"
    draw(records[-1]["rows"], picture)
    print(f"written: {picture.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_process)
    else:
        main()
