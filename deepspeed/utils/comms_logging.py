"""Old address of the comms logger."""

from __future__ import annotations

from deepspeed.comm.watchdog.comms_logger import CommsLogger, calc_bw_log, convert_size
from deepspeed.comm.watchdog.comms_logger import trimmed_mean as trim_mean

__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "trim_mean"]
