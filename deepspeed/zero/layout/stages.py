"""ZeRO stages: sharding of optimizer state, gradients and parameters.

Stages as in Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deepspeed.errors import ArgumentError


@dataclass(frozen=True)
class Policy:
    """Sharding policy of a ZeRO stage.

    Args:
        splits_parameters: each rank stores only its shard of the parameters between uses (stage 3).
        splits_gradients: each rank stores only its shard of the gradient sums (stages 2 and 3).
        splits_optimizer: each rank stores only its shard of master weights and optimizer state (stages 1 to 3).
    """

    splits_parameters: bool
    splits_gradients: bool
    splits_optimizer: bool

    @cached_property
    def gathers_before_use(self) -> bool:
        """Return whether parameters are all-gathered before their module runs, and resharded afterwards."""
        return self.splits_parameters

    @cached_property
    def reduces_as_gradients_arrive(self) -> bool:
        """Return whether gradients are reduced in each micro-batch instead of once per update."""
        return self.splits_gradients

    @cached_property
    def owns_a_shard(self) -> bool:
        """Return whether each rank updates only its shard of the parameters."""
        return self.splits_optimizer

    @cached_property
    def all_gathers_after_step(self) -> bool:
        """Return whether updated parameters are all-gathered after each step (stages 1 and 2)."""
        return self.splits_optimizer and not self.splits_parameters


_TABLE = {
    0: Policy(splits_parameters=False, splits_gradients=False, splits_optimizer=False),
    1: Policy(splits_parameters=False, splits_gradients=False, splits_optimizer=True),
    2: Policy(splits_parameters=False, splits_gradients=True, splits_optimizer=True),
    3: Policy(splits_parameters=True, splits_gradients=True, splits_optimizer=True),
}

# Policy of parameters that are not sharded at stage 3 (persistence threshold).
KEPT_WHOLE = _TABLE[2]


def policy_for(stage: int, pipeline: int = 1) -> Policy:
    """Return the sharding policy of a ZeRO stage.

    Args:
        stage: 0 to 3.
        pipeline: number of pipeline stages; if more than 1, ZeRO stage 2 has the policy of stage 1, so that gradients
            are reduced once per update instead of once per micro-batch.

    Raises:
        ArgumentError: the stage is unknown.
    """
    if stage not in _TABLE:
        raise ArgumentError(f"zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3")
    return _TABLE[1 if stage == 2 and pipeline > 1 else stage]


def stage_of(policy: Policy) -> int:
    """Return the number of the ZeRO stage with a policy (the inverse of `policy_for` without a pipeline)."""
    return next(stage for stage, row in _TABLE.items() if row == policy)
