"""Collectives of CPU ranks: shared memory through deepspeed.comm, beside gloo, compositions of its messages, a memcpy.

All sides run in one process group and alternate call by call. "composition" is the fastest composition of gloo messages
that gives the same bits as shared memory (the fp32 sum in rank order); "again" is the composition beside itself: its
interval is the noise. "floor" copies, on every rank at once, the bytes that the rank must at least write.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import World, median_interval, print_table, results_folder, serve, start_world, write_json
from torch import Tensor

OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
FEWEST_PAIRS = 15
SECONDS = 2.0  # spent on one row, at least the fewest pairs
SIDES = ["ours", "bare", "gloo", "composition", "again", "floor"]
Side = Callable[[], Any]


def sides_of(operation: str, dtype: torch.dtype, nbytes: int) -> tuple[dict[str, Side], Callable[[], None]]:
    """What is timed, and a check that all give one result."""
    from deepspeed import comm
    from deepspeed.comm.collectives.collectives import EXCHANGE, SPREAD, reduce_to_owners, spread, sum_in_rank_order
    from deepspeed.comm.process_groups.axis import group_axis, tag_of

    dist = torch.distributed
    axis = group_axis("benchmark", dist.group.WORLD)
    shared, messages = axis.shared, dataclasses.replace(axis, shared=None)
    rank, size = axis.rank, axis.size
    numel = nbytes // dtype.itemsize // size * size
    source = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    data, full = source.clone(), torch.zeros(numel, dtype=dtype)
    cuts = [numel // size * r for r in range(size + 1)]
    own, out = source[cuts[rank] : cuts[rank + 1]], torch.zeros(numel // size, dtype=dtype)
    counter = iter(range(10**9))

    def tag(kind: int) -> int:
        return tag_of(0, kind, next(counter))

    def owners(flat: Tensor, into: Tensor) -> None:
        finish = lambda parts: sum_in_rank_order(parts, into, 1.0, add=False)  # noqa: E731
        reduce_to_owners(messages, flat, cuts, tag(EXCHANGE), "reduce", finish).wait()

    def composed_sum() -> None:
        if size == 2 and dtype == torch.float32:
            dist.all_reduce(data)  # the same bits here
        else:
            owners(data, data[cuts[rank] : cuts[rank + 1]])
            spread(messages, data, cuts, tag(SPREAD), "spread").wait()

    def composed_gather() -> None:
        full[cuts[rank] : cuts[rank + 1]] = own
        spread(messages, full, cuts, tag(SPREAD), "spread").wait()

    table: dict[str, tuple[Side, Side, Side, Side, Tensor]] = {
        "all_reduce": (lambda: comm.all_reduce(data), lambda: shared.all_reduce(data), lambda: dist.all_reduce(data),
                       composed_sum, data),
        "reduce_scatter": (lambda: comm.reduce_scatter_tensor(out, source),
                           lambda: shared.reduce_scatter(source, cuts, out),
                           lambda: dist.reduce_scatter_tensor(out, source), lambda: owners(source, out), out),
        "all_gather": (lambda: comm.all_gather_into_tensor(full, own), lambda: shared.all_gather(full, cuts, own),
                       lambda: dist.all_gather_into_tensor(full, own), composed_gather, full),
        "broadcast": (lambda: comm.broadcast(data, 0), lambda: shared.broadcast(data, 0),
                      lambda: dist.broadcast(data, 0), lambda: dist.broadcast(data, 0), data),
    }  # fmt: skip
    ours, bare, gloo, composition, result = table[operation]
    written = torch.empty_like(result)
    sides = {"ours": ours, "bare": bare, "gloo": gloo, "composition": composition, "again": composition}
    sides["floor"] = lambda: written.copy_(result)

    def check() -> None:
        results = []
        for side in (ours, bare, composition):
            data.copy_(source)
            side()
            results.append(result.clone())
        if not all(torch.equal(results[0], other) for other in results[1:]):
            raise RuntimeError(f"{operation} {dtype} of {nbytes} bytes: the sides differ")
        data.zero_()

    return sides, check


def make_rank(sides: list[str]) -> Callable[..., Any]:
    """A rank; answers `row` with the seconds of every side by pair."""
    start_world()

    def handle(operation: str, dtype: str, nbytes: int, seconds: float) -> dict[str, list[float]]:
        dist = torch.distributed
        calls, check = sides_of(operation, DTYPES[dtype], nbytes)
        check()
        repeat = max(1, min(50, (1 << 20) // nbytes))  # short calls are timed in a run
        times: dict[str, list[float]] = {name: [] for name in sides}
        begun, enough = time.monotonic(), torch.zeros(1)
        while not enough:
            for name in sides:
                dist.barrier()
                started = time.perf_counter()
                for _ in range(repeat):
                    calls[name]()
                times[name].append((time.perf_counter() - started) / repeat)
            enough += len(times["ours"]) > FEWEST_PAIRS and time.monotonic() - begun > seconds
            dist.all_reduce(enough, dist.ReduceOp.MIN)
        return {name: values[1:] for name, values in times.items()}

    return handle


def bar_of(row: dict[str, Any], ranks: int) -> str:
    """What the row is held against, and whether it holds; empty where nothing is asked."""
    over, bare = row["over_composition"], row["gloo_us"] / row["bare_us"]
    if ranks > 2:
        return f"<= {row['noise_high']:.2f} {'held' if 1 / over <= row['noise_high'] else 'MISSED'}"
    if row["bytes"] == SIZES[0]:
        held = row["over_gloo"] >= 10 and bare >= 20
        return f">= 10 gloo, bare 20: {'held' if held else 'MISSED'} (bare {bare:.0f})"
    if row["bytes"] < 1 << 20:
        return ""
    least = 1.2 if row["operation"] == "broadcast" else 2.0
    return f">= {least} composition: {'held' if over >= least else 'MISSED'}"


def measure(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per operation, dtype and size."""
    rows = []
    world = World("collectives.py", ranks, {"sides": SIDES})
    try:
        for operation in OPERATIONS:
            for dtype in DTYPES:
                for nbytes in SIZES:
                    answers = world.ask(operation=operation, dtype=dtype, nbytes=nbytes, seconds=arguments.seconds)
                    rows.append(_row(ranks, operation, dtype, nbytes, answers))
                    print(".", end="", file=sys.stderr, flush=True)
    finally:
        world.close()
    print(file=sys.stderr)
    return rows


