"""Twenty create-destroy cycles, by every way to end: no thread, descriptor, mapping or variable of ours stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.comm.ranks import run_ranks

CYCLES = 20

# A first cycle of torch alone: what stays of it is torch's own (its threads, its caches).
SETUP = """
import collections, gc, threading
import torch.distributed as plain
from deepspeed.comm.collectives import one_sided as fetch
from deepspeed.comm.process_groups.axis import group_axis, make_axes
from deepspeed.comm.process_groups.mesh import current_mesh

def here():
    gc.collect()
    tasks = collections.Counter(open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks_of())
    files = collections.Counter(kind(name) for name in os.listdir("/proc/self/fd"))
    maps = [line for line in open("/proc/self/maps") if "deepspeed" in line and ".so" not in line]
    return dict(tasks), dict(files), maps, dict(os.environ), sorted(t.name for t in threading.enumerate())

def tasks_of():
    return os.listdir("/proc/self/task")

def kind(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}").split(":")[0].split(" ")[0]
    except OSError:
        return "gone"

def settled(before):
    now, end = here(), time.monotonic() + 2
    while now != before and time.monotonic() < end:  # the system takes a moment to take a thread off its list
        time.sleep(0.05)
        now = here()
    return now

met = 0

class Wrong(Exception):
    pass

def work(world, rank):
    x = torch.ones(100_000)
    dist.all_reduce(x)
    assert x[0] == world
    axis = group_axis("world", plain.group.WORLD)
    make_axes([range(0, world)], "again")
    current_mesh()
    if axis.shared is None and axis.size > 1:
        fetch.service_of(axis)
    half = dist.new_group([0])
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=half)
    dist.barrier()

plain.init_process_group("gloo")
plain.all_reduce(torch.ones(1))
plain.destroy_process_group()
meet("first")
before = here()
"""

ENDS = {
    "ours": """
    dist.init_distributed(verbose=False)
    work(dist.get_world_size(), dist.get_rank())
    dist.destroy_process_group()
""",
    "torch": """
    dist.init_distributed(verbose=False)
    work(dist.get_world_size(), dist.get_rank())
    plain.destroy_process_group()
""",
    "adopted": """
    plain.init_process_group("gloo")
    for _ in range(3):
        dist.init_distributed(verbose=False)
    assert len(plain.distributed_c10d._world.pg_coalesce_state) == 1
    work(dist.get_world_size(), dist.get_rank())
    plain.destroy_process_group()
""",
    "exception": """
    try:
        dist.init_distributed(verbose=False)
        work(dist.get_world_size(), dist.get_rank())
        raise Wrong
    except Wrong:
        plain.destroy_process_group()
""",
}

# Rank 0 may hold the store of the group that has ended a moment longer: a rank that joins it at the same port is lost.
CHECK = """
    meet(f"{cycle} {met}")
    met += 1
    now = settled(before)
    assert now == before, f"cycle {cycle}: {[pair for pair in zip(before, now) if pair[0] != pair[1]]}"
"""
CLEAN = 'print("clean")'


def cycles(end: str, world: int, count: int, native: str) -> None:
    switched = {} if native == "1" else {"DS_NATIVE": native}
    ends = run_ranks(f"{SETUP}\nfor cycle in range({count}):{ENDS[end]}{CHECK}{CLEAN}", world, limit=240, **switched)
    for rank, ended in enumerate(ends):
        assert (ended.code, ended.out.strip()) == (0, "clean"), f"rank {rank}: {ended.out}{ended.err}"


def test_nothing_stays_after_the_last_group() -> None:
    """One cycle of each way to end."""
    every = "".join(f"{ENDS[end]}    cycle = {end!r}{CHECK}" for end in ENDS)
    ends = run_ranks(f"{SETUP}\nfor cycle in range(2):{every}{CLEAN}", 2, limit=240)
    assert all((ended.code, ended.out.strip()) == (0, "clean") for ended in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("end", ENDS)
def test_nothing_stays_after_twenty_cycles(end: str, world: int, native: str) -> None:
    cycles(end, world, CYCLES, native)


@pytest.mark.parametrize("cycles", [1, pytest.param(CYCLES, marks=pytest.mark.slow)])
def test_nothing_stays_after_the_process(cycles: int) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    for _ in range(cycles):
        left = "\ndist.init_distributed(verbose=False)\nwork(dist.get_world_size(), dist.get_rank())"
        for ended in run_ranks(SETUP + left, 2, limit=240):
            assert (ended.code, ended.complaints) == (0, []), ended.err
    assert not [name for name in os.listdir("/dev/shm") if "deepspeed" in name and name not in before]


STOP = """
def watches():
    return [thread for thread in threading.enumerate() if thread.name == "deepspeed-watch"]

dist.init_distributed(verbose=False)
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(1))
    (thread,) = watches()
    assert thread.daemon
    thread.stop()
    assert not thread.is_alive() and not watches()
    thread.stop()  # once more does nothing
    time.sleep(0.2 * rank)  # they need not rest at the same time
dist.all_reduce(torch.ones(1))
assert len(watches()) == 1
"""


def test_the_thread_of_the_watch_can_be_stopped_and_a_later_collective_starts_it_anew() -> None:
    end = "plain.destroy_process_group()\nassert settled(before) == before"
    for ended in run_ranks(SETUP + STOP + end, 2, limit=240):
        assert (ended.code, ended.complaints) == (0, []), ended.err


def test_a_rank_whose_watch_rests_hears_of_a_failure() -> None:
    late = """
dist.barrier()
if rank == 0:
    watches()[0].stop()
    time.sleep(4)
    dist.all_reduce(torch.ones(1), log_name="late")  # what the other left in the shared memory is enough for it
    time.sleep(2)
    dist.barrier(log_name="end")
else:
    dist.all_reduce(torch.ones(1), log_name="early")
"""
    ends = run_ranks(SETUP + STOP + late, 2, limit=240, DEEPSPEED_TIMEOUT=str(2 / 60))
    assert all(ended.code == 1 for ended in ends), [ended.err for ended in ends]
    assert all("The last collective of each rank:" in ended.err for ended in ends), [ended.err for ended in ends]


@pytest.mark.slow
def test_the_process_ends_with_its_watch_at_rest() -> None:
    rest = "dist.barrier()\nfor thread in watches():\n    thread.stop()\n"
    for ended in run_ranks(SETUP + STOP + rest, 2, limit=240):
        assert (ended.code, ended.complaints) == (0, []), ended.err
