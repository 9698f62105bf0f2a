"""The trail of a rank: marks that ranks of different speed have in common, and where two trails part."""

from __future__ import annotations

import inspect
import time

import pytest

from deepspeed import comm
from deepspeed.comm.process_groups import axis
from deepspeed.comm.watchdog.desync import DesyncDetector, trail

OWNER = object()


def trail_of(labels, interval=4, owner=OWNER, ranks=(0, 1)):
    made = DesyncDetector()
    made.start(interval)
    for label in labels:
        made.enter(owner, "public", lambda: ranks, label)
    return made


def differs(one, other):
    [names] = other.leaders(1).values()
    return other.differs(one.marks(), names)


def test_off_nothing_is_entered():
    off = trail_of(["a"] * 8, interval=0)
    assert off.marks() == b"{}" and off.leaders(1) == {}


@pytest.mark.parametrize("behind", [0, 1, 15, 100, 1000])
def test_equal_trails_agree_however_far_one_is_behind(behind):
    labels = [f"reduce {number % 7}" for number in range(4000)]
    assert differs(trail_of(labels), trail_of(labels[: len(labels) - behind])) == ""


@pytest.mark.drawn(6)
@pytest.mark.parametrize("behind", [0, 1, 15, 100, 1000])
@pytest.mark.parametrize("at", [0, 1, 2000])
def test_one_other_label_is_seen_ever_after(at, behind):
    labels = [f"reduce {number % 7}" for number in range(4000)]
    other = labels.copy()
    other[at] = "gather"
    assert "ranks 0, 1" in differs(trail_of(labels), trail_of(other[: len(labels) - behind]))


def test_the_first_difference_is_named_with_the_lines():
    one, other = trail_of(["a", "b", "c"]), trail_of(["a"])
    line = inspect.currentframe().f_lineno + 1
    other.enter(OWNER, "public", lambda: (0, 1), "x")
    text = DesyncDetector.parting({0: one.recent(), 1: other.recent()})
    assert text.startswith("The paths part at collective 2 of ranks 0, 1:")
    assert f"rank 1 on {__import__('socket').gethostname()}: 'x' at {__file__}:{line} in " in text
    assert "'b' at" in text and "'c'" not in text


def test_a_rank_that_is_not_there_yet_comes_after_ranks_that_differ():
    group = object()
    one, other = trail_of(["a", "b"]), trail_of(["a"])
    for made, label in ((one, "c"), (other, "d")):
        made.enter(group, "public", lambda: (0, 1, 2), label)
    text = DesyncDetector.parting({0: one.recent(), 1: other.recent()})
    assert text.index("'d'") < text.index("has not entered it")


def test_equal_trails_part_nowhere():
    assert DesyncDetector.parting({0: trail_of("abc").recent(), 1: trail_of("abc").recent()}) == ""


def test_two_owners_of_the_same_ranks_share_an_order():
    one, other = trail_of("ab"), trail_of("a")
    other.enter(object(), "public", lambda: (0, 1), "b")
    assert DesyncDetector.parting({0: one.recent(), 1: other.recent()}) == ""


def test_many_ranks_take_few_lines():
    told = {rank: trail_of("ab", ranks=range(100)).recent() for rank in range(100)}
    told[50] = trail_of("ax", ranks=range(100)).recent()
    lines = DesyncDetector.parting(told).splitlines()
    assert len(lines) <= 12 and "rank 50 " in lines[1] and "more like rank" in lines[-1]


def test_entering_is_cheap():
    made = trail_of("a")
    begun = time.thread_time()
    for _ in range(10_000):
        made.enter(OWNER, "public", lambda: (0, 1), "reduce of layers.3.attention.weight")
    assert time.thread_time() - begun < 0.5  # 3 µs each on an idle core


def marks_of_local_groups():
    trail.start(1)
    try:
        axis._groups.clear()
        axis.get_own_group()
        if comm.get_rank() == 0:  # nobody else has to
            comm.new_group([0], use_local_synchronization=True)
        comm.barrier()
        return trail.marks()
    finally:
        trail.interval = 0
        trail.forget()


def test_groups_that_only_their_members_make_are_in_no_trail_of_all(workers):
    one, other = workers(2).run(marks_of_local_groups)
    assert one == other != b"{}"
