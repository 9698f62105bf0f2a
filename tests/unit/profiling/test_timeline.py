"""The recorder's ring, and what the timeline makes of spans whose answer is known."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.foundation.spans import (
    BACKWARD,
    CALL,
    FLIGHT,
    FORWARD,
    RECOMPUTE,
    UPDATE,
    WAIT,
    Span,
    SpanRecorder,
    recorder,
)
from deepspeed.profiling.timeline import ModuleSpans, RankRecord, Timeline
from deepspeed.profiling.timeline.report import lanes
from deepspeed.profiling.timeline.segments import COMMUNICATION, OUTSIDE, WAITING, common, union

MS = 1_000_000


def span(begin: float, end: float, category: str, label: str = "", module: str = "", nbytes: int = 0) -> Span:
    return Span(int(begin * MS), int(end * MS), category, label, module, nbytes, 1)


def record(rank: int, spans: list[Span], *marks: float) -> RankRecord:
    return RankRecord(rank, sorted(spans), [int(mark * MS) for mark in marks], 1, 0)


# -- the ring ---------------------------------------------------------------------------------------------------------


def test_off_it_keeps_nothing_and_makes_no_context() -> None:
    ring = SpanRecorder()
    assert ring.span("forward") is ring.span("backward")
    ring.add(0, "forward")
    ring.count("bytes", 3)
    assert ring.take() == ([], 0)


def test_a_span_costs_one_call_of_python() -> None:
    """Thousands are written in a step: what can be done when they are taken is done then."""
    ring, calls = SpanRecorder(), Counter[str]()
    ring.start()

    def heard(_frame: Any, event: str, _what: Any) -> None:
        calls[event] += 1

    sys.setprofile(heard)
    try:
        ring.add(1, FORWARD, module="layers.1")
        ring.enter(WAIT, "all_gather of layers.2")
        ring.leave()
    finally:
        sys.setprofile(None)
    assert calls["call"] == 1 + 3  # `enter`, `leave`, and what that adds
    assert calls["c_call"] <= 2 * 5 + 2
    assert [span.module for span in ring.take()[0]] == ["layers.1", "layers.2"]


def test_what_was_taken_is_not_lost_when_spans_are_taken_again() -> None:
    ring = SpanRecorder()
    ring.start()
    ring.add(1, FORWARD)
    assert len(ring.take()[0]) == 1
    assert ring.take() == ([], 0)
    ring.add(1, FORWARD)  # nobody has started it anew
    assert ring.take() == ([], 1)


def test_the_newest_spans_are_kept_and_the_others_counted() -> None:
    ring = SpanRecorder()
    ring.start(16)
    for number in range(40):
        ring.add(number, "forward", str(number))
    ring.stop()
    ring.add(50, "forward", "late")
    spans, lost = ring.take()
    assert [s.label for s in spans] == [str(n) for n in range(24, 40)] and lost == 24
    assert ring.take()[0] == []


def test_spans_of_threads_nest_apart_and_what_began_before_is_left_out() -> None:
    ring = SpanRecorder()
    ring.start()
    ring.enter(WAIT, "before")
    ring.start()
    ring.leave()

    def other() -> None:
        ring.enter(CALL, "reduce of a of b")
        ring.leave()
        ring.leave()  # as after a failure

    ring.enter(WAIT, "gather of c")
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    ring.leave()
    spans, _ = ring.take()
    assert [(s.label, s.module) for s in spans] == [("gather of c", "c"), ("reduce of a of b", "a of b")]
    assert spans[0].end >= spans[1].end and len({s.thread for s in spans}) == 2
    ring.stop()


# -- shares -----------------------------------------------------------------------------------------------------------


def test_the_innermost_span_counts_and_shares_sum_to_the_update() -> None:
    spans = [
        span(-3, 4, FORWARD),  # begins before the first mark
        span(1, 3, FORWARD, module="a"),
        span(2, 2.5, WAIT, "gather of a", "a"),
        span(5, 9, BACKWARD),
        span(5, 6, BACKWARD, module="b"),
        span(5.5, 7, RECOMPUTE, module="a"),  # does not nest: what began last counts
        span(8, 12, UPDATE),  # ends after the last
        span(0, 9, FLIGHT, "reduce of a", "a", 100),
    ]
    timeline = Timeline([record(0, spans, 0, 10)])
    assert {k: v for k, v in timeline.shares().items() if v} == pytest.approx(
        {FORWARD: 3.5e-3, COMMUNICATION: 0.5e-3, OUTSIDE: 1e-3, BACKWARD: 1.5e-3, RECOMPUTE: 1.5e-3, UPDATE: 2e-3}
    )
    assert sum(timeline.shares().values()) == pytest.approx(timeline.step_seconds) == pytest.approx(0.01)
    assert timeline.modules(FORWARD) == pytest.approx({"": 2e-3, "a": 1.5e-3})
    assert timeline.beside() == pytest.approx((9e-3, 8.5e-3)) and timeline.exposed == pytest.approx(0.5e-3)
    assert timeline.received() == {"reduce": 100}
    assert "sum                  10.00  100.0%" in timeline.table()


def test_waiting_is_charged_to_the_rank_and_module_that_were_late() -> None:
    """Rank 1's backward of `slow` takes 40 ms more; the others see it in a reduction, and in nothing else."""

    def of(rank: int) -> RankRecord:
        slow, spans = 40.0 if rank == 1 else 0.0, []
        for at in (0.0, 100.0, 200.0):
            begun = at + 20 + slow
            spans += [
                span(at, at + 10, FORWARD, module="fast"),
                span(at + 10, begun, BACKWARD, module="slow"),
                span(begun, begun + 1, CALL, "reduce of slow", "slow"),
                span(begun + 1, at + 70, WAIT, "reduce of slow", "slow"),
                span(at + 70, at + 100, UPDATE),
            ]
        return record(rank, spans, 0, 100, 200, 300)

    timeline = Timeline([of(rank) for rank in range(3)])
    assert timeline.limit[:3] == (BACKWARD, "slow", 1) and timeline.limit.share == pytest.approx(0.4, abs=0.02)
    assert timeline.charges[0].excess == pytest.approx(40 * MS, rel=0.01)
    assert timeline.shares(1)[WAITING] == 0 and timeline.shares(0)[WAITING] == pytest.approx(41e-3, abs=1e-4)
    assert timeline.shares(0)[COMMUNICATION] == pytest.approx(9e-3 + 1e-3 - 1e-3 + 1e-3, abs=1e-3)
    assert "for rank 1: it has more backward in slow" in timeline.table()


