"""Speed of block quantisation beside memcpy of the same values, one process.

`python -m benchmarks.codecs` prints GB/s of encoding, decoding and summing (three payloads and one plain part). All
speeds are bytes of the values over time, whatever else is moved: memcpy of N values reads and writes them once, and so
`encode + decode` (values to payload to values) counts 2 N values over the time of both. Every side runs once in each
round, in random order; a ratio is the speed over that of memcpy in the same round. memcpy is the C library's on one
thread, and torch's copy on several. The plain sum is that of four parts of the values' dtype, without any codec.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import median_interval, print_table, write_json
from deepspeed.comm.collectives.block_codec import BlockCodec
from deepspeed.comm.collectives.collectives import sum_in_rank_order
from deepspeed.native import state

BAR = 0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEGMENT = 384 * 1536 + 77  # elements of a parameter, so that blocks are cut
Sides = dict[str, Callable[[], Any]]


def sides_of(numel: int, dtype: torch.dtype, threads: int) -> Sides:
    """Calls to time by their names."""
    values = torch.randn(numel).to(dtype)
    copied, sums = torch.empty_like(values), torch.empty(numel)
    parts = [values, *(values.clone() for _ in range(3))]
    move = lambda: ctypes.memmove(copied.data_ptr(), values.data_ptr(), values.nbytes)  # noqa: E731
    sides: Sides = {
        "memcpy": move if threads == 1 else lambda: copied.copy_(values),
        "plain sum": lambda: sum_in_rank_order(parts, sums, 0.25, False),
    }
    for bits in (8, 4):
        layout = BlockCodec(bits).layout((*range(0, numel, SEGMENT), numel))
        payloads = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(3)]
        for payload in payloads:
            layout.encode(values, payload)
        mixed, memory = [values, *payloads], torch.zeros(numel, dtype=torch.bfloat16)
        out, payload = torch.empty_like(values), payloads[0]
        sides[f"int{bits} encode"] = lambda p=payload, own=layout: own.encode(values, p)
        sides[f"int{bits} encode, memory"] = lambda p=payload, own=layout, e=memory: own.encode(values, p, e, 0.8)
        sides[f"int{bits} decode"] = lambda p=payload, own=layout, out=out: own.decode(p, out)
        sides[f"int{bits} sum"] = lambda parts=mixed, own=layout: own.sum(parts, sums, 0.25, False)
    return sides


def measure(sides: Sides, seconds: float, fewest: int) -> list[dict[str, float]]:
    """Seconds of each side by round; the first round, which touches the memory, is left out."""
    order, rounds = random.Random(0), []
    deadline = time.monotonic() + seconds
    while len(rounds) <= fewest or time.monotonic() < deadline:
        times = {}
        for name in order.sample(list(sides), len(sides)):
            started = time.perf_counter()
            sides[name]()
            times[name] = time.perf_counter() - started
        rounds.append(times)
    return rounds[1:]


def rows_of(rounds: list[dict[str, float]], nbytes: int) -> list[dict[str, Any]]:
    """A row for each side and for encoding and decoding together."""
    for times in rounds:
        for bits in (8, 4):
            times[f"int{bits} encode + decode"] = (times[f"int{bits} encode"] + times[f"int{bits} decode"]) / 2
    rows = []
    for name in sorted(rounds[0], key=lambda name: (name != "memcpy", name)):
        ratio = median_interval([times["memcpy"] / times[name] for times in rounds])
        speed = nbytes / median_interval([times[name] for times in rounds]).median / 1e9
        row = {"side": name, "GB/s": speed, "ratio": ratio.median, "low": ratio.low, "high": ratio.high}
        rows.append(row | ({"bar": BAR, "reached": ratio.median >= BAR} if name.endswith("encode + decode") else {}))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one size and dtype."""
    body = []
    for row in rows:
        bar = f">= {row['bar']} {'reached' if row['reached'] else 'MISSED'}" if "bar" in row else ""
        ratio = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        body.append([row["side"], f"{row['GB/s']:.2f}", ratio, bar])
    print_table(["", "GB/s of values", "x memcpy [95 %]", "bar"], body)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, nargs="+", default=[1_000_000, 25_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=5, help="time limit of each size and dtype")
    parser.add_argument("--rounds", type=int, default=15, help="fewest rounds of each size and dtype")
    arguments = parser.parse_args()
    records = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for numel in arguments.values:
            for name, dtype in DTYPES.items():
                nbytes = numel * dtype.itemsize
                rounds = measure(sides_of(numel, dtype, threads), arguments.seconds, arguments.rounds)
                rows = rows_of(rounds, nbytes)
                print(f"{numel:,} values of {name}, threads: {threads}, {len(rounds)} rounds ({state()})")
                show(rows)
                records.append({"values": numel, "dtype": name, "threads": threads, "rows": rows})
    print(f"written: {write_json('codecs.json', records)}")


if __name__ == "__main__":
    main()
