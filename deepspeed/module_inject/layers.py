"""Old address of the layers that hold slices."""

from __future__ import annotations

from deepspeed.tensor_parallel.init import LinearAllreduce, LinearLayer, set_autotp_mode

__all__ = ["LinearAllreduce", "LinearLayer", "set_autotp_mode"]