def test_a_collective_that_all_enter_waits_for_who_enters_last() -> None:
    def of(rank: int) -> RankRecord:
        late = 30.0 * (rank == 0)
        spans = [span(0, 10 + late, FORWARD, module="a"), span(10 + late, 45, CALL, "agreement")]
        return record(rank, spans, 0, 50)

    timeline = Timeline([of(0), of(1)])
    assert timeline.limit[:3] == (FORWARD, "a", 0)
    assert timeline.shares(1)[WAITING] == pytest.approx(30e-3) and timeline.shares(0)[WAITING] == 0


def test_one_odd_update_does_not_decide() -> None:
    spans = [span(at, at + 8, FORWARD, module="a") for at in (0, 10, 220)] + [span(20, 219, UPDATE)]
    assert Timeline([record(0, spans, 0, 10, 20, 220, 230)]).limit[:3] == (FORWARD, "a", None)


def test_intervals() -> None:
    one, other = union([(5, 7), (0, 2), (1, 3), (7, 8)]), [(2, 6)]
    assert one == [(0, 3), (5, 8)] and sum(end - begin for begin, end in one) == 6 and common(one, other) == 2


def test_lanes_hold_no_overlap() -> None:
    spans = [span(begin, begin + 3, FLIGHT) for begin in (0, 1, 2, 3, 4)]
    assert [lane for lane, _ in lanes(spans)] == [0, 1, 2, 0, 1]


