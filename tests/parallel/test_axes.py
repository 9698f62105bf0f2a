"""One axis per set of ranks: its names, its channels, and the groups and memory that are made once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.comm.collectives.torch_api import forget_routes
from deepspeed.comm.process_groups.axis import (
    Axis,
    axis_of,
    forget_axes,
    group_axis,
    make_axes,
    world_axis,
)
from deepspeed.comm.process_groups.mesh import current_mesh, mesh_for
from deepspeed.comm.shared_memory import doorbell
from deepspeed.comm.shared_memory.doorbell import groups
from deepspeed.comm.shared_memory.transport import SharedMemory
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.native import library
from tests.harness.pool import WORKER_IMPORTS
from tests.parallel.tiny import micro_step, raises, start
from tests.unit.comm.ranks import run_ranks

META = torch.device("meta")
ROWS = [[3, 0], [1, 2]]  # no other test cuts the world like this


def groups_so_far() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def one_axis_per_set() -> None:
    rank, world = dist.get_rank(), world_axis("dp")
    pair = next(row for row in ROWS if rank in row)
    with raises(UsageError, "no process group", "make_axes"):
        axis_of(pair, "tp")
    clients: list[Any] = [dist.new_group(row) for row in ROWS]
    client = group_axis("client", clients[ROWS.index(pair)])
    assert client is axis_of(pair[::-1], "tp") is make_axes(ROWS, "sp")
    assert client.name == "client+tp+sp" and client.ranks == tuple(sorted(pair))
    assert client.ranks[client.rank] == rank and client.channel() < client.channel()
    assert axis_of(range(4), "all") is world is make_axes([range(4)], "one row") is world_axis()
    assert make_axes([[r] for r in range(4)], "pp") is axis_of([rank], "self")
    assert axis_of([rank], "self").group is None
    assert axis_of(range(4), "dp", META) is not world and axis_of(range(4), "dp", META).group is None
    shards, copies = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    shard, replicas = make_axes(shards, "shard"), make_axes(copies, "replicate")
    before = groups_so_far()
    assert make_axes(shards, "shard") is shard and make_axes(copies, "dp") is replicas
    assert make_axes(ROWS, "again") is client and groups_so_far() == before
    for rows in ([[0, 1], [2]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3, 4]], [[0, 1], [2, 2]]):
        with raises(ArgumentError, "tp", "does not hold each of the 4 ranks once"):
            make_axes(rows, "tp")
    for ranks in ([rank, rank], [(rank + 1) % 4], [rank, 9]):
        with raises(ArgumentError, "tp", f"rank {rank} among them"):
            axis_of(ranks, "tp")


def test_sets_of_ranks_have_one_axis_each(workers: Any) -> None:
    workers(4).run(one_axis_per_set, timeout=120)


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
    workers(2).run(a_clients_group_goes, timeout=120)


def axes_are_forgotten() -> None:
    sizes = {"dp_shard": dist.get_world_size()}
    before = mesh_for(sizes)
    assert mesh_for(sizes) is before is current_mesh()
    forget_routes()
    forget_axes()
    assert current_mesh() is not before
    again = mesh_for(sizes)
    assert again is not before and again.axis("dp_shard") is world_axis() is not before.axis("dp_shard")
    assert current_mesh() is again is mesh_for(sizes)


def test_no_mesh_answers_with_axes_that_were_forgotten(workers: Any) -> None:
    """What was made for them, such as communicators by host, is not handed to the engines that come after."""
    workers(2).run(axes_are_forgotten, timeout=60)


INTERLEAVED = """
    from deepspeed.comm.process_groups.axis import group_axis, world_axis, tag_of
    from deepspeed.comm.collectives.collectives import EXCHANGE, reduce_to_owners
    from deepspeed.comm.collectives.collectives import sum_in_rank_order

    dist.init_distributed("gloo")
    rank, every, pair = dist.get_rank(), dist.new_group([0, 1, 2]), dist.new_group([0, 1])

    def round_on(axis, seq, value):
        out, tag = torch.empty(2), tag_of(axis.channel(), EXCHANGE, seq)
        add = lambda parts: sum_in_rank_order(parts, out, 1.0, add=False)
        mine = torch.full((6,), value * (1.0 + rank))
        return out, lambda: reduce_to_owners(axis, mine, (0, 2, 4, 6), tag, f"round {value}", add)

    wrong = []
    for n in range(6):
        rounds = [round_on(world_axis(name), n, 10.0**at) for at, name in enumerate(["dp", "replicate"])]
        rounds.append(round_on(group_axis("mpu", every), n, 1000.0))
        # A round may start before or after others, and before or after what the client does.
        handles = [start() for _, start in rounds] if rank == 0 else []
        if rank < 2 and n % 3 == 0:
            dist.all_reduce(torch.ones(6, dtype=torch.bfloat16), group=pair)  # rank 2 knows nothing of it
        public = torch.full((60,), 100.0 * (1 + rank), dtype=torch.bfloat16)
        dist.all_reduce(public, group=every if n % 2 else None)
        handles = handles or [start() for _, start in rounds[::-1]][::-1]
        for handle in handles:
            handle.wait()
        sums = [out.tolist() for out, _ in rounds] + [public[:2].tolist()]
        wrong += [] if sums == [[6.0] * 2, [60.0] * 2, [6000.0] * 2, [600.0] * 2] else [sums]
    print("wrong:", wrong)
