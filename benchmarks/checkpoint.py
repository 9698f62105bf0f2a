"""Speed of saving and loading against torch's distributed checkpoint, torch.save and safetensors; stall of async saves.

Everybody writes the same tensors, fsyncs, and ends a load with the bytes in tensors that were there before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import World, print_table, serve, start_world, write_json
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

RANKS = 2
WIDTH = 2048
BYTES_PER_ELEMENT = 12  # fp32 parameter and two moments
OURS, CLONE, COPY = "deepspeed", "clone", "copy_"
SIDES = [OURS, "dcp", "torch.save", "safetensors"]
BAR_SAVE, BAR_LOAD, BAR_STALL = 0.9, 0.9, 1.3


# ---- inside a rank


def fsync_all(folder: Path) -> None:
    """Wait until every file of a folder is on the disk."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Rank:
    """One rank: an engine with state, the same tensors for the other sides, and a clock."""

    def __init__(self, folder: str, megabytes: int, async_save: bool) -> None:
        import deepspeed

        self.rank, _ = start_world()
        self.folder = Path(folder)
        layers = max(1, round(megabytes * 2**20 / BYTES_PER_ELEMENT / WIDTH**2))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 1_000_000,
            "zero_optimization": {"stage": 2},
            "checkpoint": {"async_save": async_save},
        }
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.engine.backward(self.engine(torch.randn(1, WIDTH)).square().mean())
        self.engine.step()
        self.tensors = {
            f"{index}.{key}": value
            for index, (leaf, state) in enumerate(self.engine.basic_optimizer.state.items())
            for key, value in {"value": leaf.detach(), **state}.items()
            if value.dim()
        }
        self.scratch: list[Tensor] = []

    def __call__(self, action: str, side: str, **how: Any) -> float:
        """Seconds of one action, all ranks starting together."""
        if action == "forget":
            if self.rank == 0:
                forget(self.folder)
            return 0.0
        if action == "clear":
            if self.rank == 0:
                shutil.rmtree(self.folder / side, ignore_errors=True)
            return 0.0
        act: Callable[[str], None] = getattr(self, action)
        torch.distributed.barrier()
        started = time.perf_counter()
        act(side)
        torch.distributed.barrier()
        return time.perf_counter() - started

    def bytes(self, side: str) -> None:
        """One pass of the checksum over this rank's bytes."""
        from deepspeed.checkpoint.format.safetensors_file import BLOCK, crc32

        for tensor in self.tensors.values():
            data = tensor.reshape(-1).view(torch.uint8)
            for at in range(0, data.numel(), BLOCK):
                crc32(data[at : at + BLOCK])

    def save(self, side: str) -> None:
        """Save, and wait until it is on the disk."""
        folder, mine = self.folder / side, self.folder / side / f"rank{self.rank}"
        if side == OURS:
            self.engine.save_checkpoint(str(folder), "tag")
        elif side == "dcp":
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
            dcp.save({f"rank{self.rank}": self.tensors}, storage_writer=dcp.FileSystemWriter(folder, overwrite=True))
        else:
            folder.mkdir(exist_ok=True)
            torch.save(self.tensors, mine) if side == "torch.save" else save_file(self.tensors, mine)
            fd = os.open(mine, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def load(self, side: str) -> None:
        """Load into the tensors that are there."""
        folder, mine = self.folder / side, self.folder / side / f"rank{self.rank}"
        if side == OURS:
            self.engine.load_checkpoint(str(folder), "tag")
        elif side == "dcp":
            dcp.load({f"rank{self.rank}": self.tensors}, storage_reader=dcp.FileSystemReader(folder))
        elif side == "torch.save":
            for name, value in torch.load(mine, weights_only=True).items():
                self.tensors[name].copy_(value)
        else:
            with safe_open(mine, "pt") as file:
                for name, tensor in self.tensors.items():
                    tensor.copy_(file.get_tensor(name))

    def stall(self, side: str) -> None:
        """What training waits for: our async save, or copies of the state."""
        if side == OURS:
            self.engine.save_checkpoint(str(self.folder / side), "tag")
        elif side == CLONE:
            self.scratch = [tensor.clone() for tensor in self.tensors.values()]
        else:
            for copy, tensor in zip(self.scratch, self.tensors.values(), strict=True):
                copy.copy_(tensor)

    def settle(self, side: str) -> None:
        """Let an async save end."""
        self.engine.wait_for_checkpoint()


# ---- the measurements


def floor(folder: Path, megabytes: int) -> dict[str, float]:
    """`dd` writing and reading as many bytes, in seconds."""
    path = folder / "dd"
    found = {}
    for name, command in {
        "write": ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={megabytes // 4}", "conv=fsync"],
        "read": ["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct"],
    }.items():
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        found[name] = time.perf_counter() - started
    path.unlink()
    return found


def speeds(folder: Path, megabytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each side's save, cold load and hot load."""
    times: dict[str, dict[str, list[float]]] = {side: {"save": [], "cold": [], "hot": []} for side in SIDES}
    times["checksum"] = {"pass": []}
    world = World(Path(__file__).name, RANKS, {"folder": str(folder), "megabytes": megabytes, "async_save": False})
    try:
        for number in range(rounds + 1):
            for side in random.sample(SIDES, len(SIDES)):
                seconds = {"save": max(world.ask(action="save", side=side))}
                world.ask(action="forget", side=side)
                seconds["cold"] = max(world.ask(action="load", side=side))
                seconds["hot"] = max(world.ask(action="load", side=side))
                world.ask(action="clear", side=side)
                if number:  # the first round warms up
                    for what, value in seconds.items():
                        times[side][what].append(value)
            times["checksum"]["pass"].append(max(world.ask(action="bytes", side=OURS)))
    finally:
        world.close()
    return times


def stalls(folder: Path, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds that training waits for async saves (the first allocates), and for copies of the same state."""
    setup = {"folder": str(folder), "megabytes": megabytes, "async_save": True}
    found: dict[str, list[float]] = {"first": [], CLONE: [], "later": [], COPY: []}
    for _ in range(rounds):
        world = World(Path(__file__).name, RANKS, setup)
        try:
            for name, side in (("first", OURS), (CLONE, CLONE), ("later", OURS), (COPY, COPY), ("later", OURS)):
                found[name].append(max(world.ask(action="stall", side=side)))
                world.ask(action="settle", side=side)
        finally:
            world.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, default=1024, help="state of all ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    given = parser.parse_args()
    if given.worker:
        serve(Rank)
        return
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=given.folder))
    try:
        dd = floor(folder, given.megabytes)
        times = speeds(folder, given.megabytes, given.rounds)
        waits = stalls(folder, given.megabytes, max(1, given.rounds - 1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(given.megabytes, dd, times, waits)


def report(megabytes: int, dd: dict[str, float], times: dict[str, Any], waits: dict[str, list[float]]) -> None:
    """Print tables with the ratios the bars are about, and keep the numbers."""
    best = {side: {what: min(values) for what, values in of.items()} for side, of in times.items()}
    rows = [
        [side, *(f"{best[side][what]:.2f} s  {megabytes / 1024 / best[side][what]:.2f} GiB/s" for what in best[side])]
        for side in SIDES
    ]
    print_table(["side", "save", "cold load", "hot load"], rows)
    print(f"dd: write and fsync {dd['write']:.2f} s, direct read {dd['read']:.2f} s")
    check = best["checksum"]["pass"]
    fastest = {what: min(best[side][what] for side in SIDES[1:]) for what in ("save", "cold", "hot")}
    ours = best[OURS]
    ratios = {
        "save": fastest["save"] / ours["save"],
        "cold": fastest["cold"] / ours["cold"],
        "hot": (fastest["hot"] + check) / ours["hot"],
    }
    for what, ratio in ratios.items():
        extra = f" plus one checksum pass of {check:.2f} s" if what == "hot" else ""
        print(f"{what}: {ratio:.2f} x the fastest other{extra} (bar {BAR_SAVE if what == 'save' else BAR_LOAD})")
    stall = {
        "first": min(waits["first"]) / min(waits[CLONE]),
        "later": statistics.median(waits["later"]) / statistics.median(waits[COPY]),
    }
    print(f"async stall: first {stall['first']:.2f} x clone(), later {stall['later']:.2f} x copy_ (bar {BAR_STALL})")
    figures = {"dd": dd, "seconds": times, "stalls": waits, "ratios": ratios, "stall": stall}
    path = write_json("checkpoint.json", figures)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
