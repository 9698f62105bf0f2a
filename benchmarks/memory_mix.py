"""What memory gives to the traffic of a bf16 Adam step, without its arithmetic, over what it gives to `z += a * x`.

The step reads as much as it writes; `z += a * x` reads twice what it writes. The table shows the best that prefetch
distances and ways of writing the 2-byte copy reach, so it bounds what `cpu_optimizer.py` can show. Every side runs once
in each round, in random order; ratios are of two sides in one round. Needs a C++ compiler and AVX2.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import BENCHMARKS, median_interval, print_table, write_json
from cpu_optimizer import BYTES, EVEN, FLOOR, even_over, floor_over

WAYS = (
    "copy around the caches",
    "copy and states around the caches",
    "copy through the caches",
    "copy through the caches, fetched",
    "copy into the gradient",
)
AHEAD = (0, 1536, 4096, 8192)  # bytes between the block at work and the one being fetched


class Streams(ctypes.Structure):
    """Mirrors `Streams` in memory_mix.cpp."""

    _fields_ = [("kept", ctypes.c_void_p * 3), ("gradient", ctypes.c_void_p), ("copy", ctypes.c_void_p)]
    _fields_ += [("count", ctypes.c_int64)]


def build() -> Any:
    """The compiled streams."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "memory_mix.so"
        source = str(BENCHMARKS / "memory_mix.cpp")
        flags = ["-std=c++17", "-O3", "-mavx2", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["c++", *flags, source, "-o", str(library)], check=True)
        return ctypes.CDLL(str(library)).touch_all


def sides(touch: Any, count: int) -> dict[str, Callable[[int], Any]]:
    """What runs, by name; each is given the number of threads and moves 28 bytes per element."""
    kept = [torch.rand(count) for _ in range(3)]
    x = torch.rand(count)
    gradient, copy = torch.rand(count).bfloat16(), torch.rand(count).bfloat16()
    streams = Streams((ctypes.c_void_p * 3)(*[z.data_ptr() for z in kept]), gradient.data_ptr(), copy.data_ptr(), count)
    streams.tensors = (kept, gradient, copy)  # which stand as long as their addresses are used
    floor, even = floor_over(kept, x), even_over(kept, x)

    def shaped(way: int, ahead: int) -> Callable[[int], Any]:
        return lambda threads: touch(ctypes.byref(streams), way, ctypes.c_int64(ahead), threads)

    found: dict[str, Callable[[int], Any]] = {FLOOR: lambda _: floor(), EVEN: lambda _: even()}
    for way, name in enumerate(WAYS):
        found |= {f"{name}, {ahead} ahead": shaped(way, ahead) for ahead in AHEAD}
    return found


def measure(count: int, rounds: int, threads: list[int]) -> list[dict[str, Any]]:
    """One record per side and number of threads, best first: GB/s and the multiple of the floor."""
    steps = sides(build(), count)
    seconds: dict[tuple[int, str], list[float]] = {(n, name): [] for n in threads for name in steps}
    for number in range(rounds + 1):
        for n, name in random.Random(number).sample(sorted(seconds), len(seconds)):
            torch.set_num_threads(n)
            started = time.perf_counter()
            steps[name](n)
            seconds[n, name].append(time.perf_counter() - started)
    rows = []
    for (n, name), spent in seconds.items():
        ratio = median_interval([a / b for a, b in zip(seconds[n, FLOOR][1:], spent[1:], strict=True)])
        row = {"threads": n, "side": name, "gb_per_second": BYTES * count / sorted(spent[1:])[rounds // 2] / 1e9}
        rows.append(row | {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "pairs": ratio.count})
    return sorted(rows, key=lambda row: (row["threads"], -row["ratio"]))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    rows = measure(arguments.elements // 128 * 128, arguments.rounds, arguments.threads)
    body = []
    for row in rows:
        ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        body.append([str(row["threads"]), row["side"], f"{row['gb_per_second']:.1f}", ratio, str(row["pairs"])])
    print_table(["threads", "side", "GB/s", "x z += a x [95 %]", "pairs"], body)
    print(f"written: {write_json('memory_mix.json', {'elements': arguments.elements, 'rows': rows})}")


if __name__ == "__main__":
    main()
