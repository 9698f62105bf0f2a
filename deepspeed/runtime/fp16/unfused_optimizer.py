"""Old address of the fp16 optimizer wrapper for layer-wise optimizers: one class serves all precisions."""

from __future__ import annotations

from deepspeed.zero.optimizer.optimizer import ZeroOptimizer as FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