# -- modules ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x).tanh())


@pytest.mark.parametrize("again", [False, True])
def test_forward_and_backward_of_modules_are_recorded(again: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual(), nn.Linear(4, 4))
    hooks = ModuleSpans(model)
    recorder.start()
    try:
        x = model[0](torch.randn(2, 4))
        x = torch.utils.checkpoint.checkpoint(model[1], x, use_reentrant=False) if again else model[1](x)
        with recorder.span(BACKWARD):
            model[2](x).sum().backward()
    finally:
        recorder.stop()
        hooks.remove()
    spans, _ = recorder.take()
    forward = [s.module for s in spans if s.category == FORWARD]
    assert forward == ["0", "1", "1.a", "1.b", "2"]
    seen: list[str] = []
    for s in spans:
        if s.category == BACKWARD and s.module and s.module not in seen[-1:]:
            seen.append(s.module)
    order = [name for name in seen if name in ("0", "1.a", "1.b", "2")]
    assert order == ["2", "1.b", "1.a", "0"]
    assert [s.module for s in spans if s.category == RECOMPUTE][:1] == (["1"] if again else [])
    assert not any(_hooks(module) for module in model.modules())


class Cached(nn.Module):
    """Gives what it made while nothing was differentiated, as caches of masks and rotations do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.kept = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept


def test_outputs_without_a_version_and_copies_of_a_model() -> None:
    model = nn.ModuleDict({"cached": Cached(), "out": nn.Linear(4, 4)})
    hooks = ModuleSpans(model)
    recorder.start()
    try:
        for each in (model, copy.deepcopy(model)):
            each["out"](each["cached"](torch.ones(2, 4)).clone()).sum().backward()
    finally:
        hooks.remove()
    assert [s.module for s in recorder.take()[0] if s.category == FORWARD] == ["cached", "out"] * 2
    copied = copy.deepcopy(model)
    recorder.start()
    try:
        each["out"](torch.ones(2, 4))  # copied while it had the hooks, which do nothing any more
        copied["out"](torch.ones(2, 4))
    finally:
        recorder.stop()
    assert not recorder.take()[0]


def test_what_is_compiled_stays_one_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual())
    hooks = ModuleSpans(model)
    recorder.start()
    try:
        torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 4)).sum().backward()
        assert not [s for s in recorder.take()[0] if s.category in (FORWARD, BACKWARD)]
        recorder.start()
        model(torch.randn(2, 4))
    finally:
        recorder.stop()
        hooks.remove()
        torch.compiler.reset()
    assert [s.module for s in recorder.take()[0] if s.category == FORWARD] == ["0", "1", "1.a", "1.b"]


class Nap(torch.autograd.Function):
    """In place; its backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return grads[0] * 2


class InPlace(nn.Module):
    """Changes in place what a module gave: as a module, or between two."""

    def __init__(self, module: bool) -> None:
        super().__init__()
        self.a, self.b, self.module = nn.Linear(4, 4), nn.Linear(4, 4), module
        self.nap = Napping() if module else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(Nap.apply(x) if self.nap is None else self.nap(x))


class Napping(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Nap.apply(x)


@pytest.mark.parametrize("module", [False, True])
def test_backward_of_what_is_done_in_place_is_its_module_s(module: bool) -> None:
    model = nn.Sequential(InPlace(module), InPlace(module))
    hooks = ModuleSpans(model)
    recorder.start()
    try:
        model(torch.randn(2, 4)).sum().backward()
    finally:
        recorder.stop()
        hooks.remove()
    spans, _ = recorder.take()
    long = [s.module for s in spans if s.category == BACKWARD and s.end - s.begin > 40 * MS]
    assert long == [f"{at}.nap" if module else str(at) for at in (1, 0)]


def _hooks(module: Any) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)
