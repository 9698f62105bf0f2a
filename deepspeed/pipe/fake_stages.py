"""Simulated stages of a pipeline, for runs without values (`deepspeed/foundation/fake_mode.py`).

Only one stage runs in this process. The progress of the others follows from the schedule: by default, each is at the
position that the costs of its parts give; with `late`, each has only run the actions before the last message that this
stage has received from it.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.collectives.p2p import Header, Receiver, Sender
from deepspeed.comm.fake_world import FakeMessage, SimulatedSender, UnheardError
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.foundation.fake_mode import late, stage_outputs
from deepspeed.pipe.executor import OtherStages
from deepspeed.pipe.schedule import INFERENCE, Action, PipelineSchedule
from deepspeed.pipe.schedule_simulator import simulate


class AbsentStages(OtherStages):
    """Simulation of the other stages of a pipeline; see `OtherStages`."""

    def __init__(self, schedule: PipelineSchedule, stage: int, costs: list[float]) -> None:
        super().__init__(schedule, stage, costs)
        self._late = late()
        self._begins = simulate(schedule, costs).begins
        self._places = [
            {(action.op, action.micro, action.chunk): place for place, action in enumerate(row)}
            for row in schedule.rows
        ]
        self._known = [-1] * schedule.stages  # by stage: index of its last action known here
        self._now = 0.0

    @staticmethod
    def sender(axis: Axis) -> type[Sender]:
        return Sender if axis.shared is None else SimulatedSender

    def come_to(self, place: int, action: Action) -> None:
        self._now = self._begins[self.stage][place]
        if action.op in ("<F", "<B"):
            stage, chunk = self._peer(action)
            self._known[stage] = self._places[stage][">" + action.op[1], action.micro, chunk]

    def _peer(self, action: Action) -> tuple[int, int]:
        """Return the (stage, chunk) that is the other end of a message."""
        onward = 1 if action.op in (">F", "<B") else -1
        chunk, stage = divmod(self.schedule.part(self.stage, action.chunk) + onward, self.schedule.stages)
        return stage, chunk

    def receive(self, action: Action, receiver: Receiver, rank: int, label: str) -> tuple[Header, list[torch.Tensor]]:
        """Return the message that the simulated run of the sending stage has recorded.

        Raises:
            UnheardError: the sending stage, on `rank`, has not run yet.
        """
        part = self.schedule.part(self.stage, action.chunk)
        if action.op == "<B":
            message = stage_outputs()[part].gradients()
        elif part - 1 not in stage_outputs():
            raise UnheardError(rank)
        else:
            message = stage_outputs()[part - 1]
        return message.header, message.arrive(receiver.axis.shared is not None)

    def before_send(self, action: Action, sender: Sender, header: Header, tensors: list[torch.Tensor]) -> None:
        """Record the shapes of an activation's message for the run of the next stage."""
        if action.op == ">F":
            stage_outputs()[self.schedule.part(self.stage, action.chunk)] = FakeMessage.of(header, tensors)
        if isinstance(sender, SimulatedSender):
            self._let_go(sender, action)

    def _let_go(self, sender: SimulatedSender, action: Action) -> None:
        """Mark earlier messages as read if their simulated receiver is done with them, and name the next message."""
        kind, (peer, _) = action.op[1], self._peer(action)
        for message in sender.unread():
            end = self._end(kind, peer, message)
            if end is not None and (self._known[peer] > end if self._late else self._begins[peer][end] < self._now):
                sender.read(message)
        sender.name((self, action))

    def _end(self, kind: str, peer: int, message: Any) -> int | None:
        """Return where a peer's row frees a message (index of the first receive after its last use), or None."""
        window, action = message
        row, used = self.schedule.rows[peer], -1
        if window is self:
            op = "W" if self.schedule.splits else "F" if self.schedule.name == INFERENCE else "B"
            used = self._places[peer][op, action.micro, self._peer(action)[1]]
        later = (place for place, other in enumerate(row) if place > used and other.op == "<" + kind)
        return next(later, None)
