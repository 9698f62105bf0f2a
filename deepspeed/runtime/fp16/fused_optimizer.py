"""Old address of the fp16 optimizer wrapper: one class serves all precisions."""

from __future__ import annotations

from deepspeed.zero.optimizer.optimizer import ZeroOptimizer as FP16_Optimizer

__all__ = ["FP16_Optimizer"]
