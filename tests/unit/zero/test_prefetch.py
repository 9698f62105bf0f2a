"""The trace of a pass, and the limits: what is kept, freed and fetched ahead. Groups are counters here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.zero.parameters.prefetch import ModuleOrder, PrefetchLimits, PrefetchScheduler
from deepspeed.zero.parameters.shard_group import State


@dataclass(eq=False)
class Group:
    name: str
    numel: int = 10
    state: State = State.SHARDED
    users: int = 0
    told: int = 0

    def expect_gather(self) -> None:
        self.told += self.state is State.SHARDED

    def start_all_gather(self, encoded: bool = False) -> None:
        self.state = State.INFLIGHT

    def keep_secondary(self) -> None: ...

    def wait_all_gather(self) -> None:
        self.state = State.GATHERED

    def reshard(self) -> None:
        self.state = State.SHARDED

    def retain(self) -> None:
        """Freeing may keep the memory: no matter here."""


def made(count: int = 4, **limits: int) -> tuple[list[Group], PrefetchScheduler]:
    groups = [Group(chr(ord("a") + n)) for n in range(count)]
    return groups, PrefetchScheduler(groups, PrefetchLimits(**limits))  # type: ignore[arg-type]


def one_pass(keeper: PrefetchScheduler, order: list[Group]) -> list[str]:
    """Use the groups in order; what was gathered or on its way at each moment."""
    keeper.trace.restart()
    seen = []
    for group in order:
        group.users += 1
        keeper.gather(group)  # type: ignore[arg-type]
        seen.append("".join(g.name for g in keeper.groups if g.state is not State.SHARDED))
        group.users -= 1
        keeper.release(group)  # type: ignore[arg-type]
    return seen


def test_the_trace_is_the_last_pass() -> None:
    (a, b, c), trace = made(3)[0], ModuleOrder()
    assert not trace.known and trace.distance(a) is None
    trace.restart()
    for group in (a, b, c, b):
        trace.used(group)  # type: ignore[arg-type]
    trace.restart()
    assert trace.known and trace.coming() == [a, b, c, b]
    assert (trace.distance(a), trace.distance(c)) == (0, 20)
    trace.used(a)  # type: ignore[arg-type]
    assert trace.coming() == [b, c, b] and trace.distance(a) is None
    trace.used(c)  # a branch that leaves b out
    assert trace.coming() == [b] and trace.distance(b) == 0
    trace.used(a)  # not to come any more: nothing changes
    assert trace.coming() == [b]


def test_limits_of_two_groups() -> None:
    groups, keeper = made(live=20, reuse=20, prefetch=20)
    order = [*groups, *groups[::-1]]
    one_pass(keeper, order)
    keeper.free_idle()
    seen = one_pass(keeper, order)
    assert all(len(whole) <= 2 for whole in seen) and keeper.peak == 20
    assert seen[0] == "ab"  # the next one is on its way
    keeper.free_idle()
    assert keeper.live() == 0


@pytest.mark.parametrize("ahead", [0, 20])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "computed again"])
def test_the_group_after_the_next_is_told(ahead: int, times: int) -> None:
    groups, keeper = made(live=20, reuse=0, prefetch=ahead)
    order = [group for group in groups for _ in range(times)]
    one_pass(keeper, order)
    keeper.free_idle()
    assert [group.told for group in groups] == [0, 0, 0, 0]  # whose order nobody knew
    keeper.trace.restart()
    for number, group in enumerate(groups):
        for _ in range(times):
            group.users += 1
            keeper.gather(group)  # type: ignore[arg-type]
        told = [each.told > 0 for each in groups]
        assert told[2:] == [bool(ahead) and place <= number + 2 for place in (2, 3)], number
        for _ in range(times):
            group.users -= 1
        keeper.release(group)  # type: ignore[arg-type]


def test_wide_limits_keep_everything_from_forward_to_backward() -> None:
    groups, keeper = made()
    for _ in range(2):
        before = keeper.gathers
        one_pass(keeper, [*groups, *groups[::-1]])
        assert keeper.gathers - before == len(groups)
        keeper.free_idle()


def test_no_prefetch_and_no_reuse() -> None:
    groups, keeper = made(live=0, reuse=0, prefetch=0)
    order = [*groups, *groups[::-1]]
    one_pass(keeper, order)
    assert one_pass(keeper, order) == list("abcd") + list("dcba")


def test_room_is_made_by_what_is_needed_last() -> None:
    (a, b, c), keeper = made(3, live=20, prefetch=0)
    one_pass(keeper, [a, b, c, b, a])
    keeper.free_idle()
    one_pass(keeper, [a, b, c])
    assert a.state is State.SHARDED and State.GATHERED in (b.state, c.state)


def test_groups_in_use_are_never_freed() -> None:
    (a, b, _), keeper = made(3, live=10)
    a.users = 1
    keeper.gather(a)  # type: ignore[arg-type]
    keeper.gather(b)  # type: ignore[arg-type]
    keeper.free_idle()
    assert (a.state, b.state) == (State.GATHERED, State.SHARDED)


Units = list[list[Group]]


def train(keeper: PrefetchScheduler, units: Units) -> list[str]:
    """Forward and backward as hooks see them: in backward a unit is gathered before the one after it is released."""
    keeper.trace.restart()
    seen = []

    def use(unit: list[Group]) -> None:
        for group in unit:
            group.users += 1
        keeper.gather(*unit)  # type: ignore[arg-type]
        seen.append("".join(g.name for g in keeper.groups if g.state is not State.SHARDED))
        assert keeper.live() == sum(g.numel for g in keeper.groups if g.state is not State.SHARDED)

    def release(unit: list[Group]) -> None:
        for group in unit:
            group.users -= 1
            keeper.release(group)  # type: ignore[arg-type]

    for unit in units:
        use(unit)
        release(unit)
    with torch.no_grad():  # as it is inside autograd
        for unit, after in zip(units[::-1], [None, *units[:0:-1]], strict=True):
            use(unit)
            if after is not None:
                release(after)
        release(units[0])
    return seen


def test_a_unit_larger_than_the_bucket_is_started_one_ahead() -> None:
    groups, keeper = made(prefetch=5, reuse=0)
    units = [[group] for group in groups]
    train(keeper, units)
    keeper.free_idle()
    assert keeper.late == 0  # of a pass nobody knew
    assert train(keeper, units) == ["ab", "bc", "cd", "d", "cd", "bcd", "abc", "ab"]
    assert keeper.late == 0


def test_a_bucket_of_zero_gathers_nothing_ahead() -> None:
    groups, keeper = made(prefetch=0, reuse=0, live=0)
    units = [[group] for group in groups]
    train(keeper, units)
    keeper.free_idle()
    assert train(keeper, units) == ["a", "b", "c", "d", "d", "cd", "bc", "ab"]
    assert keeper.late == 7  # all but the first of the pass


SIZES = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=2, max_size=9)


@given(SIZES, st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_within_the_limits_and_never_late(sizes: list[list[int]], live: int, reuse: int, prefetch: int) -> None:
    units = [[Group(f"{number}.{at}", numel) for at, numel in enumerate(unit)] for number, unit in enumerate(sizes)]
    keeper = PrefetchScheduler([g for unit in units for g in unit], PrefetchLimits(live, reuse, prefetch))  # type: ignore[arg-type]
    for _ in range(3):
        train(keeper, units)
        keeper.free_idle()
        assert keeper.live() == 0
    totals = [sum(unit) for unit in sizes]
    neighbours = max(a + b for a, b in zip(totals, totals[1:], strict=False))
    assert keeper.peak <= max(live, neighbours)
    if prefetch:
        assert keeper.late == 0


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=2, max_size=6), st.integers(10, 70))
def test_branches_and_changing_orders_stay_within_the_limit(orders: list[list[int]], live: int) -> None:
    groups, keeper = made(6, live=live)
    for order in orders:
        one_pass(keeper, [groups[index] for index in order])
        assert keeper.live() == sum(g.numel for g in groups if g.state is not State.SHARDED)
        assert keeper.peak <= max(live, 20)
    keeper.free_idle()
    assert keeper.live() == 0


class Counted(Group):
    """A group that counts how often anybody looks at it."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name in ("state", "numel", "users"):
            Counted.looks += 1
        return super().__getattribute__(name)


