"""Schedules as lists of instructions, with the class names of upstream DeepSpeed.

Pipeline schedules match the rows of `deepspeed/pipe/schedule.py`, which the engine runs. A step of a row is one forward
or backward pass with its messages. In training, the last step ends with the update.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from deepspeed.errors import ArgumentError
from deepspeed.pipe.schedule import INFERENCE, Action, PipelineSchedule, make_schedule
from deepspeed.pipe.schedule_simulator import simulate


class PipeInstruction:
    """Instruction of a stage; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.name, *sorted(self.kwargs.items())))


class OptimizerStep(PipeInstruction):
    """Update the parameters."""


class ReduceGrads(PipeInstruction):
    """Sum gradients over the replicas of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum gradients of parameters that several stages share."""


class BufferOpInstruction(PipeInstruction):
    """Instruction for one micro-batch.

    Args:
        buffer_id: index of the micro-batch's buffer among the buffers of the stage.
        kwargs: `micro_batch`, the index of the micro-batch in the update.
    """

    buffer_id: int
    micro_batch: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load the data of a micro-batch, on the first and the last stage."""


class ForwardPass(BufferOpInstruction):
    """Run the forward pass of a micro-batch."""


class BackwardPass(BufferOpInstruction):
    """Run the backward pass of a micro-batch."""


class SendActivation(BufferOpInstruction):
    """Send forward's output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the output of the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the input gradient to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the output gradient from the next stage."""


_KINDS: dict[str, type[BufferOpInstruction]] = {
    "<F": RecvActivation, "F": ForwardPass, ">F": SendActivation, "<B": RecvGrad, "B": BackwardPass, ">B": SendGrad
}  # fmt: skip
_UPDATE = (ReduceTiedGrads, ReduceGrads, OptimizerStep)


class PipeSchedule:
    """Instructions of one stage for the micro-batches of one update; iteration yields the steps.

    Args:
        micro_batches: number of micro-batches per update.
        stages: number of stages.
        stage_id: index of the stage, from 0.

    Raises:
        ArgumentError: the stage does not exist.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if not 0 <= stage_id < stages:
            raise ArgumentError(f"stage_id is {stage_id}, and there are {stages} stage(s), from 0")
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield lists of instructions, one for each step."""
        raise NotImplementedError(f"{type(self).__name__} has no steps()")

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of micro-batches that the stage has in memory at a time."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per update."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether the stage is the first one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage is the last one."""
        return self.stage_id == self.stages - 1


class _OfRows(PipeSchedule):
    """Base class of schedules that are converted from a stage's row of a `PipelineSchedule`."""

    schedule_name: str

    @staticmethod
    @functools.lru_cache(maxsize=4)  # all stages use the same schedule
    def _of_all_stages(name: str, stages: int, micro_batches: int) -> PipelineSchedule:
        return make_schedule(name, stages, micro_batches)

    def data(self) -> PipelineSchedule:
        """Return the schedule of all stages, as the engine runs it."""
        return self._of_all_stages(self.schedule_name, self.stages, self.micro_batches)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield lists of instructions, one for each forward or backward pass."""
        row, buffers = self.data().rows[self.stage_id], self.num_pipe_buffers()

        def instruction(kind: type[BufferOpInstruction], action: Action) -> BufferOpInstruction:
            return kind(action.micro % buffers, micro_batch=action.micro)

        step, computed = list[PipeInstruction](), False
        for action in row:
            if computed and action.op[0] != ">":
                yield step
                step, computed = [], False
            if action.op == "F" and (self.is_first_stage or self.is_last_stage):
                step.append(instruction(LoadMicroBatch, action))
            step.append(instruction(_KINDS[action.op], action))
            computed |= action.op in "FB"
        yield [*step, *(kind() for kind in self._ends())]

    def _ends(self) -> tuple[type[PipeInstruction], ...]:
        return ()


class TrainSchedule(_OfRows):
    """1F1B schedule (PipeDream-Flush, arXiv:2006.09503): each backward pass runs as early as possible."""

    schedule_name = "1f1b"

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def _peaks(name: str, stages: int, micro_batches: int) -> tuple[int, ...]:
        return simulate(_OfRows._of_all_stages(name, stages, micro_batches)).peaks

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of micro-batches with activations on the stage at a time."""
        return self._peaks(self.schedule_name, self.stages, self.micro_batches)[self.stage_id]

    def _ends(self) -> tuple[type[PipeInstruction], ...]:
        return _UPDATE


class InferenceSchedule(_OfRows):
    """Schedule of forward passes only; one micro-batch can be in transfer while the next is computed."""

    schedule_name = INFERENCE

    def num_pipe_buffers(self) -> int:
        """Return two, or one for a single micro-batch."""
        return min(2, self.micro_batches)


class DataParallelSchedule(PipeSchedule):
    """Schedule of a rank with the full model: forward and backward of each micro-batch, then the update."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield lists of instructions, one for each micro-batch."""
        for micro in range(self.micro_batches):
            kinds = (LoadMicroBatch, ForwardPass, BackwardPass)
            step: list[PipeInstruction] = [kind(0, micro_batch=micro) for kind in kinds]
            yield [*step, ReduceGrads(), OptimizerStep()] if micro == self.micro_batches - 1 else step

    def num_pipe_buffers(self) -> int:
        return 1
