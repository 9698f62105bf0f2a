"""Result and error of the check whether a ragged batch can run."""

from __future__ import annotations

from enum import Enum

from deepspeed.errors import DeepSpeedError


class SchedulingResult(Enum):
    """Result of `can_schedule`: success, or the limit that the batch exceeds."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5


class SchedulingError(DeepSpeedError, RuntimeError):
    """Error of a batch that cannot run; its attribute `status` is the `SchedulingResult`."""

    def __init__(self, result: SchedulingResult) -> None:
        self.status = result
        super().__init__(f"Batch scheduling failed with result {result}")