"""


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_public_collectives_and_rounds_over_the_same_ranks_stay_apart(native: str) -> None:
    ends = run_ranks(INTERLEAVED, 3, DS_NATIVE=native, limit=180, DEEPSPEED_TIMEOUT="1")
    assert [(end.code, end.out) for end in ends] == [(0, "wrong: []\n")] * 3, [end.err for end in ends]


class Reader:
    """Reads what axis rank `giver` posts, whenever it comes."""

    def __init__(self, axis: Axis, giver: int, turns: int) -> None:
        self.axis, self.giver, self.left = axis, giver, list(range(turns))

    def progress(self) -> None:
        shared = SharedMemory.require(self.axis.shared)
        if self.left and shared.posted(self.left[0], [self.giver]).within(0):
            shared.read(self.giver, self.left[0], torch.float32)
            shared.acknowledge(self.left.pop(0), [self.giver])


def a_wait_serves_every_group(turns: int) -> list[float]:
    """Rank 0 waits in one group for rank 1, which waits for rank 3, which waits for rank 0 in another group."""
    rank, patience, doorbell.NAP_US = dist.get_rank(), doorbell.NAP_US, 30_000_000
    try:
        # Opened now, with that patience: no other test cuts the world like this.
        left, right = make_axes([[0, 1, 2], [3]], "left"), make_axes([[0, 1, 3], [2]], "right")
        if world_axis().shared is None:
            assert library() is None
            return [0.0, 0.0]
        return [_one_wait(rank, left, right, turns, native) for native in (False, True)]
    finally:
        doorbell.NAP_US = patience


def _one_wait(rank: int, left: Axis, right: Axis, turns: int, native: bool) -> float:
    word, token = torch.ones(8), 1000 + native
    reader = Reader(right, 2, turns)
    dist.barrier()
    begun = time.monotonic()
    if rank == 0:
        groups.workers.add(reader)
    if rank == 1:
        SharedMemory.require(right.shared).posted(token, [2]).wait()
        SharedMemory.require(right.shared).acknowledge(token, [2])
        if not native:
            SharedMemory.require(left.shared).post(token, word, [0])
            SharedMemory.require(left.shared).acknowledged(token, [0]).wait()
    if rank == 3:
        for turn in range(turns):
            SharedMemory.require(right.shared).post(turn, word, [0])
            SharedMemory.require(right.shared).acknowledged(turn, [0]).wait()
            time.sleep(0.002)  # the one that waits falls asleep in between
        SharedMemory.require(right.shared).post(token, word, [1])
        SharedMemory.require(right.shared).acknowledged(token, [1]).wait()
    if native and rank < 3:
        SharedMemory.require(left.shared).all_reduce(word)
    if not native and rank == 0:
        SharedMemory.require(left.shared).posted(token, [1]).wait()
        SharedMemory.require(left.shared).acknowledge(token, [1])
    seconds = time.monotonic() - begun
    assert rank != 0 or reader.left == []
    groups.workers.discard(reader)
    dist.barrier()
    return seconds


def test_a_wait_in_one_group_is_woken_by_and_serves_the_others(workers: Any) -> None:
    for seconds in workers(4).run(a_wait_serves_every_group, 20, timeout=120):
        assert max(seconds) < 15, seconds  # asleep, it would look at the other group every 30 s


def holdings() -> dict[str, int]:
    while gc.collect():
        pass
    return {
        "groups": groups_so_far(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
        "threads": len(os.listdir("/proc/self/task")),
        "memories": len(groups.memories),
    }


def many_engines(count: int, settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    held = []
    for turn in range(count):
        with start(3, zero=settings) as engine:
            micro_step(engine, turn)
        if turn in (4, count - 1):
            held.append(holdings())
    return held[0], held[1]


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What there is more of; a library may map a page or two now and then."""
    return {
        name: after[name] - before[name] for name in before if after[name] > before[name] + 2 * (name == "mappings")
    }


