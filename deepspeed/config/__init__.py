"""JSON configuration: typed sections, parsed once, with the origin of every value."""

from __future__ import annotations

from deepspeed.config.auto import Facts
from deepspeed.config.config import DeepSpeedConfig
from deepspeed.config.load import load_raw
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError

__all__ = ["BatchSizeError", "DeepSpeedConfig", "DeepSpeedConfigError", "Facts", "load_raw"]
