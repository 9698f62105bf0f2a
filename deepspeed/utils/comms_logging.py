"""Old address of the comms logger."""

from __future__ import annotations

from deepspeed.comm.logging import CommsLogger, calc_bw_log, convert_size
from deepspeed.comm.logging import trimmed_mean as trim_mean

__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "trim_mean"]
