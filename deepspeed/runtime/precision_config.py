"""Old address of the typed sections of precision."""

from __future__ import annotations

from deepspeed.config.sections.precision import BF16 as DeepSpeedBF16Config
from deepspeed.config.sections.precision import FP16 as DeepSpeedFP16Config
from deepspeed.config.sections.precision import TorchAutocast as DeepSpeedTorchAutocastConfig

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "DeepSpeedTorchAutocastConfig"]
