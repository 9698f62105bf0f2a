"""The table of ZeRO stages: which of parameters, gradients and optimizer state are sharded.

Stages as in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020). This is
the only file that defines the properties of a stage's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deepspeed.errors import ArgumentError


@dataclass(frozen=True)
class Policy:
    """Which state a stage shards. The properties are read often, so each is computed once.

    Args:
        splits_parameters: each rank keeps its shard of the parameters between uses.
        splits_gradients: each rank keeps the sum of its shard of the gradients only.
        splits_optimizer: each rank holds master weights and optimizer state of its shard only.
    """

    splits_parameters: bool
    splits_gradients: bool
    splits_optimizer: bool

    @cached_property
    def gathers_before_use(self) -> bool:
        """Parameters are all-gathered around their modules only."""
        return self.splits_parameters

    @cached_property
    def reduces_as_gradients_arrive(self) -> bool:
        """Gradients are reduced in every micro-batch, not only in the boundary one."""
        return self.splits_gradients

    @cached_property
    def owns_a_shard(self) -> bool:
        """The optimizer updates a shard, not everything."""
        return self.splits_optimizer

    @cached_property
    def all_gathers_after_step(self) -> bool:
        """Updated shards are all-gathered after the step."""
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
    """The policy of a ZeRO stage (0 to 3) in a pipeline of that many stages."""
    # With several stages of a pipeline, ZeRO 2 reduces a window's gradients once, at its end, and so keeps them whole
    # until then, as ZeRO 1 does: else they would be sent once per micro-batch.
    if stage not in _TABLE:
        raise ArgumentError(f"zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3")
    return _TABLE[1 if stage == 2 and pipeline > 1 else stage]


def stage_of(policy: Policy) -> int:
    """The number of the stage that has a policy."""
    return next(stage for stage, row in _TABLE.items() if row == policy)