def test_engines_that_come_and_go_leave_nothing(workers: Any) -> None:
    for before, after in workers(4).run(many_engines, 12, {"mics_shard_size": 2}, timeout=120):
        assert grown(before, after) == {}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"mics_shard_size": 2}, {"mics_shard_size": 1}, {}])
def test_hundreds_of_engines_leave_nothing(workers: Any, settings: dict[str, Any]) -> None:
    for before, after in workers(4).run(many_engines, 200, settings, timeout=600):
        assert grown(before, after) == {}


def _in_the_child(axis: Axis, held: torch.Tensor, pipe: Any) -> None:
    shared = SharedMemory.require(axis.shared)
    mine = axis.empty(1000, torch.float32, torch.device("cpu")).fill_(9)
    pipe.send((shared.allocator.place(mine), held.sum().item()))


def forked_children() -> None:
    axis = world_axis()
    if axis.shared is None:
        assert library() is None
        return
    held = [axis.empty(1000, torch.float32, torch.device("cpu")).fill_(1) for _ in range(3)]
    fork = multiprocessing.get_context("fork")
    for _ in range(2):
        ours, theirs = fork.Pipe()
        child = fork.Process(target=_in_the_child, args=(axis, held[0], theirs))
        child.start()
        assert ours.recv() == (None, 1000.0)
        child.join()
        assert child.exitcode == 0
        word = torch.full((70_000,), float(dist.get_rank()))
        comm.all_reduce(word)
        assert (word == 1).all() and all((each == 1).all() for each in held)


def test_forked_children_leave_the_memory_of_their_parent_alone(workers: Any) -> None:
    workers(2).run(forked_children, timeout=120)


ENDING = """
    import threading
    from deepspeed.comm.process_groups.axis import group_axis, world_axis
    import deepspeed

    dist.init_distributed("gloo")
    pair = dist.new_group([0, 1])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    json = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
    json["zero_optimization"] = {"stage": 3, "mics_shard_size": 1}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=json)
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    axis = group_axis("client", pair)
    kept = [axis.empty(5000, torch.float32, torch.device("cpu")) for _ in range(3)]
    kept.append(kept)  # ends in the last collection, if at all
    if HOW == "destroyed":
        dist.destroy_process_group()
        try:
            axis.shared and axis.shared.all_reduce(torch.ones(4))
        except RuntimeError as error:
            print(str(error) == "connection closed: the process group was destroyed" or error)
        else:
            print(axis.shared is None)
    else:
        print(True)
"""


@pytest.mark.parametrize("how", ["left open", pytest.param("destroyed", marks=pytest.mark.slow)])
def test_a_process_ends_whatever_it_holds(how: str) -> None:
    ends = run_ranks(f"HOW = {how!r}\n" + textwrap.dedent(ENDING), 2, limit=180, imported=WORKER_IMPORTS)
    assert [(end.code, end.out) for end in ends] == [(0, "True\n")] * 2, [end.err for end in ends]
    assert not any("Traceback" in end.err or "terminate" in end.err for end in ends), [end.err for end in ends]
