"""Schedule of fake quantization outside of an engine; the names are those of upstream DeepSpeed."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compression.compress import section_of
from deepspeed.compression.fake_quantize import FakeQuantizers


class compression_scheduler:  # noqa: N801
    """Step counter that enables a model's fake quantizers; an engine has its own (`engine.compression_scheduler`).

    Args:
        model: model that is not sharded; its modules are changed in place.
        compression_config: value of `compression_training`, or a configuration with this key.

    Raises:
        CompressionError: a module in the config does not exist or cannot be quantized.
    """

    def __init__(self, model: nn.Module, compression_config: dict[str, Any]) -> None:
        config = compression_config
        section, training = section_of(config if "compression_training" in config else {"compression_training": config})
        self.model, self.training_steps = model, 0
        self._quantizers = FakeQuantizers(model, section, training)
        self._quantizers.at_step(0)

    def step(self, step_zero_check: bool = False) -> None:
        """Advance by one applied optimizer step; with `step_zero_check`, only apply the present step's state."""
        self.training_steps += 0 if step_zero_check else 1
        self._quantizers.at_step(self.training_steps)
