"""Old address of the wall-clock timers."""

from __future__ import annotations

from deepspeed.accelerator.instruments import ThroughputTimer
from deepspeed.foundation.timer import NoopTimer, SynchronizedWallClockTimer

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]