def looks(count: int, limits: PrefetchLimits) -> float:
    """How often a pass looks at groups, for each of them."""
    groups = [Counted(str(number)) for number in range(count)]
    keeper = PrefetchScheduler(groups, limits)  # type: ignore[arg-type]
    units: Units = [[group] for group in groups]
    for _ in range(2):
        train_quietly(keeper, units)
        keeper.free_idle()
    Counted.looks = 0
    train_quietly(keeper, units)
    keeper.free_idle()
    return Counted.looks / count


def train_quietly(keeper: PrefetchScheduler, units: Units) -> None:
    keeper.trace.restart()
    for unit in (*units, *units[::-1]):
        unit[0].users += 1
        keeper.gather(*unit)  # type: ignore[arg-type]
        unit[0].users -= 1
        keeper.release(unit[0])  # type: ignore[arg-type]


LIMITS = {
    "wide": lambda _: PrefetchLimits(),
    "tight": lambda _: PrefetchLimits(live=40),
    "half of all": lambda count: PrefetchLimits(live=5 * count),
    "no reuse": lambda _: PrefetchLimits(reuse=0),
    "none": lambda _: PrefetchLimits(0, 0, 0),
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=list(LIMITS))
def test_a_pass_looks_at_each_group_a_fixed_number_of_times(limits: Callable[[int], PrefetchLimits]) -> None:
    assert looks(512, limits(512)) <= 1.2 * looks(64, limits(64))


def test_passes_that_begin_differently_are_remembered_apart() -> None:
    (a, b, c), trace = made(3)[0], ModuleOrder()
    for kind, order in (("train", (a, b, b, a)), ("evaluation", (a, c)), ("train", (a, b, b, a))):
        trace.restart(kind)
        for group in order:
            trace.used(group)  # type: ignore[arg-type]
    trace.restart("evaluation")
    assert trace.coming() == [a, c]
    trace.restart("train")
    assert trace.coming() == [a, b, b, a]
    for number in range(100):  # not for ever
        trace.restart(number)
        trace.used(a)  # type: ignore[arg-type]
    trace.restart("train")
    assert not trace.known