def _row(ranks: int, operation: str, dtype: str, nbytes: int, answers: list[dict[str, list[float]]]) -> dict[str, Any]:
    slowest = {name: [max(pair) for pair in zip(*(a[name] for a in answers), strict=True)] for name in SIDES}
    ratio = lambda a, b: median_interval([x / y for x, y in zip(slowest[a], slowest[b], strict=True)])  # noqa: E731
    noise = ratio("again", "composition")
    row = {"ranks": ranks, "operation": operation, "dtype": dtype, "bytes": nbytes, "pairs": len(slowest["ours"])}
    row |= {f"{name}_us": 1e6 * statistics.median(slowest[name]) for name in SIDES}
    row |= {"over_composition": ratio("composition", "ours").median, "over_gloo": ratio("gloo", "ours").median}
    row |= {"over_floor": ratio("ours", "floor").median, "noise_low": noise.low, "noise_high": noise.high}
    return row | {"bar": bar_of(row, ranks)}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of one rank count."""
    head = ["operation", "dtype", "bytes", "ours us", "x faster than composition", "than gloo", "x floor", "bar"]
    body = []
    for row in rows:
        size = f"{row['bytes'] >> 20} MB" if row["bytes"] >= 1 << 20 else f"{row['bytes'] >> 10} KB"
        numbers = [f"{row['over_composition']:.2f}", f"{row['over_gloo']:.1f}", f"{row['over_floor']:.2f}"]
        body.append([row["operation"], row["dtype"], size, f"{row['ours_us']:.1f}", *numbers, row["bar"]])
    print(f"{rows[0]['ranks']} ranks:")
    print_table(head, body)


def draw(rows: list[dict[str, Any]], name: str) -> str:
    """Bandwidth over size, a panel per operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(OPERATIONS), figsize=(16, 3.6), sharey=True)
    for panel, operation in zip(panels, OPERATIONS, strict=True):
        for side, style in (("ours", "-o"), ("composition", "--s"), ("gloo", ":^"), ("floor", "-")):
            found = [r for r in rows if r["operation"] == operation and r["dtype"] == "fp32" and r["ranks"] == 2]
            panel.loglog(
                [r["bytes"] for r in found], [r["bytes"] / r[f"{side}_us"] / 1e3 for r in found], style, label=side
            )
        panel.set_title(f"{operation}, fp32, 2 ranks")
        panel.set_xlabel("bytes")
    panels[0].set_ylabel("payload, GB/s")
    panels[0].legend()
    figure.tight_layout()
    path = results_folder() / name
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="spent on a row at least")
    arguments = parser.parse_args()
    rows = []
    for ranks in arguments.ranks:
        found = measure(ranks, arguments)
        show(found)
        rows += found
    print(f"written: {write_json('collectives.json', rows)}, {draw(rows, 'collectives.png')}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
