"""Speed of block I/O as a ratio to fio's with the same block size and depth on the same file, and of its Python twin.

Each round runs every side once, in random order. "fio again" is fio beside itself: its interval is the noise of the
disk. Our buffers are on huge pages; "fio, huge pages" has that too. "busy" sides run beside a loop of pure Python, as a
training script may have one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Interval, draw_ratios, median_interval, print_table, results_folder, write_json
from torch import Tensor

from deepspeed.native import library
from deepspeed.ops.aio.files import BlockFile
from deepspeed.ops.aio.memory import aligned_bytes
from deepspeed.ops.aio.queue import BlockQueue, NativeQueue, cause_of
from deepspeed.ops.aio.threads import ThreadQueue

LEAST_RATIO = 0.9
FEWEST_ROUNDS = 9
REFERENCE, AGAIN, OURS = "fio", "fio again", "native"
Side = Callable[[bool], float]


def fio_side(path: str, arguments: argparse.Namespace, huge: bool = False) -> Side:
    """fio's own count of bytes per second; `huge` asks the C library to put its buffers on huge pages."""
    environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})
    command = [shutil.which("fio") or "fio", "--name=nvme", f"--filename={path}", f"--size={arguments.size}"]
    command += [f"--ioengine={arguments.engine}", f"--bs={arguments.block}", f"--iodepth={arguments.depth}"]
    command += ["--direct=1", "--thread", "--output-format=json"]

    def run(writing: bool) -> float:
        way = "write" if writing else "read"
        done = subprocess.run([*command, f"--rw={way}"], env=environment, capture_output=True, check=True)
        return float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"])

    return run


def own_side(queue: BlockQueue, file: BlockFile, buffer: Tensor, busy: bool) -> Side:
    """The queue moving one tensor of the file's size."""
    size = buffer.nbytes

    def run(writing: bool) -> float:
        begin = time.perf_counter()
        job = queue.submit(file, buffer, 0, writing)
        while busy and not job.done():
            sum(range(2000))
        cause = cause_of(*job.wait(), size)
        if cause:
            raise OSError(f"{file.name}: {cause}")
        return size / (time.perf_counter() - begin)

    return run


def make_sides(path: str, arguments: argparse.Namespace) -> dict[str, Side]:
    """Every side of a round by its name."""
    fio = fio_side(path, arguments)
    queues: dict[str, BlockQueue] = {"Python threads": ThreadQueue(arguments.depth, arguments.block)}
    native = library()
    if native is not None:
        queues = {OURS: NativeQueue(native, arguments.depth, arguments.block), **queues}
    sides = {REFERENCE: fio, AGAIN: fio, "fio, huge pages": fio_side(path, arguments, huge=True)}
    file, buffer = BlockFile.open(path, os.O_RDWR), aligned_bytes(arguments.size).fill_(1)
    for name, queue in queues.items():
        sides[name] = own_side(queue, file, buffer, False)
        sides[f"{name}, busy"] = own_side(queue, file, buffer, True)
    return sides


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Bytes per second of every side, by way and round."""
    order = random.Random(0)
    rounds: dict[str, list[dict[str, float]]] = {"read": [], "write": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = str(Path(folder, "blocks"))
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, arguments.size)
        sides = make_sides(path, arguments)
        for side in sides.values():
            side(True)  # makes the blocks and touches the memory; not counted
        deadline = time.monotonic() + 60 * arguments.minutes
        while len(rounds["write"]) < FEWEST_ROUNDS or time.monotonic() < deadline:
            for way, done in rounds.items():
                speeds = {name: sides[name](way == "write") for name in order.sample(list(sides), len(sides))}
                done.append({name: speeds[name] for name in sides})
    return rounds


def rows_of(way: str, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One record per side: MB/s, paired ratio to fio, and whether the bar holds."""
    ratios = {name: median_interval([speeds[name] / speeds[REFERENCE] for speeds in rounds]) for name in rounds[0]}
    rows = []
    for name, ratio in ratios.items():
        speed = median_interval([speeds[name] for speeds in rounds]).median
        row = {"way": way, "side": name, "mb_per_second": speed / 1e6, "pairs": ratio.count}
        row |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
        rows.append(row | {"held": held(ratio, ratios[AGAIN]) if name == OURS else None})
    return rows


def held(ratio: Interval, noise: Interval) -> bool:
    """The bar: nearly fio's speed, and not below what fio itself shows beside itself."""
    return ratio.median >= LEAST_RATIO and ratio.median >= noise.low


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of the ratios with their intervals."""
    names = [f"{row['way']}, {row['side']}" for row in rows]
    draw_ratios(names, rows, "bytes per second, × fio", path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".", help="folder on the disk in question")
    parser.add_argument("--size", type=int, default=512 * 1024**2, help="bytes of the file")
    parser.add_argument("--block", type=int, default=1024**2, help="bytes per request")
    parser.add_argument("--depth", type=int, default=8, help="requests in flight")
    parser.add_argument("--engine", default="libaio", help="fio's engine")
    parser.add_argument("--minutes", type=float, default=2, help=f"time limit once {FEWEST_ROUNDS} rounds are done")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    arguments = parse_arguments()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed")
    rows = [row for way, rounds in measure(arguments).items() for row in rows_of(way, rounds)]
    print(f"fio {arguments.engine}, {arguments.block} bytes x {arguments.depth} in flight, {arguments.size} bytes:")
    body = []
    for row in rows:
        bar = "" if row["held"] is None else f"{LEAST_RATIO} {'reached' if row['held'] else 'missed'}"
        interval = str(Interval(row["ratio"], row["low"], row["high"], row["pairs"]))
        body.append([row["way"], row["side"], f"{row['mb_per_second']:,.0f}", interval, str(row["pairs"]), bar])
    print_table(["way", "side", "MB/s", "x fio [95 %]", "pairs", "bar"], body)
    record = {"engine": arguments.engine, "block": arguments.block, "depth": arguments.depth, "size": arguments.size}
    print(f"written: {write_json('nvme.json', {**record, 'rows': rows})}")
    picture = results_folder() / "nvme.png"
    draw(rows, picture)
    print(f"written: {picture.name}")


if __name__ == "__main__":
    main()
