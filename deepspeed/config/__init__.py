"""The JSON configuration: one typed section per file, parsed once, every value with its source."""

from __future__ import annotations

from deepspeed.config.auto import Facts
from deepspeed.config.config import DeepSpeedConfig
from deepspeed.config.load import load_raw
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError

__all__ = ["BatchSizeError", "DeepSpeedConfig", "DeepSpeedConfigError", "Facts", "load_raw"]
