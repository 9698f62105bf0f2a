"""Old address of the optimizer wrapper's base: one class serves all stages."""

from __future__ import annotations

from deepspeed.zero.optimizer.optimizer import ZeroOptimizer as DeepSpeedOptimizer
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
