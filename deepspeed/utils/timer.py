"""Old address of the wall-clock timers."""

from __future__ import annotations

from deepspeed.foundation.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]
