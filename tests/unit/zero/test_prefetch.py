"""The trace of a pass, and the limits: what is kept, freed and fetched ahead. Groups are counters here."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.zero.prefetch import Keeper, Limits, Trace
from deepspeed.zero.shard_group import State


@dataclass(eq=False)
class Group:
    name: str
    numel: int = 10
    state: State = State.SHARDED
    users: int = 0

    def start_gather(self) -> None:
        self.state = State.INFLIGHT

    def finish_gather(self) -> None:
        self.state = State.GATHERED

    def free(self) -> None:
        self.state = State.SHARDED

    def retain(self) -> None:
        """Freeing may keep the memory: no matter here."""


def made(count: int = 4, **limits: int) -> tuple[list[Group], Keeper]:
    groups = [Group(chr(ord("a") + n)) for n in range(count)]
    return groups, Keeper(groups, Limits(**limits))  # type: ignore[arg-type]


def one_pass(keeper: Keeper, order: list[Group]) -> list[str]:
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
    (a, b, c), trace = made(3)[0], Trace()
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
