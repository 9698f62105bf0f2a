"""Old address of the bf16 optimizer wrapper: one class serves all precisions."""

from __future__ import annotations

from deepspeed.zero.optimizer.optimizer import ZeroOptimizer as BF16_Optimizer

__all__ = ["BF16_Optimizer"]
