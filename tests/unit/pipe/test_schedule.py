"""Schedules as text, by simulation and by formula, and what their validation says of planted errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deepspeed.errors import ArgumentError, PipelineError
from deepspeed.pipe.schedule import NAMES, Action, PipelineSchedule, Row, make_schedule, parse, warmup
from deepspeed.pipe.schedule_simulator import BACKWARD, FORWARD, WEIGHTS, simulate

FAST = [(1, 1), (1, 5), (2, 1), (2, 2), (2, 5), (3, 3), (4, 2), (4, 8), (5, 10), (8, 16), (16, 4)]
ALL = [(stages, micros) for stages in range(1, 17) for micros in range(1, 65)]
SOME = [*(pytest.param(*one) for one in FAST), *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL)]


def possible(name: str, stages: int, micros: int, chunks: int) -> bool:
    return not (name in ("1f1b", "zero_bubble") and chunks > 1) and not (name == "interleaved" and micros % stages)


def peak_by_formula(schedule: PipelineSchedule, stage: int) -> int:
    """Micro-batches times chunks whose activations a stage holds at most."""
    total = schedule.micros * schedule.chunks
    if schedule.name == "inference":
        return 1  # dropped when it is sent: nothing is kept for a backward that never comes
    if schedule.name == "zero_bubble":
        return min(total, schedule.stages)  # the first stage's of 1f1b
    return min(total, warmup(schedule.name, stage, schedule.stages, schedule.micros, schedule.chunks) + 1)


def put_off_by_formula(schedule: PipelineSchedule, stage: int) -> int:
    """How many of those are through backward."""
    whole = min(schedule.micros, schedule.stages - stage)
    return peak_by_formula(schedule, stage) - whole if schedule.name == "zero_bubble" else 0


def time_by_formula(schedule: PipelineSchedule) -> float:
    """Time of a schedule: what one stage computes, and the way through the others.

    Where all micro-batches go through a chunk before the next one begins, fewer of them than stages leave gaps. Where
    weights come later, they fill what would be waited for; with fewer micro-batches than stages there are too few.
    """
    cost = FORWARD if schedule.name == "inference" else FORWARD + BACKWARD
    per_chunk = max(schedule.micros, schedule.stages)
    if schedule.name == "zero_bubble":
        rest = cost - WEIGHTS
        return schedule.micros * rest + per_chunk * WEIGHTS + (schedule.stages - 1) * (rest - WEIGHTS)
    return ((schedule.chunks - 1) * per_chunk + schedule.micros + schedule.stages - 1) * cost


@pytest.mark.parametrize(("stages", "micros"), SOME)
def test_every_schedule_ends_and_costs_what_the_formula_says(stages: int, micros: int) -> None:
    for name in NAMES:
        for chunks in range(1, 5):
            if not possible(name, stages, micros, chunks):
                continue
            schedule = make_schedule(name, stages, micros, chunks)
            found = simulate(schedule)
            assert found.peaks == tuple(peak_by_formula(schedule, stage) for stage in range(stages)), schedule
            assert found.put_off == tuple(put_off_by_formula(schedule, stage) for stage in range(stages)), schedule
            assert found.time == time_by_formula(schedule), schedule
            cost = 1 if name == "inference" else 3
            assert found.idle == pytest.approx(1 - micros * chunks * cost / found.time)


def test_a_schedule_prints_and_parses() -> None:
    for name in NAMES:
        schedule = make_schedule(name, 2, 4, 2 if possible(name, 2, 4, 2) else 1)
        assert parse(str(schedule)) == schedule
    assert str(make_schedule("1f1b", 2, 2)).splitlines()[1:] == [
        "F0 >F0 F1 >F1 <B0 B0 <B1 B1",
        "<F0 F0 B0 >B0 <F1 F1 B1 >B1",
    ]
    assert str(make_schedule("zero_bubble", 2, 3)).splitlines()[1:] == [
        "F0 >F0 F1 >F1 <B0 B0 W0 F2 >F2 <B1 B1 W1 <B2 B2 W2",
        "<F0 F0 B0 >B0 <F1 F1 B1 >B1 W0 <F2 F2 B2 >B2 W1 W2",
    ]
    assert make_schedule("1f1b", 2, 2).around(0, 4, beside=2) == "… F1 >F1 [<B0] B0 <B1 …"


def test_a_place_is_told_without_a_look_at_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, told = make_schedule("1f1b", 2, 64), list[Action]()
    word = Action.__str__
    monkeypatch.setattr(Action, "__str__", lambda action: told.append(action) or word(action))
    for at in range(len(schedule.rows[0])):
        schedule.around(0, at)
    assert len(told) <= 7 * len(schedule.rows[0])
    assert schedule.around(0, 0) == "[F0] >F0 F1 >F1 …"
    assert schedule.around(0, len(schedule.rows[0]) - 1).endswith(" B62 <B63 [B63]")


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "1f1b: 2 stages",
        "1f1b: 1 stages, 1 micro-batches, 1 chunks\nF0 X0",
        "gpipe: 3 stages, 1 micro-batches, 1 chunks\nF0",
    ],
)
def test_what_is_no_schedule_does_not_parse(text: str) -> None:
    with pytest.raises(PipelineError):
        parse(text)


def without(word: str) -> Callable[[Row], Row]:
    return lambda row: tuple(action for action in row if str(action) != word)


def swapped(one: str, other: str) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        words = [str(action) for action in row]
        order = list(row)
        a, b = words.index(one), words.index(other)
        order[a], order[b] = order[b], order[a]
        return tuple(order)

    return change


def repeated(word: str) -> Callable[[Row], Row]:
    return lambda row: tuple(a for action in row for a in ([action, action] if str(action) == word else [action]))


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        (1, without("<F1"), ["stage 1: F1 without <F1"]),
        (0, without(">F1"), ["stage 1", "stage 0", "sent"]),
        (0, without(">F3"), ["never ends", "stage 1 waits for <F3 of stage 0, which never sends it"]),
        (1, without("B2"), ["stage 1: >B2 sends what has not been computed"]),
        (0, without("B2"), ["stage 0 never computes B2"]),
        (1, swapped("<F0", "<F1"), ["stage 1: <F1 would take F0"]),
        (0, swapped("F0", ">F0"), ["stage 0: >F0 sends what has not been computed (order swapped)"]),
        (0, repeated("F1"), ["stage 0: F1 is computed twice"]),
        (0, repeated(">F3"), ["stage 1 never takes F3, which stage 0 sends"]),
        (0, swapped("F0", "<B0"), ["never ends", "stage 0 waits for <B0"]),
        (0, lambda row: (*row, Action(">B", 0)), ["no other part"]),
        (0, lambda row: (*row, Action("F", 9)), ["none of the schedule's micro-batches"]),
        (1, swapped("F1", "B1"), ["stage 1: B1 before its forward"]),
    ],
)
def test_planted_errors_are_named(stage: int, change: Callable[[Row], Row], words: list[str]) -> None:
    expect_named("1f1b", stage, change, words)


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        (0, without("W2"), ["stage 0 never computes W2"]),
        (1, swapped("B1", "W1"), ["stage 1: W1 before its backward (order swapped)"]),
        (1, swapped("F0", "W0"), ["stage 1: W0 before its backward (order swapped)"]),
        (1, repeated("W3"), ["stage 1: W3 is computed twice"]),
        (0, lambda row: (*row, Action("W", 4)), ["stage 0: W4 is none of the schedule's micro-batches"]),
        (1, lambda row: tuple(one for one in row if one.op != "W"), ["stage 1 never computes W0"]),
        (0, without("B2"), ["stage 0: W2 before its backward"]),
    ],
)
def test_planted_errors_of_weights_are_named(stage: int, change: Callable[[Row], Row], words: list[str]) -> None:
    expect_named("zero_bubble", stage, change, words)


def expect_named(name: str, stage: int, change: Callable[[Row], Row], words: list[str]) -> None:
    schedule = make_schedule(name, 2, 4)
    rows = list(schedule.rows)
    rows[stage] = change(rows[stage])
    with pytest.raises(PipelineError) as found:
        simulate(replace(schedule, rows=tuple(rows)))
    assert all(word in str(found.value) for word in words), found.value


def test_a_count_that_cannot_be_had_names_the_next() -> None:
    with pytest.raises(ArgumentError, match="the next count is 8"):
        make_schedule("interleaved", 4, 5, 2)
    with pytest.raises(ArgumentError, match="interleaved"):
        make_schedule("1f1b", 2, 4, 2)
    with pytest.raises(ArgumentError, match="zero_bubble has one chunk"):
        make_schedule("zero_bubble", 2, 4, 2)
    with pytest.raises(ArgumentError, match="no schedule 'zero'"):
        make_schedule("zero", 2, 4)
    with pytest.raises(ArgumentError):
        make_schedule("1f1b", 2, 0)


def test_stages_have_parts_in_turns() -> None:
    schedule = PipelineSchedule("x", 1, 2, ((), (), ()))
    assert schedule.parts == 6 and [schedule.part(stage, 1) for stage in range(3)] == [3, 4, 5]


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (8, 8)])
def test_weights_that_come_later_leave_a_third_of_the_bubble_and_hold_no_more_than_the_first_stage_did(
    stages: int, micros: int
) -> None:
    plain, later = (simulate(make_schedule(name, stages, micros)) for name in ("1f1b", "zero_bubble"))
    least = micros * 3
    assert later.time - least == pytest.approx((plain.time - least) / 3)
    assert max(later.peaks) == max(plain.peaks)
    assert [held - off for held, off in zip(later.peaks, later.put_off, strict=True)] == list(plain.peaks)


@pytest.mark.parametrize("weights", [0.0, 0.1, 3.0])
def test_a_schedule_is_valid_whatever_weights_cost(weights: float) -> None:
    costs = [(1.0, 1.0, weights)] * 4
    found = simulate(make_schedule("zero_bubble", 4, 8), costs)
    assert found.time <= simulate(make_schedule("1f1b", 4, 8), [(1.0, 1.0 + weights)] * 4).time + 1e-9


def test_a_schedule_is_searched_for_weights_once() -> None:
    schedule = make_schedule("1f1b", 2, 8)
    rows = [Counted(row) for row in schedule.rows]
    simulate(counted := replace(schedule, rows=tuple(rows)))
    assert not counted.splits and [row.walks for row in rows] == [1, 1]


class Counted(tuple[Action, ...]):
    """A row that counts how often all of it is looked at."""

    walks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.walks += 1
        return super().__iter__()
