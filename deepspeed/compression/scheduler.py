"""Schedule of compression outside of an engine, with upstream's name."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compression.compress import section_of
from deepspeed.compression.fake_quantize import FakeQuantizers


class compression_scheduler:  # noqa: N801
    """Step counter that switches a model's quantizers; an engine has its own (`engine.compression_scheduler`).

    Args:
        model: whole.
        compression_config: the dict under `compression_training`, or a config that contains it.
    """

    def __init__(self, model: nn.Module, compression_config: dict[str, Any]) -> None:
        config = compression_config
        section, training = section_of(config if "compression_training" in config else {"compression_training": config})
        self.model, self.training_steps = model, 0
        self._quantizers = FakeQuantizers(model, section, training)
        self._quantizers.at_step(0)

    def step(self, step_zero_check: bool = False) -> None:
        """Advance by one applied optimizer step; with `step_zero_check`, only apply the state of step 0."""
        self.training_steps += 0 if step_zero_check else 1
        self._quantizers.at_step(self.training_steps)
