"""Pacing against the formulas, in exact arithmetic where there is one; wrong schedules."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from deepspeed.data.curriculum import CurriculumScheduler, truncate_batch
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, UsageError

LINEAR: dict[str, Any] = {
    "min_difficulty": 8,
    "max_difficulty": 128,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 37, "difficulty_step": 8},
}
DISCRETE: dict[str, Any] = {
    "min_difficulty": 1,
    "max_difficulty": 3,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]},
}


def root(low: int, high: int, total: int, multiple: int, degree: float) -> dict[str, Any]:
    schedule = {"total_curriculum_step": total, "difficulty_step": multiple, "root_degree": degree}
    return {
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": "fixed_root",
        "schedule_config": schedule,
    }


@pytest.mark.parametrize(("low", "high", "total", "multiple"), [(8, 128, 37, 8), (64, 2048, 1000, 64), (1, 9, 4, 1)])
def test_the_linear_pace(low: int, high: int, total: int, multiple: int) -> None:
    config = root(low, high, total, multiple, 1) | {"schedule_type": "fixed_linear"}
    scheduler = CurriculumScheduler(config)
    for step in range(1, 2 * total):
        grown = Fraction(step, total) * (high - low) + low
        expected = min(int(grown // multiple * multiple), high)
        assert abs(scheduler.get_difficulty(step) - expected) <= (multiple if grown % multiple < 1e-9 else 0)
        assert scheduler.update_difficulty(step) == scheduler.get_difficulty(step)
    assert scheduler.get_difficulty(total) == high


@pytest.mark.parametrize("degree", [2, 3])
def test_the_root_pace(degree: int) -> None:
    low, high, total, multiple = 16, 1000, 50, 8
    scheduler = CurriculumScheduler(root(low, high, total, multiple, degree))
    for step in range(1, total):
        value = scheduler.get_difficulty(step)
        # value <= (step / total) ** (1 / degree) * (high - low) + low < value + multiple, without roots
        assert value % multiple == 0 and Fraction(value - low, high - low) ** degree <= Fraction(step, total)
        assert Fraction(value + multiple - low, high - low) ** degree > Fraction(step, total)
    assert scheduler.get_difficulty(total) == scheduler.get_difficulty(10 * total) == 1000
    assert scheduler.get_difficulty(13) == {2: 512, 3: 640}[degree]


def test_the_discrete_pace() -> None:
    scheduler = CurriculumScheduler(DISCRETE)
    assert [scheduler.get_difficulty(step) for step in (1, 5, 6, 10, 11, 100)] == [1, 1, 2, 2, 3, 3]


def test_a_function_paces_once_it_is_there() -> None:
    scheduler = CurriculumScheduler({"min_difficulty": 2, "max_difficulty": 10, "schedule_type": "custom"})
    for call in (scheduler.check_ready, lambda: scheduler.update_difficulty(1), lambda: scheduler.get_difficulty(1)):
        with pytest.raises(UsageError, match="set_custom_get_difficulty"):
            call()
    with pytest.raises(UsageError, match="int cannot replace"):
        scheduler.set_custom_get_difficulty(3)  # type: ignore[arg-type]
    scheduler.set_custom_get_difficulty(lambda step: 12 - 2 * step if step > 1 else 10)
    scheduler.check_ready()
    assert [scheduler.update_difficulty(step) for step in (2, 3, 1, 4)] == [8, 6, 10, 10]  # the maximum stays
    with pytest.raises(UsageError, match="fixed_linear"):
        CurriculumScheduler(LINEAR).set_custom_get_difficulty(lambda step: step)


def test_the_state_is_the_current_difficulty() -> None:
    scheduler = CurriculumScheduler(LINEAR)
    assert scheduler.get_current_difficulty() == 8
    scheduler.update_difficulty(20)
    other = CurriculumScheduler(LINEAR)
    other.set_state(scheduler.get_state())
    assert other.get_current_difficulty() == scheduler.get_current_difficulty() == 72
    other.set_current_difficulty(16)
    assert other.current_difficulty == 16


def changed(config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """With other keys, of the schedule if they are its own; None removes one."""
    result = {**config, "schedule_config": dict(config["schedule_config"])}
    for key, value in keys.items():
        place = result["schedule_config"] if key in result["schedule_config"] else result
        place[key] = value
        if value is None:
            del place[key]
    return result


WRONG = {
    "no minimum": (changed(LINEAR, min_difficulty=None), "`min_difficulty` is missing"),
    "no maximum": (changed(LINEAR, max_difficulty=None), "`max_difficulty` is missing"),
    "no type": (changed(LINEAR, schedule_type=None), "`schedule_type` is missing"),
    "no schedule": (changed(LINEAR, schedule_config=None), "`schedule_config` is missing"),
    "no steps": (changed(LINEAR, total_curriculum_step=None), "`schedule_config.total_curriculum_step` is missing"),
    "no root": (changed(LINEAR, schedule_type="fixed_root"), "`schedule_config.root_degree` is missing"),
    "unknown type": (changed(LINEAR, schedule_type="fixed_cosine"), "'fixed_cosine' is unknown"),
    "minimum above maximum": (changed(LINEAR, min_difficulty=136), "not above the second"),
    "minimum is no multiple": (changed(LINEAR, min_difficulty=12), "the first difficulty would be 8"),
    "multiple above maximum": (changed(LINEAR, difficulty_step=136), "is above `max_difficulty` 128"),
    "zero steps": (changed(LINEAR, total_curriculum_step=0), "`schedule_config.total_curriculum_step` is 0"),
    "steps in floats": (changed(LINEAR, total_curriculum_step=10.5), "is 10.5"),
    "negative root": (root(8, 128, 37, 8, -1), "`schedule_config.root_degree` is -1"),
    "steps that fall": (changed(DISCRETE, max_step=[10, 5]), "has to increase"),
    "as many steps as difficulties": (changed(DISCRETE, max_step=[1, 2, 3]), "has 3 entries for 3 difficulties"),
    "difficulty is no list": (changed(DISCRETE, difficulty=3), "`schedule_config.difficulty` is 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_schedule_is_refused_at_the_start(case: str) -> None:
    config, message = WRONG[case]
    with pytest.raises(DeepSpeedConfigError, match=message.replace("`", ".")):
        CurriculumScheduler(config)


def test_batches_of_other_mappings_are_cut() -> None:
    from collections import OrderedDict, UserDict

    ids, mask = torch.arange(20).reshape(2, 10), torch.ones(2, 1, 10, 10)
    for kind in (dict, OrderedDict, UserDict):
        batch = kind({"labels": torch.zeros(2, 3), "input_ids": ids, "mask": mask, "pixel": torch.ones(2, 3, 10, 10)})
        cut = truncate_batch(batch, 4)
        assert type(cut) is kind and {name: tuple(cut[name].shape) for name in cut} == {
            "labels": (2, 3), "input_ids": (2, 4), "mask": (2, 1, 4, 4), "pixel": (2, 3, 10, 10),
        }  # fmt: skip
        assert batch["input_ids"].shape == (2, 10)
    assert truncate_batch((ids, [mask]), 4)[1][0].shape == (2, 1, 4, 4)


def test_a_batch_that_is_padded_on_the_left_is_refused() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with pytest.raises(ArgumentError, match="pad on the right"):
        truncate_batch({"input_ids": torch.ones(2, 6, dtype=torch.long), "attention_mask": mask}, 3)
