"""The five schedules against their formulas, torch's by name, and the errors of both."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from deepspeed.errors import SchedulerError
from deepspeed.optim.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
)

MAKERS = {
    "WarmupLR": lambda opt: WarmupLR(opt, 0.1, 0.9, 8),
    "WarmupDecayLR": lambda opt: WarmupDecayLR(opt, 20, 0.1, 0.9, 8),
    "WarmupCosineLR": lambda opt: WarmupCosineLR(opt, 20, 0.1, 8),
    "LRRangeTest": lambda opt: LRRangeTest(opt, 0.1, 5, 2.0),
    "OneCycle": lambda opt: OneCycle(opt, 0.1, 0.9, 0.5, 5, decay_step_size=4, decay_mom_rate=0.1),
}


def adam(groups: int = 1, lr: float = 0.5) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=lr)


def rates(schedule: object, steps: int) -> list[float]:
    made = []
    for _ in range(steps):
        schedule.step()
        made.append(schedule.get_last_lr()[0])
    return made


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup(kind: str) -> None:
    optimizer = adam()
    schedule = WarmupLR(optimizer, 0.1, 0.9, 10, kind)
    assert optimizer.param_groups[0]["lr"] == 0.1
    rise = [math.log(i + 1) / math.log(10) if kind == "log" else i / 10 for i in range(10)]
    assert rates(schedule, 13) == pytest.approx([0.1 + 0.8 * g for g in rise] + [0.9] * 3, abs=1e-15)
    assert optimizer.param_groups[0]["lr"] == 0.9


def test_warmup_ends_at_the_optimizers_own_rate_unless_told() -> None:
    assert rates(WarmupLR(adam(lr=0.5), warmup_num_steps=4), 6)[-1] == 0.5


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_a_warmup_of_no_steps_is_none(kind: str) -> None:
    optimizer = adam()
    assert rates(WarmupLR(optimizer, 0.1, 0.9, 0, kind), 3) == [0.9] * 3
    made = WarmupLR(optimizer, 0.1, 0.9, 0, kind)
    assert optimizer.param_groups[0]["lr"] == 0.9 and made.get_lr() == [0.9]
    WarmupDecayLR(optimizer, 10, 0.1, 0.9, 0, kind)
    assert optimizer.param_groups[0]["lr"] == 0.9  # of the first step
    fall = rates(WarmupDecayLR(adam(), 10, 0.1, 0.9, 0, kind), 11)
    assert fall == pytest.approx([0.1 + 0.8 * (10 - i) / 10 for i in range(11)])
    half = [(1 + math.cos(math.pi * (i + 1) / 10)) / 2 for i in range(10)]
    cosine = WarmupCosineLR(adam(lr=2.0), 10, 0.1, 0, 0.0, kind)
    assert cosine.get_lr() == pytest.approx([2.0])
    assert rates(cosine, 10) == pytest.approx([2 * part for part in half])


def test_warmup_of_one_step_takes_two() -> None:
    assert rates(WarmupLR(adam(), 0.0, 1.0, 1), 3) == pytest.approx([0.0, 1.0, 1.0])


def test_warmup_decay() -> None:
    expected = [0.1 + 0.8 * math.log(i + 1) / math.log(4) for i in range(4)]
    expected += [0.1 + 0.8 * (10 - i) / 6 for i in range(4, 11)] + [0.1] * 2
    assert rates(WarmupDecayLR(adam(), 10, 0.1, 0.9, 4), 13) == pytest.approx(expected)


def test_warmup_cosine_scales_the_groups_own_rates() -> None:
    optimizer = adam(2)
    optimizer.param_groups[1]["lr"] = 0.05
    schedule = WarmupCosineLR(optimizer, 10, 0.2, 4, 0.01, "linear")
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    ratios = [0.2 + 0.8 * i / 4 for i in range(4)]
    ratios += [0.01 + 0.99 * (1 + math.cos(math.pi * min(1, (i - 3) / 6))) / 2 for i in range(4, 12)]
    for ratio in ratios:
        schedule.step()
        assert schedule.get_last_lr() == pytest.approx([0.5 * ratio, 0.05 * ratio])


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase: bool) -> None:
    schedule = LRRangeTest(adam(), 0.1, 4, 0.5, staircase)
    expected = [0.1 * (1 + 0.5 * ((i + 1) // 4 if staircase else (i + 1) / 4)) for i in range(10)]
    assert rates(schedule, 10) == pytest.approx(expected)


def test_one_cycle_moves_rate_and_momentum_against_each_other() -> None:
    optimizer = adam()
    schedule = OneCycle(optimizer, 0.1, 0.9, 1.0, 4, 2, decay_step_size=2, decay_mom_rate=0.01)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    heights = [0.25, 0.5, 0.75, 1.0, 0.5]
    for height in heights:
        schedule.step()
        assert schedule.get_last_lr() == pytest.approx([0.1 + 0.8 * height])
        assert optimizer.param_groups[0]["betas"] == pytest.approx((0.9 - 0.1 * height, 0.999))
    for decays in (0.0, 0.5, 1.0):
        schedule.step()
        assert schedule.get_last_lr() == pytest.approx([0.1 / (1 + decays)])
        assert schedule.get_mom() == pytest.approx([0.9 * (1 + 0.01 * decays)])


def test_one_cycle_in_stairs() -> None:
    assert rates(OneCycle(adam(), 0.0, 1.0, 0.0, 4, cycle_first_stair_count=2), 8) == pytest.approx(
        [0.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.0]
    )


@pytest.mark.parametrize(("momentum", "cycled"), [(0.5, 0.8), (0.0, 0.0)])
def test_one_cycle_with_sgd(momentum: float, cycled: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=momentum)
    OneCycle(optimizer, 0.1, 0.9, cycle_first_step_size=1).step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(cycled)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_state_resumes_the_sequence(name: str) -> None:
    whole = MAKERS[name](adam())
    expected = rates(whole, 15)
    first = MAKERS[name](adam())
    rates(first, 6)
    assert first.state_dict() == {"last_batch_iteration": 5}
    second = MAKERS[name](adam())
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == first.get_last_lr() == [second.optimizer.param_groups[0]["lr"]]
    assert rates(second, 9) == expected[6:]


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_common_behaviour(name: str) -> None:
    schedule = MAKERS[name](SimpleNamespace(optimizer=adam()))
    assert type(schedule).__name__ == name
    with pytest.raises(AssertionError, match="need to call step"):
        schedule.get_last_lr()
    schedule.step(7)
    assert schedule.last_batch_iteration == 7
    assert schedule.get_lr() == schedule.get_last_lr()
    with pytest.raises(TypeError, match="str is no torch.optim.Optimizer"):
        MAKERS[name]("nothing")


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    WarmupLR(optimizer, 0.0, 1.0, 2).step(5)
    assert rate is optimizer.param_groups[0]["lr"] and rate == 1.0


def test_a_group_added_later_keeps_its_rate() -> None:
    optimizer = adam()
    schedule = WarmupLR(optimizer, 0.0, 1.0, 2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.3})
    schedule.step(5)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.3]


def test_build() -> None:
    assert isinstance(build_scheduler("WarmupLR", {"warmup_num_steps": 5}, adam()), WarmupLR)
    stepped = build_scheduler("StepLR", {"step_size": 2}, SimpleNamespace(optimizer=adam()))
    assert isinstance(stepped, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("WarmupDecay", {}, r"unknown \(did you mean 'WarmupDecayLR'\?\)"),
        ("WarmupLR", {"warmup_steps": 4}, r"scheduler.params.warmup_steps .*did you mean 'warmup_num_steps'"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps is required"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps is -1"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "must be an integer"),
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.2]}, "2 values, but the optimizer has 1"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "step_size is 0"),
        ("LambdaLR", {}, "scheduler.params.lr_lambda is required"),
        ("CyclicLR", {"base_lr": 1, "max_lr": 2, "mode": "x"}, "mode is invalid"),
    ],
)
def test_build_errors(name: str, params: dict, text: str) -> None:
    with pytest.raises(SchedulerError, match=text):
        build_scheduler(name, params, adam())
