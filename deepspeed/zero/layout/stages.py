"""Table of ZeRO stages: sharding of parameters, gradients and optimizer state.

Stages as in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020). This is
the only file that defines the properties of a stage's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deepspeed.errors import ArgumentError


@dataclass(frozen=True)
class Policy:
    """Sharding of a stage. The properties are read often, so each is computed once.

    Args:
        splits_parameters: each rank stores only its shard of the parameters between uses.
        splits_gradients: each rank stores only the gradient sum of its shard.
        splits_optimizer: each rank stores master weights and optimizer state of its shard only.
    """

    splits_parameters: bool
    splits_gradients: bool
    splits_optimizer: bool

    @cached_property
    def gathers_before_use(self) -> bool:
        """Return whether parameters are all-gathered only around the use of their module."""
        return self.splits_parameters

    @cached_property
    def reduces_as_gradients_arrive(self) -> bool:
        """Return whether gradients are reduced in every micro-batch, not only at the accumulation boundary."""
        return self.splits_gradients

    @cached_property
    def owns_a_shard(self) -> bool:
        """Return whether a rank's optimizer updates only its shard."""
        return self.splits_optimizer

    @cached_property
    def all_gathers_after_step(self) -> bool:
        """Return whether updated shards are all-gathered after the step."""
        return self.splits_optimizer and not self.splits_parameters


_TABLE = {
    0: Policy(splits_parameters=False, splits_gradients=False, splits_optimizer=False),
    1: Policy(splits_parameters=False, splits_gradients=False, splits_optimizer=True),
    2: Policy(splits_parameters=False, splits_gradients=True, splits_optimizer=True),
    3: Policy(splits_parameters=True, splits_gradients=True, splits_optimizer=True),
}

# Parameters that stay whole under stage 3 (persistence threshold) live by the row above it.
KEPT_WHOLE = _TABLE[2]


def policy_for(stage: int, pipeline: int = 1) -> Policy:
    """Return the policy of a ZeRO stage (0 to 3) in a pipeline of `pipeline` stages."""
    # With several stages of a pipeline, ZeRO 2 reduces a window's gradients once, at its end, and so keeps them whole
    # until then, as ZeRO 1 does: else they would be sent once per micro-batch.
    if stage not in _TABLE:
        raise ArgumentError(f"zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3")
    return _TABLE[1 if stage == 2 and pipeline > 1 else stage]


def stage_of(policy: Policy) -> int:
    """Return the number of the stage that has this policy."""
    return next(stage for stage, row in _TABLE.items() if row == policy)
