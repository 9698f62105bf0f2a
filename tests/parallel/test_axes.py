"""One axis per set of ranks: its names, its channels, and the groups and memory that are made once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm.axis import axis_of, group_axis, hybrid_axes, make_axes, world_axis
from deepspeed.errors import ArgumentError, UsageError
from tests.parallel.tiny import raises

META = torch.device("meta")
ROWS = [[3, 0], [1, 2]]  # no other test cuts the world like this


def groups_so_far() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def one_axis_per_set() -> None:
    rank, world = dist.get_rank(), world_axis("dp")
    pair = next(row for row in ROWS if rank in row)
    with raises(UsageError, "no process group", "make_axes"):
        axis_of(pair, "tp")
    groups: list[Any] = [dist.new_group(row) for row in ROWS]
    client = group_axis("client", groups[ROWS.index(pair)])
    assert client is axis_of(pair[::-1], "tp") is make_axes(ROWS, "sp")
    assert client.name == "client+tp+sp" and client.ranks == tuple(sorted(pair))
    assert client.ranks[client.rank] == rank and client.channel() < client.channel()
    assert axis_of(range(4), "all") is world is make_axes([range(4)], "one row") is world_axis()
    assert make_axes([[r] for r in range(4)], "pp") is axis_of([rank], "self")
    assert axis_of([rank], "self").group is None
    assert axis_of(range(4), "dp", META) is not world and axis_of(range(4), "dp", META).group is None
    shard, replicas = hybrid_axes(2)
    before = groups_so_far()
    assert hybrid_axes(2) == (shard, replicas) and make_axes([[0, 2], [1, 3]], "dp") is replicas
    assert make_axes(ROWS, "again") is client and groups_so_far() == before
    for rows in ([[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3, 4]], [[0, 1], [2, 2]]):
        with raises(ArgumentError, "tp", "does not hold each of the 4 ranks once"):
            make_axes(rows, "tp")
    for ranks in ([rank, rank], [(rank + 1) % 4], [rank, 9]):
        with raises(ArgumentError, "tp", f"rank {rank} among them"):
            axis_of(ranks, "tp")


def test_sets_of_ranks_have_one_axis_each(workers: Any) -> None:
    workers(4).run(one_axis_per_set, timeout=60)


def a_clients_group_goes() -> None:
    world = world_axis()
    theirs: Any = dist.new_group([0, 1])
    comm.all_reduce(torch.ones(3), group=theirs)
    assert group_axis("client", theirs) is world and world.group is dist.group.WORLD
    comm.destroy_process_group(theirs)
    comm.all_reduce(torch.ones(3))
    again: Any = dist.new_group([0, 1])
    assert group_axis("client", again) is world_axis() is world
    comm.destroy_process_group(again)


def test_a_client_may_destroy_its_group(workers: Any) -> None:
    workers(2).run(a_clients_group_goes)
