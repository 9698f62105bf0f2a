"""The table of stages, and the four questions asked of it."""

from __future__ import annotations

import pytest

from deepspeed.errors import ArgumentError
from deepspeed.zero.layout.stages import KEPT_WHOLE, Policy, policy_for, stage_of

QUESTIONS = ("gathers_before_use", "reduces_as_gradients_arrive", "owns_a_shard", "all_gathers_after_step")
ANSWERS = {
    0: (False, False, False, False),
    1: (False, False, True, True),
    2: (False, True, True, True),
    3: (True, True, True, False),
}


@pytest.mark.parametrize("stage", ANSWERS)
def test_answers(stage: int) -> None:
    policy = policy_for(stage)
    assert tuple(getattr(policy, question) for question in QUESTIONS) == ANSWERS[stage]
    assert stage_of(policy) == stage


def test_kept_parameters_live_by_stage_2() -> None:
    assert policy_for(2) == KEPT_WHOLE


def test_unknown_stage_and_frozen_rows() -> None:
    with pytest.raises(ArgumentError, match="4.*0, 1, 2 or 3"):
        policy_for(4)
    with pytest.raises(AttributeError):
        policy_for(0).splits_gradients = True  # type: ignore[misc]
    assert Policy(True, False, True) not in map(policy_for, ANSWERS)
