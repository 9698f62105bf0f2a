"""A named dimension of the device mesh: which ranks share a state, and how messages pass between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.shared_memory import SharedMemory, forget_shared_memory, shared_memory_of
from deepspeed.errors import ArgumentError


@dataclass(eq=False)
class Axis:
    """The ranks of one mesh dimension that this process belongs to.

    Args:
        name: `dp`, `shard`, `replicate`, …; part of every label.
        ranks: global ranks, in axis order.
        rank: position of this process in `ranks`.
        group: the process group of `ranks`; None when nothing travels: one rank, or tensors without bytes.
        tagged: messages carry tags (gloo on CPU), so their order may differ from rank to rank.
        shared: the memory its ranks share, where they are on one machine's CPU.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    tagged: bool
    shared: SharedMemory | None = field(default=None, repr=False)
    _channels: itertools.count = field(default_factory=lambda: itertools.count(1), repr=False)

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)

    @property
    def peers(self) -> list[int]:
        """Axis positions of the other ranks."""
        return [r for r in range(self.size) if r != self.rank]

    def channel(self) -> int:
        """A new message channel. Ranks open channels in the same order, so numbers agree without a message."""
        return next(self._channels)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor of any values, for what the other ranks are to read: without a copy, where memory is shared."""
        if self.shared is not None and device.type == "cpu":
            return self.shared.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)


def world_axis(name: str = "dp", device: torch.device | None = None) -> Axis:
    """The axis of all ranks of the process group."""
    if not dist.is_initialized():
        return Axis(name, (0,), 0, None, True)
    return _axis(name, tuple(range(dist.get_world_size())), dist.group.WORLD, device)


def group_axis(name: str, group: dist.ProcessGroup, device: torch.device | None = None) -> Axis:
    """The axis of an existing process group (a client's mpu or data_parallel_group)."""
    return _axis(name, tuple(dist.get_process_group_ranks(group)), group, device)


def hybrid_axes(shard_size: int, device: torch.device | None = None) -> tuple[Axis, Axis]:
    """Split the world into a shard axis of `shard_size` neighbours and a replicate axis across them (MiCS, HSDP).

    Args:
        shard_size: ranks that hold one copy of the state together; must divide the world size.

    Returns:
        (shard axis, replicate axis) of this process.

    Raises:
        ArgumentError: when `shard_size` does not divide the world.
    """
    world, me = dist.get_world_size(), dist.get_rank()
    if shard_size < 1 or world % shard_size:
        raise ArgumentError(f"mics_shard_size {shard_size} does not divide the world of {world} ranks")
    shards = [range(i, i + shard_size) for i in range(0, world, shard_size)]
    replicas = [range(i, world, shard_size) for i in range(shard_size)]
    return _own("shard", shards, me, device), _own("replicate", replicas, me, device)


def _own(name: str, rows: Sequence[Sequence[int]], me: int, device: torch.device | None) -> Axis:
    # Every rank creates every group, in one order: torch demands it.
    groups: list[Any] = [dist.new_group(list(row)) if len(row) > 1 else None for row in rows]
    ranks, group = next((tuple(row), made) for row, made in zip(rows, groups, strict=True) if me in row)
    return _axis(name, ranks, group, device)


# One axis per process group, device and name: channels are numbered per axis, so two axes must not share messages.
_axes: dict[tuple[str, str, int], Axis] = {}


def _axis(name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, device: torch.device | None) -> Axis:
    me = ranks.index(dist.get_rank())
    device = device or torch.device("cpu")
    if len(ranks) == 1:
        return Axis(name, ranks, 0, None, True)
    if device.type == "meta":  # a simulation: nothing has bytes that could travel
        return Axis(name, ranks, me, None, False)
    key = (name, device.type, id(group))
    known = _axes.get(key)
    if known is None or known.group is not group:
        backend = str(dist.get_backend(group))
        tagged = device.type == "cpu" and "fake" not in backend
        known = _axes[key] = Axis(
            name, ranks, me, group, tagged, shared_memory_of(group) if tagged and group is not None else None
        )
    return known


def forget_axes() -> None:
    """The process groups are gone."""
    _axes.clear()
    forget_shared_memory()
