"""Command `ds_io`: measures a disk for several block sizes and queue depths, and suggests an `aio` section."""

from __future__ import annotations

import argparse
import json
import time

from deepspeed.errors import StorageError
from deepspeed.ops.aio.files import BlockFile
from deepspeed.ops.aio.memory import aligned_bytes
from deepspeed.ops.aio.queue import block_queue, cause_of

_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}
_ENOUGH = 0.95  # fraction of the best speed; faster settings only cost memory and threads


def parse_size(text: str) -> int:
    """Parse a size such as "4096", "128K", "1M" or "2G" (powers of 1024) to bytes; ValueError for other texts."""
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    return int(number) * unit


def measure(folder: str, io_size: int, block_size: int, in_flight: int) -> tuple[float, float]:
    """Return the bytes per second of (writing, reading) a temporary file in `folder`.

    Args:
        folder: a folder on the disk.
        io_size: bytes of the file.
        block_size: bytes per request.
        in_flight: number of requests at a time.

    Raises:
        OSError: the folder is not writable, or (StorageError) the disk is full or has failed.
    """
    file = BlockFile.unnamed(folder)
    queue = block_queue(block_size, in_flight, 1)
    buffer = aligned_bytes(io_size)
    speeds = []
    try:
        for writing in (True, True, False):  # the first write allocates the blocks and does not count
            begin = time.perf_counter()
            cause = cause_of(*queue.submit(file, buffer, 0, writing).wait(), io_size)
            if cause:
                raise StorageError(
                    f"moving {io_size} bytes to or from {file.name} failed: {cause}. {file.disk_state()}"
                )
            speeds.append(io_size / (time.perf_counter() - begin))
    finally:
        queue.stop()
        file.close()
    return speeds[1], speeds[2]


def suggestion(curve: dict[tuple[int, int], tuple[float, float]]) -> dict[str, int]:
    """Return an `aio` section: the smallest product of block size and queue depth with at least 95% of the best speed.

    `curve` has (write, read) bytes per second by (block size, queue depth).
    """
    pace = {setting: 1 / (1 / write + 1 / read) for setting, (write, read) in curve.items()}
    fast = [setting for setting, speed in pace.items() if speed >= _ENOUGH * max(pace.values())]
    block_size, depth = min(fast, key=lambda setting: setting[0] * setting[1])
    return {"block_size": block_size, "queue_depth": depth}


def main(arguments: list[str] | None = None) -> None:
    """Run the command: print the table of speeds and the suggestion. `arguments`: None is the command line."""
    parser = argparse.ArgumentParser(prog="ds_io", description="Measure a disk for offload to NVMe.")
    parser.add_argument("--folder", "--nvme_dir", default=".", help="folder on the disk (default: this one)")
    parser.add_argument("--io_size", type=parse_size, default="256M", help="bytes of the file (default: 256M)")
    parser.add_argument("--block_size", type=parse_size, nargs="+", default=[128 * 1024, 1024**2, 8 * 1024**2])
    parser.add_argument("--queue_depth", type=int, nargs="+", default=[4, 8, 16, 32])
    options = parser.parse_args(arguments)
    print(f"{'block':>10} {'in flight':>10} {'write MB/s':>12} {'read MB/s':>12}")
    curve = {}
    for block in options.block_size:
        for depth in options.queue_depth:
            try:
                curve[block, depth] = write, read = measure(options.folder, options.io_size, block, depth)
            except OSError as error:
                parser.exit(1, f"ds_io: {error}\n")
            print(f"{block:>10} {depth:>10} {write / 1e6:>12,.0f} {read / 1e6:>12,.0f}", flush=True)
    print(f"suggested: {json.dumps({'aio': suggestion(curve)})}")


if __name__ == "__main__":
    main()
