"""The schedule of compression outside of an engine, under upstream's name."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compression.compress import section_of
from deepspeed.compression.fake_quantize import FakeQuantizers


class compression_scheduler:  # noqa: N801
    """Counts steps and switches a model's quantizers; an engine counts by itself (`engine.compression_scheduler`).

    Args:
        model: whole.
        compression_config: the dict under `compression_training`, or a config that has it.
    """

    def __init__(self, model: nn.Module, compression_config: dict[str, Any]) -> None:
        config = compression_config
        section, training = section_of(config if "compression_training" in config else {"compression_training": config})
        self.model, self.training_steps = model, 0
        self._quantizers = FakeQuantizers(model, section, training)
        self._quantizers.at_step(0)

    def step(self, step_zero_check: bool = False) -> None:
        """One optimizer step was applied (`step_zero_check`: none yet, look at step 0 only)."""
        self.training_steps += 0 if step_zero_check else 1
        self._quantizers.at_step(self.training_steps)
