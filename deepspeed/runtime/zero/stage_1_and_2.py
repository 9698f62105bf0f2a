"""Old address of the stage 1 and 2 optimizer wrapper and memory estimators: one class serves all stages."""

from __future__ import annotations

from deepspeed.zero.api.memory_estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer as DeepSpeedZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
