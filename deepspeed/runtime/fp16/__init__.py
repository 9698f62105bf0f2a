"""Old addresses of loss scaling and the fp16 optimizer wrappers."""

from __future__ import annotations

from deepspeed.runtime.fp16 import fused_optimizer, loss_scaler, unfused_optimizer

__all__ = ["fused_optimizer", "loss_scaler", "unfused_optimizer"]
