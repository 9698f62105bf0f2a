"""The table of parity on the device: its columns, which values go together, and a pairwise cover of them."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

VALUES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "ranks": (1, 2, 4),
    "dtype": ("fp32", "bf16", "fp16"),
    "tier": ("device", "cpu", "nvme", "cpu-cpu", "device-cpu", "nvme-nvme"),  # of optimizer state, of parameters
    "accumulation": (1, 2),
    "init": (False, True),  # under zero.Init
    "checkpointing": (False, True),
    "hybrid": (False, True),  # sharded over two of four ranks
    "own_stream": (False, True),
    "small_buckets": (False, True),
}


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    stage: int = 0
    ranks: int = 1
    dtype: str = "fp32"
    tier: str = "device"
    accumulation: int = 1
    init: bool = False
    checkpointing: bool = False
    hybrid: bool = False
    own_stream: bool = False
    small_buckets: bool = False
    wire: str = ""  # codec of gradients and weights within the host; not a column of the table
    hosts: bool = False  # the codec is for messages between hosts instead; not a column either
    secondary: bool = False  # secondary shards of stage 3 on two ranks; not a column either

    def __str__(self) -> str:
        parts = [f"stage{self.stage}", f"ranks{self.ranks}", self.dtype, self.tier, f"acc{self.accumulation}"]
        parts += [self.wire] if self.wire else []
        return "-".join(parts + [f.name for f in fields(self) if getattr(self, f.name) is True])

    @property
    def possible(self) -> bool:
        """Whether a user can ask for it."""
        if self.stage < 3 and (self.init or self.hybrid or "-" in self.tier):
            return False
        if self.stage < 1 and self.tier != "device":
            return False
        return not self.hybrid or self.ranks == 4


Pair = tuple[tuple[str, Any], tuple[str, Any]]


@functools.cache
def _pairs(cell: Cell) -> set[Pair]:
    return set(itertools.combinations(((name, getattr(cell, name)) for name in VALUES), 2))


def every_cell() -> Iterator[Cell]:
    """All cells a user can ask for."""
    for values in itertools.product(*VALUES.values()):
        cell = Cell(*values)
        if cell.possible:
            yield cell


@functools.cache
def pairwise() -> list[Cell]:
    """Cells in which every two values meet that can meet, few on four ranks; always the same ones."""
    cells = list(every_cell())
    random.Random(1).shuffle(cells)
    wanted = set().union(*map(_pairs, cells))
    found: list[Cell] = []
    while wanted:
        sample = cells if len(wanted) < 40 else random.Random(len(wanted)).sample(cells, 400)
        best = max(sample, key=lambda cell: len(_pairs(cell) & wanted))
        wanted -= _pairs(best)
        found.append(best)
    return found


def others(count: int) -> list[Cell]:
    """Cells beside the cover, drawn by chance; always the same ones."""
    cover = set(pairwise())
    return random.Random(2).sample([cell for cell in every_cell() if cell not in cover], count)
