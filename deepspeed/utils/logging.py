"""Old address of the package's logger."""

from __future__ import annotations

from deepspeed.foundation.log import log_dist, logger

__all__ = ["log_dist", "logger"]
