"""Results of the check whether a batch can run."""

from __future__ import annotations

from enum import Enum

from deepspeed.errors import DeepSpeedError


class SchedulingResult(Enum):
    """Results of `can_schedule`."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5


class SchedulingError(DeepSpeedError, RuntimeError):
    """Error of a batch that cannot run; `status` has the reason."""

    def __init__(self, result: SchedulingResult) -> None:
        self.status = result
        super().__init__(f"Batch scheduling failed with result {result}")
