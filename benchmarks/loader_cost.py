"""Time of a loader's step, and memory of its order, beside torch's DistributedSampler, in one process and in turns."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.data.mixture import Mixture

WORLD, BATCH = 2, 8


class Tokens(Dataset):
    """Rows of 512 tokens, cut out of one tensor."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.tokens = torch.arange(1 << 16)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index % 1000
        return self.tokens[start : start + 512]


def torchs(count: int) -> Iterable[Any]:
    dataset = Tokens(count)
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, WORLD, 0))


def ours(count: int) -> Iterable[Any]:
    return DeepSpeedDataLoader(Tokens(count), BATCH, rank=0, world=WORLD)


def mixed(count: int) -> Iterable[Any]:
    mixture = Mixture([Tokens(count // 4), Tokens(count - count // 4)], [1, 1], by="samples")
    return DeepSpeedDataLoader(mixture, BATCH, rank=0, world=WORLD)


SIDES = {"DistributedSampler": torchs, "ours": ours, "mixture of two": mixed}


def seconds(loader: Iterable[Any]) -> float:
    """Return the time of a pass, with its start."""
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


def memory(side: str, count: int) -> float:
    """Return the growth of resident memory, in MB, while the first batch of `count` samples is read."""
    program = (
        "import resource, sys; from benchmarks.loader_cost import SIDES; "
        f"small = iter(SIDES[{side!r}](64)); next(small); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        f"batches = iter(SIDES[{side!r}]({count})); next(batches); "
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side, make in SIDES.items():
            times[side].append(seconds(make(options.samples)))
    first = times["DistributedSampler"]
    steps = options.samples // WORLD // BATCH
    for side, measured in times.items():
        ratios = [own / other for own, other in zip(measured, first, strict=True)]
        grown = ", ".join(f"{memory(side, count):.0f} MB of {count // 10**6} M samples" for count in (10**6, 10**7))
        print(
            f"{side:20} {min(measured) / steps * 1e6:6.1f} us a step, over torch's {statistics.median(ratios):.3f} "
            f"[{min(ratios):.3f}, {max(ratios):.3f}]; {grown}"
        )


if __name__ == "__main__":
    main()
